"""Actors that give their memory back while the trainer trains: the bodies of /sleep and /wake, which every actor's
server understands, and the side that asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

from torchtitan.config.job_config import Inference
from torchtitan.inference.client import UPDATING, ActorClient, ActorHealth
from torchtitan.inference.types import TAGS, Tag


def parse_sleep(data: dict[str, Any]) -> tuple[int, float]:
    """{"level", "finish_s"} -> level, and seconds for what runs to finish. Raises ValueError."""
    level, finish_s = data.get("level", 1), data.get("finish_s", 0.0)
    if type(level) is not int or level not in (1, 2):
        raise ValueError(f"level must be 1 or 2, got {level!r}")
    if type(finish_s) not in (int, float) or not 0 <= finish_s < float("inf"):
        raise ValueError(f"finish_s must be a finite number of at least 0, got {finish_s!r}")
    return level, float(finish_s)


def parse_wake(data: dict[str, Any]) -> list[Tag]:
    """{"tags"} -> the parts of its memory that an engine is to take again, or all. Raises ValueError."""
    tags = data.get("tags", list(TAGS))
    if not isinstance(tags, list) or not all(tag in TAGS for tag in tags):
        raise ValueError(f"tags must be a list of {' and '.join(TAGS)}, got {tags!r}")
    return tags


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
