"""What state a rank's slots are in, on both sides: FREE → RESERVED → WRITING → READY → FREE. Pure, no I/O.

A slot's state is one 64-bit word that two processes share. Every transition belongs to exactly one of them: from FREE
to READY to the trainer's SlotWriter, from READY on to the shard server's LiveSlots, so that neither needs a lock.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

_NUMBER_BITS = 30
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


class SlotState(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    WRITING = 2
    READY = 3


_STATES = tuple(SlotState)
_READY_WORD = SlotState.READY << 2 * _NUMBER_BITS


@dataclass(frozen=True)
class SlotView:
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


class Words(Protocol):
    """A row of 64-bit words: shared memory, or a list in tests."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


def filled(words: Words) -> dict[int, tuple[int, int]]:
    """serial -> (slot index, version) of all slots that hold a snapshot."""
    # Read often: without a view of each word.
    return {
        word & _NUMBER_MASK: (index, (word >> _NUMBER_BITS) & _NUMBER_MASK)
        for index, word in enumerate(words)
        if word >= _READY_WORD
    }


class SlotWriter:
    """The trainer's transitions. None of them waits."""

    def __init__(self, words: Words):
        self._words = words

    def view(self, index: int) -> SlotView:
        return SlotView.unpack(self._words[index])

    def has_free(self) -> bool:
        """Whether reserve() would find a slot."""
        return any(self.view(index).state is SlotState.FREE for index in range(len(self._words)))

    def reserve(self) -> int | None:
        """FREE → RESERVED for the first free slot; its index, or None when there is none."""
        for index in range(len(self._words)):
            if self.view(index).state is SlotState.FREE:
                self._move(index, SlotState.FREE, SlotView(SlotState.RESERVED, 0, 0))
                return index
        return None

    def release(self, index: int) -> None:
        """RESERVED → FREE: the step was dropped, or another rank voted no."""
        self._move(index, SlotState.RESERVED, SlotView(SlotState.FREE, 0, 0))

    def begin(self, index: int, version: int, serial: int) -> None:
        """RESERVED → WRITING."""
        self._move(index, SlotState.RESERVED, SlotView(SlotState.WRITING, version, serial))

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
        return filled(self._words)

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

    def hold(self, serial: int) -> None:
        """A thread is about to read the memory."""
        self._holds[serial] += 1

    def let_go(self, serial: int) -> None:
        """It does not read it any more."""
        self._holds[serial] -= 1
        self.sweep()

    def sweep(self) -> None:
        """Free what is over."""
        for serial, (index, _version) in self.filled().items():
            over = serial < self.newest or serial in self._dropped
            if over and serial != self.base and not self.lives(serial) and not self._holds[serial]:
                del self._holds[serial]
                self._words[index] = SlotView(SlotState.FREE, 0, 0).pack()
