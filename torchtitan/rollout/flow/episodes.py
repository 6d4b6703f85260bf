"""Multi-turn conversations between the policy, on any actor, and an environment or agent in a worker process."""

from __future__ import annotations

import asyncio
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.replicas.replica_pool import ReplicaPool
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.types import Branch, GenerateRequest, add_turn, sampled_segments, stream_seed
from torchtitan.rollout.conversation.thoughts import Turn
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.turns import TurnReader, reader_of
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.environments.environment_pool import AgentPool, EnvironmentPool, Episode
from torchtitan.rollout.environments.failure_log import FailureLog
from torchtitan.rollout.gateway.exchange import OUTCOMES
from torchtitan.rollout.gateway.gateway_process import Gateway, GatewayLost
from torchtitan.rollout.gateway.record import SessionRecord
from torchtitan.rollout.gateway.session import COUNTS
from torchtitan.rollout.types import Failure, Prompt, Trajectory
from torchtitan.rollout.workers.worker_process import CallFailed

Engines = InferencePool | ReplicaPool
"""Samples completions; if an actor is lost, another one redoes its requests"""


# Of an answer that is much longer than what fits, only this many characters per token that fits are encoded at first.
# Where the text is cut, a few tokens may differ.
ENCODED_CHARACTERS, CERTAIN_SHARE = 8, 1.5
# Of an answer that is quoted in an event.
SHOWN_CHARACTERS = 100
# An episode without a call in a process that ends is begun again so often, besides Environment.max_retries.
MAX_STRAYS = 20
# What may become of an attempt at an episode, besides a trajectory with an outcome.
EPISODES = ("episodes_redone", "episodes_lost", "episodes_failed", "episodes_without_room")
# The process or program of an episode that is alone may end so often by a signal that somebody else could have sent.
ENDED_ALONE = 1


class EpisodeFailed(Exception):
    """An attempt at an episode that failed. `cause` is a CallFailed or GatewayLost; `played` is what the policy had
    sampled by then, None if that was nothing."""

    def __init__(self, cause: CallFailed | GatewayLost, played: Trajectory | None = None, stderr: str = ""):
        """stderr: the end of its agent's standard error."""
        super().__init__(str(cause))
        self.cause, self.played, self.stderr = cause, played, stderr


class Player(ABC):
    """Plays episodes.

    `statistics` counts turns, and what becomes of attempts at episodes. Each attempt that fails (`failures` counts them
    by kind) is redone, or its episode is lost, or has failed by its own turn; an episode without room for a turn is
    lost without one: failures + episodes_without_room = episodes_redone + episodes_lost + episodes_failed.
    """

    def __init__(self, config: JobConfig, *parts: EnvironmentPool | Gateway):
        self._config = config
        pools = [part for part in parts if isinstance(part, EnvironmentPool)]
        self.failures = pools[0].failures if pools else FailureLog(None)
        self.counting: list[Any] = [self, *parts]
        """All whose `statistics` count something of its episodes"""
        self.statistics: Counter[str] = Counter(dict.fromkeys(("turns", *EPISODES), 0))
        self.last_failure = ""
        """Why the latest failed episode failed"""

    @abstractmethod
    async def play_one(
        self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int, alone: bool = False
    ) -> Trajectory | None:
        """Play one episode; None if the prompt leaves no room for a turn. Episodes of one `group` share a prompt.

        alone: no other episode is in its process. Raises EpisodeFailed, or UserError if nothing can be played.
        """

    async def play(self, prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        """Play request.sampling.n episodes of one prompt, and return them in order; some may have a `failure`.

        Raises UserError if no actor can sample, or if a worker or the gateway does not start.
        """
        numbers = range(request.sampling.n)
        tasks = [asyncio.ensure_future(self._persist(prompt, request, number, min_version)) for number in numbers]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _persist(self, prompt: Prompt, request: GenerateRequest, number: int, min_version: int) -> Trajectory:
        """Play one episode until it is known who caused its failure, if it fails.

        What its own turn causes is final: with other random numbers only episodes that do not fail would be left, and
        the policy would look better than it is. Anything else is redone with the same random numbers, and alone after
        the end of its process, for which a neighbour may be to blame.
        """
        name = f"{request.request_id}-{number}"
        sampling = replace(request.sampling, n=1, seed=stream_seed(request.sampling.seed, number, 0))
        alone, has_begun, blame = False, False, Blame(self._config.environment.max_retries)
        for attempt in itertools.count():
            attempt_request = GenerateRequest(f"{name}-{attempt}", [], sampling)
            try:
                trajectory = await self.play_one(prompt, attempt_request, request.request_id, min_version, alone)
            except EpisodeFailed as error:
                self.last_failure = str(error)
                has_begun = has_begun or error.played is not None
                if error.played is not None and blame.is_its_own(error.cause, alone):
                    self._count_failure(error, "episodes_failed")
                    error.played.failure = Failure.OWN_TURN
                    error.played.extra["failure"] = str(error)
                    return error.played
                if blame.ends(error.cause, alone):
                    self._count_failure(error, "episodes_lost")
                    break
                alone = alone or blame.is_in_doubt(error.cause)
                self._count_failure(error, "episodes_redone")
                continue
            if trajectory is not None:
                return trajectory
            self.statistics.update(["episodes_without_room", "episodes_lost"])
            break
        return Trajectory([], "stop", "", failure=Failure.LOST if has_begun else Failure.NOT_BEGUN)

    def _count_failure(self, error: EpisodeFailed, outcome: str) -> None:
        """Count a failed attempt, and what becomes of the episode (one of EPISODES)."""
        self.statistics[outcome] += 1
        cause, then = error.cause, outcome.removeprefix("episodes_")
        if isinstance(cause, GatewayLost):
            self.failures.attempt_failed("gateway", "run", str(cause), then)
        elif not cause.counted:
            self.failures.attempt_failed(cause.kind, cause.where, str(cause), then, error.stderr, cause.reported)


class Blame:
    """Finds out who has made an episode fail, from the failures of its attempts."""

    def __init__(self, max_retries: int):
        self._retries, self._strays, self._ended_alone = max_retries, MAX_STRAYS, 0

    def is_its_own(self, cause: Exception, alone: bool) -> bool:
        """Whether its own turn is to blame: nothing else could be, or its process or program ends whenever it is alone
        there, be it by a signal that somebody else might have sent."""
        if not isinstance(cause, CallFailed):
            return False
        self._ended_alone += alone and self.is_in_doubt(cause)
        return cause.caused or self._ended_alone > ENDED_ALONE

    def is_in_doubt(self, cause: Exception) -> bool:
        """Whether a neighbour in the process, or who sent a signal, may be to blame as well."""
        if not isinstance(cause, CallFailed):
            return False
        if cause.kind == "crash":
            return cause.in_flight > 0
        return cause.kind == "exception" and not cause.caused

    def ends(self, cause: Exception, alone: bool) -> bool:
        """Count one more attempt, and return whether it was the last one."""
        if isinstance(cause, CallFailed) and cause.kind == "crash" and not cause.in_flight and self._strays:
            self._strays -= 1  # the process ended between two of its calls
            return False
        if not alone and self.is_in_doubt(cause):
            return False
        self._retries -= 1
        return self._retries < 0


@dataclass
class PlayedEpisode:
    """What an episode consists of so far."""

    branches: list[Branch]
    messages: list[dict[str, Any]]
    rewards: list[float]
    """Of each turn"""
    finish_reason: str
    opened: str = ""
    """What the prompt had begun of the last turn, and that turn with the special tokens that mark its parts"""
    marked: str = ""


class EpisodePlayer(Player):
    """Alternates between a sampled turn and the tokens of the environment's answer."""

    def __init__(
        self,
        config: JobConfig,
        engines: Engines,
        environments: EnvironmentPool,
        maker: PromptMaker,
        tokenizer: Tokenizer,
    ):
        super().__init__(config, environments)
        self._engines, self._environments = engines, environments
        self._maker, self._tokenizer = maker, tokenizer
        self._turns = TurnReader(tokenizer, environments.tool_format)
        self._has_noted_unknown_text = False

    async def play_one(
        self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int, alone: bool = False
    ) -> Trajectory | None:
        async with await self._environments.episode(alone) as episode:
            trajectory = await self._play(prompt, request, group, episode, min_version)
        self.failures.attempt_ended_well()
        return trajectory

    async def _play(
        self, prompt: Prompt, template: GenerateRequest, group: str, episode: Episode, min_version: int
    ) -> Trajectory | None:
        row = {self._config.rollout.prompt_column: prompt.text, **prompt.columns}
        try:
            opening = await episode.reset(row)
        except CallFailed as failure:
            raise EpisodeFailed(failure) from failure
        tokens = self._maker.extended(prompt, opening)
        played = PlayedEpisode([], [], [], "length")
        try:
            await self._take_turns(prompt, played, tokens, template, group, episode, min_version)
            outcome = await episode.finish() if played.branches else None
        except CallFailed as failure:
            played.finish_reason = "stop"  # a turn that a limit cuts off does not reach the environment
            raise EpisodeFailed(failure, self._trajectory(prompt, played, len(tokens))) from failure
        if outcome is None:
            self.last_failure = f"its prompt has {len(tokens)} tokens, which leaves no room in training.seq_len"
            return None
        trajectory = self._trajectory(prompt, played, len(tokens))
        # get_reward may return something other than the sum of the steps' rewards.
        adds_up = outcome.reward is not None and math.isclose(outcome.reward, sum(played.rewards))
        trajectory.turn_rewards = played.rewards if adds_up and any(played.rewards) else []
        trajectory.reward, trajectory.environment, trajectory.opening = outcome.reward, outcome.attributes, opening
        return trajectory

    async def _take_turns(
        self,
        prompt: Prompt,
        played: PlayedEpisode,
        tokens: list[int],
        template: GenerateRequest,
        group: str,
        episode: Episode,
        min_version: int,
    ) -> None:
        """Add turns and answers to `played` until the environment is done or a limit is reached. Raises CallFailed."""
        limit = min(self._config.training.seq_len, len(tokens) + template.sampling.max_tokens)
        for turn in range(self._config.environment.max_turns):
            if len(tokens) >= limit:
                return
            # Every turn has its own random stream, wherever and however often it is sampled.
            seed = stream_seed(template.sampling.seed, turn)
            sampling = replace(template.sampling, max_tokens=limit - len(tokens), seed=seed)
            request = GenerateRequest(f"{template.request_id}-{turn}", tokens, sampling)
            (completion,) = await self._engines.generate(request, min_version, shares=group)
            self.statistics["turns"] += 1
            add_turn(played.branches, tokens, completion)
            played.opened, played.marked = self._turns.opened(tokens), self._turns.marked(completion.token_ids)
            tokens = tokens + completion.token_ids
            text = self._tokenizer.decode(completion.token_ids)
            played.messages.append({"role": "assistant", "content": text})
            played.rewards.append(0.0)
            if completion.finish_reason == "length":
                # A truncated turn may mean something else than the whole one, so the environment does not get it.
                return
            if not self._maker.tools:
                text = self._turns.read_marked(played.opened, played.marked).shown(self._turns.hidden)
            reply = await episode.act(text, played.opened + played.marked)
            played.rewards[-1] = reply.reward
            if reply.calls:
                played.messages[-1]["tool_calls"] = [
                    {"id": result["tool_call_id"], "type": "function", "function": call}
                    for call, result in zip(reply.calls, reply.messages, strict=True)
                ]
            played.messages += reply.messages
            if reply.done:
                played.finish_reason = "stop"
                return
            self._note_unknown_text(reply.messages)
            if self._overflows(reply.messages, limit - len(tokens)):
                return
            if self._is_chat(prompt):
                following = self._maker.renderer.following(tokens, reply.messages, self._maker.tools)
            else:
                following = self._maker.renderer.following_text(reply.messages)
            if len(tokens) + len(following) >= limit:
                return
            tokens = tokens + following

    def _note_unknown_text(self, messages: Sequence[dict[str, Any]]) -> None:
        """Write an event, once, if the policy cannot read how an environment's answer begins."""
        if self._has_noted_unknown_text or self._tokenizer.unknown_id is None:
            return
        text = "".join(str(message["content"]) for message in messages)[:SHOWN_CHARACTERS]
        if self._tokenizer.unknown_id not in self._tokenizer.encode(text):
            return
        self._has_noted_unknown_text = True
        advice = f"the tokenizer of {self._tokenizer.directory} does not know it all: the policy reads <unk> instead"
        self.failures.write("unknown_text", "environment_text_unknown", text=text, look_at=advice)

    def _trajectory(self, prompt: Prompt, played: PlayedEpisode, begin: int) -> Trajectory:
        """Return what was played, without an outcome. begin: the number of tokens before the first turn."""
        completion: Any = played.messages
        if isinstance(prompt.text, str):
            # Template text between turns and tool results must not be mistaken for the policy's answer.
            turns = [message["content"] for message in played.messages if message["role"] == "assistant"]
            sampled_ids = played.branches[0].token_ids[begin:]
            completion = "\n".join(turns) if self._is_chat(prompt) else self._tokenizer.decode(sampled_ids)
        last = self._turns.read_marked(played.opened, played.marked, self._maker.tools)
        return Trajectory(played.branches, played.finish_reason, completion, turn=last)

    def _is_chat(self, prompt: Prompt) -> bool:
        return not isinstance(prompt.text, str) or self._config.rollout.chat_template

    def _overflows(self, messages: list[dict[str, Any]], room: int) -> bool:
        """Return whether messages have more than `room` tokens already at their beginning. To encode all of an
        observation of a megabyte would take a second, and nothing else would go on meanwhile."""
        text = "".join(message["content"] for message in messages)
        beginning = text[: ENCODED_CHARACTERS * room]
        return len(beginning) < len(text) and len(self._tokenizer.encode(beginning)) > CERTAIN_SHARE * room


class AgentPlayer(Player):
    """Plays episodes of agents, which reach the policy through the gateway.

    `statistics` also counts their calls, each once by what became of it (gateway/exchange.py), refused ones also by
    kind.
    """

    def __init__(self, config: JobConfig, gateway: Gateway, agents: AgentPool, tokenizer: Tokenizer):
        super().__init__(config, agents, gateway)
        self._gateway, self._agents, self._tokenizer = gateway, agents, tokenizer
        calls = ("calls", *(f"calls_{outcome}" for outcome in OUTCOMES))
        self.statistics.update(dict.fromkeys((*calls, *COUNTS), 0))

    async def play_one(
        self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int, alone: bool = False
    ) -> Trajectory:
        try:
            return await self._play(prompt, request, group, min_version, alone)
        except GatewayLost as lost:
            raise EpisodeFailed(lost) from lost

    async def _play(
        self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int, alone: bool
    ) -> Trajectory:
        environment = self._config.environment
        row = {self._config.rollout.prompt_column: prompt.text, **prompt.columns}
        access = await self._gateway.open(
            request.request_id,
            request.sampling,
            min_version=min_version,
            shares=group,
            many=bool(environment.verifiers.id),
        )
        failure: CallFailed | None = None
        reward = None
        try:
            async with await self._agents.episode(alone) as episode:
                reward = await episode.run(row, prompt.index, access, environment.episode_timeout_s)
        except CallFailed as error:
            failure = error
        finally:
            # An episode that was aborted must also stop sampling.
            record = await self._gateway.end(access.session)
            self.statistics["turns"] += len(sampled_segments(record.branches))
            self.statistics.update(record.counts)
        wrong = self.failures.calls_went_wrong(access.session, record.counts, record.refusals, access.stderr)
        failure = _cause(failure, record)
        if not record.branches:
            assert failure is not None
            raise EpisodeFailed(failure, stderr=access.stderr) from failure
        answer = self._answer_of(prompt, record.branches)
        turn = self._last_turn(record.branches[-1])
        trajectory = Trajectory(record.branches, "length" if record.truncated else "stop", answer, reward, turn=turn)
        if record.side:
            trajectory.extra["side_branches"] = record.side
        if failure is not None:
            raise EpisodeFailed(failure, trajectory, access.stderr) from failure
        self.failures.attempt_ended_well(wrong)
        return trajectory

    def _last_turn(self, branch: Branch) -> Turn:
        *before, last = branch.segments
        prompt_ids = [token for segment in before for token in segment.token_ids]
        return reader_of(self._tokenizer).read(prompt_ids, last.token_ids)

    def _answer_of(self, prompt: Prompt, branches: list[Branch]) -> str | list[dict[str, str]]:
        """Return the policy's turns in the branch with which the main conversation ended, for reward functions."""
        texts = [self._tokenizer.decode(turn.token_ids) for turn in branches[-1].sampled]
        if isinstance(prompt.text, str):
            return "\n".join(texts)
        return [{"role": "assistant", "content": text} for text in texts]


def _cause(failure: CallFailed | None, record: SessionRecord) -> CallFailed | None:
    """Return why an agent's episode has failed, None if it has not. failure: that of the agent itself."""
    if record.failed:
        # An agent that got no answer may well have failed of that.
        cause = CallFailed("unanswered", f"{record.failed} calls of the policy were not answered")
    elif not record.branches:
        reasons = "".join(f"; {refusal['path']} was refused: {refusal['reason']}" for refusal in record.refusals)
        kind = "refused" if reasons else "unasked"
        cause = failure or CallFailed(kind, f"the agent has got no answer of the policy{reasons}")
    elif failure is None and record.ended_by:
        # The program could not go on: what it has not done then says nothing else about the policy.
        cause = CallFailed("refused", f"the agent ended on a call that was refused, {record.ended_by}", caused=True)
    else:
        return failure
    cause.where = cause.where or "run"
    return cause
