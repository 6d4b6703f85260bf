"""Makes a scored group from a prompt: samples on the actors, with or without an environment, teacher and rewards."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import learns_from_rewards
from torchtitan.config.training_tables import Distill
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import ActorError, JsonClient, RequestRefused, TokenRefused
from torchtitan.inference.answers import Top
from torchtitan.inference.teacher import ask_teacher
from torchtitan.inference.types import Branch, Completion, GenerateRequest, SamplingParameters, add_turn, stream_seed
from torchtitan.models.shape.checkpoint_shape import vocabulary_of
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.turns import TurnReader
from torchtitan.rollout.flow.episodes import Engines, Player
from torchtitan.rollout.flow.hints import Hints
from torchtitan.rollout.rewards.reward_pool import RewardPool, Score
from torchtitan.rollout.types import Failure, Prompt, Sample, Trajectory
from torchtitan.utils.typed_json import WrongForm

# The token of a teacher server, and its retries.
TOKEN_VARIABLE = "TORCHTITAN_TEACHER_TOKEN"
ATTEMPTS = 3
PAUSE_S = 1.0
ATTEMPT_TIMEOUT_S = 120.0
# Concurrent requests: a server processes a prompt as a whole, so further requests would only queue there.
CONCURRENT = 32
# So much of a reference answer goes with each sample to other ranks and into the journal: it may be a whole test suite.
ANSWER_CHARACTERS = 1000


class GroupMaker:
    """Samples and scores groups according to the configuration."""

    def __init__(
        self,
        config: JobConfig,
        pool: Engines,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        epoch: str,
        episodes: Player | None = None,
        hints: Hints | None = None,
    ):
        """episodes: plays conversations with an environment; without it, a prompt has a single turn. hints: gives a
        teacher those that follow from the scores."""
        self._config = config
        self.pool = pool
        self.rewards = rewards
        self._tokenizer, self._turns = tokenizer, TurnReader(tokenizer)
        self._epoch = epoch
        self.episodes, self.hints = episodes, hints
        self.single_turn = episodes is None
        self._environment = config.environment.reward_name
        self._groups = 0
        self.teacher = Teacher(config.distill, vocabulary_of(config)) if config.distill.server.url else None
        self.stop_token_ids = list(dict.fromkeys([*config.rollout.stop_token_ids, *tokenizer.eos_token_ids]))

    @property
    def progress(self) -> int:
        """A counter that grows as long as the actors sample anything."""
        return self._groups + (0 if self.episodes is None else self.episodes.statistics["turns"])

    @property
    def last_failure(self) -> str:
        """Why the latest sample without a reward has none."""
        episode = "" if self.episodes is None else self.episodes.last_failure
        lost = episode and f"an episode was lost: {episode}"
        return (
            self.rewards.last_failure
            or lost
            or "the functions returned None (what they printed is in logs/rewards.log)"
        )

    @property
    def lost_rewards(self) -> str:
        """For messages: how many samples lost their reward and how many episodes failed, and why the latest ones did;
        empty for none."""
        count = self.rewards.statistics.get("failures", 0)
        lost = f"; {count} samples got no reward, the latest by {self.rewards.last_failure}" if count else ""
        return lost if self.episodes is None else lost + self.episodes.failures.summary()

    def request(self, prompt: Prompt) -> GenerateRequest:
        """Return the request for a prompt's group. Its seed depends only on the prompt's position, so that a group
        that is redone after a failure or a resume draws the same random numbers."""
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
        name = f"{self._epoch}-{prompt.index}"
        return GenerateRequest(name, prompt.token_ids, sampling, single_turn=self.single_turn)

    async def sample(self, prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        """Return the request.sampling.n trajectories of a request; those of environments may have a `failure`.

        Raises UserError if no actor can sample them.
        """
        if self.episodes is not None:
            return await self.episodes.play(prompt, request, min_version)
        completions = await self.pool.generate(request, min_version)
        self._groups += 1
        return [self._of_one_turn(prompt, completion) for completion in completions]

    def _of_one_turn(self, prompt: Prompt, completion: Completion) -> Trajectory:
        branches: list[Branch] = []
        completion.hint_ids = prompt.hint_ids
        add_turn(branches, prompt.token_ids, completion)
        text = self._tokenizer.decode(completion.token_ids)
        answer = text if isinstance(prompt.text, str) else [{"role": "assistant", "content": text}]
        turn = self._turns.read(prompt.token_ids, completion.token_ids)
        return Trajectory(branches, completion.finish_reason, answer, turn=turn)

    async def teach(self, trajectories: Sequence[Trajectory]) -> None:
        """Get the log-probs of a teacher server, if one is configured. Raises UserError if it does not answer."""
        if self.teacher is not None:
            await self.teacher.teach(trajectories)

    async def score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], functions: Sequence[str] | None = None
    ) -> list[Score]:
        """Return the rewards from `functions` (None: the configured ones), plus each environment's own reward, which
        counts once. A failure has none, but environment.on_failure may say for training that its rewards are 0."""
        finished = [trajectory for trajectory in trajectories if trajectory.failure is None]
        of_finished = iter(await self._score_finished(prompt, finished, functions))
        scores: list[Score] = []
        for trajectory in trajectories:
            if trajectory.failure is None:
                scores.append(next(of_finished))
            else:
                scores.append(self._score_of_failure(trajectory, functions))
        return scores

    async def _score_finished(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], functions: Sequence[str] | None
    ) -> list[Score]:
        if not trajectories:
            return []
        asked = functions
        if functions is not None:
            asked = [name for name in functions if name != self._environment]
        every_sample_counts = functions is None and not learns_from_rewards(self._config)
        scores: list[Score] = []
        found = await self.rewards.score(prompt, trajectories, asked)
        for (reward, rewards), trajectory in zip(found, trajectories, strict=True):
            if every_sample_counts:
                reward = reward or 0.0
            if trajectory.reward is not None:
                reward = (reward or 0.0) + trajectory.reward
                rewards = {**rewards, self._environment: trajectory.reward}
            scores.append((reward, rewards))
        return scores

    def _score_of_failure(self, trajectory: Trajectory, functions: Sequence[str] | None) -> Score:
        config = self._config
        if functions is not None or trajectory.failure is not Failure.OWN_TURN:
            return None, {}
        if config.environment.on_failure == "leave_out":
            return None, {}
        return 0.0, dict.fromkeys(filter(None, [*config.rewards.functions, self._environment]), 0.0)


def counters(makers: Sequence[GroupMaker]) -> dict[str, float]:
    """Return the counts since the start, under their keys in metrics.jsonl; what several makers share counts once."""
    # id -> (the beginning of its keys, what counts)
    counting: dict[int, tuple[str, Any]] = {}
    for maker in makers:
        counting[id(maker.rewards)] = "reward", maker.rewards
        counting[id(maker.pool)] = "inference", maker.pool
        if maker.hints is not None:
            counting[id(maker.hints)] = "hint", maker.hints
        if maker.episodes is not None:
            counting |= {id(part): ("environment", part) for part in maker.episodes.counting}
    figures: dict[str, float] = defaultdict(float)
    for prefix, part in counting.values():
        for name, count in part.statistics.items():
            figures[f"{prefix}/{name}"] += count
    return dict(figures)


def make_sample(
    trajectory: Trajectory, reward: float, rewards: dict[str, float | None], answer: object = None
) -> Sample:
    """answer: the reference answer, whose end is shown beside the completion."""
    shown = {} if answer is None else {"answer": str(answer)[-ANSWER_CHARACTERS:]}
    return Sample(
        trajectory.branches, trajectory.finish_reason, reward, rewards,
        turn_rewards=trajectory.turn_rewards, extra={**shown, **trajectory.extra},
    )  # fmt: skip


class Teacher:
    """A teacher on a server, which scores the policy's samples for job.stage = "distill". Belongs to one asyncio loop.
    If the server requires a token, it is read from TORCHTITAN_TEACHER_TOKEN."""

    def __init__(self, config: Distill, vocabulary: int | None = None):
        """vocabulary: of the run's model, if that is known."""
        self._config, self._vocabulary = config, vocabulary
        self._client = JsonClient(config.server.url, os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)
        self._free = asyncio.Semaphore(CONCURRENT)

    async def teach(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the teacher's log-prob of every sampled token, and for a divergence over the vocabulary the likeliest in
        its place. Raises UserError if the server returns none."""
        branches = [branch for trajectory in trajectories for branch in trajectory.branches]
        answers = await asyncio.gather(*map(self._teach, branches))
        for branch, (begin, log_probs, top) in zip(branches, answers, strict=True):
            end = begin
            for segment in branch.segments[1:]:
                begin, end = end, end + len(segment.token_ids)
                if isinstance(segment, Completion):
                    segment.teacher_log_probs = log_probs[begin - 1 : end - 1]
                    segment.teacher_top = top[begin - 1 : end - 1] or None

    async def _teach(self, branch: Branch) -> tuple[int, list[float], list[Top]]:
        """The length of the prompt that the teacher reads, and its answer."""
        token_ids, prompt = branch.token_ids, branch.segments[0].token_ids
        hint = branch.sampled[0].hint_ids
        read = prompt if hint is None else hint
        return len(read), *await self.ask(read + token_ids[len(prompt) :])

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probs of all tokens but the first. Raises UserError if all attempts fail."""
        return (await self.ask(token_ids))[0]

    async def ask(self, token_ids: list[int]) -> tuple[list[float], list[Top]]:
        """Return the log-probs of all tokens but the first, and for a divergence over the vocabulary the likeliest
        tokens in their places. Raises UserError if all attempts fail."""
        top = 0 if self._config.divergence == "sampled" else self._config.top_k
        problem = ""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(attempt * PAUSE_S)
            try:
                async with self._free:
                    backend, limit_s = self._config.server.backend, ATTEMPT_TIMEOUT_S
                    return await ask_teacher(self._client, backend, token_ids, top, limit_s, self._vocabulary)
            except (RequestRefused, TokenRefused, WrongForm) as error:
                problem = str(error)
                break
            except ActorError as error:
                problem = str(error)
        raise UserError(f"distill.server.url = {self._config.server.url!r} returns no log-probs: {problem}")

    async def close(self) -> None:
        await self._client.close()
