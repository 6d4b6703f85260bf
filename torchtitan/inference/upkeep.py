"""What an actor's supervision keeps as it is to be: its memory, given back while the trainer trains, its weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from torchtitan.config.job_config import Inference, JobConfig
from torchtitan.inference.client import UPDATING, ActorClient, ActorHealth
from torchtitan.inference.types import Tag

# After so many fruitless connections in a row a process is started anew.
ATTEMPTS = 3


class ActorMemory:
    """Which parts of its memory one actor is to have, and the calls that see to it. Belongs to one asyncio loop.

    write(kind, level, …) writes an event of this actor.
    """

    def __init__(self, config: Inference, write: Callable[..., None]):
        self._config, self._write = config, write
        self.asleep: frozenset[Tag] = frozenset()
        """The parts that the actor is to be without"""
        self._level = 0
        self.reached = asyncio.Event()
        """Set when the actor is as it is to be, or cannot be; a new one for each `aim`"""
        self.may_be_asleep = False
        """It was told to sleep, and has not been seen awake since"""
        self.said_unable = False
        """An event has said that this process cannot sleep"""

    @property
    def without_weights(self) -> bool:
        """Whether it is to be without its weights too: then its memory is the trainer's."""
        return "weights" in self.asleep

    def aim(self, asleep: Collection[Tag], level: int = 0) -> None:
        """From now on the actor is to be without these parts, and sleeps as deep as `level`."""
        self.asleep, self._level = frozenset(asleep), level
        self.reached.set()
        self.reached = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Whether what was aimed at is reached, or replaced, within that time."""
        try:
            await asyncio.wait_for(self.reached.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def stay_awake(self, reason: str) -> None:
        """It does not sleep this time; an event gives the reason, if there is one to give."""
        self.aim(())
        self.reached.set()
        if reason:
            self._write("actor_stays_awake", level=logging.WARNING, reason=reason)

    async def match(self, client: ActorClient, health: ActorHealth) -> tuple[ActorHealth, bool]:
        """Have it asleep or awake as it is to be: also one that has just come, or that an earlier run left asleep.
        Returns its health after that, and whether there is nothing more to do. Raises ActorError."""
        timeout_s, level = self._config.sleep_timeout_s, self._level
        sleeps = self.without_weights and set(health.asleep) != self.asleep
        wakes = [tag for tag in health.asleep if tag not in self.asleep]
        if not sleeps and not wakes:
            return health, True
        if health.weights_state in UPDATING and "weights" not in health.asleep:
            # The call would only wait for that version, which has deadlines of its own.
            return health, False
        self.may_be_asleep = True
        if not sleeps:
            await client.wake(wakes, timeout_s)
        elif not (await client.capabilities(self._config.health_timeout_s)).sleep:
            self.stay_awake("" if self.said_unable else "it was not started so that it can sleep (see docs/engines.md)")
            self.said_unable = True
        elif not await client.sleep(level, timeout_s):
            self.stay_awake("its engine still works on something")
        return await client.health(self._config.health_timeout_s), True


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
