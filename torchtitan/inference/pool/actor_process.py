"""The process of an actor that the run starts."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import TOKEN_VARIABLE, UNUSABLE, ActorError, base_url
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.placement import threads_per_actor
from torchtitan.inference.serving.command_line import HOST
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.json_lines import actor_file

# The first restart is at once, the second after this time, and each further one after twice the time of the one before.
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
# An actor that has served for this long has its restarts forgiven.
STABLE_S = 600.0


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
        self.restarts = 0

    async def may_restart(self, served_s: float) -> bool:
        """Wait until the process may be started again, and count that. Returns False if it was started too often.

        served_s: how long the one before has served.
        """
        if served_s > STABLE_S:
            self.restarts = 0
        if self.restarts >= self._config.inference.max_restarts:
            return False
        if self.restarts:
            await asyncio.sleep(min(BACKOFF_S * 2 ** (self.restarts - 1), MAX_BACKOFF_S))
        self.restarts += 1
        return True

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
