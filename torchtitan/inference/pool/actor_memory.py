"""The memory of an actor, which it can give back while the trainer trains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from torchtitan.config.job_config import Inference
from torchtitan.inference.actor_client import ActorClient, ActorHealth
from torchtitan.inference.types import Tag
from torchtitan.weight_sync.actor_state import UPDATING


class ActorMemory:
    """Which parts of its memory one actor should hold, and the calls that make it so. Belongs to one asyncio loop.

    write(kind, level, …) writes an event of this actor.
    """

    def __init__(self, config: Inference, write: Callable[..., None]):
        self._config, self._write = config, write
        self.asleep: frozenset[Tag] = frozenset()
        """The parts that the actor should be without"""
        self._level = 0
        self.reached = asyncio.Event()
        """Set once the actor is as `aim` asked, or cannot be; each `aim` makes a new event"""
        self.may_be_asleep = False
        """The actor was told to sleep and has not been seen awake since"""
        self.said_unable = False
        """An event has said that this process cannot sleep"""

    @property
    def without_weights(self) -> bool:
        """Whether the actor should be without its weights too; its memory then belongs to the trainer."""
        return "weights" in self.asleep

    def aim(self, asleep: Collection[Tag], level: int = 0) -> None:
        """From now on, the actor should be without these parts and sleep at this level."""
        self.asleep, self._level = frozenset(asleep), level
        self.reached.set()
        self.reached = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Return whether what the last `aim` asked for is reached, or replaced by another `aim`, within `timeout_s`."""
        try:
            await asyncio.wait_for(self.reached.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def stay_awake(self, reason: str) -> None:
        """Let the actor stay awake this time. An event gives the reason unless it is empty."""
        self.aim(())
        self.reached.set()
        if reason:
            self._write("actor_stays_awake", level=logging.WARNING, reason=reason)

    async def match(self, client: ActorClient, health: ActorHealth) -> tuple[ActorHealth, bool]:
        """Put the actor to sleep or wake it as `aim` asked, also one that has just come or that an earlier run left
        asleep. Returns its health afterwards, and whether nothing is left to do. Raises ActorError."""
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
            self.stay_awake("" if self.said_unable else "it was started unable to sleep (see docs/engines.md)")
            self.said_unable = True
        elif not await client.sleep(level, timeout_s):
            self.stay_awake("its engine is still busy")
        return await client.health(self._config.health_timeout_s), True
