"""Group-relative advantages (Shao et al. 2024, DeepSeekMath, section 4.1.2; Liu et al. 2025, Dr. GRPO)."""

from __future__ import annotations

import torch

# Added to the standard deviation, so that a nearly constant group does not blow up.
STD_EPSILON = 1e-4


def group_advantages(groups: list[list[float]], scale_rewards: str = "none") -> list[list[float]]:
    """Advantages of every sample of every group: R - mean(R of its group), optionally scaled.

    Args:
        groups: rewards, one list per group; groups may differ in size.
        scale_rewards: `none` (Dr. GRPO), `group` divides by the group's standard deviation + 1e-4 (GRPO),
            `batch` by that of all rewards.

    Raises:
        ValueError: unknown scale_rewards.
    """
    if scale_rewards not in ("none", "group", "batch"):
        raise ValueError(f"scale_rewards must be none, group or batch, not {scale_rewards!r}")
    rewards = [torch.tensor(group, dtype=torch.float64) for group in groups]
    batch_std = torch.cat(rewards).std(correction=0) if rewards else torch.zeros(())
    result = []
    for group in rewards:
        centred = group - group.mean()
        if scale_rewards == "group":
            centred = centred / (group.std(correction=0) + STD_EPSILON)
        elif scale_rewards == "batch":
            centred = centred / (batch_std + STD_EPSILON)
        result.append(centred.tolist())
    return result
