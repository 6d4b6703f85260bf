"""What engines with a server of their own have in common to the rest of a run: an agent beside the server, which gives
it its weights, and the client of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.engines import EngineSpec
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import ActorClient
from torchtitan.inference.engines.descriptor import EngineDescriptor
from torchtitan.inference.engines.registry import load_engine
from torchtitan.inference.engines.sidecar.foreign_engine import ForeignEngine
from torchtitan.inference.engines.sidecar.sidecar_process import AgentClient, agent_command, agent_settings, find_python
from torchtitan.inference.types import Completion, GenerateRequest, ScoredTokens


class ServedEngine(EngineDescriptor):
    """An engine that is a server of its own."""

    foreign: ForeignEngine
    """How its server is started, steered and asked"""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        assert self.foreign.name == spec.name, f"{self.foreign.name} is in the folder {spec.name}"

    def problems(self, config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
        yield from self.foreign.problems(config)

    def python(self, config: JobConfig) -> str | None:
        if config.inference.servers or config.rollout.replay:
            return None
        try:
            return find_python(self.spec.name, config.inference.engine.python)
        except UserError:
            return None

    def node_settings(self, config: JobConfig) -> list[str]:
        python = find_python(self.spec.name, config.inference.engine.python)
        return [*agent_settings(self.foreign, config), "--python", python]

    def command(self, config: JobConfig, port_file: Path, number: int) -> list[str]:
        return agent_command(self.foreign, config, port_file, number)

    def make_client(self, url: str, token: str, experts: int = 0, vocabulary: int | None = None) -> ActorClient:
        return AgentClient(self.foreign, url, token, experts, vocabulary)

    def completions(self, request: GenerateRequest, answer: bytes | memoryview) -> list[Completion]:
        return self.foreign.completions(request, answer)

    def scored(self, token_ids: list[int], answer: bytes | memoryview) -> ScoredTokens:
        return self.foreign.scored(token_ids, answer)


def load_foreign(name: str) -> ForeignEngine:
    """Return how the engine in the folder of that name is served. Raises UserError if there is none, or it has no
    server of its own."""
    engine = load_engine(name)
    if not isinstance(engine, ServedEngine):
        raise UserError(f"the engine {name!r} has no server of its own to start an agent for")
    return engine.foreign
