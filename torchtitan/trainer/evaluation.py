"""Evaluation on held-out prompts at one pinned policy version.

It computes pass@k from sampled completions, and greedy accuracy. Every token must be tagged with the one version that
is evaluated. Others are redone; if that is impossible, the evaluation is missing, but never wrong.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torchtitan.config.derived import judging_reward
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, sampled_segments
from torchtitan.rollout.group_maker import GroupMaker, make_sample
from torchtitan.rollout.types import Prompt, Sample, Trajectory
from torchtitan.trainer.interval import interval
from torchtitan.utils.json_lines import EventLog

Result = TypeVar("Result")

# How many times completions of another version are requested again.
MAX_ROUNDS = 4
# A sample passes at this reward.
PASSING_REWARD = 1.0
# Figures of which several sets have the sum, not the mean.
COUNTS = ("eval/prompts", "eval/samples", "eval/unscored", "eval/redone")
# Failures of actors and reward workers that end an evaluation; any other exception is a defect of the program.
# The three timeouts are one class from Python 3.11 on.
FAILURES = (UserError, OSError, TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError)


class Evaluator:
    """Evaluates the policy that the actors serve on a fixed set of prompts. Belongs to the thread of `groups`.

    Rewards are those of eval.reward_function (or else the first of rewards.functions, or else the environment's own),
    without weights.
    """

    def __init__(self, config: JobConfig, epoch: str, prompts: Sequence[Prompt], groups: GroupMaker, events: EventLog):
        self.config = config
        self.epoch = epoch
        self.prompts = list(prompts)
        self.groups = groups
        self.events = events
        self.record: Callable[[int, int, Iterable[tuple[Sample, bool]]], None] | None = None
        """Called with the step, the version, and every sample and whether it is greedy"""

    async def evaluate(self, step: int, version: int, timeout_s: float) -> dict[str, float | int | None] | None:
        """Return the `eval/…` figures of one version, which the actors already serve; None if they are missing.

        Samples that no reward function could judge are left out and counted in eval/unscored. timeout_s is the rest of
        eval.timeout_s.
        """
        started = time.perf_counter()
        try:
            figures = await self._evaluate(step, version, started + timeout_s)
        except FAILURES as error:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self.events.write(
                "evaluation_missing", level=logging.WARNING, step=step, version=version, reason=reason.strip(": ")
            )
            return None
        return figures | {"eval/time_s": time.perf_counter() - started}

    async def _evaluate(self, step: int, version: int, deadline: float) -> dict[str, float | int | None]:
        if not self.prompts:
            raise UserError("there are no held-out prompts")
        requests = [self._request(step, prompt, greedy=False) for prompt in self.prompts]
        if self.config.eval.greedy:
            requests += [self._request(step, prompt, greedy=True) for prompt in self.prompts]
        prompts = self.prompts * (2 if self.config.eval.greedy else 1)
        trajectories, redone = await self._sample_pinned(prompts, requests, version, deadline)
        rewards = await self._score(prompts, trajectories, deadline)
        if self.record is not None:
            self.record(step, version, self._samples(trajectories, rewards))
        sampled, greedy = rewards[: len(self.prompts)], rewards[len(self.prompts) :]
        judged = [[reward for reward in group if reward is not None] for group in sampled]
        counts = [(len(group), sum(reward >= PASSING_REWARD for reward in group)) for group in judged]
        if all(n == 0 for n, _ in counts):
            raise UserError("no sample could be judged by the reward function")
        figures: dict[str, float | int | None] = {"eval/version": version, "policy_version": version}
        for k in sorted({1, *self.config.eval.pass_at_k}):
            figures[f"eval/pass@{k}"] = _mean([pass_at_k(n, passed, k) for n, passed in counts if n >= k])
        rates = [passed / n for n, passed in counts if n]
        low, high = interval(rates, sum(n for n, _ in counts))
        figures |= {"eval/interval_low": low, "eval/interval_high": high}
        if self.config.eval.greedy:
            answers = [reward for group in greedy for reward in group if reward is not None]
            figures["eval/greedy"] = _mean([float(reward >= PASSING_REWARD) for reward in answers])
        flat = [trajectory for group in trajectories[: len(self.prompts)] for trajectory in group]
        lengths = [sum(len(turn.token_ids) for turn in sampled_segments(trajectory.branches)) for trajectory in flat]
        return figures | {
            "eval/prompts": len(self.prompts),
            "eval/samples": sum(n for n, _ in counts),
            "eval/unscored": sum(reward is None for group in rewards for reward in group),
            "eval/length_mean": _mean(lengths),
            "eval/truncated_fraction": _mean([float(trajectory.finish_reason == "length") for trajectory in flat]),
            "eval/redone": redone,
        }

    async def _sample_pinned(
        self, prompts: list[Prompt], requests: list[GenerateRequest], version: int, deadline: float
    ) -> tuple[list[list[Trajectory]], int]:
        """Return trajectories of one version only, and how many requests had to be redone for that."""
        results: dict[int, list[Trajectory]] = {}
        redone = 0
        for round_number in range(MAX_ROUNDS):
            wanted = [index for index in range(len(requests)) if index not in results]
            # The whole request is redone with its own seed, so its outcome is as if it had succeeded at once.
            again = f"-again{round_number}" if round_number else ""
            batch = [
                (prompts[index], replace(requests[index], request_id=requests[index].request_id + again))
                for index in wanted
            ]
            redone += len(wanted) if round_number else 0
            # Actors that serve an older version are left out.
            groups = await _before(deadline, [self.groups.sample(*request, version) for request in batch])
            for index, group in zip(wanted, groups, strict=True):
                turns = [turn for trajectory in group for turn in sampled_segments(trajectory.branches)]
                # Samples that an environment lost are left out, because the version is not to blame.
                if turns and all(is_pinned(turn, self.epoch, version) for turn in turns):
                    results[index] = group
            if len(results) == len(requests):
                return [results[index] for index in range(len(requests))], redone
        if lost := sum(not group for group in groups):
            raise UserError(
                f"every episode of {lost} of {len(requests)} requests failed, {MAX_ROUNDS} times in a row; "
                f"{self.groups.last_failure}"
            )
        raise UserError(
            f"{len(requests) - len(results)} of {len(requests)} requests were answered by other versions than "
            f"{version}, {MAX_ROUNDS} times in a row"
        )

    async def _score(
        self, prompts: list[Prompt], trajectories: list[list[Trajectory]], deadline: float
    ) -> list[list[float | None]]:
        name = judging_reward(self.config)
        work = [self.groups.score(prompt, group, [name]) for prompt, group in zip(prompts, trajectories, strict=True)]
        return [[rewards.get(name) for _, rewards in group] for group in await _before(deadline, work)]

    def _samples(
        self, trajectories: list[list[Trajectory]], rewards: list[list[float | None]]
    ) -> Iterator[tuple[Sample, bool]]:
        name = judging_reward(self.config)
        for number, group in enumerate(zip(trajectories, rewards, strict=True)):
            for trajectory, reward in zip(*group, strict=True):
                judged = math.nan if reward is None else reward
                yield make_sample(trajectory, judged, {name: reward}), number >= len(self.prompts)

    def _request(self, step: int, prompt: Prompt, greedy: bool) -> GenerateRequest:
        rollout, settings = self.config.rollout, self.config.eval
        kind = "greedy" if greedy else "sampled"
        room = self.config.training.seq_len - len(prompt.token_ids)
        # Every evaluation uses the same seeds, so that differences between two of them come from the policy.
        digest = hashlib.sha256(f"{self.config.training.seed} eval {prompt.index} {kind}".encode()).digest()
        sampling = SamplingParameters(
            max_tokens=max(1, min(rollout.max_completion_tokens, room)),
            n=1 if greedy else settings.samples_per_prompt,
            temperature=0.0 if greedy else settings.temperature,
            # Evaluation must stop at the same tokens as training.
            stop_token_ids=self.groups.stop_token_ids,
            seed=int.from_bytes(digest[:4], "big") >> 1,
        )
        name = f"eval-{step}-{kind}-{prompt.source}{prompt.index}"
        return GenerateRequest(name, prompt.token_ids, sampling, single_turn=self.groups.single_turn)


async def evaluate_all(
    evaluators: Mapping[str, Evaluator], sets: int, step: int, version: int, timeout_s: float
) -> dict[str, float | int | None] | None:
    """Return the figures of these of the run's `sets`, one evaluation after the other; None if all are missing.

    The figures of a set with a name are eval/NAME/…. If no set is missing, eval/… is their mean, or for counts their
    sum. The interval of the mean has the bounds of the sets' (Zou and Donner 2008), which are independent.
    """
    begun = time.perf_counter()
    found: dict[str, dict[str, float | int | None]] = {}
    for name, evaluator in evaluators.items():
        figures = await evaluator.evaluate(step, version, max(timeout_s - (time.perf_counter() - begun), 1.0))
        if figures is not None:
            found[name] = figures
    if "" in found or not found:
        return found.get("")
    merged: dict[str, float | int | None] = {}
    if len(found) == sets:
        for key in dict.fromkeys(key for figures in found.values() for key in figures):
            values = [value for figures in found.values() if (value := figures.get(key)) is not None]
            if len(values) == sets:
                merged[key] = sum(values) if key in COUNTS else _mean(values)
        for key, sign in (("eval/interval_low", -1), ("eval/interval_high", 1)):
            squares = [((figures["eval/pass@1"] or 0) - (figures[key] or 0)) ** 2 for figures in found.values()]
            merged[key] = (merged["eval/pass@1"] or 0) + sign * math.sqrt(sum(squares)) / sets
    for name, figures in found.items():
        merged |= {key.replace("/", f"/{name}/", 1): value for key, value in figures.items() if "/" in key}
    return merged | {"eval/version": version, "policy_version": version, "eval/time_s": time.perf_counter() - begun}


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from n of which `passed` pass, passes (k ≤
    n)."""
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def is_pinned(completion: Completion, epoch: str, version: int) -> bool:
    """Whether every token was sampled under that one version and the completion was not cut off by an abort."""
    bounds = [0, *(span.end for span in completion.spans)]
    expected = [(epoch, version, begin) for begin in bounds[:-1]]
    whole = bool(expected) and bounds[-1] == len(completion.token_ids) and completion.finish_reason != "abort"
    return whole and [(span.epoch, span.version, span.start) for span in completion.spans] == expected


async def _before(deadline: float, work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results; if one fails or time runs out, the others are cancelled. Raises TimeoutError."""
    left = max(deadline - time.perf_counter(), 0.0)
    tasks = [asyncio.ensure_future(task) for task in work]
    try:
        # Of a cancelled gather(), asyncio prints the failures of its parts, as no task awaits them.
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        results = [task.result() for task in tasks if task in done]
        if len(results) < len(tasks) or not left:
            raise asyncio.TimeoutError
        return results
    except asyncio.TimeoutError:
        raise TimeoutError(f"not done within {left:g} s: a call took too long, or eval.timeout_s passed") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
