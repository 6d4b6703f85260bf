"""Per-token estimates of the divergence from a reference policy (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from collections.abc import Callable

import torch


def k1(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log π - log π_ref [N]: unbiased for KL(π ‖ π_ref), of any sign; its gradient alone has mean zero."""
    return log_probs - reference


def k2(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """½ (log π - log π_ref)² [N]: biased; its gradient alone, on policy, has the mean of the KL's."""
    return 0.5 * (log_probs - reference).square()


def k3(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r [N] with r = π_ref / π: unbiased and never negative (GRPO, Shao et al. 2024, eq. 4). Its gradient
    alone, on policy, has the mean of that of KL(π_ref ‖ π)."""
    log_ratio = reference - log_probs
    return log_ratio.expm1() - log_ratio


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def corrected(
    estimate: torch.Tensor, log_probs: torch.Tensor, reference: torch.Tensor, ratio: torch.Tensor
) -> torch.Tensor:
    """ratio × estimate [N] with the gradient of KL(π ‖ π_ref) in expectation; ratio: π/μ [N] without gradient.

    That gradient is E_μ[π/μ · log(π/π_ref) · ∇log π]. Differentiating the product π/μ · k3 gives it sample by sample,
    π/μ · k1 as well but for a part of mean zero, and π/μ · k2 does not: that is the gradient of E_π[k2], so there the
    ratio has to be stopped. Here all three take sg(π/μ) ∇k2; they differ in the value alone.
    """
    slope = k2(log_probs, reference)
    return ratio * (estimate.detach() + (slope - slope.detach()))
