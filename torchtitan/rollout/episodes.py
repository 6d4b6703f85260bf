"""Conversations of several turns: the policy's, on any actor, and the environment's, in a worker process."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from dataclasses import replace
from typing import Any, Protocol

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.trajectory import Branch, add_turn
from torchtitan.inference.types import Completion, GenerateRequest
from torchtitan.rollout.environments.pool import EnvironmentPool, Episode, Reply
from torchtitan.rollout.prompts import PromptMaker
from torchtitan.rollout.rendering import ChatRenderer
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.process import CallFailed


class Sampler(Protocol):
    """What samples turns: the engines' pool, which redoes on another actor what is lost with one."""

    async def generate(
        self, request: GenerateRequest, min_version: int = 0, *, shares: str = ""
    ) -> list[Completion]: ...


class EpisodePlayer:
    """Plays episodes: a turn is sampled, the environment answers, and its answer's tokens follow.

    `statistics` counts turns, and episodes by how they ended.
    """

    def __init__(
        self,
        config: JobConfig,
        engines: Sampler,
        environments: EnvironmentPool,
        maker: PromptMaker,
        tokenizer: Tokenizer,
    ):
        self._config, self._engines, self._environments = config, engines, environments
        self._maker, self._tokenizer, self._renderer = maker, tokenizer, ChatRenderer(tokenizer)
        self.statistics: Counter[str] = Counter({"turns": 0, "episodes_redone": 0, "episodes_lost": 0})

    def counts(self) -> Counter[str]:
        """Turns, episodes and failures since the start."""
        return Counter({**self.statistics, **self._environments.statistics})

    async def play(self, prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        """request.sampling.n episodes of one prompt, each with an environment of its own; fewer where environments
        fail again and again. Raises UserError where no actor can sample or no environment worker starts."""
        episodes = [self._persist(prompt, request, number, min_version) for number in range(request.sampling.n)]
        tasks = [asyncio.ensure_future(one) for one in episodes]
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
        """One episode. Where its environment fails it begins again, with other random numbers: what was sampled may be
        why."""
        group = request.request_id
        for attempt in range(1 + self._config.environment.max_retries):
            seed = stream_seed(request.sampling.seed, number, attempt)
            own = GenerateRequest(
                f"{request.request_id}-{number}-{attempt}", [], replace(request.sampling, n=1, seed=seed)
            )
            try:
                async with await self._environments.episode() as episode:
                    if (trajectory := await self._play(prompt, own, group, episode, min_version)) is not None:
                        return trajectory
                    break
            except CallFailed:
                self.statistics["episodes_redone"] += attempt < self._config.environment.max_retries
        self.statistics["episodes_lost"] += 1
        return None

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
            # Every turn draws from a stream of its own, wherever it is sampled or sampled again.
            seed = stream_seed(template.sampling.seed, turn)
            sampling = replace(template.sampling, max_tokens=limit - len(tokens), seed=seed)
            request = GenerateRequest(f"{template.request_id}-{turn}", tokens, sampling)
            (completion,) = await self._engines.generate(request, min_version, shares=group)
            self.statistics["turns"] += 1
            add_turn(branches, tokens, completion)
            tokens = tokens + completion.token_ids
            text = self._tokenizer.decode(completion.token_ids)
            messages.append({"role": "assistant", "content": text})
            rewards.append(0.0)
            if completion.finish_reason == "length":
                # What was cut off may not mean what it says.
                break
            reply = await episode.act(text)
            rewards[-1] = reply.reward
            messages += _described(messages, reply)
            if reply.done:
                finish_reason = "stop"
                break
            if chat:
                following = self._renderer.following(tokens, reply.messages)
            else:
                following = self._renderer.following_text(reply.messages)
            if len(tokens) + len(following) >= limit:
                break
            tokens = tokens + following
        if not branches:
            return None
        outcome = await episode.finish()
        said = branches[0].token_ids[begun:]
        completion_of = messages if not isinstance(prompt.text, str) else self._tokenizer.decode(said)
        # get_reward may say something else than the steps have.
        adds_up = outcome.reward is not None and math.isclose(outcome.reward, sum(rewards))
        by_turn = rewards if adds_up and any(rewards) else []
        return Trajectory(branches, finish_reason, completion_of, outcome.reward, outcome.attributes, by_turn)


def stream_seed(*parts: object) -> int:
    """A seed for these parts, of 48 bits, which every engine and every JSON reader can hold."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest(), "little")


def _described(messages: list[dict[str, Any]], reply: Reply) -> list[dict[str, Any]]:
    """The environment's messages; the turn's own, the last of `messages`, is given its tool calls."""
    if reply.calls:
        messages[-1]["tool_calls"] = [{"type": "function", "function": call} for call in reply.calls]
    return reply.messages
