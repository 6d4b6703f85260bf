"""The registry's settings and state: ranks, actors and incomplete versions. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan.config.transports import TRANSPORTS
from torchtitan.weight_sync.actor_state import OUT, SERVING, ActorState
from torchtitan.weight_sync.wire.runtime import Channel, Message

if TYPE_CHECKING:
    from torchtitan.config.job_config import WeightSync


# Nobody waits for an actor in one of these states to take a version.
NOT_AWAITED = (*OUT, ActorState.LATE)
# Metrics and console lines name each of so many actors; of more, they count how many are in which state.
MAX_NAMED = 32
# An actor with this many failures in a row is not waited for until it has applied a version again.
MAX_FAILURES = 3
# What a new process inherits from an earlier one of its name.
KEPT = ("evictions", "eviction", "taken", "late", "disputes")


def differing(wanted: Message, offers: Message) -> list[str]:
    """Return a sentence for each fact of an actor that is not what a job needs. wanted: a text is what it has to be, a
    number what it has to be at least."""
    sentences = []
    for key, needed in wanted.items():
        given = offers.get(key)
        if isinstance(needed, str):
            fits, more = given == needed, ""
        else:
            fits, more = type(given) in (int, float) and given >= needed, " or more"
        if not fits:
            sentences.append(f"its {key} is {given}, and this job needs {needed}{more}")
    return sentences


@dataclass(frozen=True)
class RegistrySettings:
    """From [weight_sync]; times in seconds."""

    world_size: int
    retained: int = 1
    """Most retained snapshots at a time: older ones that are still being pulled"""
    lease_s: float = 60.0
    """How long a snapshot is retained at most"""
    relay_fanout: int = 0
    """How many hosts' fastest actors pull from the trainer, and how many from each that relays; 0: all actors pull from
    the trainer"""
    progress_timeout_s: float = 5.0
    """A pull that moves no byte for this long no longer retains its snapshot"""
    apply_timeout_s: float = 10.0
    snapshot_timeout_s: float = 60.0
    sees_bytes: bool = True
    """Whether shard servers see how many bytes an actor has taken. Otherwise its word has to do"""
    over_channel: bool = True
    """Whether all bytes cross the connections to shard servers: actors may receive them anywhere"""
    connections: int = 1
    """How many connections an actor has to each shard server"""
    delta: bool = False
    """Whether to keep a snapshot as the base of deltas, which takes one more slot"""
    guests: Message = field(default_factory=dict)
    """What a guest has to offer: a text is what it has to be, a number what it has to be at least. Empty: none may
    come"""

    def lacks(self, offers: Message) -> str:
        """Return what keeps a guest out that offers this, for people; empty: nothing."""
        return "; ".join(differing(self.guests, offers))

    @property
    def take_timeout_s(self) -> float:
        """How long an actor may take no version though one is offered, over all its attempts."""
        return self.lease_s + self.apply_timeout_s

    @classmethod
    def of(
        cls,
        config: WeightSync,
        world_size: int,
        version_bytes: int,
        drain_s: float = 0.0,
        guests: Message | None = None,
        applied_bytes: int = 0,
    ) -> RegistrySettings:
        """Derive the settings from the configuration. drain_s, applied_bytes: see WeightSync."""
        return cls(
            world_size=world_size,
            guests=guests or {},
            retained=config.num_slots - 2,
            lease_s=config.pull_deadline(version_bytes),
            relay_fanout=config.relay_fanout if config.table.relay else 0,
            progress_timeout_s=config.progress_timeout_s,
            apply_timeout_s=config.apply_deadline(max(version_bytes, applied_bytes), drain_s),
            sees_bytes=TRANSPORTS[config.transport].sends,
            over_channel=TRANSPORTS[config.transport].over_channel,
            connections=config.table.connections,
            delta=config.table.delta and TRANSPORTS[config.transport].over_channel,
        )


@dataclass
class PeerConnection:
    """The connection of a shard server, or of a guest, whose address is its URL."""

    channel: Channel
    address: str
    heard_at: float


@dataclass
class ActorRecord:
    """An actor that is connected, or was recently."""

    channel: Channel | None
    instance: str
    address: str
    """Where it relays versions; empty if it does not"""
    heard_at: float
    state: ActorState = ActorState.JOINING
    version: int = -1
    pinned: bool = False
    reason: str = ""
    evictions: int = 0
    """How often it was evicted, or given up"""
    eviction: str = ""
    """Why it was evicted or given up last, also when it is back"""
    failures: int = 0
    """How many versions in a row it could not take: refused, or partly applied"""
    figures: Message = field(default_factory=dict)
    applies_since: float | None = None
    taken: int = -1
    """The newest version that it has served"""
    offered_since: float | None = None
    """Since when a newer version than it serves is offered, or since the last one that it took after that"""
    source: str = ""
    """Name of the actor that it was last told to pull from; empty: the trainer"""
    left_source: bool = False
    """Whether it has come to a shard server for the newest version, which its source was to send"""
    took_s: float | None = None
    """Seconds from the announcement of the last version that it got from shard servers until they had sent all of it"""
    got: dict[int, int] = field(default_factory=dict)
    """Serial -> bytes that shard servers have sent it of this snapshot, of the last ones"""
    disputes: bool = False
    """Whether it says of another actor, or another one of it, that what was relayed is not what the trainer sent, or
    came too slowly. One of the two is wrong, so both pull from the trainer, and neither relays."""
    leaves: bool = False
    """It has finished its requests and ends: that is no eviction"""
    late: str = ""
    """Which deadline it has missed; empty again once it has taken a version. A new process of this name inherits it."""

    @property
    def serves(self) -> bool:
        """Return whether prompts may be sent to it."""
        return self.channel is not None and self.version >= 0 and self.state is not ActorState.POISONED

    @property
    def is_ready(self) -> bool:
        """Return whether it begins with a new version at once, as far as it says."""
        is_free = self.applies_since is None and not self.pinned and not self.late
        return is_free and self.state is not ActorState.POISONED

    def enter(self, state: ActorState) -> None:
        """Be in this state, unless it is poisoned: only a version that it has applied ends that."""
        if self.state is not ActorState.POISONED:
            self.state = state

    @property
    def speed_class(self) -> float:
        """Return the rounded log of the time that it took, so coarse that similar actors keep their sources across
        versions."""
        return math.inf if self.took_s is None else round(math.log(max(self.took_s, 1e-3), 4))

    def apply_elapsed_s(self, now: float) -> float:
        """Return for how many seconds a staged version has not been served. A pinned actor has to wait: 0."""
        return 0.0 if self.pinned or self.applies_since is None else now - self.applies_since

    def offer(self, newest: int, now: float) -> None:
        """Record that version `newest` is offered."""
        if self.offered_since is None and self.version < newest:
            self.offered_since = now

    def take(self, version: int, newest: int | None, now: float) -> None:
        """Record that it serves `version`. Only a version that it had not taken before restarts the deadline."""
        if version > self.taken or version == newest:
            self.taken, self.late = version, ""
            self.offered_since = None if newest is None or version >= newest else now

    def take_elapsed_s(self, now: float) -> float:
        """Return for how many seconds it has taken no version though one is offered. A pinned actor has to wait: 0."""
        return 0.0 if self.pinned or self.offered_since is None else now - self.offered_since

    @property
    def shown_state(self) -> ActorState:
        """Return the state that the trainer is told."""
        if self.late and self.state in (ActorState.JOINING, *SERVING):
            return ActorState.LATE
        return self.state

    def status(self) -> Message:
        """Return what the trainer is told."""
        shown = ("version", "serves", "pinned", "figures", "evictions", "eviction", "failures")
        about = {"state": self.shown_state, "reason": self.reason or self.late}
        return {**about, **{name: getattr(self, name) for name in shown}}


def tally(actors: Iterable[ActorRecord]) -> Message:
    """Return how many actors are in which state, serve which version (-1: none), and how many of those that the trainer
    waits for serve which."""
    states, serving, awaited = Counter[ActorState](), Counter[int](), Counter[int]()
    for actor in actors:
        state, version = actor.shown_state, actor.version if actor.serves else -1
        states[state] += 1
        serving[version] += 1
        if state not in NOT_AWAITED and actor.failures < MAX_FAILURES and not actor.pinned:
            awaited[version] += 1
    return {"states": dict(states), "serving": list(serving.items()), "awaited": list(awaited.items())}


@dataclass
class PendingVersion:
    """A version that not all ranks have reported yet."""

    version: int
    since: float
    snapped: dict[int, Message] = field(default_factory=dict)
    """What each rank has reported about it"""
