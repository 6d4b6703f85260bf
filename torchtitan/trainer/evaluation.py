"""Evaluation on held-out prompts at one pinned policy version.

It computes pass@k from sampled completions, and greedy accuracy. Every token must be tagged with the one version that
is evaluated. Others are redone; if that is impossible, the evaluation is missing, but never wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import judging_reward
from torchtitan.errors import UserError
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, sampled_segments, sampled_tokens
from torchtitan.rollout.flow.group_maker import GroupMaker, make_sample
from torchtitan.rollout.rewards import PASSING_REWARD
from torchtitan.rollout.types import Failure, Prompt, Sample, Trajectory
from torchtitan.trainer.interval import interval
from torchtitan.utils.json_lines import EventLog

Result = TypeVar("Result")

# How many times completions of another version are requested again.
MAX_ROUNDS = 4
# Figures of which several sets have the sum, not the mean.
COUNTS = ("eval/prompts", "eval/samples", "eval/failed", "eval/lost", "eval/unscored", "eval/redone")
# Failures of actors and reward workers that end an evaluation; any other exception is a defect of the program.
FAILURES = (UserError, OSError, TimeoutError)


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

        A sample whose own turn made its environment fail has not passed (counted in eval/failed). Samples whose episode
        is lost, or on which the reward function failed (eval/lost), are left out of the rates, and the interval is wide
        enough for each outcome of them. Samples that the reward function does not judge (None), or whose environment
        could not begin, are left out (eval/unscored).
        timeout_s is the rest of eval.timeout_s.
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
        outcomes = [list(map(passes, *group)) for group in zip(trajectories, rewards, strict=True)]
        sampled, greedy = outcomes[: len(self.prompts)], outcomes[len(self.prompts) :]
        # (judged samples, passed ones) of each prompt
        counts: list[tuple[int, int]] = []
        for group in sampled:
            judged = [outcome for outcome in group if outcome is not None]
            counts.append((len(judged), sum(judged)))
        if all(n == 0 for n, _ in counts):
            raise UserError(f"no sample could be judged by the reward function; {self.groups.last_failure}")
        figures: dict[str, float | int | None] = {"eval/version": version, "policy_version": version}
        # Powers of two up to the samples of a prompt.
        for k in (1 << exponent for exponent in range(self.config.eval.samples_per_prompt.bit_length())):
            figures[f"eval/pass@{k}"] = _mean([pass_at_k(n, passed, k) for n, passed in counts if n >= k])
        judge = judging_reward(self.config)
        lost = [sum(is_lost(trajectory, judge) for trajectory in group) for group in trajectories]
        low, high = interval_with_lost(counts, lost[: len(self.prompts)])
        figures |= {"eval/interval_low": low, "eval/interval_high": high}
        if self.config.eval.greedy:
            figures["eval/greedy"] = _mean(
                [float(passed) for group in greedy for passed in group if passed is not None]
            )
        everything = list(itertools.chain.from_iterable(trajectories))
        unjudged = list(itertools.chain.from_iterable(outcomes)).count(None)
        at_temperature = itertools.chain.from_iterable(trajectories[: len(self.prompts)])
        answered = [trajectory for trajectory in at_temperature if trajectory.branches]
        lengths = [sampled_tokens(trajectory.branches) for trajectory in answered]
        truncated = [float(trajectory.finish_reason == "length") for trajectory in answered]
        return figures | {
            "eval/prompts": len(self.prompts),
            "eval/samples": sum(n for n, _ in counts),
            "eval/failed": sum(trajectory.failure is Failure.OWN_TURN for trajectory in everything),
            "eval/lost": sum(lost),
            "eval/unscored": unjudged - sum(lost),
            "eval/length_mean": _mean(lengths),
            "eval/truncated_fraction": _mean(truncated),
            "eval/redone": redone,
        }

    async def _sample_pinned(
        self, prompts: list[Prompt], requests: list[GenerateRequest], version: int, deadline: float
    ) -> tuple[list[list[Trajectory]], int]:
        """Return trajectories of one version only, and how many requests had to be redone for that."""
        results: dict[int, list[Trajectory]] = {}
        redone = 0
        for round_number in range(MAX_ROUNDS):
            unanswered = [index for index in range(len(requests)) if index not in results]
            # The whole request is redone with its own seed, so its outcome is as if it had succeeded at once.
            again = f"-again{round_number}" if round_number else ""
            batch = [
                (prompts[index], replace(requests[index], request_id=requests[index].request_id + again))
                for index in unanswered
            ]
            redone += len(unanswered) if round_number else 0
            # Actors that serve an older version are left out.
            groups = await _before(deadline, [self.groups.sample(*request, version) for request in batch])
            for index, group in zip(unanswered, groups, strict=True):
                turns = [turn for trajectory in group for turn in sampled_segments(trajectory.branches)]
                # Of a sample that is lost or never began there are no turns, and the version is not to blame.
                if group and all(is_pinned(turn, self.epoch, version) for turn in turns):
                    results[index] = group
            if len(results) == len(requests):
                return [results[index] for index in range(len(requests))], redone
        raise UserError(
            f"{len(requests) - len(results)} of {len(requests)} requests were answered by other versions than "
            f"{version}, {MAX_ROUNDS} times in a row"
        )

    async def _score(
        self, prompts: list[Prompt], trajectories: list[list[Trajectory]], deadline: float
    ) -> list[list[float | None]]:
        name = judging_reward(self.config)
        work = [self.groups.score(prompt, group, [name]) for prompt, group in zip(prompts, trajectories, strict=True)]
        scored = await _before(deadline, work)
        return [[rewards.get(name) for _, rewards in group] for group in scored]

    def _samples(
        self, trajectories: list[list[Trajectory]], rewards: list[list[float | None]]
    ) -> Iterator[tuple[Sample, bool]]:
        name = judging_reward(self.config)
        for number, group in enumerate(zip(trajectories, rewards, strict=True)):
            for trajectory, reward in zip(*group, strict=True):
                if not trajectory.branches:
                    continue
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
    started = time.perf_counter()
    found: dict[str, dict[str, float | int | None]] = {}
    for name, evaluator in evaluators.items():
        figures = await evaluator.evaluate(step, version, max(timeout_s - (time.perf_counter() - started), 1.0))
        if figures is not None:
            found[name] = figures
    if "" in found or not found:
        return found.get("")
    merged: dict[str, float | int | None] = {}
    if len(found) == sets:
        for key in dict.fromkeys(itertools.chain.from_iterable(found.values())):
            values: list[float] = []
            for figures in found.values():
                value = figures.get(key)
                if value is not None:
                    values.append(value)
            if len(values) == sets:
                merged[key] = sum(values) if key in COUNTS else _mean(values)
        for key, sign in (("eval/interval_low", -1), ("eval/interval_high", 1)):
            squares = 0.0
            for figures in found.values():
                squares += ((figures["eval/pass@1"] or 0) - (figures[key] or 0)) ** 2
            merged[key] = (merged["eval/pass@1"] or 0) + sign * math.sqrt(squares) / sets
    for name, figures in found.items():
        merged |= {key.replace("/", f"/{name}/", 1): value for key, value in figures.items() if "/" in key}
    return merged | {"eval/version": version, "policy_version": version, "eval/time_s": time.perf_counter() - started}


def passes(trajectory: Trajectory, reward: float | None) -> bool | None:
    """Return whether a sample has passed; None if nobody knows."""
    if trajectory.failure is Failure.OWN_TURN:
        return False
    return None if trajectory.failure is not None or reward is None else reward >= PASSING_REWARD


def is_lost(trajectory: Trajectory, judge: str) -> bool:
    """Return whether a sample might have passed and was lost. judge: the reward that decides."""
    return trajectory.failure is Failure.LOST or judge in trajectory.failed_rewards


def interval_with_lost(counts: Sequence[tuple[int, int]], lost: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % interval of pass@1 from each prompt's samples, (judged, passed) and lost: its lower bound is that
    of no lost sample passing, its upper bound that of all."""
    judged = [(n + missing, passed, missing) for (n, passed), missing in zip(counts, lost, strict=True) if n + missing]
    samples = sum(n for n, _, _ in judged)
    low, _ = interval([passed / n for n, passed, _ in judged], samples)
    _, high = interval([(passed + missing) / n for n, passed, missing in judged], samples)
    return low, high


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from n of which `passed` pass, passes (k ≤
    n)."""
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def is_pinned(completion: Completion, epoch: str, version: int) -> bool:
    """Whether every token was sampled under that one version and the completion was not cut off by an abort."""
    bounds = [0, *(span.end for span in completion.spans)]
    expected = [(epoch, version, begin) for begin in bounds[:-1]]
    complete = bool(expected) and bounds[-1] == len(completion.token_ids) and completion.finish_reason != "abort"
    return complete and [(span.epoch, span.version, span.start) for span in completion.spans] == expected


async def _before(deadline: float, work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results; if one fails or time runs out, the others are cancelled. Raises TimeoutError."""
    left = max(deadline - time.perf_counter(), 0.0)
    tasks = [asyncio.ensure_future(task) for task in work]
    try:
        # Of a cancelled gather(), asyncio prints the failures of its parts, as no task awaits them.
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        results = [task.result() for task in tasks if task in done]
        if len(results) < len(tasks) or not left:
            raise TimeoutError
        return results
    except TimeoutError:
        raise TimeoutError(f"not done within {left:g} s: a call took too long, or eval.timeout_s passed") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
