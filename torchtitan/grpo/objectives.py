"""Policy-gradient objectives: a per-token loss, and the weight with which each token counts.

Every objective is a sum over tokens of weight × loss. The weights depend only on lengths, which are known before the
first forward, so packing, micro-batching and the number of ranks cannot change the result.

To add an objective: write its per-token loss and its token weights, and name the pair in OBJECTIVES
and in names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ClipRange:
    """Bounds of the importance ratio ρ = π / π_old. `delta` = 0 leaves the two-sided clip off."""

    low: float
    high: float
    delta: float = 0.0


@dataclass
class TokenLoss:
    """Per-token loss [N] with its diagnostics (booleans [N]: where the clip decided)."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, clip: ClipRange) -> TokenLoss:
    """-min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A) per token (Schulman et al. 2017, eq. 7; DAPO's asymmetric range).

    With `delta`, ρ is bounded by it where the advantage is negative too (two-sided clip, Team et al. 2025,
    INTELLECT-2, section 3.4).

    Args:
        log_ratio: log π - log π_old, [N].
        advantages: [N].
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(max=clip.delta) if clip.delta > 0 else ratio
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = -torch.minimum(bounded * advantages, clipped * advantages)
    return TokenLoss(
        loss,
        clipped_low=(ratio < 1 - clip.low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip.high) & (advantages > 0),
    )


def per_token(lengths: list[int], max_length: int) -> list[float]:
    """Every token of the batch counts the same (DAPO, Yu et al. 2025, section 3.3)."""
    total = sum(lengths)
    return [1.0 / max(total, 1)] * len(lengths)


def per_sequence(lengths: list[int], max_length: int) -> list[float]:
    """Every sequence counts the same, its tokens share its weight (GRPO, Shao et al. 2024, eq. 3)."""
    active = sum(1 for length in lengths if length > 0)
    return [1.0 / (max(active, 1) * length) if length else 0.0 for length in lengths]


def per_constant(lengths: list[int], max_length: int) -> list[float]:
    """A constant budget of sequences × longest completion (Dr. GRPO, Liu et al. 2025, section 3.2)."""
    return [1.0 / (max(len(lengths), 1) * max_length)] * len(lengths)


@dataclass(frozen=True)
class Objective:
    """token_loss(log_ratio, advantages, clip) and token_weights(active tokens per sequence, longest completion)."""

    token_loss: Callable[[torch.Tensor, torch.Tensor, ClipRange], TokenLoss]
    token_weights: Callable[[list[int], int], list[float]]


OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(clipped_surrogate, per_sequence),
    "dapo": Objective(clipped_surrogate, per_token),
    "dr_grpo": Objective(clipped_surrogate, per_constant),
}
