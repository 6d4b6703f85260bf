"""Advantages of the samples of a batch from their rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from torchtitan.errors import UserError, load_function

# Added to a standard deviation, so that nearly constant rewards do not give huge advantages.
STD_EPSILON = 1e-4

Groups = list[torch.Tensor]


def group(rewards: Groups, tokens: Groups) -> Groups:
    """R - mean of its group (Shao et al. 2024, DeepSeekMath, section 4.1.2; Liu et al. 2025, Dr. GRPO)."""
    return [values - values.mean() for values in rewards]


def rloo(rewards: Groups, tokens: Groups) -> Groups:
    """R - mean of the *other* samples of its group (Ahmadian et al. 2024, eq. 8). A group of one gives 0."""
    return [(values - values.mean()) * (len(values) / max(len(values) - 1, 1)) for values in rewards]


def batch(rewards: Groups, tokens: Groups) -> Groups:
    """R - mean of the batch."""
    mean = torch.cat(rewards).mean() if rewards else torch.zeros(())
    return [values - mean for values in rewards]


def reinforce_pp(rewards: Groups, tokens: Groups) -> Groups:
    """R - mean of its group, then normalised over all tokens of the batch (Hu et al. 2025, REINFORCE++-baseline)."""
    return _normalized(group(rewards, tokens), tokens)


def reinforce_pp_no_baseline(rewards: Groups, tokens: Groups) -> Groups:
    """R, normalised over all tokens of the batch (Hu et al. 2025, REINFORCE++, arXiv 2501.03262)."""
    return _normalized(rewards, tokens)


def opo(rewards: Groups, tokens: Groups) -> Groups:
    """R - Σ length · R / Σ length over its group: the minimum-variance baseline if the squared norm of a sample's
    gradient grows with its length (Hao et al. 2025, OPO, arXiv 2505.23585)."""
    pairs = zip(rewards, tokens, strict=True)
    return [values - (values * lengths).sum() / lengths.sum().clamp(min=1) for values, lengths in pairs]


def _deviation(values: torch.Tensor) -> torch.Tensor:
    """Standard deviation with n - 1, as in TRL and verl; 0 for a single value."""
    return values.std() if values.numel() > 1 else torch.zeros((), dtype=values.dtype)


def _normalized(advantages: Groups, tokens: Groups) -> Groups:
    """Normalise to mean 0 and standard deviation 1 over the batch; a sample counts once for each of its tokens."""
    if not advantages:
        return []
    everything, counts = torch.cat(advantages), torch.cat(tokens)
    total = counts.sum().clamp(min=1)
    mean = (counts * everything).sum() / total
    squares = (counts * (everything - mean).square()).sum()
    deviation = (squares / (total - 1).clamp(min=1)).sqrt()
    return [(values - mean) / (deviation + STD_EPSILON) for values in advantages]


# (rewards, number of trained tokens of every sample) -> advantages
ADVANTAGE_ESTIMATORS: dict[str, Callable[[Groups, Groups], Groups]] = {
    "group": group,
    "rloo": rloo,
    "batch": batch,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_no_baseline": reinforce_pp_no_baseline,
    "opo": opo,
}


@functools.cache
def load_estimator(name: str) -> Callable[[Groups, Groups], Groups]:
    """Return an estimator by name, or a user's `package.module:function`. Raises UserError if it cannot be found."""
    return ADVANTAGE_ESTIMATORS.get(name) or load_function(name, "grpo.advantage")


def _ones(groups: Groups) -> Groups:
    return [torch.ones_like(values) for values in groups]


def _tensors(groups: Sequence[Sequence[float]]) -> Groups:
    return [torch.tensor(values, dtype=torch.float64) for values in groups]


def group_advantages(
    groups: Sequence[Sequence[float]],
    scale_rewards: str = "none",
    estimator: str = "group",
    tokens: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Compute the advantages of every sample of every group.

    Args:
        groups: rewards, one list per group; groups may differ in size.
        scale_rewards: `none` (Dr. GRPO); `group` divides by the group's standard deviation + 1e-4 (GRPO); `batch`
            divides by that of all rewards; standard deviations use n - 1. `mean` divides by the mean of the group's
            rewards, which must not be negative, and gives 0 if that mean is 0 (Tajwar et al. 2026, MaxRL).
        estimator: a name in ADVANTAGE_ESTIMATORS, or of a function; reinforce_pp has its own scale.
        tokens: how many tokens of every sample are trained (reinforce_pp, opo); default 1 each.

    Raises:
        UserError: a user's function does not return advantages, or a negative reward is to be scaled by `mean`.
    """
    rewards = _tensors(groups)
    counts = _ones(rewards) if tokens is None else _tensors(tokens)
    centred = load_estimator(estimator)(rewards, counts)
    if [getattr(values, "shape", None) for values in centred] != [values.shape for values in rewards]:
        raise UserError("grpo.advantage must return one tensor for each group, with an advantage for each reward")
    return [advantages.tolist() for advantages in _scaled(centred, rewards, scale_rewards)]


def _scaled(centred: Groups, rewards: Groups, scale_rewards: str) -> Groups:
    """Divide advantages as grpo.scale_rewards says."""
    if scale_rewards == "group":
        return [values / (_deviation(raw) + STD_EPSILON) for values, raw in zip(centred, rewards, strict=True)]
    if scale_rewards == "batch" and rewards:
        deviation = _deviation(torch.cat(rewards))
        return [values / (deviation + STD_EPSILON) for values in centred]
    if scale_rewards == "mean":
        if any((raw < 0).any() for raw in rewards):
            raise UserError("grpo.scale_rewards = mean (MaxRL) is for rewards of at least 0, and one is negative")
        return [_relative_to_mean(values, raw) for values, raw in zip(centred, rewards, strict=True)]
    return centred


def _relative_to_mean(centred: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Divide by the mean of rewards that are not negative; 0 where all of them are 0."""
    return centred / rewards.mean() if rewards.any() else centred * 0


def normalized_each(
    groups: Sequence[Sequence[dict[str, float | None]]],
    weights: dict[str, float],
    scale_rewards: str = "none",
    estimator: str = "group",
    tokens: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Compute advantages for each reward function separately, then their weighted sum (Liu et al. 2026, GDPO).

    If rewards are scaled, the sum is normalised over the batch, as in that paper, so that its size does not grow with
    the number of functions. groups: the rewards by function, per sample; None is absent: it is not part of its group's
    mean and adds nothing.
    """
    result = [[0.0] * len(samples) for samples in groups]
    for name, weight in weights.items():
        # (number of the group, which of its samples have this reward)
        members: list[tuple[int, list[int]]] = []
        values: list[list[float]] = []
        counts: list[list[int]] = []
        for number, samples in enumerate(groups):
            present = [i for i, rewards in enumerate(samples) if rewards.get(name) is not None]
            if not present:  # it is left out, because it has no mean
                continue
            members.append((number, present))
            values.append([float(samples[i][name] or 0.0) for i in present])
            if tokens is not None:
                counts.append([tokens[number][i] for i in present])
        advantages = group_advantages(values, scale_rewards, estimator, None if tokens is None else counts)
        for (number, present), of_group in zip(members, advantages, strict=True):
            for i, advantage in zip(present, of_group, strict=True):
                result[number][i] += weight * advantage
    if scale_rewards == "none":
        return result
    sums = _tensors(result)
    return [values.tolist() for values in _normalized(sums, _ones(sums))]
