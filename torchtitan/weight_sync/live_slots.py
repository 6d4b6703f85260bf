"""The shard server's side of a rank's slots: what may be read, what is being read, and when a slot is free. Pure.

The trainer's side is SlotWriter (slot_states.py): it owns a slot up to READY, this one from READY on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torchtitan.weight_sync.slot_states import SlotState, SlotView, Words, filled


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
