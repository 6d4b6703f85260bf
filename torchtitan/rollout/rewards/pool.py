"""Reward functions in worker processes: a hang, a crash or a memory bomb costs one sample's reward, never the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.rollout.rewards import load_reward
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.process import CallFailed, WorkerProcess

logger = logging.getLogger(__name__)

Score = tuple[float | None, dict[str, float | None]]
"""Weighted sum of the rewards (None where no function gave one) and every function's own reward"""

# After a group's call timed out, its samples get this many times the group's limit, shared equally.
RETRY_SHARE = 2.0
LOGGED_FAILURES = 10


class RewardPool:
    """Runs config.rewards.functions (and `extra_functions`, which only count where they are asked for by name).

    All methods belong to one asyncio loop. `statistics` counts samples that lost a reward to a failure, calls that ran
    into the time limit and workers that were replaced.
    """

    def __init__(self, config: JobConfig, extra_functions: Sequence[str] = (), log_file: Path | None = None):
        """Raises UserError for an unknown function."""
        rewards = config.rewards
        self.functions = list(rewards.functions)
        self._weights = dict(zip(self.functions, rewards.weights or [1.0] * len(self.functions), strict=True))
        self._all_functions = list(dict.fromkeys([*self.functions, *extra_functions]))
        for name in self._all_functions:
            load_reward(name)
        self._timeout_s = rewards.timeout_s
        self._max_completion_tokens = config.rollout.max_completion_tokens
        setup = {"functions": self._all_functions, "memory_limit_mb": rewards.memory_limit_mb}
        self._workers = [
            WorkerProcess("the reward worker", "torchtitan.rollout.rewards.worker", setup, log_file)
            for _ in range(rewards.num_workers)
        ]
        self._free: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self.statistics: Counter[str] = Counter({"failures": 0, "timeouts": 0, "worker_restarts": 0})
        self.last_failure = ""
        """The latest failure in words, for messages"""
        self._logged = 0

    async def start(self) -> None:
        """Start all workers. Raises UserError where they cannot start."""
        await asyncio.gather(*(worker.start() for worker in self._workers))
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def score(
        self,
        prompt: Prompt,
        completions: Sequence[Trajectory],
        functions: Sequence[str] | None = None,
    ) -> list[Score]:
        """Rewards of one prompt's completions; `functions` replaces the configured ones.

        Raises:
            UserError: a worker died and no new one could be started.
        """
        names = self.functions if functions is None else list(functions)
        if not names:
            return [(None, {}) for _ in completions]
        worker = await self._free.get()
        try:
            columns = [await self._run(worker, name, prompt, completions) for name in names]
        finally:
            self._free.put_nowait(worker)
        return [self._combine(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]

    def _combine(self, rewards: dict[str, float | None]) -> Score:
        given = [self._weights.get(name, 1.0) * value for name, value in rewards.items() if value is not None]
        return (sum(given) if given else None), rewards

    async def _run(
        self, worker: WorkerProcess, name: str, prompt: Prompt, completions: Sequence[Trajectory]
    ) -> list[float | None]:
        """One function over one group. Where that fails, each sample is tried alone to find the bad ones; the others
        are then scored together, since a reward may compare the completions of its group."""
        try:
            return self._accept(name, await self._call(worker, name, prompt, completions, self._timeout_s))
        except CallFailed as failure:
            if len(completions) == 1:
                self._lost(name, failure)
                return [None]
        limit = min(self._timeout_s, RETRY_SHARE * self._timeout_s / len(completions))
        values: list[float | None] = [None] * len(completions)
        good = []
        begun = time.monotonic()
        for i, completion in enumerate(completions):
            try:
                await self._call(worker, name, prompt, [completion], limit)
                good.append(i)
            except CallFailed as failure:
                self._lost(name, failure)
        if good:
            try:
                # What needs its time for every sample needs as much again for all of them.
                together = self._timeout_s + time.monotonic() - begun
                reply = await self._call(worker, name, prompt, [completions[i] for i in good], together)
                for i, value in zip(good, self._accept(name, reply), strict=True):
                    values[i] = value
            except CallFailed as failure:
                for _ in good:
                    self._lost(name, failure)
        return values

    def _lost(self, name: str, failure: CallFailed) -> None:
        """Count a sample's lost reward."""
        self.statistics["failures"] += 1
        self.last_failure = f"reward function {name!r}: {failure.kind} ({failure})"
        self._logged += 1
        if self._logged <= LOGGED_FAILURES:
            silence = "; further ones are only counted" if self._logged == LOGGED_FAILURES else ""
            logger.warning("a sample has no reward: %s%s", self.last_failure, silence)

    def _accept(self, name: str, reply: dict[str, Any]) -> list[float | None]:
        for _ in reply["invalid"]:
            self._lost(name, CallFailed("invalid", "a reward must be a finite number or None"))
        return reply["values"]

    async def _call(
        self,
        worker: WorkerProcess,
        name: str,
        prompt: Prompt,
        completions: Sequence[Trajectory],
        timeout_s: float,
    ) -> dict[str, Any]:
        message = {
            "function": name,
            "samples": {
                "prompt": prompt.text,
                "columns": prompt.columns,
                "completions": [one.completion for one in completions],
                "completion_ids": [one.completion_ids for one in completions],
                "finish_reasons": [one.finish_reason for one in completions],
                "environments": [one.environment for one in completions],
                "max_completion_tokens": self._max_completion_tokens,
                "prefill": prompt.prefill,
            },
        }
        if not worker.alive:
            await worker.start()
        try:
            return await worker.call(message, timeout_s)
        except CallFailed as failure:
            if failure.kind != "exception":
                self.statistics["timeouts"] += failure.kind == "timeout"
                self.statistics["worker_restarts"] += 1
                await worker.start()
            raise
        except asyncio.CancelledError:
            # The next call would have to wait for this one.
            await worker.stop()
            raise
