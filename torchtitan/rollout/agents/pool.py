"""Agents in worker processes: like environments, but one call plays the whole episode and returns its reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.agent.command import find_python
from torchtitan.rollout.environments.pool import EnvironmentPool, Episode, Outcome
from torchtitan.rollout.gateway.process import Door
from torchtitan.rollout.workers.process import WorkerProcess
from torchtitan.utils.events import EventLog


class AgentPool(EnvironmentPool):
    """Runs environment.agent, or the taskset of environment.verifiers with its own Python."""

    def __init__(self, config: JobConfig, events: EventLog, log_file: Path | None = None):
        """Raises UserError where verifiers cannot be had."""
        super().__init__(config, events, log_file)
        environment = config.environment
        self._setup = {"agent": environment.agent, "memory_limit_mb": environment.memory_limit_mb}
        self._python: str | None = None
        if environment.verifiers:
            self._python = find_python("verifiers", environment.verifiers_python, "environment.verifiers_python")
            self._setup |= {
                "taskset": environment.verifiers,
                "model": config.model.hf_assets_path,
                "harness": environment.verifiers_harness,
                "renderer": environment.verifiers_renderer,
                "max_turns": environment.max_turns,
                # Nothing of our environment, which has other versions of the same packages.
                "path": [str(Path.cwd())],
            }

    def _new_process(self) -> WorkerProcess:
        name = "verifiers_worker" if self._python else "worker"
        return WorkerProcess(
            "the agent worker", f"torchtitan.rollout.agents.{name}", self._setup, self._log_file, self._flooded,
            python=self._python,
        )  # fmt: skip

    async def episode(self) -> AgentEpisode:
        """A place for one episode, on the worker with the fewest. Raises UserError where no worker starts."""
        episode = await super().episode()
        return AgentEpisode(self, episode.host, episode.number)


class AgentEpisode(Episode):
    """One run of an agent; a context manager."""

    async def __aenter__(self) -> AgentEpisode:
        return self

    async def run(self, row: dict[str, Any], index: int, door: Door, timeout_s: float) -> Outcome:
        """Have it play; returns how it went. Raises CallFailed: it raised, hung or died."""
        reply = await self._call(timeout_s, do="run", row=row, index=index, base_url=door.base_url, key=door.key)
        self._finished = True
        return Outcome(reply["reward"], {})
