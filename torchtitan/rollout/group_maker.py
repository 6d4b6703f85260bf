"""From a prompt to a scored group: sampled on one actor, decoded, judged by the reward workers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, Tag
from torchtitan.rollout.prompts import TextTokenizer
from torchtitan.rollout.rewards.pool import Score
from torchtitan.rollout.types import Prompt, Sample


class Generator(Protocol):
    """What rollouts need of inference.pool.InferencePool."""

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest, min_version: int = 0) -> list[Completion]: ...

    async def connect_weights(self, coordinator: str) -> None: ...

    def expect(self, version: int, token_ids: list[int], log_probs: list[float]) -> None: ...

    async def redo_elsewhere(self, actor: str, reason: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self, tag: Tag) -> None: ...

    @property
    def statistics(self) -> dict[str, int]: ...

    @property
    def actors(self) -> dict[str, str]: ...

    async def close(self) -> None: ...


class Scorer(Protocol):
    """What rollouts need of rewards.pool.RewardPool."""

    last_failure: str

    @property
    def statistics(self) -> dict[str, int]: ...

    async def start(self) -> None: ...

    async def score(
        self, prompt: Prompt, completions: Sequence[tuple[Completion, str]], functions: Sequence[str] | None = None
    ) -> list[Score]: ...

    async def close(self) -> None: ...


class GroupMaker:
    """Samples and scores groups as the configuration says."""

    def __init__(self, config: JobConfig, generator: Generator, scorer: Scorer, tokenizer: TextTokenizer, epoch: str):
        self._config = config
        self._generator = generator
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._epoch = epoch
        self._stop_token_ids = list(dict.fromkeys([*config.rollout.stop_token_ids, *tokenizer.eos_token_ids]))

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
            stop_token_ids=self._stop_token_ids,
            seed=_seed(self._config.training.seed, prompt.index),
        )
        return GenerateRequest(f"{self._epoch}-{prompt.index}", prompt.token_ids, sampling)

    def with_stop_tokens(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the stop tokens of training, whatever it had: an evaluation must end where training does."""
        return replace(request, sampling=replace(request.sampling, stop_token_ids=self._stop_token_ids))

    async def generate(self, prompt: Prompt, min_version: int) -> list[Completion]:
        """Completions of a whole group. Raises UserError where no actor can make them."""
        return await self._generator.generate(self.request(prompt), min_version)

    async def score(
        self, prompt: Prompt, completions: Sequence[Completion], functions: Sequence[str] | None = None
    ) -> list[Score]:
        """Rewards of completions; what they say is decoded without special tokens."""
        texts = [self._tokenizer.decode(completion.token_ids) for completion in completions]
        return await self._scorer.score(prompt, list(zip(completions, texts, strict=True)), functions)

    def last_reward_failure(self) -> str:
        return self._scorer.last_failure or "the functions returned None"

    def describe_actors(self) -> str:
        return ", ".join(f"{name} {state}" for name, state in self._generator.actors.items()) or "none"

    def counters(self) -> dict[str, float]:
        """Counts since the start, under their names in metrics.jsonl."""
        rewards = {f"reward/{name}": float(count) for name, count in self._scorer.statistics.items()}
        return rewards | {f"inference/{name}": float(count) for name, count in self._generator.statistics.items()}


def make_sample(prompt: Prompt, completion: Completion, reward: float, rewards: dict[str, float | None]) -> Sample:
    return Sample(
        prompt_ids=prompt.token_ids,
        completion_ids=completion.token_ids,
        log_probs=completion.log_probs,
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        reward=reward,
        rewards=rewards,
        kept_token_ids=completion.kept_token_ids,
    )


def _seed(job_seed: int, index: int) -> int:
    """48 bits, which every engine and every JSON reader can hold."""
    return int.from_bytes(hashlib.blake2b(f"{job_seed}/{index}".encode(), digest_size=6).digest(), "little")
