"""Corrections for samples from an older policy, or from an engine with different numerics.

w is π_old/μ in decoupled mode. In direct mode, where the clip already acts on π/μ, only masks apply, and they use π/μ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan.errors import UserError, load_function
from torchtitan.grpo.objectives import Sequences, takes_sequences


@dataclass(frozen=True)
class CorrectionOptions:
    """Bounds of all corrections."""

    cap: float = 2.0
    icepop_band: tuple[float, float] = (0.5, 5.0)
    geometric_band: tuple[float, float] | None = None
    negative_threshold: float = 0.0
    """0 masks nothing"""


def truncate(ratio: torch.Tensor, options: CorrectionOptions) -> torch.Tensor:
    """min(w, cap) per token: truncated importance sampling (Yao et al. 2025, TIS)."""
    return ratio.clamp(max=options.cap)


def mask(ratio: torch.Tensor, options: CorrectionOptions) -> torch.Tensor:
    """w if w <= cap, else 0: tokens that have become much likelier are left out (masked importance sampling)."""
    return torch.where(ratio <= options.cap, ratio, 0.0)


def icepop(ratio: torch.Tensor, options: CorrectionOptions) -> torch.Tensor:
    """w inside [low, high], else 0 (Ring team 2025, IcePop)."""
    low, high = options.icepop_band
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def none(ratio: torch.Tensor, options: CorrectionOptions) -> torch.Tensor:
    """Weight 1 for every token."""
    return torch.ones_like(ratio)


@dataclass(frozen=True)
class Correction:
    """A function that weights tokens, and what it needs."""

    weigh: Callable[..., torch.Tensor]
    """(w [N], options) -> weights [N]; with sees_sequences also `sequences`"""
    masks: bool = False
    """Tokens of weight 0 are also left out in direct mode, where w is π/μ"""
    sees_sequences: bool = False

    def __call__(self, ratio: torch.Tensor, options: CorrectionOptions, sequences: Sequences) -> torch.Tensor:
        """Return the weights [N]. Raises UserError if a user's function does not return them."""
        weights = self.weigh(ratio, options, **({"sequences": sequences} if self.sees_sequences else {}))
        if not isinstance(weights, torch.Tensor) or weights.shape != ratio.shape:
            raise UserError(f"grpo.off_policy_correction must return a weight per token, of shape {list(ratio.shape)}")
        return weights


CORRECTIONS: dict[str, Correction] = {
    "truncate": Correction(truncate),
    "mask": Correction(mask, masks=True),
    "icepop": Correction(icepop, masks=True),
    "none": Correction(none),
}


@functools.cache
def load_correction(name: str) -> Correction:
    """Return a correction by name, or a user's `package.module:function`. Raises UserError if it cannot be found."""
    if name in CORRECTIONS:
        return CORRECTIONS[name]
    function = load_function(name, "grpo.off_policy_correction")
    return Correction(function, masks=True, sees_sequences=takes_sequences(function))


def sequence_mask(
    log_ratio: torch.Tensor, advantages: torch.Tensor, sequences: Sequences, options: CorrectionOptions
) -> torch.Tensor:
    """1 for tokens [N] of sequences within all bounds, else 0. log_ratio: log w per token [N].

    - geometric: exp(mean log w) in [low, high]. Unlike the product, the geometric mean does not grow with the length,
      so long answers are not masked more often.
    - negative: sequences with a negative advantage are masked if their mean -log w exceeds the threshold (DeepSeek-V3.2
      2025, section 3.1): the policy need not unlearn what it no longer samples.
    """
    mean = sequences.means(log_ratio.detach())
    keep = torch.ones_like(mean, dtype=torch.bool)
    if options.geometric_band is not None:
        low, high = options.geometric_band
        keep = (mean.exp() >= low) & (mean.exp() <= high)
    mask = sequences.spread(keep)
    if options.negative_threshold > 0:
        mask = mask & ~((advantages < 0) & sequences.spread(-mean > options.negative_threshold))
    return mask.to(log_ratio.dtype)


def uses_sequences(options: CorrectionOptions) -> bool:
    """Whether sequence_mask can mask anything."""
    return options.geometric_band is not None or options.negative_threshold > 0
