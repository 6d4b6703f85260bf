"""Slots are not alternated: FREE → RESERVED → WRITING → READY → FREE. Pure, no I/O.

A slot's state is one 64-bit word that two processes share. Every transition belongs to exactly one of them: from FREE
to READY to the trainer's SlotWriter, from READY on to the shard server's LiveSlots, so that neither needs a lock.
"""

from __future__ import annotations

import enum
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


def filled(words: Words) -> dict[int, tuple[int, int]]:
    """serial -> (slot index, version) of all slots that hold a snapshot."""
    found = {}
    for index in range(len(words)):
        word = words[index]
        # Read often: without a view of each word.
        if word >> 2 * _NUMBER_BITS >= SlotState.READY:
            found[word & _NUMBER_MASK] = (index, (word >> _NUMBER_BITS) & _NUMBER_MASK)
    return found


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
