"""A rank's slots: whose each is, the memory that the trainer and its shard server share, and the vote. No torch.

A slot's state is one 64-bit word that two processes share: FREE → RESERVED → WRITING → READY → FREE. Every transition
belongs to exactly one of them: from FREE to READY to the trainer's SlotWriter, from READY on to the shard server's
LiveSlots. Words are aligned, one store each: neither needs a lock. The doorbell after a store is a system call, which
also orders the slot's bytes before it.

The memory has no name (memfd), so nothing is left behind however a process dies. Processes of the same user reach it
through /proc: so actors of this machine copy buckets out of it themselves (ipc on a CPU), and verify their copies.
"""

from __future__ import annotations

import enum
import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torchtitan.weight_sync.wire import Message, ProtocolError, field_of

_NUMBER_BITS = 30
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


class SlotState(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    WRITING = 2
    READY = 3


_STATES = tuple(SlotState)
_READY_WORD = SlotState.READY << 2 * _NUMBER_BITS


class SlotView(NamedTuple):
    """What a word says. `serial` numbers the snapshots of an epoch: a version that was dropped may be taken again."""

    state: SlotState
    version: int
    serial: int

    def pack(self) -> int:
        """The word."""
        return (self.state << 2 * _NUMBER_BITS) | (self.version << _NUMBER_BITS) | self.serial

    @classmethod
    def unpack(cls, word: int) -> SlotView:
        """The view of a word."""
        state = _STATES[word >> 2 * _NUMBER_BITS]
        return cls(state, (word >> _NUMBER_BITS) & _NUMBER_MASK, word & _NUMBER_MASK)


Words: TypeAlias = "list[int] | memoryview"
"""A row of 64-bit words: shared memory, or a list in tests"""


class SlotWriter:
    """The trainer's transitions. None of them waits."""

    def __init__(self, words: Words):
        self._words = words
        self._reserved: int | None = None

    def view(self, index: int) -> SlotView:
        return SlotView.unpack(self._words[index])

    def _free(self) -> int | None:
        return next((i for i in range(len(self._words)) if self.view(i).state is SlotState.FREE), None)

    def reserve(self) -> bool:
        """FREE → RESERVED for the first free slot, where none is reserved already. False when there is none."""
        if self._reserved is None and (index := self._free()) is not None:
            self._move(index, SlotState.FREE, SlotView(SlotState.RESERVED, 0, 0))
            self._reserved = index
        return self._reserved is not None

    def release(self) -> None:
        """RESERVED → FREE: the step was dropped, or another rank voted no. Without a reservation a no-op."""
        if self._reserved is not None:
            self._move(self._reserved, SlotState.RESERVED, SlotView(SlotState.FREE, 0, 0))
            self._reserved = None

    def begin(self, version: int, serial: int) -> int:
        """RESERVED → WRITING; the slot. Raises RuntimeError without a reservation."""
        if self._reserved is None:
            raise RuntimeError("snapshot without a reserved slot")
        index, self._reserved = self._reserved, None
        self._move(index, SlotState.RESERVED, SlotView(SlotState.WRITING, version, serial))
        return index

    def finish(self, index: int) -> None:
        """WRITING → READY: the fence has fired. From here on the slot is the shard server's."""
        view = self.view(index)
        self._move(index, SlotState.WRITING, SlotView(SlotState.READY, view.version, view.serial))

    def _move(self, index: int, expected: SlotState, new: SlotView) -> None:
        found = self.view(index).state
        if found is not expected:
            raise RuntimeError(f"slot {index} is {found.name}, expected {expected.name}")
        self._words[index] = new.pack()


class LiveSlots:
    """A snapshot is kept while it lives, while it may still come to live, and while a thread reads its memory.

    Sockets read only what lives: who changes that closes them before anything else happens.
    """

    def __init__(self, words: Words):
        self._words = words
        self._holds: Counter[int] = Counter()
        self.newest = -1
        """Serial that was published last, as far as is known"""
        self.lanes: dict[int, float] = {}
        """Older serials that live -> since when"""
        self.base: int | None = None
        """An older one that is kept for deltas"""
        self._dropped: frozenset[int] = frozenset()

    def filled(self) -> dict[int, tuple[int, int]]:
        """Serial -> (slot, version) of every snapshot that is there."""
        # Read often: without a view of each word.
        return {
            word & _NUMBER_MASK: (index, (word >> _NUMBER_BITS) & _NUMBER_MASK)
            for index, word in enumerate(self._words)
            if word >= _READY_WORD
        }

    def lives(self, serial: int) -> bool:
        """Whether this snapshot may be read."""
        return serial == self.newest or serial in self.lanes

    def readable(self, serial: int) -> tuple[int, int] | None:
        """(slot, version) of a snapshot that lives, None where there is none.

        An actor may hear of a version before this process does: what is newer than all that is known may be read too.
        """
        lives = self.lives(serial) or (serial > self.newest and serial not in self._dropped)
        return self.filled().get(serial) if lives else None

    def base_slot(self, serial: int) -> int | None:
        """The slot of a snapshot that a delta may be taken against, None where there is none."""
        found = self.filled().get(serial)
        return found[0] if found is not None and (serial == self.base or self.lives(serial)) else None

    def live(
        self, newest: int, lanes: Collection[int], dropped: Collection[int], now: float, base: int | None = None
    ) -> None:
        """What the registry says. A lane keeps the time of its beginning."""
        if newest >= self.newest:
            self.newest = newest
            self.base = base
            self.lanes = {serial: self.lanes.get(serial, now) for serial in lanes}
            self._dropped = frozenset(dropped)
            self.sweep()

    def expire(self, now: float, lease_s: float) -> None:
        """End lanes that are too old, also where no registry says so."""
        old = [serial for serial, since in self.lanes.items() if now - since > lease_s]
        for serial in old:
            del self.lanes[serial]
        if old:
            self.sweep()

    def hold(self, *serials: int) -> None:
        """A thread is about to read their memory."""
        self._holds.update(serials)

    def let_go(self, *serials: int) -> None:
        """It does not read it any more."""
        self._holds.subtract(serials)
        self.sweep()

    def sweep(self) -> None:
        """Free what is over."""
        for serial, (index, _version) in self.filled().items():
            over = serial < self.newest or serial in self._dropped
            if over and serial != self.base and not self.lives(serial) and not self._holds[serial]:
                del self._holds[serial]
                self._words[index] = SlotView(SlotState.FREE, 0, 0).pack()


class SlotPort(Protocol):
    """This rank's slots, as the boundary uses them."""

    def reserve(self) -> bool:
        """Take a slot for the next snapshot. False when none is free; a reservation that is there already is kept."""

    def release(self) -> None:
        """Give the reservation back, if there is one."""

    def snapshot(self, version: int, serial: int) -> None:
        """Fill the reserved slot."""

    def fail(self, version: int, serial: int) -> None:
        """This rank cannot take a snapshot that all were told to take."""


class Boundary:
    """One rank's side of the vote, and what it owes. All ranks call it in the same order with the same arguments."""

    def __init__(self, slots: SlotPort):
        self._slots = slots
        self.serial = 0
        self.published = self.skipped = 0
        self._owed: int | None = None
        self._last_snapshot = (0, -1)

    def reserve(self) -> bool:
        """False is this rank's no to the coming version."""
        return self._slots.reserve()

    def commit(self, version: int, noes: int) -> bool:
        """Snapshot `version`, or, if any rank voted no, skip it: then it is owed. Whether it was snapshotted."""
        self.serial += 1
        if noes:
            self._slots.release()
            self.skipped += 1
            self._owed = version
            return False
        self._snapshot(version)
        return True

    def snapshot_owed(self, version: int) -> bool:
        """Snapshot the owed version. Without a slot here it is dropped on all ranks, and stays owed: False."""
        self.serial += 1
        if self._slots.reserve():
            self._snapshot(version)
            return True
        self._slots.fail(version, self.serial)
        self._owed = version
        return False

    def _snapshot(self, version: int) -> None:
        self._slots.snapshot(version, self.serial)
        self.published += 1
        self._owed = None
        self._last_snapshot = (self.serial, version)

    def owed(self, newest: int | None, dropped: Collection[Sequence[int]]) -> int | None:
        """The version that was skipped, or dropped because another rank could not snapshot it.

        newest: the newest published version; dropped: (serial, version) of the last dropped snapshots.
        """
        if self._owed is None and any(tuple(pair) == self._last_snapshot for pair in dropped):
            version = self._last_snapshot[1]
            return version if newest is None or newest < version else None
        return self._owed


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

    def slot(self, index: int) -> memoryview:
        """A slot's bytes."""
        return self._memory[index * self.stride :][: self.slot_bytes]

    def refer(self, slot: int, start: int, _end: int) -> Message:
        """What names bytes [start, end) of a slot to other processes."""
        return {"memory": named(self.data_fd), "offset": slot * self.stride + start}

    def close_files(self) -> None:
        super().close_files()
        os.close(self.data_fd)


def _stride(slot_bytes: int) -> int:
    return max(_PAGE, -(-slot_bytes // _PAGE) * _PAGE)


class NamedMemory:
    """Memory of shard servers, opened when it is first named: open_memory() makes something to be cut with [start:end]
    of what a reference says of it."""

    def __init__(self, open_memory: Callable[[Message], Any]):
        self._open = open_memory
        self._opened: dict[str, Any] = {}

    def part(self, reference: Any, size: int) -> Any:
        """So many bytes. Raises ProtocolError for what names none, and whatever open_memory() raises."""
        memory, offset = field_of(reference, "memory", dict), field_of(reference, "offset", int)
        # Another shard server of the same rank may name the same memory otherwise.
        name = json.dumps(memory, sort_keys=True)
        if name not in self._opened:
            self._opened[name] = self._open(memory)
        opened = self._opened[name]
        if offset > len(opened) - size:
            raise ProtocolError(f"{size} bytes at {offset} lie outside of the memory")
        return opened[offset : offset + size]


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
