"""What became of each version on its way to each actor: one row per pull that has ended, and per version that an actor
has left out. A row is written where it is decided, once, and never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.wire.runtime import Message

# Of each actor, at most this many versions are remembered that it has not asked for.
MAX_OFFERED = 1024
# An actor asks for a version a few times, unless it means harm: of one version, so many pulls in vain have a row.
MAX_IN_VAIN = 8

Outcome = Literal["applied", "superseded", "aborted", "refused", "poisoned", "evicted"]
"""superseded: the actor never asked for it, because a newer version was there. aborted: the pull ended before the actor
had all of it, usually for a newer version. evicted: the actor was evicted or given up meanwhile."""


@dataclass
class Delivery:
    """A row of the journal. Times are in seconds since 1970."""

    epoch: str
    actor: str
    version: int
    offered_at: float | None
    """When it was published, or the actor joined after that"""
    attempt: int = 0
    """How often the actor has asked for this version, this time included"""
    begun_at: float | None = None
    staged_at: float | None = None
    """When the actor had all of it, verified"""


class Deliveries:
    """The pulls in progress, and what each actor was offered. clock(): the time; write(event, fields) writes a line of
    the journal."""

    def __init__(self, epoch: str, clock: Callable[[], float], write: Callable[[str, Message], None]):
        self._epoch, self._clock, self._write = epoch, clock, write
        self._offered: dict[str, dict[int, float]] = {}
        """Actor -> version -> since when it is offered"""
        self._tried: dict[str, tuple[int, int]] = {}
        """Actor -> the newest version that it asked for, and how often"""
        self._pulls: dict[str, Delivery] = {}

    def offer(self, version: int, actors: Iterable[str]) -> None:
        """These actors may pull this version from now on."""
        now = self._clock()
        for actor in actors:
            offered = self._offered.setdefault(actor, {})
            offered.setdefault(version, now)
            if len(offered) > MAX_OFFERED:
                self._supersede(actor, min(offered) + 1)

    def begin(self, actor: str, version: int) -> None:
        """The actor pulls this version."""
        if actor in self._pulls:
            if self._pulls[actor].version == version:
                return
            self._end_pull(actor, "aborted", "the actor began another pull")
        self._supersede(actor, version)
        newest, attempt = self._tried.get(actor, (-1, 0))
        attempt = 1 if version > newest else attempt + 1
        self._tried[actor] = max(version, newest), attempt
        offered_at = self._offered.get(actor, {}).get(version)
        self._pulls[actor] = Delivery(self._epoch, actor, version, offered_at, attempt, self._clock())

    def stage(self, actor: str, version: int) -> None:
        """The actor has received the whole version."""
        if self._pulled_version(actor) == version:
            self._pulls[actor].staged_at = self._clock()

    def end(self, actor: str, version: int, outcome: Outcome, reason: str) -> None:
        """The pull of this version has delivered nothing. Does nothing if there is none: what an actor says of a
        version that it serves is not the end of its pull of another one."""
        if self._pulled_version(actor) == version:
            self._end_pull(actor, outcome, reason)

    def serves(self, actor: str, version: int, figures: Message) -> None:
        """The actor serves this version. figures: what it has measured; empty if it only repeats what it serves, as to
        each registry anew: whoever reads the rows leaves out what an earlier one has written already."""
        delivery = self._pulls.get(actor)
        if delivery is not None and delivery.version == version:
            del self._pulls[actor]
        else:
            # It has applied the version, and said so to nobody; or nobody heard that it pulled it.
            delivery = Delivery(self._epoch, actor, version, self._offered.get(actor, {}).get(version))
        self._write_row(delivery, "applied", figures=figures)
        self._supersede(actor, version)
        self._offered.get(actor, {}).pop(version, None)

    def evict(self, actor: str, reason: str) -> None:
        """The actor is out. When it comes back, it is offered the newest version anew."""
        self._end_pull(actor, "evicted", reason)
        self._offered.pop(actor, None)

    def forget(self, actor: str) -> None:
        """The actor has ended, or has been out for long."""
        self._end_pull(actor, "aborted", "the actor has left")
        for known in (self._offered, self._tried):
            known.pop(actor, None)

    def _pulled_version(self, actor: str) -> int | None:
        """The version that the actor pulls; None if it pulls none."""
        delivery = self._pulls.get(actor)
        return None if delivery is None else delivery.version

    def _end_pull(self, actor: str, outcome: Outcome, reason: str) -> None:
        """End the actor's pull, whichever it is. Does nothing if there is none."""
        delivery = self._pulls.pop(actor, None)
        if delivery is None or delivery.attempt > MAX_IN_VAIN:
            return
        state = ActorState.PULLING if delivery.staged_at is None else ActorState.APPLYING
        self._write_row(delivery, outcome, state=state, reason=reason)

    def _supersede(self, actor: str, below: int) -> None:
        """The actor will not ask for offered versions before `below`."""
        offered = self._offered.get(actor, {})
        for version in sorted(version for version in offered if version < below):
            offered_at = offered.pop(version)
            if version != self._tried.get(actor, (-1, 0))[0]:
                self._write_row(Delivery(self._epoch, actor, version, offered_at), "superseded")

    def _write_row(self, delivery: Delivery, outcome: Outcome, **more: object) -> None:
        self._write("delivery", {**asdict(delivery), "outcome": outcome, "ended_at": self._clock(), **more})
