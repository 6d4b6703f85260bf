"""Multi-turn conversations between the policy, on any actor, and an environment or agent in a worker process."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.colocated.pool import ColocatedPool
from torchtitan.inference.pool import InferencePool
from torchtitan.inference.types import Branch, GenerateRequest, add_turn, sampled_segments, stream_seed
from torchtitan.rollout.data.thoughts import Turn
from torchtitan.rollout.data.turns import TurnReader, reader_of
from torchtitan.rollout.environments.pool import AgentPool, EnvironmentPool, Episode
from torchtitan.rollout.gateway.process import Gateway, GatewayLost
from torchtitan.rollout.gateway.session import COUNTS
from torchtitan.rollout.prompts import PromptMaker
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.process import CallFailed

Engines = InferencePool | ColocatedPool
"""Samples completions; if an actor is lost, another one redoes its requests"""


# Of an answer that is much longer than what fits, only this many characters per token that fits are encoded at first.
# Where the text is cut, a few tokens may differ.
ENCODED_CHARACTERS, CERTAIN_SHARE = 8, 1.5


class Player(ABC):
    """Plays episodes. `statistics` counts turns, and episodes that were redone or lost."""

    failures: tuple[type[Exception], ...] = (CallFailed,)
    """Exceptions after which an episode starts again; any other exception ends the run"""

    def __init__(self, config: JobConfig, *parts: EnvironmentPool | Gateway):
        self._config = config
        self.counting: list[Any] = [self, *parts]
        """All whose `statistics` count something of its episodes"""
        self.statistics: Counter[str] = Counter({"turns": 0, "episodes_redone": 0, "episodes_lost": 0})
        self.last_failure = ""
        """Why the latest failed episode failed"""

    @abstractmethod
    async def play_one(
        self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int
    ) -> Trajectory | None:
        """Play one episode; None if the prompt leaves no room for a turn. Episodes of one `group` share a prompt.

        Raises one of `failures`, or UserError if nothing can be played.
        """

    async def play(self, prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        """Play request.sampling.n episodes of one prompt; return fewer if some fail in all their attempts.

        Raises UserError if no actor can sample, or if a worker or the gateway does not start.
        """
        numbers = range(request.sampling.n)
        tasks = [asyncio.ensure_future(self._persist(prompt, request, number, min_version)) for number in numbers]
        try:
            trajectories = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [trajectory for trajectory in trajectories if trajectory is not None]

    async def _persist(
        self, prompt: Prompt, request: GenerateRequest, number: int, min_version: int
    ) -> Trajectory | None:
        """Play one episode. After a failure, retry with another seed, because the samples may have caused it."""
        retries = self._config.environment.max_retries
        for attempt in range(1 + retries):
            seed = stream_seed(request.sampling.seed, number, attempt)
            name = f"{request.request_id}-{number}-{attempt}"
            own = GenerateRequest(name, [], replace(request.sampling, n=1, seed=seed))
            try:
                trajectory = await self.play_one(prompt, own, request.request_id, min_version)
            except self.failures as error:
                self.last_failure = str(error)
                self.statistics["episodes_redone"] += attempt < retries
                continue
            if trajectory is not None:
                return trajectory
            break
        self.statistics["episodes_lost"] += 1
        return None


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

    async def play_one(
        self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int
    ) -> Trajectory | None:
        async with await self._environments.episode() as episode:
            return await self._play(prompt, request, group, episode, min_version)

    async def _play(
        self, prompt: Prompt, template: GenerateRequest, group: str, episode: Episode, min_version: int
    ) -> Trajectory | None:
        row = {self._config.rollout.prompt_column: prompt.text, **prompt.columns}
        tokens = self._maker.extended(prompt, await episode.reset(row))
        limit = min(self._config.training.seq_len, len(tokens) + template.sampling.max_tokens)
        begun, branches, messages = len(tokens), list[Branch](), list[dict[str, Any]]()
        chat = not isinstance(prompt.text, str) or self._config.rollout.chat_template
        finish_reason, rewards = "length", list[float]()
        for turn in range(self._config.environment.max_turns):
            if len(tokens) >= limit:
                break
            # Every turn has its own random stream, wherever and however often it is sampled.
            seed = stream_seed(template.sampling.seed, turn)
            sampling = replace(template.sampling, max_tokens=limit - len(tokens), seed=seed)
            request = GenerateRequest(f"{template.request_id}-{turn}", tokens, sampling)
            (completion,) = await self._engines.generate(request, min_version, shares=group)
            self.statistics["turns"] += 1
            add_turn(branches, tokens, completion)
            opened, marked = self._turns.opened(tokens), self._turns.marked(completion.token_ids)
            tokens = tokens + completion.token_ids
            text = self._tokenizer.decode(completion.token_ids)
            messages.append({"role": "assistant", "content": text})
            rewards.append(0.0)
            if completion.finish_reason == "length":
                # A truncated turn may mean something else than the whole one, so the environment does not get it.
                break
            if not self._maker.tools:
                text = self._turns.read_marked(opened, marked).shown(self._turns.hidden)
            reply = await episode.act(text, opened + marked)
            rewards[-1] = reply.reward
            if reply.calls:
                messages[-1]["tool_calls"] = [
                    {"id": result["tool_call_id"], "type": "function", "function": call}
                    for call, result in zip(reply.calls, reply.messages, strict=True)
                ]
            messages += reply.messages
            if reply.done:
                finish_reason = "stop"
                break
            if self._overflows(reply.messages, limit - len(tokens)):
                break
            if chat:
                following = self._maker.renderer.following(tokens, reply.messages, self._maker.tools)
            else:
                following = self._maker.renderer.following_text(reply.messages)
            if len(tokens) + len(following) >= limit:
                break
            tokens = tokens + following
        if not branches:
            self.last_failure = f"its prompt has {begun} tokens, which leaves no room in training.seq_len"
            return None
        outcome = await episode.finish()
        completion_of: Any = messages
        if isinstance(prompt.text, str):
            # Template text between turns and tool results must not be mistaken for the policy's answer.
            said = [message["content"] for message in messages if message["role"] == "assistant"]
            completion_of = "\n".join(said) if chat else self._tokenizer.decode(branches[0].token_ids[begun:])
        # get_reward may return something other than the sum of the steps' rewards.
        adds_up = outcome.reward is not None and math.isclose(outcome.reward, sum(rewards))
        by_turn = rewards if adds_up and any(rewards) else []
        last = self._turns.read_marked(opened, marked, self._maker.tools)
        return Trajectory(
            branches, finish_reason, completion_of, outcome.reward, outcome.attributes, by_turn, turn=last
        )

    def _overflows(self, messages: list[dict[str, Any]], room: int) -> bool:
        """Return whether messages have more than `room` tokens already at their beginning. To encode all of an
        observation of a megabyte would take a second, and nothing else would go on meanwhile."""
        text = "".join(message["content"] for message in messages)
        beginning = text[: ENCODED_CHARACTERS * room]
        return len(beginning) < len(text) and len(self._tokenizer.encode(beginning)) > CERTAIN_SHARE * room


class AgentPlayer(Player):
    """Plays episodes of agents, which reach the policy through the gateway. `statistics` also counts failed calls."""

    failures = (CallFailed, GatewayLost)

    def __init__(self, config: JobConfig, gateway: Gateway, agents: AgentPool, tokenizer: Tokenizer):
        super().__init__(config, agents, gateway)
        self._gateway, self._agents, self._tokenizer = gateway, agents, tokenizer
        self.statistics.update(dict.fromkeys(("calls_failed", *COUNTS), 0))

    async def play_one(self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int) -> Trajectory:
        environment = self._config.environment
        row = {self._config.rollout.prompt_column: prompt.text, **prompt.columns}
        access = await self._gateway.open(
            request.request_id,
            request.sampling,
            min_version=min_version,
            shares=group,
            many=bool(environment.verifiers),
        )
        try:
            async with await self._agents.episode() as episode:
                reward = await episode.run(row, prompt.index, access, environment.episode_timeout_s)
        finally:
            # An episode that was aborted must also stop sampling.
            record = await self._gateway.end(access.session)
            self.statistics["turns"] += len(sampled_segments(record.branches))
            self.statistics.update(record.counts)
        if record.failed:
            self.statistics["calls_failed"] += record.failed
            raise CallFailed("exception", f"{record.failed} calls of the policy were not answered")
        if not record.branches:
            raise CallFailed("exception", "the agent has not asked the policy anything")
        said = self._said(prompt, record.branches)
        turn = self._last_turn(record.branches[-1])
        return Trajectory(record.branches, "length" if record.cut else "stop", said, reward, turn=turn)

    def _last_turn(self, branch: Branch) -> Turn:
        *before, last = branch.segments
        prompt_ids = [token for segment in before for token in segment.token_ids]
        return reader_of(self._tokenizer).read(prompt_ids, last.token_ids)

    def _said(self, prompt: Prompt, branches: list[Branch]) -> str | list[dict[str, str]]:
        """Return the policy's turns in the branch that ended last, for reward functions."""
        texts = [self._tokenizer.decode(one.token_ids) for one in branches[-1].sampled]
        if isinstance(prompt.text, str):
            return "\n".join(texts)
        return [{"role": "assistant", "content": text} for text in texts]
