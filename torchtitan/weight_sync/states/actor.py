"""What the coordinator knows about one actor. Pure.

JOINING → READY → OFFERED → RECEIVING → STAGED → APPLYING → READY; SUSPECT (a deadline passed) → EVICTED → JOINING; and
POISONED (apply failed), which serves nothing until a full version has been applied.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from torchtitan.weight_sync.states.attempt import Attempt
from torchtitan.weight_sync.states.version import VersionRecord


class ActorState(enum.Enum):
    JOINING = "JOINING"
    READY = "READY"
    OFFERED = "OFFERED"
    RECEIVING = "RECEIVING"
    STAGED = "STAGED"
    APPLYING = "APPLYING"
    SUSPECT = "SUSPECT"
    EVICTED = "EVICTED"
    POISONED = "POISONED"


_S = ActorState
_NEXT = {
    _S.JOINING: {_S.READY, _S.POISONED, _S.EVICTED},
    _S.READY: {_S.OFFERED, _S.SUSPECT, _S.EVICTED},
    # An aborted, declined or refused attempt leads back to where the actor was.
    _S.OFFERED: {_S.RECEIVING, _S.READY, _S.POISONED, _S.SUSPECT, _S.EVICTED},
    _S.RECEIVING: {_S.STAGED, _S.READY, _S.POISONED, _S.SUSPECT, _S.EVICTED},
    _S.STAGED: {_S.APPLYING, _S.EVICTED},
    _S.APPLYING: {_S.READY, _S.POISONED, _S.EVICTED},
    _S.SUSPECT: {_S.READY, _S.POISONED, _S.EVICTED},
    _S.EVICTED: set(),
    _S.POISONED: {_S.OFFERED, _S.SUSPECT, _S.EVICTED},
}

NO_VERSION = -1
MAXIMUM_FAILURES = 3
FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 60.0


def backoff_seconds(doublings: int) -> float:
    """FIRST_BACKOFF_SECONDS, doubled so often, up to LONGEST_BACKOFF_SECONDS."""
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(doublings, 16))


@dataclass
class Actor:
    """One connection's life of one actor; a rejoin makes a new one."""

    name: str
    session: int
    data: str | list[str]
    """host:port of each of its workers, which senders connect to"""
    heard_at: float
    since: float
    state: ActorState = ActorState.JOINING
    version: int = NO_VERSION
    """Served version of this epoch, NO_VERSION when it serves none"""
    digest: str = ""
    poisoned: bool = False
    acknowledged: bool = False
    """The served version was applied on this connection: it may be the base of a delta"""
    shadow: bool = False
    """Its staging memory holds the served version, as far as is known here: it may pass it on"""
    deltas: int = 0
    """Versions applied as deltas since the last one in full"""
    fed_by_trainer: bool = False
    """The served version came from the couriers, on this connection"""
    distrusts: dict[tuple[str, int], float] = field(default_factory=dict)
    """(name, session) of a peer whose relay to this one failed -> until when it is not asked again"""
    parts: list[str] = field(default_factory=list)
    """What identifies the buckets that each worker needs"""
    process: str | None = None
    """Differs between two processes of one name; None where the actor does not say"""
    mailbox: bool = False
    """A version waits: always the newest (depth one, latest wins)"""
    attempt: Attempt | None = None
    unanswered_since: float | None = None
    """First offer that got no answer; outlives attempts that are aborted for want of slots"""
    shortage_aborts: int = 0
    """Consecutive attempts aborted for want of slots although they made progress"""
    missed_deadlines: int = 0
    failures: int = 0
    """Attempts that ended in corruption, a broken connection or a failed apply, and evictions over a deadline, since
    the last applied version; a rejoin does not forget them"""
    replacements: int = 0
    """New processes of this name, one after the other, without any that applied a version"""
    declines: int = 0
    """Consecutive offers that were declined"""
    offers_from: float = 0.0
    """No offer before this time"""
    pinned: bool = False
    reason: str = ""
    evictions: int = 0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def idle_state(self) -> ActorState:
        """Where an ended attempt leads back to."""
        return ActorState.POISONED if self.poisoned else ActorState.READY

    @property
    def idle(self) -> bool:
        """Can be offered a version."""
        return self.state in (ActorState.READY, ActorState.POISONED)

    @property
    def serves(self) -> bool:
        """May be sent prompts: some version of this epoch is whole in it."""
        return self.has_version and not self.poisoned and self.state is not ActorState.EVICTED

    @property
    def has_version(self) -> bool:
        """Holds some version of this epoch, whole or poisoned."""
        return self.version != NO_VERSION

    def holds(self, record: VersionRecord) -> bool:
        """Serves exactly this version."""
        return self.version == record.version and self.digest == record.digest and not self.poisoned

    @property
    def on_probation(self) -> bool:
        """Has failed so often that nobody waits for it before it has applied a version."""
        return self.failures >= MAXIMUM_FAILURES

    @property
    def backoff(self) -> float:
        """Seconds from a rejoin to the first offer: bandwidth goes to actors that make use of it."""
        return backoff_seconds(self.failures - MAXIMUM_FAILURES) if self.on_probation else 0.0

    def succeed(self, previous: Actor) -> None:
        """Take over what the last connection of this name left behind.

        The same process keeps its failures. A new one starts afresh, unless one after the other ends before it has
        applied anything: from the third on it is on probation like an actor that fails.
        """
        self.evictions, self.figures = previous.evictions, previous.figures
        if self.process is None or self.process == previous.process:
            self.failures, self.replacements, self.reason = previous.failures, previous.replacements, previous.reason
        else:
            self.replacements = previous.replacements + 1
            self.failures = self.replacements if self.replacements >= MAXIMUM_FAILURES else 0
        if self.version > previous.version and not self.poisoned:
            self.failures = 0  # it did apply, only the acknowledgement was lost or late

    def move(self, state: ActorState, now: float) -> None:
        """Raises RuntimeError for a step that the protocol does not have."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"actor {self.name} cannot go from {self.state.value} to {state.value}")
        self.state, self.since = state, now

    def status(self) -> dict[str, Any]:
        """For the trainer and the logs; JSON."""
        return {
            "state": self.state.value,
            "version": self.version,
            "digest": self.digest,
            "serves": self.serves,
            "poisoned": self.poisoned,
            "pinned": self.pinned,
            "on_probation": self.on_probation,
            "reason": self.reason,
            "evictions": self.evictions,
            "figures": self.figures,
        }
