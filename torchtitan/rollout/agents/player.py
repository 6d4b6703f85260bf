"""Episodes of agents: a session of the gateway for each, and what it has recorded as a trajectory."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.trajectory import Branch, sampled_segments
from torchtitan.inference.types import GenerateRequest
from torchtitan.rollout.agents.pool import AgentPool
from torchtitan.rollout.episodes import stream_seed
from torchtitan.rollout.gateway.process import Gateway, GatewayLost
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.process import CallFailed

logger = logging.getLogger(__name__)


class AgentPlayer:
    """Plays episodes as episodes.EpisodePlayer does, with agents that ask the policy through the gateway.

    `statistics` counts turns, and episodes by how they ended.
    """

    def __init__(self, config: JobConfig, gateway: Gateway, agents: AgentPool, tokenizer: Tokenizer):
        self._config, self._gateway, self._agents, self._tokenizer = config, gateway, agents, tokenizer
        self.statistics: Counter[str] = Counter(
            {"turns": 0, "episodes_redone": 0, "episodes_lost": 0, "calls_failed": 0}
        )

    def counts(self) -> Counter[str]:
        """Turns, episodes and failures since the start."""
        return Counter({**self.statistics, **self._agents.statistics, **self._gateway.statistics})

    async def play(self, prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        """request.sampling.n episodes of one row; fewer where agents fail again and again.

        Raises UserError where neither gateway nor worker starts.
        """
        tasks = [
            asyncio.ensure_future(self._persist(prompt, request, number, min_version))
            for number in range(request.sampling.n)
        ]
        try:
            played = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [trajectory for trajectory in played if trajectory is not None]

    async def _persist(
        self, prompt: Prompt, request: GenerateRequest, number: int, min_version: int
    ) -> Trajectory | None:
        """One episode; begun again, with other random numbers, where the agent or the system failed."""
        for attempt in range(1 + self._config.environment.max_retries):
            seed = stream_seed(request.sampling.seed, number, attempt)
            own = GenerateRequest(
                f"{request.request_id}-{number}-{attempt}", [], replace(request.sampling, n=1, seed=seed)
            )
            try:
                return await self._play(prompt, own, request.request_id, min_version)
            except (CallFailed, GatewayLost) as error:
                logger.debug("episode %s: %s", own.request_id, error)
                self.statistics["episodes_redone"] += attempt < self._config.environment.max_retries
        self.statistics["episodes_lost"] += 1
        return None

    async def _play(self, prompt: Prompt, own: GenerateRequest, group: str, min_version: int) -> Trajectory:
        """Raises CallFailed, or GatewayLost."""
        environment = self._config.environment
        row = {self._config.rollout.prompt_column: prompt.text, **prompt.columns}
        door = await self._gateway.open(
            own.request_id, own.sampling, min_version=min_version, shares=group, many=bool(environment.verifiers)
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
