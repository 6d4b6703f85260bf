"""Which published snapshots live: the newest, and older ones that are retained for those that still pull them. No I/O.

What retains a snapshot is bytes that move, as the shard servers see them. Whoever holds one and does not get the whole
version meanwhile retains none for a while, so a liar takes the place of the others for about a tenth of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchtitan.weight_sync.registry.state import RegistrySettings

# Whoever has held a snapshot in vain retains none for so many times as long.
REST = 10.0
# Shard servers count what has moved five times a second, so a pull that has ended is judged this much later.
SETTLE_SECONDS = 1.0
# So much of a version shard servers have to have sent to an actor that says that it has all of it.
STAGED_SHARE = 0.5


@dataclass
class Pull:
    """The snapshot that one actor is pulling."""

    serial: int
    moved_at: float
    """When bytes moved last"""
    bytes: int = 0
    relayed: bool = False
    """Whether another actor was to send it. Unless the actor comes to a shard server, it needs no snapshot"""
    is_old: bool = False
    """Whether it may have begun before this registry"""
    is_staged: bool = False
    """Whether the actor has said that it has the whole version"""

    def lacks(self, count: float) -> bool:
        """Return whether shard servers have sent less than `count` bytes, though they were to send the whole
        version."""
        return self.bytes < count and not self.relayed and not self.is_old


@dataclass
class _Held:
    """A pull that has ended, of a snapshot that was retained for it."""

    pull: Pull
    since: float
    ended_at: float | None = None


@dataclass
class Snapshots:
    """Which published snapshots live, who pulls them, and which one is the base of deltas."""

    settings: RegistrySettings
    version_bytes: int = 0
    """Of all ranks; 0: not known yet"""
    newest: int | None = None
    retained: dict[int, float] = field(default_factory=dict)
    """Serial -> when it ceased to be the newest"""
    pulls: dict[str, Pull] = field(default_factory=dict)
    base: int | None = None
    holds: dict[str, int] = field(default_factory=dict)
    """Actor -> the last snapshot that it held completely"""
    lost: dict[str, int] = field(default_factory=dict)
    """Actor -> retained snapshots in a row that ended before it had finished"""
    resting: dict[str, float] = field(default_factory=dict)
    """Actor, also an earlier process of its name -> until when its pulls retain nothing"""
    _held: dict[str, _Held] = field(default_factory=dict)
    """Actor -> its last pull, until it is judged"""

    @property
    def room(self) -> bool:
        """Return whether another snapshot may be retained."""
        return len(self.retained) < self.settings.retained

    def lives(self, serial: int) -> bool:
        """Return whether this snapshot may be read."""
        return serial == self.newest or serial in self.retained

    def publish(self, serial: int, now: float) -> None:
        """Make `serial` the newest snapshot."""
        self._wake(now)
        old, self.newest = self.newest, serial
        if old is not None and self.room and old in self._kept():
            self.retained[old] = now
        self._choose_base((old, self.base, *self.retained))
        self.pulls = {actor: pull for actor, pull in self.pulls.items() if self.lives(pull.serial)}

    def begin(self, actor: str, serial: int, now: float, relayed: bool = False) -> None:
        """Record that an actor pulls this snapshot. If the snapshot no longer lives, the actor will find it gone."""
        if actor in self.pulls and self.pulls[actor].serial == serial:
            return
        self.end(actor)
        before = self._held.get(actor)
        if before is not None and before.pull.serial == serial and serial in self.retained:
            # It was only disconnected. That is no new pull, whose deadlines would begin anew.
            self.pulls[actor] = self._held.pop(actor).pull
        # A restarted registry hears of pulls before it has published anything.
        elif self.newest is None or self.lives(serial):
            self.pulls[actor] = Pull(serial, now, relayed=relayed, is_old=self.newest is None)

    def moved(self, actor: str, serial: int, count: int, now: float) -> None:
        """Record that a shard server has sent an actor `count` bytes more of this snapshot."""
        held = self._held.get(actor)
        for pull in (self.pulls.get(actor), None if held is None else held.pull):
            if pull is not None and pull.serial == serial:
                pull.bytes, pull.moved_at = pull.bytes + count, now

    def progress(self, actor: str, count: int, now: float) -> None:
        """Record that an actor says that `count` bytes of its pull have arrived in total."""
        pull = self.pulls.get(actor)
        if pull is not None and count > pull.bytes and not self.settings.sees_bytes:
            pull.bytes, pull.moved_at = count, now

    def end(self, actor: str) -> None:
        """Record that the actor pulls nothing (any more). A snapshot that nobody pulls is not retained."""
        pull = self.pulls.pop(actor, None)
        if pull is not None and pull.serial in self.retained:
            self._hold(actor, pull)
        if pull is not None and (pull.serial in self.retained or self.settings.delta):
            self._sweep()

    def finished(self, actor: str) -> None:
        """Record that the actor has a complete version."""
        self.lost.pop(actor, None)
        if actor in self.pulls:
            self.pulls[actor].is_staged = True
            self.holds[actor] = self.pulls[actor].serial
        self.end(actor)

    def expire(self, now: float) -> list[str]:
        """End retained snapshots that are too old, and stalled pulls. Returns the actors that have lost theirs."""
        self._wake(now)
        late = []
        for actor, pull in list(self.pulls.items()):
            since = self.retained.get(pull.serial)
            if since is None or not self._keeps(actor, pull):
                continue
            is_stalled = now - max(since, pull.moved_at) > self.settings.progress_timeout_s
            if is_stalled or self._is_behind(pull, now - since) or now - since > self.settings.lease_s:
                late.append(actor)
                del self.pulls[actor]
                self.lost[actor] = self.lost.get(actor, 0) + 1
                self._rest(actor, now - since, now)
        for actor, held in list(self._held.items()):
            held.ended_at = now if held.ended_at is None else held.ended_at
            if now - held.ended_at > SETTLE_SECONDS:
                del self._held[actor]
                # Counts get lost with a shard server or a connection, so whoever says that it has all needs half.
                needed = self.version_bytes * (STAGED_SHARE if held.pull.is_staged else 1.0)
                if self.settings.sees_bytes and held.pull.lacks(needed):
                    self._rest(actor, held.ended_at - held.since, now)
        self._sweep()
        return late

    def leave(self, actor: str) -> None:
        """Record that the actor is disconnected."""
        self.holds.pop(actor, None)
        self.end(actor)
        self._sweep()

    def forget(self, actor: str) -> None:
        """Reset what is known of a name that a new process now uses, but for how long it rests."""
        self.leave(actor)
        self.lost.pop(actor, None)

    def _is_behind(self, pull: Pull, held_s: float) -> bool:
        """Return whether a pull is too slow to end within the lease of its snapshot."""
        due = (held_s - self.settings.progress_timeout_s) / self.settings.lease_s * self.version_bytes
        return self.settings.sees_bytes and pull.lacks(due)

    def _keeps(self, actor: str, pull: Pull) -> bool:
        return actor not in self.resting and (pull.bytes > 0 or not pull.relayed)

    def _kept(self) -> set[int]:
        return {pull.serial for actor, pull in self.pulls.items() if self._keeps(actor, pull)}

    def _hold(self, actor: str, pull: Pull) -> None:
        if self._keeps(actor, pull):
            before = self._held.get(actor)
            since = self.retained[pull.serial]
            # One that was not judged yet is judged with this one.
            self._held[actor] = _Held(pull, since if before is None else min(since, before.since))

    def _rest(self, actor: str, held_s: float, now: float) -> None:
        self.resting[actor] = max(self.resting.get(actor, now), now) + REST * held_s

    def _wake(self, now: float) -> None:
        self.resting = {actor: until for actor, until in self.resting.items() if until > now}

    def _sweep(self) -> None:
        self._choose_base((self.base, *self.retained))
        kept = self._kept()
        self.retained = {serial: since for serial, since in self.retained.items() if serial in kept}

    def _choose_base(self, serials: Iterable[int | None]) -> None:
        """Choose the snapshot among `serials` that most actors hold; the newest if there is a tie."""
        if self.settings.delta:
            held = Counter(self.holds.values())
            known = [serial for serial in serials if serial is not None and serial != self.newest and held[serial]]
            self.base = max(known, key=lambda serial: (held[serial], serial), default=None)
