"""Per-token estimates of the divergence from a reference policy (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from collections.abc import Callable

import torch


def k1(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log π - log π_ref [N]: unbiased for KL(π ‖ π_ref), of any sign; its gradient alone has mean zero."""
    return log_probs - reference


def k2(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """½ (log π - log π_ref)² [N]: biased, with the gradient of the KL in expectation."""
    return 0.5 * (log_probs - reference).square()


def k3(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r [N] with r = π_ref / π: unbiased and never negative (GRPO, Shao et al. 2024, eq. 4)."""
    log_ratio = reference - log_probs
    return log_ratio.expm1() - log_ratio


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
