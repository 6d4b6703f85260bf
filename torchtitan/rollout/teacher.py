"""A teacher that a server has: its log-probs of what the policy samples, for job.stage = "distill"."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config.tables.training import Distill
from torchtitan.errors import UserError
from torchtitan.inference.client import ActorError, JsonClient, RequestRefused, TokenRefused
from torchtitan.inference.sglang.dialect import DIALECT as SGLANG
from torchtitan.inference.types import Completion
from torchtitan.rollout.types import Trajectory

TOKEN_VARIABLE = "TORCHTITAN_TEACHER_TOKEN"
ATTEMPTS = 3
PAUSE_S = 1.0
# Requests under way at a time: a server computes a prompt as a whole, so that more would only wait there.
CONCURRENT = 32


@dataclass(frozen=True)
class Route:
    """How a kind of server is asked for log-probs of given tokens."""

    request: Callable[[list[int]], tuple[str, dict[str, Any]]]
    """Tokens -> path and body"""
    read: Callable[[list[int], Any], list[float]]
    """Tokens and answer -> log-probs at temperature 1 of all tokens but the first; raises where it is no such answer"""


def _ask_vllm(token_ids: list[int]) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


def _read_vllm(token_ids: list[int], answer: Any) -> list[float]:
    rows = answer["choices"][0]["prompt_logprobs"]
    return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], token_ids[1:], strict=True)]


def _ask_sglang(token_ids: list[int]) -> tuple[str, dict[str, Any]]:
    call = SGLANG.score(token_ids)
    return call.path, dict(call.body)


def _read_sglang(token_ids: list[int], answer: Any) -> list[float]:
    return [float(row[0]) for row in answer["meta_info"]["input_token_logprobs"][1:]]


def _ask_embedded(token_ids: list[int]) -> tuple[str, dict[str, Any]]:
    return "/v1/score", {"token_ids": token_ids}


def _read_embedded(token_ids: list[int], answer: Any) -> list[float]:
    return [float(value) for value in answer["log_probs"]]


ROUTES = {
    "vllm": Route(_ask_vllm, _read_vllm),
    "sglang": Route(_ask_sglang, _read_sglang),
    "embedded": Route(_ask_embedded, _read_embedded),
}
"""The keys of distill.teacher_backend"""


class Teacher:
    """Belongs to one asyncio loop. The server's token, where it asks for one, is in TORCHTITAN_TEACHER_TOKEN."""

    def __init__(self, config: Distill):
        self._config, self._route = config, ROUTES[config.teacher_backend]
        self._client = JsonClient(config.teacher_url, os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)
        self._free = asyncio.Semaphore(CONCURRENT)

    async def teach(self, trajectories: Sequence[Trajectory]) -> None:
        """Give every sampled token the teacher's log-prob. Raises UserError where the server gives none."""
        branches = [branch for one in trajectories for branch in one.branches]
        scores = await asyncio.gather(*(self.score(branch.token_ids) for branch in branches))
        for branch, log_probs in zip(branches, scores, strict=True):
            end = 0
            for segment in branch.segments:
                begin, end = end, end + len(segment.token_ids)
                if isinstance(segment, Completion):
                    segment.teacher_log_probs = log_probs[begin - 1 : end - 1]

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs of all tokens but the first. Raises UserError where the server gives none in three attempts."""
        path, body = self._route.request(token_ids)
        problem = ""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(attempt * PAUSE_S)
            try:
                async with self._free:
                    answer = await self._client.call("score", "POST", path, self._config.teacher_timeout_s, body)
                log_probs = self._route.read(token_ids, answer)
                if len(log_probs) == len(token_ids) - 1:
                    return log_probs
                problem = f"{len(log_probs)} log-probs came for {len(token_ids)} tokens"
            except (RequestRefused, TokenRefused) as error:
                problem = str(error)
                break
            except ActorError as error:
                problem = str(error)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                problem = f"{path} answered something else than distill.teacher_backend does: {error!r}"
                break
        raise UserError(f"distill.teacher_url = {self._config.teacher_url!r} gives no log-probs: {problem}")

    async def close(self) -> None:
        await self._client.close()
