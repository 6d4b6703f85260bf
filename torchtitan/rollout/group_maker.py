"""From a prompt to a scored group: sampled on one actor, decoded, judged by the reward workers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.colocated.pool import ColocatedPool
from torchtitan.inference.pool import InferencePool
from torchtitan.inference.trajectory import Branch, add_turn
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.rollout.rewards.pool import RewardPool, Score
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt, Sample

Engines = InferencePool | ColocatedPool


class GroupMaker:
    """Samples and scores groups as the configuration says."""

    def __init__(self, config: JobConfig, pool: Engines, rewards: RewardPool, tokenizer: Tokenizer, epoch: str):
        self._config = config
        self.pool = pool
        self.rewards = rewards
        self._tokenizer = tokenizer
        self._epoch = epoch
        self.stop_token_ids = list(dict.fromkeys([*config.rollout.stop_token_ids, *tokenizer.eos_token_ids]))

    def request(self, prompt: Prompt) -> GenerateRequest:
        """The request of a prompt's group. Its seed depends on the prompt's position alone, so that a group that is
        redone after a failure or a resume draws the same random numbers."""
        rollout = self._config.rollout
        sampling = SamplingParameters(
            max_tokens=rollout.max_completion_tokens,
            n=self._config.grpo.group_size,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=self.stop_token_ids,
            seed=_seed(self._config.training.seed, prompt.index),
        )
        return GenerateRequest(f"{self._epoch}-{prompt.index}", prompt.token_ids, sampling)

    async def generate(self, prompt: Prompt, min_version: int) -> list[Completion]:
        """Completions of a whole group. Raises UserError where no actor can make them."""
        return await self.pool.generate(self.request(prompt), min_version)

    async def score(
        self, prompt: Prompt, completions: Sequence[Completion], functions: Sequence[str] | None = None
    ) -> list[Score]:
        """Rewards of completions; what they say is decoded without special tokens."""
        texts = [self._tokenizer.decode(completion.token_ids) for completion in completions]
        return await self.rewards.score(prompt, list(zip(completions, texts, strict=True)), functions)

    def counters(self) -> dict[str, float]:
        """Counts since the start, under their names in metrics.jsonl."""
        rewards = {f"reward/{name}": float(count) for name, count in self.rewards.statistics.items()}
        return rewards | {f"inference/{name}": float(count) for name, count in self.pool.statistics.items()}


def make_sample(prompt: Prompt, completion: Completion, reward: float, rewards: dict[str, float | None]) -> Sample:
    branches: list[Branch] = []
    add_turn(branches, prompt.token_ids, completion)
    return Sample(branches, completion.finish_reason, reward, rewards)


def _seed(job_seed: int, index: int) -> int:
    """48 bits, which every engine and every JSON reader can hold."""
    return int.from_bytes(hashlib.blake2b(f"{job_seed}/{index}".encode(), digest_size=6).digest(), "little")
