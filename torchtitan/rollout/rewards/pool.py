"""Reward functions in worker processes: a hang, a crash or a memory bomb costs one sample's reward, never the run."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.types import Completion
from torchtitan.rollout.rewards import load_reward
from torchtitan.rollout.types import Prompt
from torchtitan.utils.child_process import ChildProcess, child_environment

logger = logging.getLogger(__name__)

Score = tuple[float | None, dict[str, float | None]]
"""Weighted sum of the rewards (None where no function gave one) and every function's own reward"""

HEADER = struct.Struct(">I")
START_TIMEOUT_S = 60.0
MAX_START_ATTEMPTS = 3
STOP_TIMEOUT_S = 2.0
# After a group's call timed out, its samples get this many times the group's limit, shared equally.
RETRY_SHARE = 2.0
LOGGED_FAILURES = 10


class CallFailed(Exception):
    """A call that gave no rewards. `kind` is timeout, crash or exception."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


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
        setup = {"functions": self._all_functions, "path": sys.path, "memory_limit_mb": rewards.memory_limit_mb}
        self._workers = [_Worker(setup, log_file) for _ in range(rewards.num_workers)]
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
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
        completions: Sequence[tuple[Completion, str]],
        functions: Sequence[str] | None = None,
    ) -> list[Score]:
        """Rewards of one prompt's completions, given with their texts; `functions` replaces the configured ones.

        Raises:
            UserError: a worker died and no new one could be started.
        """
        names = self.functions if functions is None else list(functions)
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
        self, worker: _Worker, name: str, prompt: Prompt, completions: Sequence[tuple[Completion, str]]
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
        worker: _Worker,
        name: str,
        prompt: Prompt,
        completions: Sequence[tuple[Completion, str]],
        timeout_s: float,
    ) -> dict[str, Any]:
        message = {
            "function": name,
            "samples": {
                "prompt": prompt.text,
                "chat": not isinstance(prompt.text, str),
                "columns": prompt.columns,
                "texts": [text for _, text in completions],
                "completion_ids": [completion.token_ids for completion, _ in completions],
                "finish_reasons": [completion.finish_reason for completion, _ in completions],
                "max_completion_tokens": self._max_completion_tokens,
                "prefill": prompt.prefill,
            },
        }
        try:
            return await worker.call(message, timeout_s)
        except CallFailed as failure:
            if failure.kind != "exception":
                self.statistics["timeouts"] += failure.kind == "timeout"
                self.statistics["worker_restarts"] += 1
                await worker.start()
            raise


class _Worker:
    """One worker process, replaced whenever a call kills it."""

    def __init__(self, setup: dict[str, Any], log_file: Path | None):
        self._setup = setup
        self._log_file = log_file
        self._process = ChildProcess("the reward worker", log_file)

    async def start(self) -> None:
        """(Re)start the process; raises UserError after a few attempts in vain."""
        reason = ""
        for _ in range(MAX_START_ATTEMPTS):
            await self.stop()
            command = [sys.executable, "-m", "torchtitan.rollout.rewards.worker"]
            await self._process.launch(command, child_environment(threads=1), pipes=True)
            try:
                reply = await self._exchange(self._setup, START_TIMEOUT_S)
            except CallFailed as failure:
                reason = f"{failure.kind}: {failure}"
                continue
            if "error" not in reply:
                return
            await self.stop()
            raise UserError(f"the reward worker could not load the functions: {reply['error']}")
        where = f", see {self._log_file}" if self._log_file else ""
        raise UserError(f"the reward worker does not start ({MAX_START_ATTEMPTS} attempts, last: {reason}){where}")

    async def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises CallFailed; after a timeout or a crash the process is gone until start() or the next call."""
        if not self._process.alive:
            await self.start()
        reply = await self._exchange(message, timeout_s)
        if "error" in reply:
            raise CallFailed("exception", reply["error"])
        return reply

    async def stop(self) -> None:
        """Kill the process and what it has forked; none of them has anything to lose. Never takes long."""
        await self._process.stop(grace_s=0, kill_grace_s=STOP_TIMEOUT_S)

    async def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        data = json.dumps(message, default=str).encode()
        try:
            return await asyncio.wait_for(self._round_trip(data), timeout_s)
        except asyncio.TimeoutError:
            await self.stop()
            raise CallFailed("timeout", f"no answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            # The reply would be taken for that of the next call.
            await self.stop()
            raise
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.stop()
            raise CallFailed("crash", self._process.describe_end()) from error

    async def _round_trip(self, data: bytes) -> dict[str, Any]:
        to_worker, from_worker = self._process.streams
        to_worker.write(HEADER.pack(len(data)) + data)
        await to_worker.drain()
        (length,) = HEADER.unpack(await from_worker.readexactly(HEADER.size))
        return json.loads(await from_worker.readexactly(length))
