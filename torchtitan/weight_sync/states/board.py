"""What the coordinator knows and the commands that it gathers: the ground on which its decisions stand. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchtitan.weight_sync.states.actor import Actor
from torchtitan.weight_sync.states.attempt import Attempt, AttemptState
from torchtitan.weight_sync.states.commands import Command, Message, Record, Settings, ToActor, ToCourier
from torchtitan.weight_sync.states.version import VersionTable

PROTECTED_SHARE = 0.1


class Board:
    """Actors, versions and the attempts between them. `time` is the machine's own clock."""

    def __init__(self, settings: Settings, term: int):
        self.settings = settings
        self.term = term
        self.actors: dict[str, Actor] = {}
        self.versions = VersionTable(settings.world_size, settings.snapshot_timeout_s)
        self.couriers_heard_at: dict[int, float] = {}
        """Rank of a connected courier -> when it was last heard"""
        self.layout: Message | None = None
        self.layout_id = ""
        self.pinned_version: int | None = None
        self.time = 0.0
        self._out: list[Command] = []

    def _actor_of(self, attempt: int) -> Actor | None:
        """Who receives in this attempt."""
        for actor in self.actors.values():
            if actor.attempt is not None and actor.attempt.number == attempt:
                return actor
        return None

    def _leasing(self) -> Iterable[tuple[Actor, Attempt]]:
        """Deliveries that hold somebody's memory."""
        for actor in self.actors.values():
            if actor.attempt is not None and actor.attempt.leases:
                yield actor, actor.attempt

    def _moves(self, actor: Actor) -> bool:
        """Whether its delivery shows life; a share of the deadline is enough to tell who only holds others up."""
        attempt = actor.attempt
        if attempt is None:
            return False
        if attempt.state is AttemptState.OFFERED:
            begun, patience = actor.unanswered_since, self.settings.offer_timeout_s
        else:
            begun, patience = attempt.progress_at, self.settings.progress_timeout_s
        return begun is not None and self.time - begun < patience * PROTECTED_SHARE

    def _behind(self, actor: Actor) -> int:
        """Versions between what an actor serves (or was first offered) and the newest."""
        newest = self.versions.newest
        # One that never had a version falls behind the first that it was offered.
        held = actor.attempt.version if not actor.has_version and actor.attempt is not None else actor.version
        return 0 if newest is None or held < 0 else newest.version - held

    def _to_couriers(self, message: Message, rank: int | None = None) -> None:
        self._out.append(ToCourier(rank, message))

    def _to_actor(self, actor: Actor, message: Message) -> None:
        self._out.append(ToActor(actor.name, actor.session, message))

    def _to_senders(self, attempt: Attempt, message: Message) -> None:
        """Whoever sends in this attempt: all couriers, or the actor that passes its version on."""
        if attempt.source is None:
            self._to_couriers(message)
        elif attempt.source in self.actors:
            self._to_actor(self.actors[attempt.source], message)

    def _record(self, event: str, **fields: Any) -> None:
        self._out.append(Record(event, fields))
