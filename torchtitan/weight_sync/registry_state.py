"""What the registry is told to do, and what it knows of ranks, actors and versions that are not whole yet. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan.weight_sync.runtime import Channel
from torchtitan.weight_sync.wire import Message

if TYPE_CHECKING:
    from torchtitan.config.job_config import WeightSync


@dataclass(frozen=True)
class Settings:
    """Of [weight_sync]; times in seconds."""

    world_size: int
    lanes: int = 1
    lease_s: float = 60.0
    relay_fanout: int = 0
    """Actors that pull from the trainer, and from each actor that passes versions on; 0: all pull from the trainer"""
    progress_timeout_s: float = 5.0
    apply_timeout_s: float = 10.0
    snapshot_timeout_s: float = 60.0
    delta: bool = False
    """Whether a snapshot is kept for deltas, which takes a slot more"""

    @classmethod
    def of(cls, config: WeightSync, world_size: int, version_bytes: int, drain_s: float = 0.0) -> Settings:
        """drain_s: how long an apply may wait for requests to end."""
        # Not above: the processes of registry and shard server do without pydantic.
        from torchtitan.config.derived import apply_timeout, lease

        return cls(
            world_size=world_size,
            lanes=config.num_slots - 2,
            lease_s=lease(config, version_bytes),
            relay_fanout=config.relay_fanout if config.relay else 0,
            progress_timeout_s=config.progress_timeout_s,
            apply_timeout_s=apply_timeout(config, version_bytes, drain_s),
            snapshot_timeout_s=config.snapshot_timeout_s,
            delta=config.delta,
        )


@dataclass
class Rank:
    """A shard server's connection."""

    channel: Channel
    address: str
    heard_at: float


@dataclass
class Actor:
    """An actor, connected or lately gone."""

    channel: Channel | None
    instance: str
    address: str
    """Where it passes versions on, empty where it does not"""
    heard_at: float
    state: str = "JOINING"
    version: int = -1
    digest: str = ""
    pinned: bool = False
    reason: str = ""
    evictions: int = 0
    """How often it has been lost or given up"""
    failures: int = 0
    """Versions in a row that it could not take: refused, or applied by half"""
    figures: Message = field(default_factory=dict)
    applies_since: float | None = None

    @property
    def serves(self) -> bool:
        """Whether prompts may be sent to it."""
        return self.channel is not None and self.version >= 0 and self.state != "POISONED"

    @property
    def speed_class(self) -> float:
        """So coarse that actors of like speed keep their places from one version to the next, and their connections."""
        transfer_s = self.figures.get("transfer_s")
        return math.inf if transfer_s is None else round(math.log(max(transfer_s, 1e-3), 4))

    def has_applied_for(self, now: float) -> float:
        """Seconds since it had staged what it does not serve yet. A pinned one has to wait: 0."""
        return 0.0 if self.pinned or self.applies_since is None else now - self.applies_since

    def status(self) -> Message:
        """What the trainer is told."""
        shown = ("state", "version", "digest", "serves", "pinned", "reason", "figures", "evictions", "failures")
        return {name: getattr(self, name) for name in shown}


@dataclass
class Gathering:
    """A version that not all ranks have reported yet."""

    version: int
    since: float
    checksums: dict[int, list[str]] = field(default_factory=dict)
    files: dict[int, Message] = field(default_factory=dict)
    """Of the disk transport: what each rank has written"""


def relaying(actors: Mapping[str, Actor], slow: Container[str]) -> dict[str, str]:
    """Addresses by name of the actors that pass versions on, the fast ones first."""
    able = [name for name, actor in actors.items() if actor.channel is not None and actor.address and name not in slow]
    able.sort(key=lambda name: (actors[name].speed_class, name))
    return {name: actors[name].address for name in able}
