"""The connection of one actor to the trainer's weights: made, made anew where it is lost or brings none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.client import UPDATING, ActorClient, ActorHealth

# After so many fruitless connections in a row a process is started anew.
ATTEMPTS = 3


class WeightConnection:
    """key: of the actor `name` (handshake.role_key). write(kind, level, …) writes an event of it."""

    def __init__(self, name: str, config: JobConfig, epoch: str, key: str, write: Callable[..., None]):
        self._name, self._epoch, self._key, self._write = name, epoch, key, write
        self._relay = config.weight_sync.relay
        self._timeout_s, self._join_timeout_s = config.inference.health_timeout_s, config.weight_sync.join_timeout_s
        self._registry: str | None = None
        self.connected = False
        self._fruitless = 0
        self._waiting_since = 0.0
        """On time.monotonic(), 0.0 where nothing is waited for"""

    @property
    def hopeless(self) -> bool:
        """Whether connecting anew has not helped several times."""
        return self._fruitless >= ATTEMPTS

    def use(self, registry: str) -> None:
        """Pull weights from the trainer with this registry (host:port) from now on."""
        self._registry, self.connected = registry, False

    def stop_waiting(self, success: bool) -> None:
        """Weights have come (success), or are not expected now."""
        self._waiting_since = 0.0
        if success:
            self._fruitless = 0

    def reset(self) -> None:
        """Another process has the actor's name: it is not connected."""
        self.connected, self._fruitless, self._waiting_since = False, 0, 0.0

    async def keep(self, client: ActorClient, health: ActorHealth, may_connect: bool) -> ActorHealth:
        """Connect the actor where it is not connected, or not any more. Returns its health after that; raises
        ActorError."""
        if self.connected and health.weights_failure is not None:
            self.connected = False
            self._write("actor_weights_lost", level=logging.WARNING, reason=health.weights_failure)
        if self._registry is None or self.connected or not may_connect:
            return health
        names = self._registry, self._name, self._epoch, self._key
        await client.connect_weights(*names, self._relay, self._timeout_s)
        self.connected = True
        return await client.health(self._timeout_s)

    def overdue(self, health: ActorHealth) -> str:
        """Why an actor that serves nothing is to be connected anew; "" while its weights may still come."""
        now = time.monotonic()
        if not self.connected or health.status == "paused":
            self._waiting_since = 0.0
            return ""
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since <= self._join_timeout_s or health.weights_state in UPDATING:
            return ""
        self._waiting_since, self.connected = 0.0, False
        self._fruitless += 1
        why = health.reason or f"it serves version {health.version} of epoch {health.epoch}"
        reason = f"no weights within weight_sync.join_timeout_s = {self._join_timeout_s:g} s: {why}"
        self._write("actor_join_timeout", level=logging.WARNING, reason=reason)
        return reason
