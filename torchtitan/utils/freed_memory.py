"""What happens to memory that is freed: on a CPU malloc may keep it, or give it back, and the next tensor pays for new
pages."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def keep_freed_memory(large: bool = False) -> None:
    """Have malloc keep what is freed, as torch's allocator does on a GPU: the next tensor takes it again.

    Pages that went back to the system come back zeroed, one page fault each. large: blocks of 32 MiB and more too,
    which by default come from the system and go back to it: for a process that frees and takes the same sizes again,
    for what is kept in another's place is never given back.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return  # not glibc
    change(_M_TRIM_THRESHOLD, -1 if large else 2**31 - 1)
    if large:
        change(_M_MMAP_MAX, 0)
    else:
        change(_M_MMAP_THRESHOLD, 32 << 20)


def return_freed_memory() -> None:
    """Have malloc give all that it keeps back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc, that is
        trim(0)
