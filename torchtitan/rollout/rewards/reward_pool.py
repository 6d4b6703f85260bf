"""Reward functions in worker processes: a hang, a crash or a memory bomb costs one sample's reward, never the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.config.evaluations import task_configs
from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import groups_per_batch
from torchtitan.config.reward_names import reward_weights
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.thoughts import last_text, read_turn
from torchtitan.rollout.rewards import BUILTIN
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.worker_pool import WorkerPool
from torchtitan.rollout.workers.worker_process import CallFailed

logger = logging.getLogger(__name__)

# A sample's value, and what is logged with it.
SAMPLE_BYTES, REPLY_BYTES = 1 << 18, 1 << 18

Score = tuple[float | None, dict[str, float | None]]
"""Weighted sum of the rewards (None if no function returned one) and each function's own reward"""

# After a group's call failed, its samples get this many times the group's time limit, shared equally.
RETRY_SHARE = 2.0
LOGGED_FAILURES = 10
# A function that has failed on every sample of so many batches' worth of groups, and never worked, is broken; and so
# is an environment whose every episode has failed. Of small batches, it is at least so many groups.
BATCHES_OF_FAILURES, FEWEST_FAILED_GROUPS = 2, 8
# Calls of async functions that run side by side, each over one group.
ASYNC_CALLS = 16
# The worker enforces an async function's time limit, unless the function blocks the process: then the parent's limit,
# which is this many seconds later, ends the worker.
BLOCKED_S = 2.0


def groups_until_broken(groups_per_batch: float) -> float:
    """Return with how many groups of nothing but failures a function, or an environment, is broken."""
    return max(BATCHES_OF_FAILURES * groups_per_batch, FEWEST_FAILED_GROUPS)


class RewardReply(msgspec.Struct):
    """The reply to a call: see worker.py. One entry per sample."""

    late: bool = False
    values: list[float | None] = []
    invalid: list[int] = []
    extra: dict[str, list[str | int | float | bool | None]] = {}
    metrics: dict[str, list[float]] = {}


class RewardPool:
    """Runs the rewards.functions of all sources (and eval.reward_function, which only counts if requested by name).

    Calls of async functions run concurrently in one dedicated worker, at most ASYNC_CALLS at a time. Any other
    call has a worker to itself, and so does every retry, which finds the samples that make a function fail.

    All methods belong to one asyncio loop. `statistics` counts samples that lost a reward to a failure, calls that
    timed out, and workers that were restarted.
    """

    def __init__(self, config: JobConfig, log_file: Path | None = None, run_dir: Path | None = None):
        """run_dir: the run's folder, which isolated functions do not see.

        Raises UserError if rewards.sandbox.isolate = true is not possible here."""
        rewards = config.rewards
        self._sources = task_configs(config)
        named: list[str] = []
        environments: set[str] = set()
        for source_config in self._sources.values():
            named += source_config.rewards.functions
            environments.add(source_config.environment.reward_name)
        named += [source_config.eval.reward_function for source_config in self._sources.values()]
        self._all_functions = [name for name in dict.fromkeys(named) if name and name not in environments]
        self._timeout_s = rewards.timeout_s

        def new_pool(functions: Sequence[str], side_by_side: bool) -> WorkerPool:
            setup = {"functions": functions, "side_by_side": side_by_side, "timeout_s": rewards.timeout_s}
            module = "torchtitan.rollout.rewards.reward_worker"
            table = replace(rewards, num_workers=1) if side_by_side else rewards
            return WorkerPool(
                table, "the reward worker", module, setup, log_file, run_dir, replaced=self._count_restart
            )

        self._alone = new_pool(self._all_functions, False)
        self._async: list[str] = []
        """The coroutine functions. Only a worker that has imported them can tell: here, they would run unisolated"""
        self._shared: WorkerPool | None = None
        self._new_pool = new_pool
        self._places = asyncio.Semaphore(rewards.num_workers)
        self._turns = asyncio.Semaphore(ASYNC_CALLS)
        self._state = {"global_step": 0, "max_steps": config.training.steps}
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._worked: set[str] = set()
        """Functions that have answered a call"""
        self._failed_groups: Counter[str] = Counter()
        """Training groups on whose every sample a function has failed, of those that have not worked yet"""
        self._most_failed_groups = groups_until_broken(groups_per_batch(config))
        self.statistics: Counter[str] = Counter({"failures": 0, "timeouts": 0, "worker_restarts": 0})
        self.last_failure = ""
        """A description of the latest failure, for messages"""

    def _count_restart(self) -> None:
        self.statistics["worker_restarts"] += 1

    async def start(self) -> None:
        """Start all workers. Raises UserError if they cannot start, or for an unknown function."""
        await self._alone.start()
        self._async = self._alone.about["coroutines"]
        if self._async:
            self._shared = self._new_pool(self._async, True)
            await self._shared.start()

    @property
    def missing_isolation(self) -> str:
        """As of WorkerPool; empty where all functions are part of this package."""
        return "" if set(self._all_functions) <= set(BUILTIN) else self._alone.missing_isolation

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in (self._alone, self._shared) if pool is not None))

    def set_step(self, step: int) -> None:
        """Set the trainer_state.global_step that reward functions see from now on."""
        self._state["global_step"] = step

    def take_logged(self) -> dict[str, float]:
        """Return the means of all log_metric values of training groups since the last call, under their keys in
        metrics.jsonl."""
        means = {f"logged/{name}": sum(values) / len(values) for name, values in sorted(self._metrics.items())}
        self._metrics.clear()
        return means

    async def score(
        self, prompt: Prompt, completions: Sequence[Trajectory], functions: Sequence[str] | None = None
    ) -> list[Score]:
        """Return the rewards of one prompt's completions. Values from log_extra go into the completions' `extra`.

        functions: replaces those of its source (in evaluations); take_logged then omits their log_metric values.

        Raises:
            UserError: a worker died and could not be restarted, or a function of the training groups never works.
        """
        source = self._sources[prompt.source]
        names = source.rewards.functions if functions is None else list(functions)
        if not names:
            return [(None, {}) for _ in completions]
        logged = self._metrics if functions is None else defaultdict(list)
        columns = await asyncio.gather(*(self._run(name, prompt, completions, logged) for name in names))
        has_others = len(names) > 1 or bool(source.environment.reward_name)
        if functions is None and has_others:  # without any reward, the source says so (flow/source_flow.py)
            self._refuse_broken(names)
        weights = reward_weights(source)
        return [combined(dict(zip(names, row, strict=True)), weights) for row in zip(*columns, strict=True)]

    def _refuse_broken(self, names: Sequence[str]) -> None:
        """Count one more training group. Raises UserError for a function that has failed from the beginning on."""
        for name in names:
            if name in self._worked:
                continue
            self._failed_groups[name] += 1
            if (count := self._failed_groups[name]) >= self._most_failed_groups:
                raise UserError(
                    f"reward function {name!r} has failed on every sample of its first {count} groups; "
                    f"{self.last_failure} (logs/rewards.log): fix it, or take it out of rewards.functions"
                )

    async def _run(
        self, name: str, prompt: Prompt, completions: Sequence[Trajectory], logged: dict[str, list[float]]
    ) -> list[float | None]:
        """Run one function on one group. If that fails, each sample is tried alone to find the bad ones. The others are
        then scored together, since a reward may compare the completions of its group."""
        try:
            async with self._turn(name) as pool:
                reply = await self._call(pool, name, prompt, completions, self._timeout_s)
            return self._accept(name, reply, completions, logged)
        except CallFailed as failure:
            if len(completions) == 1:
                self._lost(name, failure, completions[0])
                return [None]
        limit = min(self._timeout_s, RETRY_SHARE * self._timeout_s / len(completions))
        values: list[float | None] = [None] * len(completions)
        good = []
        async with self._turn() as pool:
            started = time.monotonic()
            for i, completion in enumerate(completions):
                try:
                    await self._call(pool, name, prompt, [completion], limit)
                    self._worked.add(name)
                    good.append(i)
                except CallFailed as failure:
                    self._lost(name, failure, completion)
            if good:
                members = [completions[i] for i in good]
                try:
                    # A function that needed this time sample by sample needs as much again for all together.
                    together = self._timeout_s + time.monotonic() - started
                    reply = await self._call(pool, name, prompt, members, together)
                    for i, value in zip(good, self._accept(name, reply, members, logged), strict=True):
                        values[i] = value
                except CallFailed as failure:
                    for member in members:
                        self._lost(name, failure, member)
        return values

    @contextlib.asynccontextmanager
    async def _turn(self, name: str = "") -> AsyncIterator[WorkerPool]:
        """Wait until a call may begin: beside others for an async function of that name, else on its own worker."""
        if self._shared is None or name not in self._async:
            async with self._places:
                yield self._alone
        else:
            async with self._turns:
                yield self._shared

    def _lost(self, name: str, failure: CallFailed, completion: Trajectory) -> None:
        """Count a sample's lost reward."""
        completion.failed_rewards.add(name)
        self.statistics["failures"] += 1
        self.last_failure = f"reward function {name!r}: {failure.kind} ({failure})"
        if (count := self.statistics["failures"]) <= LOGGED_FAILURES:
            silence = "; further ones are only counted" if count == LOGGED_FAILURES else ""
            logger.warning("a sample has no reward: %s%s", self.last_failure, silence)

    def _accept(
        self, name: str, reply: RewardReply, completions: Sequence[Trajectory], logged: dict[str, list[float]]
    ) -> list[float | None]:
        if len(reply.invalid) < len(completions):
            self._worked.add(name)
        for number, completion in enumerate(completions):
            if number in reply.invalid:
                self._lost(name, CallFailed("invalid", "a reward must be a finite number or None"), completion)
        for name_of_column, column in reply.extra.items():
            for completion, value in zip(completions, column, strict=True):
                completion.extra[name_of_column] = value
        for metric, numbers in reply.metrics.items():
            logged[metric] += numbers
        return reply.values

    def _samples(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """What a reward worker is told: of the prompt, and a list with a value of each sample."""
        turns = [
            trajectory.turn or read_turn(last_text(trajectory.completion), prompt.prefill)
            for trajectory in trajectories
        ]
        return {
            "prompt": prompt.text,
            "columns": prompt.columns,
            "completions": [trajectory.completion for trajectory in trajectories],
            "thoughts": [turn.thought for turn in turns],
            "final_texts": [turn.final_text for turn in turns],
            "well_formed": [turn.well_formed for turn in turns],
            "completion_ids": [trajectory.completion_ids for trajectory in trajectories],
            "finish_reasons": [trajectory.finish_reason for trajectory in trajectories],
            "environments": [trajectory.environment for trajectory in trajectories],
            "max_completion_tokens": self._sources[prompt.source].rollout.max_completion_tokens,
            "prefill": prompt.prefill,
        }

    async def _call(
        self, pool: WorkerPool, name: str, prompt: Prompt, completions: Sequence[Trajectory], timeout_s: float
    ) -> RewardReply:
        samples = self._samples(prompt, completions)
        message = {"function": name, "state": self._state, "timeout_s": timeout_s, "samples": samples}
        shared = pool is self._shared
        async with pool.worker() as worker:
            try:
                most_bytes = REPLY_BYTES + len(completions) * SAMPLE_BYTES
                reply = await worker.call(message, RewardReply, timeout_s + BLOCKED_S * shared, most_bytes)
            except CallFailed as failure:
                self.statistics["timeouts"] += failure.kind == "timeout"
                if worker.broken:  # the calls beside this one cannot succeed either
                    await worker.stop()
                raise
            except asyncio.CancelledError:
                # Its next call would have to wait for this one.
                worker.broken = worker.broken or not shared
                raise
            lengths = {len(reply.values), *map(len, reply.extra.values())}
            if not reply.late and (lengths != {len(completions)} or len(reply.invalid) > len(completions)):
                worker.broken = True  # the function has written it in the worker's place
                await worker.stop()
                raise CallFailed("invalid", f"the reply is not about {len(completions)} samples")
        if reply.late:
            self.statistics["timeouts"] += 1
            raise CallFailed("timeout", f"the reward worker gave no answer within {timeout_s:g} s")
        return reply


def combined(rewards: dict[str, float | None], weights: Mapping[str, float]) -> Score:
    given = [weights.get(name, 1.0) * value for name, value in rewards.items() if value is not None]
    return (sum(given) if given else None), rewards
