"""The GRPO loss of one packed micro-batch, in direct and in decoupled mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtitan.grpo.objectives import ClipRange, Objective
from torchtitan.grpo.off_policy import geometric_mask, truncated_weights
from torchtitan.grpo.packing import MicroBatch


@dataclass(frozen=True)
class LossSettings:
    """What of the configuration the loss needs."""

    objective: Objective
    clip: ClipRange
    importance_cap: float
    mask_low: float
    mask_high: float


@dataclass
class LossResult:
    """The differentiable loss (a sum, already divided) and sums over active tokens for the metrics."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    ratio_max: torch.Tensor


def grpo_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    micro_batch: MicroBatch,
    old_log_probs: torch.Tensor | None,
    settings: LossSettings,
) -> LossResult:
    """Loss of one micro-batch from the policy's log-probs and entropy at its active positions, [A] each.

    Direct mode (old_log_probs is None): the behaviour policy μ is the proximal policy, the clip acts on π/μ.
    Decoupled mode: the clip acts on π/π_old and each token is weighted by min(π_old/μ, cap) (Hilton et al. 2021;
    Fu et al. 2025, AReaL, eq. 5). The sequence mask acts on the geometric mean of π/μ, of π_old/μ when decoupled.
    """
    behaviour = micro_batch.behaviour_log_probs
    proximal = behaviour if old_log_probs is None else old_log_probs
    # Bounded before exp: a ratio of inf times a mask of 0 would be NaN. e^20 lies far outside any clip range.
    log_ratio = (log_probs - proximal).clamp(-20.0, 20.0)
    token = settings.objective.token_loss(log_ratio, micro_batch.advantages, settings.clip)
    drift = (log_probs if old_log_probs is None else old_log_probs).detach() - behaviour
    mask = geometric_mask(
        drift, micro_batch.sequence, len(micro_batch.layout.lengths), settings.mask_low, settings.mask_high
    )
    factor = micro_batch.weights * mask
    if old_log_probs is not None:
        factor = factor * truncated_weights(old_log_probs, behaviour, settings.importance_cap)
    loss = (token.loss * factor).sum()
    ratio = log_ratio.detach().exp()
    sums = {
        "tokens": torch.full_like(loss, float(len(log_probs))).detach(),
        "entropy": entropy.sum().detach(),
        "clip/low": token.clipped_low.sum().float(),
        "clip/high": token.clipped_high.sum().float(),
        "masked": (1 - mask).sum(),
        "ratio": ratio.sum(),
    }
    return LossResult(loss, sums, ratio.max() if len(ratio) else ratio.new_zeros(()))
