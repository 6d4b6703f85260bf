"""A coordinator's state machine, driven by hand."""

from __future__ import annotations

from typing import Any

from torchtitan.weight_sync.states.actor import ActorState
from torchtitan.weight_sync.states.commands import Record, Settings, ToActor, ToCourier
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine


class Desk:
    """One coordinator with one rank, driven by hand."""

    def __init__(self, **settings: Any):
        self.machine = CoordinatorMachine(Settings(**{"world_size": 1, **settings}), term=1)
        self.ranks = range(settings.get("world_size", 1))
        self.now = 0.0
        self.out: list[Any] = self.machine.layout_known({}, "layout", str, 0.0)
        self.serial = 0
        self.sessions: dict[str, int] = {}

    def take(self, commands: list[Any]) -> list[Any]:
        self.out = commands
        return commands

    def join(
        self, name: str, version: int | None = None, session: int = 1, poisoned: bool = False, **more: Any
    ) -> list[Any]:
        served = None if version is None else ["e", version, str([[str(version)]])]
        self.sessions[name] = session
        fields = {"data": [f"{name}:1"], "epoch": "e", "served": served, "poisoned": poisoned, **more}
        self.machine.actor_joined(name, session, fields, self.now)
        return self.say(name, "ready", layout_id="layout")

    def say(self, name: str, kind: str, **fields: Any) -> list[Any]:
        attempt = self.machine.actors[name].attempt
        message = {"type": kind, "attempt": attempt.number if attempt else 0, **fields}
        return self.take(self.machine.actor_message(name, self.sessions[name], message, self.now))

    def publish(self, version: int) -> list[Any]:
        self.serial += 1
        message = {"type": "snapped", "serial": self.serial, "version": version, "checksums": [str(version)]}
        return self.take([one for rank in self.ranks for one in self.machine.courier_message(rank, message, self.now)])

    def need_slot(self, rank: int = 0) -> list[Any]:
        return self.take(self.machine.courier_message(rank, {"type": "need_slot"}, self.now))

    def wait(self, seconds: float, pings: tuple[str, ...] = ()) -> list[Any]:
        events: list[Any] = []
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for name in pings:
                events += self.machine.actor_message(name, self.sessions[name], {"type": "ping"}, self.now)
            events += self.machine.tick(self.now)
        return self.take([c for c in events if not isinstance(c, ToActor) or c.message["type"] != "pong"])

    def state(self, name: str) -> ActorState:
        return self.machine.actors[name].state

    def offers(self) -> list[tuple[str, int]]:
        return [
            (c.actor, c.message["version"]) for c in self.out if isinstance(c, ToActor) and c.message["type"] == "offer"
        ]

    def sent(self, kind: str) -> list[tuple[str | None, dict[str, Any]]]:
        """Messages of a kind, and which actor they are for (None: couriers)."""
        messages = [(getattr(c, "actor", None), c.message) for c in self.out if isinstance(c, ToActor | ToCourier)]
        return [(actor, message) for actor, message in messages if message["type"] == kind]

    def records(self, event: str) -> list[dict[str, Any]]:
        return [c.fields for c in self.out if isinstance(c, Record) and c.event == event]

    def stage(self, name: str) -> str:
        """The actor takes what it is offered, and has all of it; returns the digest."""
        attempt = self.machine.actors[name].attempt
        assert attempt is not None
        digest = self.machine.versions.records[attempt.serial].digest
        self.say(name, "accept")
        self.say(name, "staged", digest=digest)
        return digest

    def apply(self, name: str) -> list[Any]:
        attempt = self.machine.actors[name].attempt
        assert attempt is not None
        digest = self.stage(name)
        return self.say(name, "applied", version=attempt.version, digest=digest, figures={})
