"""Figures about the rollouts between two batches, for metrics.jsonl."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan.inference.trajectory import sampled_segments
from torchtitan.rollout.staleness import sample_version
from torchtitan.rollout.types import Group, Sample, Trajectory


@dataclass
class RolloutStatistics:
    """What was sampled since the last batch. Rewards and lengths are those of everything that was scored, groups that
    were dropped for equal rewards included, so that they show the policy and not the choice of groups."""

    max_completion_tokens: int
    rewards: list[float] = field(default_factory=list)
    per_function: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    turns: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    groups_scored: int = 0
    groups_zero_variance: int = 0
    groups_filtered: int = 0
    groups_unscored: int = 0
    samples_unscored: int = 0
    admitted: list[bool] = field(default_factory=list)
    admitted_long: list[bool] = field(default_factory=list)

    def add_sample(self, trajectory: Trajectory, reward: float | None, rewards: dict[str, float | None]) -> None:
        turns = sampled_segments(trajectory.branches)
        self.turns.append(len(turns))
        self.lengths.append(sum(len(turn.token_ids) for turn in turns))
        self.truncated += trajectory.finish_reason == "length"
        if reward is None:
            self.samples_unscored += 1
            return
        self.rewards.append(reward)
        for name, value in rewards.items():
            if value is not None:
                self.per_function[name].append(value)

    def add_gate(self, group: Group, admitted: bool) -> None:
        """The staleness gate let a group pass, or not."""
        self.admitted.append(admitted)
        if _mean([len(sample.completion_ids) for sample in group.samples]) > self.max_completion_tokens / 2:
            self.admitted_long.append(admitted)

    def figures(self, version: int, samples: Sequence[Sample]) -> dict[str, float]:
        """All figures, for a batch of `samples` that is handed out at `version`."""
        rewards = self.rewards or [sample.reward for sample in samples]
        lengths = self.lengths or [len(sample.completion_ids) for sample in samples]
        truncated = self.truncated if self.lengths else sum(sample.finish_reason == "length" for sample in samples)
        staleness = [version - sample_version(sample.spans) for sample in samples]
        figures = {
            "reward/mean": _mean(rewards),
            "reward/std": _std(rewards),
            "completion/length_mean": _mean(lengths),
            "completion/length_max": float(max(lengths)),
            "completion/truncated_fraction": truncated / len(lengths),
            "staleness/mean": _mean(staleness),
            "staleness/max": float(max(staleness)),
            "groups/zero_variance_fraction": self.groups_zero_variance / max(1, self.groups_scored),
            "groups/filtered_fraction": self.groups_filtered / max(1, self.groups_scored),
            "groups/unscored": float(self.groups_unscored),
            "rollout/samples_unscored": float(self.samples_unscored),
            "rollout/groups_stale": float(self.admitted.count(False)),
            "rollout/admission_rate": _mean(self.admitted) if self.admitted else 1.0,
            "rollout/mixed_version_fraction": _mean([len(sample.spans) > 1 for sample in samples]),
        }
        turns = self.turns or [len(sampled_segments(sample.branches)) for sample in samples]
        if max(turns) > 1:
            figures["environment/turns_mean"] = _mean(turns)
        if self.admitted_long:
            figures["rollout/admission_rate_long"] = _mean(self.admitted_long)
        for name, values in sorted(self.per_function.items()):
            figures[f"reward/{name}/mean"] = _mean(values)
            figures[f"reward/{name}/std"] = _std(values)
        return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))
