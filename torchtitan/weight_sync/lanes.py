"""Which published snapshots live: the newest, and a few older ones ("lanes") that slow actors are still pulling. Pure.

When a version is published while the one before is being pulled, that one becomes a lane if there is room, for at most
`lease_s`; else whoever pulls it is told that it is gone. So slow actors share the lanes and the trainer always has a
free slot: one of its slots is written, one holds the newest, the others are lanes.

With deltas there is one slot more, for the base: the older snapshot that most actors hold. It cannot be pulled, only be
what a delta is taken against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

# An actor that could not finish in so many lanes is given up.
MOST_LOST_LANES = 3


@dataclass
class Pull:
    """What one actor is pulling."""

    serial: int
    moved_at: float
    """When its last byte was reported"""
    bytes: int = 0


@dataclass
class Lanes:
    """limit: lanes at a time; lease_s: the longest life of one; progress_s: a pull that moves nothing for so long does
    not keep its lane; keeps_base: whether there is a base."""

    limit: int
    lease_s: float
    progress_s: float
    keeps_base: bool = False
    newest: int | None = None
    lanes: dict[int, float] = field(default_factory=dict)
    """Serial -> since when it is no longer the newest"""
    pulls: dict[str, Pull] = field(default_factory=dict)
    base: int | None = None
    holds: dict[str, int] = field(default_factory=dict)
    """Actor -> the last snapshot that it had as a whole"""
    lost: dict[str, int] = field(default_factory=dict)
    """Actor -> lanes in a row in which it did not finish"""

    @property
    def room(self) -> bool:
        """Whether another lane may begin."""
        return len(self.lanes) < self.limit

    def lives(self, serial: int) -> bool:
        """Whether this snapshot may be read."""
        return serial == self.newest or serial in self.lanes

    def publish(self, serial: int, now: float) -> None:
        """`serial` is the newest from now on."""
        old, self.newest = self.newest, serial
        if old is not None and self.room and any(pull.serial == old for pull in self.pulls.values()):
            self.lanes[old] = now
        self._choose_base((old, self.base, *self.lanes))
        self.pulls = {actor: pull for actor, pull in self.pulls.items() if self.lives(pull.serial)}

    def begin(self, actor: str, serial: int, now: float) -> None:
        """An actor says that it pulls this snapshot. What does not live any more it will find gone."""
        self.end(actor)
        # A new registry hears of pulls before it has published anything.
        if self.newest is None or self.lives(serial):
            self.pulls[actor] = Pull(serial, now)

    def progress(self, actor: str, count: int, now: float) -> None:
        """So many bytes of its pull have arrived."""
        pull = self.pulls.get(actor)
        if pull is not None and count > pull.bytes:
            pull.bytes, pull.moved_at = count, now

    def end(self, actor: str) -> None:
        """The actor pulls nothing (any more). A lane that nobody pulls ends."""
        if self.pulls.pop(actor, None) is not None:
            self._sweep()

    def finished(self, actor: str) -> None:
        """The actor has a whole version."""
        self.lost.pop(actor, None)
        if actor in self.pulls:
            self.holds[actor] = self.pulls[actor].serial
        self.end(actor)

    def expire(self, now: float) -> list[str]:
        """End lanes that are too old, and pulls that stand still in one. Returns the actors that have lost a lane."""
        late = []
        for actor, pull in list(self.pulls.items()):
            since = self.lanes.get(pull.serial)
            if since is None:
                continue
            if now - since > self.lease_s or now - max(since, pull.moved_at) > self.progress_s:
                late.append(actor)
                del self.pulls[actor]
                self.lost[actor] = self.lost.get(actor, 0) + 1
        self._sweep()
        return late

    def leave(self, actor: str) -> None:
        """The actor is out of reach."""
        self.holds.pop(actor, None)
        self.pulls.pop(actor, None)
        self._sweep()

    def forget(self, actor: str) -> None:
        """A new process of this name starts afresh."""
        self.leave(actor)
        self.lost.pop(actor, None)

    def _sweep(self) -> None:
        self._choose_base((self.base, *self.lanes))
        pulled = {pull.serial for pull in self.pulls.values()}
        self.lanes = {serial: since for serial, since in self.lanes.items() if serial in pulled}

    def _choose_base(self, there: Iterable[int | None]) -> None:
        """Of these, the one that most actors hold; of equals the newest."""
        if self.keeps_base:
            held = Counter(self.holds.values())
            known = [serial for serial in there if serial is not None and serial != self.newest and held[serial]]
            self.base = max(known, key=lambda serial: (held[serial], serial), default=None)
