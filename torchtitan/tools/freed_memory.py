"""What happens to memory that is freed: on a CPU malloc may keep it, or give it back, and the next tensor pays for new
pages."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, as torch's allocator does on a GPU: the next tensor takes it again.

    Pages that went back to the system come back zeroed, one page fault each. Tensors of 32 MiB and more are left out.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:  # glibc, that is
        change(_M_TRIM_THRESHOLD, 2**31 - 1)
        change(_M_MMAP_THRESHOLD, 32 << 20)


def return_freed_memory() -> None:
    """Have malloc give all that it keeps back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc, that is
        trim(0)
