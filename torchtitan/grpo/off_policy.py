"""Corrections for samples that an older policy, or another numeric path, produced."""

from __future__ import annotations

import torch


def truncated_weights(old_log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, cap: float) -> torch.Tensor:
    """min(π_old / μ, cap) per token [N], without gradient: truncated importance sampling (Yao et al. 2025, TIS)."""
    return (old_log_probs - behaviour_log_probs).detach().exp().clamp(max=cap)


def geometric_mean_log_ratio(log_ratio: torch.Tensor, sequence: torch.Tensor, count: int) -> torch.Tensor:
    """Mean of log_ratio [N] over the tokens of each sequence -> [count]. Sequences without tokens give 0.

    The geometric mean does not grow with the length, unlike the product, so long answers are not masked more often.
    """
    total = torch.zeros(count, dtype=log_ratio.dtype, device=log_ratio.device).index_add_(0, sequence, log_ratio)
    tokens = torch.zeros_like(total).index_add_(0, sequence, torch.ones_like(log_ratio))
    return total / tokens.clamp(min=1)


def geometric_mask(
    log_ratio: torch.Tensor, sequence: torch.Tensor, count: int, low: float, high: float
) -> torch.Tensor:
    """1 for tokens [N] whose sequence's geometric mean ratio π/μ lies in [low, high], else 0. A bound of 0 is off."""
    mean = geometric_mean_log_ratio(log_ratio.detach(), sequence, count).exp()
    keep = torch.ones_like(mean, dtype=torch.bool)
    if low > 0:
        keep &= mean >= low
    if high > 0:
        keep &= mean <= high
    return keep[sequence].to(log_ratio.dtype)


def k3_divergence(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(μ ‖ π) from samples of μ, never negative: r - 1 - log r, r = π/μ (Schulman 2020)."""
    log_ratio = log_probs - behaviour_log_probs
    return log_ratio.expm1() - log_ratio
