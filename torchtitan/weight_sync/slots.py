"""Slots in memory that the trainer and its shard server share, and the words that say whose each is. No torch.

The memory has no name (memfd), so nothing is left behind however a process dies. Processes of the same user reach it
through /proc: so actors of this machine copy buckets out of it themselves (ipc on a CPU), and verify their copies.
State words are 64-bit and aligned: one store each, no lock. The doorbell after a store is a system call, which also
orders the slot's bytes before it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

from torchtitan.weight_sync.slot_states import SlotView, SlotWriter
from torchtitan.weight_sync.wire import Message, ProtocolError, field_of

_PAGE = mmap.PAGESIZE
_WORD_BYTES = 8
# After the slots' words: the last snapshots that this rank could not take (a shard server that was away reads all
# of them), and the shard server's sign of life.
_FAILURES = 64
_EXTRA_WORDS = _FAILURES + 1

NAMES = ("process", "descriptor", "device", "inode")


def anonymous_file(name: str, size: int) -> int:
    """A descriptor of `size` zero bytes."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, size)
    return descriptor


class SlotWords:
    """The words of `count` slots of `slot_bytes` each, wherever the slots are. Without slots: a sign of life alone."""

    def __init__(self, words_fd: int, count: int, slot_bytes: int):
        self.words_fd, self.count, self.slot_bytes = words_fd, count, slot_bytes
        self._words_map = mmap.mmap(words_fd, (count + _EXTRA_WORDS) * _WORD_BYTES)
        self._words = memoryview(self._words_map).cast("Q")

    @staticmethod
    def new_file(count: int) -> int:
        """Descriptor of words that are all FREE."""
        return anonymous_file("weight-sync-words", (count + _EXTRA_WORDS) * _WORD_BYTES)

    def writer(self) -> SlotWriter:
        """The trainer's side."""
        return SlotWriter(self._words[: self.count])

    @property
    def state_words(self) -> memoryview:
        """One word per slot."""
        return self._words[: self.count]

    @property
    def failed(self) -> list[tuple[int, int]]:
        """(serial, version) of the last snapshots that this rank could not take, the oldest first."""
        views = [SlotView.unpack(word) for word in self._words[self.count : self.count + _FAILURES] if word]
        return sorted((view.serial, view.version) for view in views)

    def set_failed(self, serial: int, version: int) -> None:
        self._words[self.count + serial % _FAILURES] = (version << 30) | serial

    @property
    def pulse(self) -> int:
        """Changes for as long as the shard server works."""
        return self._words[self.count + _FAILURES]

    def beat(self) -> None:
        self._words[self.count + _FAILURES] += 1

    def close_files(self) -> None:
        """Close the descriptors; the mapping lives as long as somebody uses it."""
        os.close(self.words_fd)


class SharedSlots(SlotWords):
    """Slots in host memory."""

    def __init__(self, words_fd: int, data_fd: int, count: int, slot_bytes: int):
        super().__init__(words_fd, count, slot_bytes)
        self.data_fd = data_fd
        self.stride = _stride(slot_bytes)
        self.map = mmap.mmap(data_fd, count * self.stride)
        self._memory = memoryview(self.map)

    @classmethod
    def create(cls, count: int, slot_bytes: int) -> SharedSlots:
        """New slots, all free and zero."""
        data_fd = anonymous_file("weight-sync-slots", count * _stride(slot_bytes))
        return cls(cls.new_file(count), data_fd, count, slot_bytes)

    def offset(self, index: int) -> int:
        """First byte of a slot in `map`."""
        return index * self.stride

    def slot(self, index: int) -> memoryview:
        """A slot's bytes."""
        return self._memory[self.offset(index) : self.offset(index) + self.slot_bytes]

    def close_files(self) -> None:
        super().close_files()
        os.close(self.data_fd)


def _stride(slot_bytes: int) -> int:
    return max(_PAGE, -(-slot_bytes // _PAGE) * _PAGE)


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
