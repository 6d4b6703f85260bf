"""An actor's connection to the weight sync, as the pool orders it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import ActorClient, ActorHealth
from torchtitan.weight_sync.actor_state import UPDATING, ActorState

# After this many fruitless connections in a row, the process is restarted.
ATTEMPTS = 3


class WeightConnection:
    """Connects one actor to the weight sync.

    key: of the actor `name` (handshake.role_key). write(kind, level, …) writes an event of this actor.
    """

    def __init__(self, name: str, config: JobConfig, epoch: str, key: str, write: Callable[..., None]):
        self._name, self._epoch, self._key, self._write = name, epoch, key, write
        self._relay = config.weight_sync.table.relay
        self._config, self._timeout_s = config.inference, config.inference.health_timeout_s
        self._registry: str | None = None
        self.connected = False
        self._was_there = False
        """Whether the actor has told of this connection"""
        self._fruitless = 0
        self._waiting_since = 0.0
        """On time.monotonic(); 0.0 while nothing is awaited"""

    @property
    def deadline_s(self) -> float:
        """How long the actor may be without weights once it is connected."""
        return self._config.startup_timeout_s

    @property
    def hopeless(self) -> bool:
        """Whether connecting again has failed to help several times."""
        return self._fruitless >= ATTEMPTS

    def use(self, registry: str) -> None:
        """From now on, pull weights from the trainer with this registry (host:port)."""
        self._registry, self.connected = registry, False

    def stop_waiting(self, success: bool) -> None:
        """Weights have come (success), or are not expected now."""
        self._waiting_since = 0.0
        if success:
            self._fruitless = 0

    def reset(self) -> None:
        """The actor has a new process, which is not connected."""
        self.connected, self._fruitless, self._waiting_since = False, 0, 0.0

    def is_forgotten(self, health: ActorHealth) -> bool:
        """Whether the actor no longer knows of a connection that it has told of: it is another process, started between
        two looks at it."""
        return self.connected and self._was_there and health.weights_state is None

    async def keep(self, client: ActorClient, health: ActorHealth, may_connect: bool) -> ActorHealth:
        """Connect the actor unless it is connected. Returns its health afterwards. Raises ActorError."""
        if self.connected and health.weights_failure is not None:
            self.connected = False
            self._write("actor_weights_lost", level=logging.WARNING, reason=health.weights_failure)
        if self._registry is not None and not self.connected and may_connect:
            names = self._registry, self._name, self._epoch, self._key
            await client.connect_weights(*names, self._relay, self._timeout_s)
            self.connected, health = True, await client.health(self._timeout_s)
        self._was_there = health.weights_state is not None
        return health

    def overdue(self, health: ActorHealth) -> str:
        """Return why an actor that serves nothing should be connected again, or "" while its weights may still come."""
        now = time.monotonic()
        if not self.connected or health.state in (ActorState.PAUSED, ActorState.LEAVING):
            self._waiting_since = 0.0
            return ""
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since <= self.deadline_s or health.weights_state in UPDATING:
            return ""
        self._waiting_since, self.connected = 0.0, False
        self._fruitless += 1
        why = health.reason or f"it serves version {health.version} of epoch {health.epoch}"
        reason = f"no weights within inference.startup_timeout_s = {self.deadline_s:g} s: {why}"
        self._write("actor_join_timeout", level=logging.WARNING, reason=reason)
        return reason
