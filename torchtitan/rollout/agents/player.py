"""Agents: worker processes that play whole episodes, and what a session of the gateway has recorded of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.agent.command import find_python
from torchtitan.inference.trajectory import Branch, sampled_segments
from torchtitan.inference.types import GenerateRequest
from torchtitan.rollout.environments.pool import EnvironmentPool, Episode, Outcome
from torchtitan.rollout.episodes import Player
from torchtitan.rollout.gateway.process import Door, Gateway, GatewayLost
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.process import CallFailed, WorkerProcess
from torchtitan.utils.json_lines import EventLog


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
        module = "torchtitan.rollout.agents.worker"
        return WorkerProcess(
            "the agent worker", module, self._setup, self._log_file, self._flooded, python=self._python
        )

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


class AgentPlayer(Player):
    """Agents ask the policy through the gateway. `statistics` counts calls that were not answered, too."""

    failures = (CallFailed, GatewayLost)

    def __init__(self, config: JobConfig, gateway: Gateway, agents: AgentPool, tokenizer: Tokenizer):
        super().__init__(config)
        self._gateway, self._agents, self._tokenizer = gateway, agents, tokenizer
        self.statistics["calls_failed"] = 0

    def counts(self) -> Counter[str]:
        return Counter({**self.statistics, **self._agents.statistics, **self._gateway.statistics})

    async def play_one(self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int) -> Trajectory:
        environment = self._config.environment
        row = {self._config.rollout.prompt_column: prompt.text, **prompt.columns}
        door = await self._gateway.open(
            request.request_id,
            request.sampling,
            min_version=min_version,
            shares=group,
            many=bool(environment.verifiers),
        )
        try:
            async with await self._agents.episode() as episode:
                outcome = await episode.run(row, prompt.index, door, environment.episode_timeout_s)
        finally:
            # Also what broke off must not sample any longer.
            played = await self._gateway.end(door.session)
            self.statistics["turns"] += len(sampled_segments(played.branches))
        if played.failed:
            self.statistics["calls_failed"] += played.failed
            raise CallFailed("exception", f"{played.failed} calls of the policy were not answered")
        if not played.branches:
            raise CallFailed("exception", "the agent has not asked the policy anything")
        said = self._said(prompt, played.branches)
        return Trajectory(played.branches, "length" if played.cut else "stop", said, outcome.reward)

    def _said(self, prompt: Prompt, branches: list[Branch]) -> str | list[dict[str, str]]:
        """What the policy has said in the branch that ended last, for reward functions."""
        texts = [self._tokenizer.decode(one.token_ids) for one in branches[-1].sampled]
        if isinstance(prompt.text, str):
            return "\n".join(texts)
        return [{"role": "assistant", "content": text} for text in texts]
