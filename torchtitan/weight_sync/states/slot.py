"""Slots are leased, not alternated: FREE → RESERVED → WRITING → READY → LEASED → FREE. Pure, no I/O.

A slot's state is one 64-bit word that two processes share. Every transition belongs to exactly one of them: from FREE
to READY to the trainer's SlotWriter, from READY on to the courier's SlotKeeper, so that neither ever needs a lock.
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
    LEASED = 4


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
        """WRITING → READY: the fence has fired. From here on the slot is the courier's."""
        view = self.view(index)
        self._move(index, SlotState.WRITING, SlotView(SlotState.READY, view.version, view.serial))

    def _move(self, index: int, expected: SlotState, new: SlotView) -> None:
        found = self.view(index).state
        if found is not expected:
            raise RuntimeError(f"slot {index} is {found.name}, expected {expected.name}")
        self._words[index] = new.pack()


class SlotKeeper:
    """The courier's transitions: who reads a slot, which one is pinned, when one is free again.

    Readers are attempts that hold a lease; holds are reasons why the transport or the checksum thread still touches the
    memory, although a lease may be over. A slot is free when both are empty and it is dropped, or older than the pinned
    and not retained as the base of deltas.
    """

    def __init__(self, words: Words):
        self._words = words
        self._readers: dict[int, set[int]] = {}
        self._holds: dict[int, set[str]] = {}
        self._dropped: set[int] = set()
        self.pinned: int | None = None
        self.retained: int | None = None

    def filled(self) -> dict[int, tuple[int, int]]:
        """serial -> (slot index, version) of all slots that hold a snapshot."""
        found = {}
        for index in range(len(self._words)):
            word = self._words[index]
            # Read often: without a view of each word.
            if word >> 2 * _NUMBER_BITS >= SlotState.READY:
                found[word & _NUMBER_MASK] = (index, (word >> _NUMBER_BITS) & _NUMBER_MASK)
        return found

    def lease(self, serial: int, attempt: int) -> bool:
        """READY → LEASED (one more reader). False when there is no such snapshot."""
        if serial not in self.filled() or serial in self._dropped:
            return False
        self._readers.setdefault(serial, set()).add(attempt)
        self._sweep()
        return True

    def end_lease(self, attempt: int) -> None:
        """The attempt is staged or aborted. Idempotent."""
        for readers in self._readers.values():
            readers.discard(attempt)
        self._sweep()

    def end_all_leases(self) -> None:
        """The coordinator is gone, and every attempt with it."""
        self._readers.clear()
        self._sweep()

    def leases(self, serial: int) -> frozenset[int]:
        """Attempts that read this snapshot."""
        return frozenset(self._readers.get(serial, ()))

    def hold(self, serial: int, reason: str) -> None:
        """Somebody is about to touch the memory."""
        self._holds.setdefault(serial, set()).add(reason)

    def let_go(self, serial: int, reason: str) -> None:
        """They do not touch it any more."""
        self._holds.get(serial, set()).discard(reason)
        self._sweep()

    def publish(self, serial: int) -> None:
        """All ranks have this snapshot: it is pinned until a newer one is published."""
        if self.pinned is None or serial > self.pinned:
            self.pinned = serial
        # Another term of the coordinator may have dropped what this one found whole.
        self._dropped.discard(serial)
        self._sweep()

    def retain(self, serial: int | None) -> None:
        """Keep this published snapshot as the base of deltas until told otherwise; one at a time."""
        self.retained = serial
        self._sweep()

    def drop(self, serial: int) -> None:
        """This snapshot will never be published, as far as this term knows: the pinned one outlives even that."""
        self._dropped.add(serial)
        self._sweep()

    def _sweep(self) -> None:
        filled = self.filled()
        for serial, (index, version) in filled.items():
            superseded = self.pinned is not None and serial < self.pinned and serial != self.retained
            outdated = superseded or (serial in self._dropped and serial != self.pinned)
            if self._readers.get(serial):
                state = SlotState.LEASED
            elif outdated and not self._holds.get(serial):
                state = SlotState.FREE
            else:
                state = SlotState.READY
            if state is SlotState.FREE:
                self._readers.pop(serial, None)
                self._holds.pop(serial, None)
                self._dropped.discard(serial)
                self._words[index] = SlotView(SlotState.FREE, 0, 0).pack()
            else:
                self._words[index] = SlotView(state, version, serial).pack()
