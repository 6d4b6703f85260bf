"""Episodes of agents: a session of the gateway for each, and what it has recorded as a trajectory."""

from __future__ import annotations

from collections import Counter

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.trajectory import Branch, sampled_segments
from torchtitan.inference.types import GenerateRequest
from torchtitan.rollout.agents.pool import AgentPool
from torchtitan.rollout.gateway.process import Gateway, GatewayLost
from torchtitan.rollout.player import Player
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.process import CallFailed


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
