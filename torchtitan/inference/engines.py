"""The engines that can sample, by the name that inference.backend gives them: its client, its process."""

from __future__ import annotations

import importlib
import secrets
import time
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.client import TOKEN_VARIABLE, ActorClient, ActorError, base_url
from torchtitan.inference.placement import engine_devices, threads_per_actor
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.json_lines import actor_file


def make_client(backend: str, url: str, token: str) -> ActorClient:
    """A client of the actor at `url`."""
    if backend == "embedded":
        from torchtitan.inference.embedded.client import EmbeddedClient

        return EmbeddedClient(url, token)
    from torchtitan.inference.agent.client import AgentClient

    return AgentClient(importlib.import_module(f"torchtitan.inference.{backend}.dialect").DIALECT, url, token)


def actor_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of started actor `number` (from 0), which reports its port in `port_file` and serves nothing
    before it got its first weights version. Raises UserError where it cannot be started here."""
    backend = config.inference.backend
    if backend == "embedded":
        from torchtitan.inference.embedded.client import embedded_command

        return embedded_command(config, port_file, number)
    from torchtitan.inference.agent.client import agent_command

    return agent_command(backend, config, port_file, number)


class ActorProcess(ChildProcess):
    """Starts and stops one actor. Belongs to one asyncio loop."""

    def __init__(self, name: str, config: JobConfig, token: str, run_dir: Path, number: int = 0):
        """`number` tells the started actors of a run apart, from 0."""
        self._logs = run_dir / "logs"
        super().__init__("the process", self._logs / f"{name}.log")
        self._name, self._config, self._number = name, config, number
        self._variables = {TOKEN_VARIABLE: token}
        self._activity_file = actor_file(run_dir, name)

    async def start(self) -> str:
        """Start the process; returns its URL once it listens.

        Raises:
            ActorError: it ended or did not listen within inference.startup_timeout_s.
        """
        inference = self._config.inference
        # Another name every time: an actor that outlived its trainer may still be about to write its port.
        port_file = self._logs / f"{self._name}.{secrets.token_hex(4)}.port"
        environment = child_environment(
            threads_per_actor(inference), **self._variables, **engine_devices(self._config, self._number)
        )
        command = actor_command(self._config, port_file, self._number)
        await self.launch([*command, "--activity-file", str(self._activity_file)], environment)
        limit = f"after inference.startup_timeout_s = {inference.startup_timeout_s:g} s"
        try:
            port = await self.read_port(port_file, time.monotonic() + inference.startup_timeout_s, limit)
        except UserError as error:
            await self.stop()
            raise ActorError("startup", str(error)) from error
        return base_url(inference.host, port)
