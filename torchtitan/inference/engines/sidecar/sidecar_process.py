"""A foreign engine as a run sees it: the command line of the agent that starts the engine, and the client of both.
Generation goes straight to the engine, everything else to the agent.

ForeignEngine knows how to ask the engine for tokens and how to read its answers. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from torchtitan.config.job_config import JobConfig
from torchtitan.config.transports import TRANSPORTS
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import (
    TOKEN_VARIABLE,
    ActorClient,
    ActorError,
    ActorHealth,
    ActorNotReady,
    JsonClient,
    parse_health,
)
from torchtitan.inference.answers import generated_bytes, scored_bytes
from torchtitan.inference.engines.options import engine_words
from torchtitan.inference.engines.reading import completions_of, scores_of
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.engines.sidecar.foreign_engine import ForeignEngine
from torchtitan.inference.placement import (
    check_fits,
    colocated_memory,
    device_bytes_of_driver,
    own_share,
    threads_per_actor,
)
from torchtitan.inference.serving.command_line import shared_command, shared_settings
from torchtitan.inference.types import Capabilities, Completion, EngineCall, GenerateRequest, ScoredTokens
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import applied_bytes
from torchtitan.utils.machine import is_loopback
from torchtitan.utils.ranks import world_size
from torchtitan.utils.reader_process import Pieces

# Both engines use this name.
RETURN_ROUTES = "enable-return-routed-experts"
# An apply's order to the engine must end before the registry considers the actor stuck. The drain comes before it.
SHARE_OF_APPLY_TIMEOUT = 0.9
# Keys that only a newer agent knows are ignored.
CAPABILITIES = TypeAdapter(Capabilities)


def agent_command(engine: ForeignEngine, config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """Return the command line of actor `number` with `engine`. The agent writes its own port to `port_file`.

    Raises UserError if the engine is not installed or does not have the route.
    """
    inference, name = config.inference, f"actor-{number}"
    device_share = share_beside_trainer(config) or own_share(config, device_bytes_of_driver())
    return [
        *shared_command("torchtitan.inference.engines.sidecar", config, port_file),
        "--engine", engine.name,
        "--name", name,
        "--python", find_python(engine.name, inference.engine.python),
        "--log-file", str(port_file.with_name(f"{name}.engine.log")),
        *_settings_of_agents(engine, config),
        "--memory-gb", str(inference.engine.memory_gb),
        "--device-share", str(device_share),
        "--threads", str(max(1, threads_per_actor(inference) // inference.engine.tensor_parallel_size)),
    ]  # fmt: skip


def agent_settings(engine: ForeignEngine, config: JobConfig) -> list[str]:
    """Return the run's options for an agent that it does not start itself (scripts/grpo_multinode.slurm)."""
    share = own_share(config, device_bytes_of_driver())
    memory = ["--memory-gb", str(config.inference.engine.memory_gb)]
    if share:
        memory += ["--device-share", str(share)]
    return [*shared_settings(config), *_settings_of_agents(engine, config), *memory]


def _settings_of_agents(engine: ForeignEngine, config: JobConfig) -> list[str]:
    inference, sync, args = config.inference, config.weight_sync, read_shape(config)
    size, drain_s = applied_bytes(config, args), config.inference.drain_s
    route = engine.find_route(inference.engine.route)
    # The pool may add our own options after these, so the engine's options travel as one value.
    engine_args = dict(inference.engine.args)
    if config.grpo.routing_replay:
        engine_args[RETURN_ROUTES] = True
    update_s = (sync.apply_deadline(size, drain_s) - drain_s) * SHARE_OF_APPLY_TIMEOUT
    settings = [
        "--route", route,
        "--tensor-parallel-size", str(inference.engine.tensor_parallel_size),
        "--sleep-level", str(inference.sleep_level if config.sleeps_between_batches else 0),
        "--update-timeout", str(update_s),
        "--startup-timeout", str(inference.startup_timeout_s),
        "--engine-arguments", json.dumps(engine_words(engine_args)),
    ]  # fmt: skip
    # These transports move a version from device to device.
    if TRANSPORTS[sync.transport].on_device:
        settings.append("--stage-on-device")
    if config.verification == "digest":
        settings += ["--verify-every", "1"]
    if sync.table.path and "://" not in sync.table.path:
        settings += ["--disk-path", sync.table.path]
    return settings


def share_beside_trainer(config: JobConfig) -> float:
    """Return the share of a GPU for an engine that takes turns with the trainer on a rank's GPU, or 0 for any other
    engine.

    Raises UserError if not even one sequence fits.
    """
    device_bytes = device_bytes_of_driver() if config.shares_devices else None
    memory = colocated_memory(config, world_size(), device_bytes) if device_bytes else None
    if memory is None or device_bytes is None:
        return 0.0
    check_fits(config, memory)
    return engine_of(config).memory_share(memory, device_bytes)


def find_python(engine: str, configured: str, key: str = "") -> str:
    """Return the interpreter that runs the engine: the one configured under `key` (inference.NAME.python), or that of
    the environment made by scripts/install_engine.sh (the CPU build if only that exists). Raises UserError if there is
    none."""
    key = key or f"inference.{engine}.python"
    if configured:
        found = shutil.which(str(Path(configured).expanduser()))
        if found is None:
            raise UserError(f"{key} = {configured!r} is not a program")
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("TORCHTITAN_ENGINES") or cache / "torchtitan" / "engines")
    for name in (engine, f"{engine}-cpu"):
        if (home / name / ".complete").exists():
            return str(home / name / "bin" / "python")
    raise UserError(
        f"{engine} is not installed: run scripts/install_engine.sh {engine} (or {engine}-cpu), or set "
        f"{key} to the Python of an environment that has it"
    )


def reachable_url(engine: str, agent: str) -> str:
    """Return the engine's address for a caller that reached the agent at `agent`. A loopback address is only valid on
    the agent's machine. Raises ValueError if `engine` is not an address."""
    engine_url, sidecar_url = urlsplit(engine), urlsplit(agent)
    if not is_loopback(engine_url.hostname or "") or sidecar_url.hostname is None or is_loopback(sidecar_url.hostname):
        return engine
    host = f"[{sidecar_url.hostname}]" if ":" in sidecar_url.hostname else sidecar_url.hostname
    return engine_url._replace(netloc=host if engine_url.port is None else f"{host}:{engine_url.port}").geturl()


class AgentClient(ActorClient):
    """Talks to the agent at `url`, and to the engine at the address that the agent reports in /health."""

    def __init__(
        self,
        engine: ForeignEngine,
        url: str,
        token: str,
        experts: int = 0,
        vocabulary: int | None = None,
    ):
        super().__init__(url, token, experts, vocabulary)
        self._kind, self._token = engine, token
        self._engine: JsonClient | None = None
        self._capabilities: Capabilities | None = None

    async def health(self, timeout_s: float) -> ActorHealth:
        data = await self.state(timeout_s)
        await self._note_engine(data.get("engine"))
        return parse_health(data)

    async def capabilities(self, timeout_s: float) -> Capabilities:
        await self.health(timeout_s)
        assert self._capabilities is not None
        return self._capabilities

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Return the completions of one request; raises the same errors as EmbeddedClient.generate."""
        most = generated_bytes(request, self.experts)
        answer = await self._ask("generate", self._kind.generate(request), timeout_s, most)
        return await completions_of(self._kind.name, request, answer, self.vocabulary)

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        answer = await self._ask("score", self._kind.score(token_ids), timeout_s, scored_bytes(len(token_ids)))
        return await scores_of(self._kind.name, token_ids, answer)

    async def close(self) -> None:
        await super().close()
        if self._engine is not None:
            await self._engine.close()

    async def _ask(self, phase: str, call: EngineCall, timeout_s: float, most_bytes: int) -> Pieces:
        if self._engine is None:
            raise ActorNotReady(phase, "the agent has not reported yet where its engine is")
        # If this is cancelled, the closed connection makes the engine drop the request.
        refused = self._kind.refused
        # It may be sent twice: an engine keeps nothing of a request but what is under its weights in the prefix cache.
        return await self._engine.fetch(phase, "POST", call.path, timeout_s, call.body, refused, most_bytes, True)

    async def _note_engine(self, data: Any) -> None:
        try:
            url = reachable_url(str(data["url"]), self.url)
            capabilities = CAPABILITIES.validate_python(data["capabilities"])
            variable = data.get("token_env")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ActorError("health", f"the agent's answer about its engine is malformed: {error!r}") from error
        if capabilities.engine != self._kind.name:
            raise ActorError(
                "health", f"this is an agent of {capabilities.engine}, but inference.backend is {self._kind.name}"
            )
        self._capabilities = capabilities
        if self._engine is None or self._engine.url != url.rstrip("/"):
            if self._engine is not None:
                await self._engine.close()
            self._engine = JsonClient(url, self._engine_token(variable), variable or TOKEN_VARIABLE)

    def _engine_token(self, variable: object) -> str:
        """Return the engine's token. `variable` is None if the agent started the engine, which then has the agent's
        token. Otherwise it names the environment variable in which both sides find the token, or is "" for an engine
        without one: ours must not reach it. Raises ActorError."""
        if variable is None:
            return self._token
        token = os.environ.get(str(variable)) if variable else ""
        if token is None:
            raise ActorError("health", f"the agent says that the engine's token is in {variable}: set it here too")
        return token
