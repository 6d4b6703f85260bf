"""From a prompt to a scored group: sampled on the actors, with an environment or without, and judged."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan.config.derived import environment_name, learns_from_rewards
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.colocated.pool import ColocatedPool
from torchtitan.inference.pool import InferencePool
from torchtitan.inference.trajectory import Branch, add_turn
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, stream_seed
from torchtitan.rollout.episodes import Player
from torchtitan.rollout.rewards.pool import RewardPool, Score
from torchtitan.rollout.teacher import Teacher
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt, Sample, Trajectory

Engines = InferencePool | ColocatedPool


class GroupMaker:
    """Samples and scores groups as the configuration says."""

    def __init__(
        self,
        config: JobConfig,
        pool: Engines,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        epoch: str,
        episodes: Player | None = None,
    ):
        """episodes: where the policy talks to an environment; otherwise a prompt has one turn."""
        self._config = config
        self.pool = pool
        self.rewards = rewards
        self._tokenizer = tokenizer
        self._epoch = epoch
        self._episodes = episodes
        self._environment = environment_name(config)
        self._groups = 0
        self.teacher = Teacher(config.distill) if config.distill.teacher_url else None
        self.stop_token_ids = list(dict.fromkeys([*config.rollout.stop_token_ids, *tokenizer.eos_token_ids]))

    @property
    def progress(self) -> int:
        """Grows while the actors sample anything."""
        return self._groups + (0 if self._episodes is None else self._episodes.statistics["turns"])

    @property
    def last_failure(self) -> str:
        """Why the latest sample without a reward has none, in words."""
        lost = "" if self._episodes is None else f"{self._episodes.statistics['episodes_lost']} episodes were lost"
        return self.rewards.last_failure or lost or "the functions returned None"

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
            seed=stream_seed(self._config.training.seed, prompt.index),
            routes=self._config.grpo.routing_replay,
        )
        return GenerateRequest(f"{self._epoch}-{prompt.index}", prompt.token_ids, sampling)

    async def sample(self, prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        """The trajectories of a request: request.sampling.n, or fewer where environments have failed.

        Raises UserError where no actor can make them.
        """
        if self._episodes is not None:
            return await self._episodes.play(prompt, request, min_version)
        completions = await self.pool.generate(request, min_version)
        self._groups += 1
        return [self._of_one_turn(prompt, completion) for completion in completions]

    def _of_one_turn(self, prompt: Prompt, completion: Completion) -> Trajectory:
        branches: list[Branch] = []
        add_turn(branches, prompt.token_ids, completion)
        text = self._tokenizer.decode(completion.token_ids)
        said = text if isinstance(prompt.text, str) else [{"role": "assistant", "content": text}]
        return Trajectory(branches, completion.finish_reason, said)

    async def teach(self, trajectories: Sequence[Trajectory]) -> None:
        """Ask the teacher behind a server, where there is one. Raises UserError where it does not answer."""
        if self.teacher is not None:
            await self.teacher.teach(trajectories)

    async def score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], functions: Sequence[str] | None = None
    ) -> list[Score]:
        """Rewards of trajectories: those of `functions` (None: the configured ones), and their environments' own, which
        counts once."""
        if not trajectories:
            return []
        own = self._environment
        asked = None if functions is None else [name for name in functions if name != own]
        scores = await self.rewards.score(prompt, trajectories, asked)
        if functions is None and not learns_from_rewards(self._config):
            scores = [(reward or 0.0, rewards) for reward, rewards in scores]
        return [
            score if one.reward is None else ((score[0] or 0.0) + one.reward, {**score[1], own: one.reward})
            for score, one in zip(scores, trajectories, strict=True)
        ]

    def counters(self) -> dict[str, float]:
        """Counts since the start, under their names in metrics.jsonl."""
        parts = {"reward": self.rewards.statistics, "inference": self.pool.statistics}
        if self._episodes is not None:
            parts["environment"] = self._episodes.counts()
        return {f"{part}/{name}": float(count) for part, counts in parts.items() for name, count in counts.items()}


def make_sample(trajectory: Trajectory, reward: float, rewards: dict[str, float | None]) -> Sample:
    return Sample(
        trajectory.branches, trajectory.finish_reason, reward, rewards,
        turn_rewards=trajectory.turn_rewards, extra=trajectory.extra,
    )  # fmt: skip
