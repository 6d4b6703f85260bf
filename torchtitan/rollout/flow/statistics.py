"""What is counted of rollouts between two batches, and the metrics that it makes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from torchtitan.inference.types import VersionSpan, sampled_segments, sampled_tokens
from torchtitan.rollout.types import Sample, Trajectory


def sample_version(spans: Sequence[VersionSpan]) -> int:
    """Return the version of a sample's oldest token. Raises ValueError for a sample without tokens."""
    return min(span.version for span in spans if span.end > span.start)


@dataclass
class RolloutStatistics:
    """Statistics since the last batch. Rewards and lengths include groups that were dropped for equal rewards, so that
    they describe the policy rather than the selection of groups."""

    labels: dict[str, str]
    """What curves call each reward"""
    rewards: list[float] = field(default_factory=list)
    per_function: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    turns: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    tokens: int = 0
    """Of all branches, given and sampled"""
    tokens_beside: int = 0
    """Those of all branches but the longest of each sample"""
    lengths: list[int] = field(default_factory=list)
    usable_lengths: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each group, from its prompt to its rewards"""
    truncated: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    """scored (all), of which zero_variance, filtered and unscored were dropped"""
    samples_unscored: int = 0
    admitted: list[bool] = field(default_factory=list)
    admitted_long: list[bool] = field(default_factory=list)

    def add_sample(self, trajectory: Trajectory, reward: float | None, rewards: dict[str, float | None]) -> None:
        turns = sampled_segments(trajectory.branches)
        self.turns.append(len(turns))
        lengths = [len(branch) for branch in trajectory.branches]
        self.branches.append(len(lengths))
        self.tokens += sum(lengths)
        self.tokens_beside += sum(lengths) - max(lengths, default=0)
        self.lengths.append(sampled_tokens(trajectory.branches))
        self.truncated += trajectory.finish_reason == "length"
        if reward is None:
            self.samples_unscored += 1
            return
        self.rewards.append(reward)
        for name, value in rewards.items():
            if value is not None:
                self.per_function[name].append(value)

    def add_gate(self, admitted: bool, is_long: bool) -> None:
        """Record whether the staleness gate admitted a group."""
        self.admitted.append(admitted)
        if is_long:
            self.admitted_long.append(admitted)

    def figures(self, version: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Return all metrics for a batch of `samples` that is handed out at `version`."""
        trained = [sampled_tokens(sample.branches) for sample in samples]
        rewards = self.rewards or [sample.reward for sample in samples]
        lengths = self.lengths or trained
        truncated = self.truncated
        if not self.lengths:
            truncated = sum(sample.finish_reason == "length" for sample in samples)
        staleness = [version - sample_version(sample.spans) for sample in samples]
        figures = {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            "completion/length_mean": fmean(lengths),
            "completion/length_max": float(max(lengths)),
            "completion/length_trained_mean": fmean(trained),
            "completion/length_usable_mean": fmean(self.usable_lengths or trained),
            "completion/truncated_fraction": truncated / len(lengths),
            "staleness/mean": fmean(staleness),
            "staleness/max": float(max(staleness)),
            "groups/scored": float(self.groups["scored"]),
            "groups/zero_variance_fraction": self.groups["zero_variance"] / max(1, self.groups["scored"]),
            "groups/filtered_fraction": self.groups["filtered"] / max(1, self.groups["scored"]),
            "groups/unscored": float(self.groups["unscored"]),
            "rollout/samples_unscored": float(self.samples_unscored),
            "rollout/groups_stale": float(self.admitted.count(False)),
            "rollout/admission_rate": fmean(self.admitted) if self.admitted else 1.0,
            "rollout/mixed_version_fraction": fmean([len(sample.spans) > 1 for sample in samples]),
        }
        if self.seconds:
            figures["rollout/group_time_s"] = fmean(self.seconds)
        turns = self.turns or [len(sampled_segments(sample.branches)) for sample in samples]
        if max(turns) > 1:
            figures["environment/turns_mean"] = fmean(turns)
            figures["environment/branches_mean"] = fmean(self.branches or [len(sample.branches) for sample in samples])
            figures["environment/branches_token_share"] = self.tokens_beside / max(1, self.tokens)
        if self.admitted_long:
            figures["rollout/admission_rate_long"] = fmean(self.admitted_long)
        for name, values in sorted(self.per_function.items()):
            label = self.labels.get(name, name)
            figures[f"reward/{label}/mean"] = fmean(values)
            figures[f"reward/{label}/std"] = pstdev(values)
        return figures


def of_source(figures: dict[str, float], name: str) -> dict[str, float]:
    """Name metrics as those of a source: reward/mean becomes reward/NAME/mean."""
    return {key.replace("/", f"/{name}/", 1): value for key, value in figures.items()}


def means_of_sources(by_source: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the means over the sources, each given as its groups in the batch and its figures.

    Between two batches one source may finish more groups than its share and another none, so that a mean over all that
    was scored would follow who was fast.
    """
    trained = sum(groups for groups, _ in by_source)
    if not trained:
        return {}
    means: dict[str, float] = {}
    for key in ("reward/mean", "completion/length_mean", "completion/truncated_fraction"):
        means[key] = sum(groups * figures[key] for groups, figures in by_source) / trained
    return means
