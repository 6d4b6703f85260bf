"""What the coordinator's machine is told at its start, and what it orders. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Deadlines in seconds; see [weight_sync] in the configuration. delta needs one slot more on every rank."""

    world_size: int
    join_timeout_s: float = 60.0
    offer_timeout_s: float = 5.0
    progress_timeout_s: float = 5.0
    apply_timeout_s: float = 10.0
    snapshot_timeout_s: float = 60.0
    evict_after_versions: int = 16
    delta: bool = False
    full_every: int = 20
    relay: bool = False
    relay_fanout: int = 2


@dataclass(frozen=True)
class ToCourier:
    """To one rank's courier, or to all (rank None)."""

    rank: int | None
    message: Message


@dataclass(frozen=True)
class ToActor:
    actor: str
    session: int
    message: Message


@dataclass(frozen=True)
class Disconnect:
    """Close the actor's connection, after what was sent before."""

    actor: str
    session: int


@dataclass(frozen=True)
class HangUp:
    """Close the connection of a rank's courier, which shows no life; its loss is known already."""

    rank: int


@dataclass(frozen=True)
class Record:
    """A line of the journal."""

    event: str
    fields: Message


Command = ToCourier | ToActor | Disconnect | HangUp | Record
