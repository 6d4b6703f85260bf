"""Advantages of the samples of a batch, by grpo.advantage, reward_aggregation and advantage_level."""

from __future__ import annotations

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import reward_weights
from torchtitan.grpo.advantages import group_advantages, normalized_each
from torchtitan.inference.types import sampled_segments
from torchtitan.rollout.types import Batch, Sample
from torchtitan.trainer.packing import trained_tokens


def assign_advantages(config: JobConfig, batch: Batch) -> None:
    """Give every sample of `batch` its advantage, from the rewards of its group or of the whole batch; with
    grpo.advantage_level = turn, one for each of its turns."""
    grpo = config.grpo
    tokens = [[trained_tokens(sample, grpo.mask_truncated) for sample in group.samples] for group in batch.groups]
    if grpo.reward_aggregation == "normalize_each":
        weights = reward_weights(config)
        by_function = [[sample.rewards for sample in group.samples] for group in batch.groups]
        advantages = normalized_each(by_function, weights, grpo.scale_rewards, grpo.advantage, tokens)
    else:
        rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
        advantages = group_advantages(rewards, grpo.scale_rewards, grpo.advantage, tokens)
    for group, values in zip(batch.groups, advantages, strict=True):
        for sample, value in zip(group.samples, values, strict=True):
            sample.advantage = value
    if grpo.advantage_level == "turn":
        assign_by_turn(batch, grpo.scale_rewards, grpo.advantage)


def assign_by_turn(batch: Batch, scale_rewards: str, estimator: str) -> None:
    """Turn t of a trajectory is compared with turns t of its group, by what was still to come of the reward there
    (rewards to go, Sutton & Barto 2018, section 13.4, with the group's mean as the baseline)."""
    places: list[list[tuple[Sample, int]]] = []
    returns: list[list[float]] = []
    lengths: list[list[int]] = []
    for group in batch.groups:
        most_turns = max(len(sample.returns) for sample in group.samples)
        for turn in range(most_turns):
            compared = [sample for sample in group.samples if turn < len(sample.returns)]
            turns = [sampled_segments(sample.branches)[turn] for sample in compared]
            places.append([(sample, turn) for sample in compared])
            returns.append([sample.returns[turn] for sample in compared])
            lengths.append([len(completion.token_ids) for completion in turns])
    for sample in batch.samples:
        sample.turn_advantages = [0.0] * len(sample.returns)
    for members, values in zip(places, group_advantages(returns, scale_rewards, estimator, lengths), strict=True):
        for (sample, turn), value in zip(members, values, strict=True):
            sample.turn_advantages[turn] = value
