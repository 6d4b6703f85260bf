"""A rank's slots: their states, the memory that the trainer and its shard server share, and the vote. No torch.

A slot's state is one 64-bit word that two processes share: FREE → RESERVED → WRITING → READY → FREE. Each transition
belongs to one of them: those up to READY to the trainer's SlotWriter, the one back to FREE to the shard server's
LiveSlots. A word is aligned and written in one store, so neither needs a lock. The doorbell after a store is a system
call, which also orders the slot's bytes before it.

The memory has no name (memfd), so nothing is left behind however a process dies. Processes of the same user reach it
through /proc: actors on this machine copy buckets from it themselves (ipc on a CPU), and verify their copies.
"""

from __future__ import annotations

import enum
import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torchtitan.errors import UserError
from torchtitan.weight_sync.wire.runtime import Message, ProtocolError, field_of

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
    """The fields of a word. `serial` numbers the snapshots of an epoch: a dropped version may get a second snapshot."""

    state: SlotState
    version: int
    serial: int

    def pack(self) -> int:
        """Return the word."""
        return (self.state << 2 * _NUMBER_BITS) | (self.version << _NUMBER_BITS) | self.serial

    @classmethod
    def unpack(cls, word: int) -> SlotView:
        """Return the fields of a word."""
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
        """FREE → RESERVED for the first free slot, unless one is reserved already. Returns False if none is free."""
        if self._reserved is None and (index := self._free()) is not None:
            self._move(index, SlotState.FREE, SlotView(SlotState.RESERVED, 0, 0))
            self._reserved = index
        return self._reserved is not None

    def release(self) -> None:
        """RESERVED → FREE: the step was dropped, or another rank voted no. Does nothing without a reservation."""
        if self._reserved is not None:
            self._move(self._reserved, SlotState.RESERVED, SlotView(SlotState.FREE, 0, 0))
            self._reserved = None

    def begin(self, version: int, serial: int) -> int:
        """RESERVED → WRITING. Returns the slot. Raises RuntimeError without a reservation."""
        if self._reserved is None:
            raise RuntimeError("snapshot without a reserved slot")
        index, self._reserved = self._reserved, None
        self._move(index, SlotState.RESERVED, SlotView(SlotState.WRITING, version, serial))
        return index

    def finish(self, index: int) -> None:
        """WRITING → READY: the fence has been reached. From here on the slot belongs to the shard server."""
        view = self.view(index)
        self._move(index, SlotState.WRITING, SlotView(SlotState.READY, view.version, view.serial))

    def _move(self, index: int, expected: SlotState, new: SlotView) -> None:
        found = self.view(index).state
        if found is not expected:
            raise RuntimeError(f"slot {index} is {found.name}, expected {expected.name}")
        self._words[index] = new.pack()


class LiveSlots:
    """Keeps a snapshot while it lives, while it may still be published, and while a thread reads its memory.

    Sockets read only live snapshots: whatever ends one then closes the connections that read it, before anything else.
    """

    def __init__(self, words: Words):
        self._words = words
        self._holds: Counter[int] = Counter()
        self.newest = -1
        """Serial of the last published snapshot, as far as is known"""
        self.retained: dict[int, float] = {}
        """Serial of each older live snapshot -> since when it is older"""
        self.base: int | None = None
        """Serial of an older snapshot that is kept for deltas"""
        self._dropped: frozenset[int] = frozenset()

    def filled(self) -> dict[int, tuple[int, int]]:
        """Return serial -> (slot, version) of every READY snapshot."""
        # Called often, so it does not build a view of each word.
        return {
            word & _NUMBER_MASK: (index, (word >> _NUMBER_BITS) & _NUMBER_MASK)
            for index, word in enumerate(self._words)
            if word >= _READY_WORD
        }

    def lives(self, serial: int) -> bool:
        """Return whether this snapshot may be read."""
        return serial == self.newest or serial in self.retained

    def readable(self, serial: int) -> tuple[int, int] | None:
        """Return (slot, version) of a snapshot that may be read, else None.

        That includes snapshots newer than all known ones, because an actor may hear of a version before this process
        does.
        """
        lives = self.lives(serial) or (serial > self.newest and serial not in self._dropped)
        return self.filled().get(serial) if lives else None

    def base_slot(self, serial: int) -> int | None:
        """Return the slot of a snapshot that a delta may be taken against, else None."""
        found = self.filled().get(serial)
        if found is None or not (serial == self.base or self.lives(serial)):
            return None
        return found[0]

    def live(
        self, newest: int, retained: Collection[int], dropped: Collection[int], now: float, base: int | None = None
    ) -> None:
        """Adopt what the registry says. Those that are retained further keep their start time."""
        if newest >= self.newest:
            self.newest = newest
            self.base = base
            self.retained = {serial: self.retained.get(serial, now) for serial in retained}
            self._dropped = frozenset(dropped)
            self.sweep()

    def expire(self, now: float, lease_s: float) -> None:
        """End retained snapshots that are too old, even if no registry says so."""
        old = [serial for serial, since in self.retained.items() if now - since > lease_s]
        for serial in old:
            del self.retained[serial]
        if old:
            self.sweep()

    def retain(self, *serials: int) -> None:
        """Keep these snapshots: a thread is about to read their memory."""
        self._holds.update(serials)

    def release(self, *serials: int) -> None:
        """End a hold(): the thread no longer reads them."""
        self._holds.subtract(serials)
        self.sweep()

    def sweep(self) -> None:
        """Free the slots of snapshots that are no longer needed."""
        for serial, (index, _version) in self.filled().items():
            over = serial < self.newest or serial in self._dropped
            if over and serial != self.base and not self.lives(serial) and not self._holds[serial]:
                del self._holds[serial]
                self._words[index] = SlotView(SlotState.FREE, 0, 0).pack()


class SlotPort(Protocol):
    """This rank's slots, as the boundary uses them."""

    def reserve(self) -> bool:
        """Take a slot for the next snapshot, or keep the existing reservation. Returns False if no slot is free."""

    def release(self) -> None:
        """Give up the reservation, if there is one."""

    def snapshot(self, version: int, serial: int) -> None:
        """Fill the reserved slot."""

    def fail(self, version: int, serial: int) -> None:
        """Report that this rank cannot take a snapshot that all ranks were told to take."""


class Boundary:
    """A rank's vote and pending version. All ranks call it in the same order, with the same arguments."""

    def __init__(self, slots: SlotPort):
        self._slots = slots
        self.serial = 0
        self.published = self.skipped = 0
        self._pending_version: int | None = None
        self._last_snapshot = (0, -1)

    def reserve(self) -> bool:
        """Reserve a slot. False is this rank's vote against the coming version."""
        return self._slots.reserve()

    def commit(self, version: int, votes_against: int) -> bool:
        """Snapshot `version`, or skip it if any rank voted no: then it is pending. Returns whether it was taken."""
        self.serial += 1
        if votes_against:
            self._slots.release()
            self.skipped += 1
            self._pending_version = version
            return False
        self._snapshot(version)
        return True

    def snapshot_pending(self, version: int) -> bool:
        """Snapshot the pending version. Returns False if there is no slot here: all ranks drop it, it stays pending."""
        self.serial += 1
        if self._slots.reserve():
            self._snapshot(version)
            return True
        self._slots.fail(version, self.serial)
        self._pending_version = version
        return False

    def _snapshot(self, version: int) -> None:
        self._slots.snapshot(version, self.serial)
        self.published += 1
        self._pending_version = None
        self._last_snapshot = (self.serial, version)

    def pending_version(self, newest: int | None, dropped: Collection[Sequence[int]]) -> int | None:
        """Return the version that was skipped, or dropped because another rank could not snapshot it.

        newest: the newest published version; dropped: (serial, version) of the last dropped snapshots.
        """
        if self._pending_version is not None:
            return self._pending_version
        version = self._last_snapshot[1]
        was_dropped = any(tuple(pair) == self._last_snapshot for pair in dropped)
        if was_dropped and (newest is None or newest < version):
            return version
        return None


_PAGE = mmap.PAGESIZE
_WORD_BYTES = 8
# After the slots' words come the last snapshots that this rank could not take (a shard server that was away reads all
# of them), and the shard server's sign of life.
_FAILURES = 64
_EXTRA_WORDS = _FAILURES + 1

NAMES = ("process", "descriptor", "device", "inode")


def anonymous_file(name: str, size: int) -> int:
    """Return a descriptor of `size` zero bytes. Raises UserError where a limit of this process forbids that."""
    descriptor = os.memfd_create(name)
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise UserError(
            f"weight sync needs a shared memory file ({name}) of {size:,} bytes: {error.strerror}. Raise the limit on "
            "the size of files (ulimit -f), or lower weight_sync.num_slots"
        ) from error
    return descriptor


class SlotWords:
    """The words of `count` slots of `slot_bytes` each, wherever the slots are. With count 0, only a sign of life."""

    def __init__(self, words_fd: int, count: int, slot_bytes: int):
        self.words_fd, self.count, self.slot_bytes = words_fd, count, slot_bytes
        self._words_map = mmap.mmap(words_fd, (count + _EXTRA_WORDS) * _WORD_BYTES)
        self._words = memoryview(self._words_map).cast("Q")

    @staticmethod
    def new_file(count: int) -> int:
        """Return a descriptor of words that are all FREE."""
        return anonymous_file("weight-sync-words", (count + _EXTRA_WORDS) * _WORD_BYTES)

    @property
    def state_words(self) -> memoryview:
        """One word per slot."""
        return self._words[: self.count]

    @property
    def failed(self) -> list[tuple[int, int]]:
        """(serial, version) of the last snapshots that this rank could not take, oldest first."""
        views = [SlotView.unpack(word) for word in self._words[self.count : self.count + _FAILURES] if word]
        return sorted((view.serial, view.version) for view in views)

    def set_failed(self, serial: int, version: int) -> None:
        self._words[self.count + serial % _FAILURES] = (version << 30) | serial

    @property
    def heartbeat(self) -> int:
        """A number that changes while the shard server works."""
        return self._words[self.count + _FAILURES]

    def beat(self) -> None:
        self._words[self.count + _FAILURES] += 1

    def close_files(self) -> None:
        """Close the descriptors. The mapping stays while it is used."""
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
        """Create slots that are all free and zero."""
        data_fd = anonymous_file("weight-sync-slots", count * _stride(slot_bytes))
        return cls(cls.new_file(count), data_fd, count, slot_bytes)

    def slot(self, index: int) -> memoryview:
        """A slot's bytes."""
        return self._memory[index * self.stride :][: self.slot_bytes]

    def refer(self, slot: int, start: int, _end: int) -> Message:
        """Return the reference to bytes [start, end) of a slot, for other processes."""
        return {"memory": file_reference(self.data_fd), "offset": slot * self.stride + start}

    def close_files(self) -> None:
        super().close_files()
        os.close(self.data_fd)


def _stride(slot_bytes: int) -> int:
    return max(_PAGE, -(-slot_bytes // _PAGE) * _PAGE)


class ReferencedMemory:
    """Memory of shard servers, opened when a reference first names it. open_memory() gets what the reference says of
    the memory, and returns an object to be sliced as [start:end]."""

    def __init__(self, open_memory: Callable[[Message], Any]):
        self._open = open_memory
        self._opened: dict[str, Any] = {}

    def part(self, reference: Any, size: int) -> Any:
        """Return `size` bytes at a reference. Raises ProtocolError for an invalid one, and what open_memory()
        raises."""
        memory, offset = field_of(reference, "memory", dict), field_of(reference, "offset", int)
        # The whole name is the key, because another shard server of the same rank may name the same memory differently.
        name = json.dumps(memory, sort_keys=True)
        if name not in self._opened:
            self._opened[name] = self._open(memory)
        opened = self._opened[name]
        if offset > len(opened) - size:
            raise ProtocolError(f"{size} bytes at {offset} lie outside of the memory")
        return opened[offset : offset + size]


def file_reference(descriptor: int) -> Message:
    """Return a message that names an open file of this process to others of the same user, see open_shared."""
    status = os.fstat(descriptor)
    return {"process": os.getpid(), "descriptor": descriptor, "device": status.st_dev, "inode": status.st_ino}


def open_shared(memory: Message, writable: bool = False) -> mmap.mmap:
    """Map a file that another process has named. Raises ProtocolError for an invalid name, OSError if it does not
    open."""
    process, descriptor, device, inode = (field_of(memory, name, int) for name in NAMES)
    access = os.O_RDWR if writable else os.O_RDONLY
    opened = os.open(f"/proc/{process}/fd/{descriptor}", access | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        # Process and descriptor numbers are reused: it must still be the same file.
        if (status.st_dev, status.st_ino, status.st_uid) != (device, inode, os.geteuid()):
            raise ProtocolError("the slots that were named are not there any more, or another user's")
        return mmap.mmap(opened, status.st_size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(opened)
