"""ipc on the CPU: a bucket is named instead of sent, and the actor copies it from the slots' memory itself. No torch.

The slots' memory is a file without a name, which processes of the same user reach through /proc. The actor verifies its
copy, so it does not matter to it what becomes of the slot meanwhile.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.wire import Message, ProtocolError, field_of

NAMES = ("process", "descriptor", "device", "inode")


def file_references(slots: SharedSlots) -> Callable[[int, int, int], Message]:
    """What names bytes [start, end) of a slot to other processes: a function of (slot, start, end)."""
    memory = named(slots.data_fd)
    return lambda slot, start, _end: {"memory": memory, "offset": slots.offset(slot) + start}


class SharedFiles:
    """Memory of shard servers, opened read-only when it is first named."""

    def __init__(self) -> None:
        self._opened: dict[tuple[int, ...], mmap.mmap] = {}

    def copy(self, reference: Any, target: memoryview) -> None:
        """Fill `target`. Raises ProtocolError for what names no such memory, OSError for what does not open."""
        memory, offset = field_of(reference, "memory", dict), field_of(reference, "offset", int)
        fields = tuple(field_of(memory, name, int) for name in NAMES)
        if fields not in self._opened:
            # Another shard server of the same rank has another entry; the memory is the same.
            self._opened = {fields: open_shared(memory), **self._opened}
        opened = self._opened[fields]
        if offset > len(opened) - len(target):
            raise ProtocolError(f"{len(target)} bytes at {offset} lie outside of the memory")
        target[:] = memoryview(opened)[offset : offset + len(target)]


def named(descriptor: int) -> Message:
    """What names an open file of this process to others of the same user, see open_shared."""
    status = os.fstat(descriptor)
    return {"process": os.getpid(), "descriptor": descriptor, "device": status.st_dev, "inode": status.st_ino}


def open_shared(memory: Message, writable: bool = False) -> mmap.mmap:
    """A file that another process has named. Raises ProtocolError for what names none, OSError for one that does not
    open."""
    process, descriptor, device, inode = (field_of(memory, name, int) for name in NAMES)
    access = os.O_RDWR if writable else os.O_RDONLY
    opened = os.open(f"/proc/{process}/fd/{descriptor}", access | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        # Numbers of processes and descriptors are used again: it must still be the file that was meant.
        if (status.st_dev, status.st_ino, status.st_uid) != (device, inode, os.geteuid()):
            raise ProtocolError("the slots that were named are not there any more, or another user's")
        return mmap.mmap(opened, status.st_size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(opened)
