"""The engines that can sample, by the name that inference.backend gives them: the process of an actor and its client.
The embedded engine's are here, those of an engine with an agent in agent/client.py."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import psutil

from torchtitan.config.derived import verification
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_main import shared_command
from torchtitan.inference.agent.client import AgentClient, agent_command
from torchtitan.inference.agent.engine import load_engine
from torchtitan.inference.client import TOKEN_VARIABLE, ActorClient, ActorError, base_url, check_completions
from torchtitan.inference.placement import actor_cores, engine_devices, threads_per_actor
from torchtitan.inference.types import Capabilities, Completion, GenerateRequest, ScoredTokens
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.json_lines import actor_file


def make_client(backend: str, url: str, token: str) -> ActorClient:
    """A client of the actor at `url`."""
    if backend == "embedded":
        return EmbeddedClient(url, token)
    return AgentClient(load_engine(backend), url, token)


def actor_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of started actor `number` (from 0), which reports its port in `port_file` and serves nothing
    before it got its first weights version. Raises UserError where it cannot be started here."""
    backend = config.inference.backend
    if backend == "embedded":
        return embedded_command(config, port_file, number)
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


def cache_megabytes(config: JobConfig) -> int:
    """Upper bound of one actor's KV cache: together they may take half of the memory that is free now."""
    return max(1, psutil.virtual_memory().available // (2 * max(1, config.inference.num_actors)) // 2**20)


def embedded_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of embedded actor `number`, which reports its port in `port_file` and serves nothing before it
    got its first weights version. Raises UserError where its cores are not there."""
    inference = config.inference
    command = [
        *shared_command("torchtitan.inference.embedded", config, port_file),
        "--cache-mb", str(cache_megabytes(config)),
        "--threads", str(threads_per_actor(inference)),
        "--verify-every", str(config.weight_sync.verify_every if verification(config) == "digest" else 0),
        "--require-version",
    ]  # fmt: skip
    if inference.pin_cores:
        command += ["--cores", ",".join(map(str, actor_cores(inference, number)))]
    return [*command, "--exact"] if inference.exact else command


class EmbeddedClient(ActorClient):
    """Talks to the embedded engine's server, which does everything at one address."""

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Completions of one request.

        Raises:
            ActorNotReady: the engine has no weights yet.
            RequestRefused: the request itself is wrong.
            ActorError: no answer, an error, or an answer that is not well-formed.
        """
        data = await self.client.call_object("generate", "POST", "/v1/generate", timeout_s, request.to_json())
        try:
            completions = [Completion.from_json(item) for item in data["completions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ActorError("generate", f"the answer is malformed: {error!r}") from error
        return check_completions(completions, request.sampling.n)

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        data = await self.client.call_object("score", "POST", "/v1/score", timeout_s, {"token_ids": token_ids})
        try:
            return ScoredTokens([float(value) for value in data["log_probs"]], str(data["epoch"]), int(data["version"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ActorError("score", f"the answer is malformed: {error!r}") from error

    async def capabilities(self, timeout_s: float) -> Capabilities:
        data = await self.state(timeout_s)
        return Capabilities(
            "embedded", score=True, kept_tokens=True, digest=bool(data.get("verifies", False)), sleep=True
        )
