"""The parts that the supervision of an actor (actor.py) works with: its process; its memory, which it can give back
while the trainer trains; and its connection to the weights."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path

from torchtitan.config.job_config import Inference, JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import (
    TOKEN_VARIABLE,
    UNUSABLE,
    ActorClient,
    ActorError,
    ActorHealth,
    base_url,
)
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.placement import threads_per_actor
from torchtitan.inference.serving.command_line import HOST
from torchtitan.inference.types import Tag
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.json_lines import actor_file
from torchtitan.weight_sync.actor_state import UPDATING, ActorState

# After this many fruitless connections in a row, the process is restarted.
ATTEMPTS = 3


def actor_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """Return the command line of the started actor `number`; see EngineDescriptor.command."""
    return engine_of(config).command(config, port_file, number)


class StartRefused(ActorError):
    """The process has ended because its options or its engine cannot work: it would end the same way again."""


class ActorProcess(ChildProcess):
    """Starts and stops one actor. Belongs to one asyncio loop."""

    def __init__(self, name: str, config: JobConfig, token: str, run_dir: Path, number: int = 0):
        """`token` lets us in at this actor. `number` (from 0) tells the actors that a run starts apart."""
        self._logs = run_dir / "logs"
        super().__init__(f"the process of {name}", self._logs / f"{name}.log")
        self._name, self._config, self._number = name, config, number
        self._variables = {TOKEN_VARIABLE: token}
        self._activity_file = actor_file(run_dir, name)

    async def start(self) -> str:
        """Start the process and return its URL once it listens.

        Raises:
            ActorError: it ended or did not listen within inference.startup_timeout_s.
        """
        inference = self._config.inference
        # The name is new every time: an actor that outlived its trainer may still be about to write its port.
        port_file = self._logs / f"{self._name}.{secrets.token_hex(4)}.port"
        devices = engine_of(self._config).environment(self._config, self._number)
        environment = child_environment(threads_per_actor(inference), secrets=True, **self._variables, **devices)
        command = actor_command(self._config, port_file, self._number)
        starter = engine_of(self._config).starter(command, environment)
        await self.launch([*command, "--activity-file", str(self._activity_file)], environment, starter=starter)
        limit = f"after inference.startup_timeout_s = {inference.startup_timeout_s:g} s"
        try:
            port = await self.read_port(port_file, time.monotonic() + inference.startup_timeout_s, limit)
        except UserError as error:
            code = self.end_code()
            await self.stop()
            kind = StartRefused if code == UNUSABLE else ActorError
            raise kind("startup", str(error)) from error
        return base_url(HOST, port)


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
        except asyncio.TimeoutError:
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

    async def keep(self, client: ActorClient, health: ActorHealth, may_connect: bool) -> ActorHealth:
        """Connect the actor unless it is connected. Returns its health afterwards. Raises ActorError."""
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
