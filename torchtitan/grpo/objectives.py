"""Policy-gradient objectives: a per-token loss, and the weight of each token.

Every objective is a sum over tokens of weight × loss. The weights depend only on lengths, which are known before the
first forward, so packing, micro-batching and the number of ranks cannot change the result (except in bnpo, by design).
To add one, see docs/adding_an_objective.md.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan.config.objectives import SAPO_TEMPERATURES, describe
from torchtitan.errors import UserError, load_function


@dataclass(frozen=True)
class Sequences:
    """The assignment of N tokens to `count` sequences. A sequence without tokens has sums of 0."""

    of_token: torch.Tensor
    """[N] int64"""
    count: int

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values [N] over the tokens of each sequence, [count]."""
        zero = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zero.index_add(0, self.of_token, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of values [N] over the tokens of each sequence, [count]."""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    def spread(self, of_sequence: torch.Tensor) -> torch.Tensor:
        """Copy each sequence's value [count] to its tokens [N]."""
        return of_sequence[self.of_token]


@functools.cache
def takes_sequences(function: Callable[..., Any]) -> bool:
    """Whether a function uses whole sequences: it has a parameter `sequences`, and is passed their Sequences."""
    return "sequences" in inspect.signature(function).parameters


@dataclass(frozen=True)
class ClipRange:
    """Bounds of the importance ratio ρ = π / π_old. `delta` = 0 turns the two-sided clip off. For cispo `high` is the
    cap of ρ itself."""

    low: float
    high: float
    delta: float = 0.0


@dataclass(frozen=True)
class ObjectiveOptions:
    """Constants of all objectives; each uses its own."""

    clip: ClipRange
    reinforce_cap: float = 2.0
    sapo_temperatures: tuple[float, float] = SAPO_TEMPERATURES


@dataclass
class TokenLoss:
    """Per-token loss [N] with its diagnostics (booleans [N]: where the clip decided)."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


# (log π, log π - log π_old, advantages, options), tensors [N] each -> the loss of every token. With sees_sequences,
# `sequences` is passed too, and the N tokens are all tokens of these sequences.
TokenLossFunction = Callable[..., TokenLoss | torch.Tensor]
# (active tokens per sequence, longest completion) -> the weight of each sequence's tokens.
Normalizer = Callable[[list[int], int], list[float]]


def clipped_surrogate(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> TokenLoss:
    """-min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A) per token (Schulman et al. 2017, eq. 7; DAPO's asymmetric range).

    `delta` also bounds ρ if the advantage is negative (two-sided clip, Team et al. 2025, INTELLECT-2, section 3.4).
    """
    clip, ratio = options.clip, log_ratio.exp()
    bounded = ratio.clamp(max=clip.delta) if clip.delta > 0 else ratio
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    return TokenLoss(
        -torch.minimum(bounded * advantages, clipped * advantages),
        clipped_low=(ratio < 1 - clip.low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip.high) & (advantages > 0),
    )


def _capped_score(log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, cap: float) -> TokenLoss:
    ratio = log_ratio.detach().exp()
    above = ratio > cap
    return TokenLoss(-ratio.clamp(max=cap) * advantages * log_probs, torch.zeros_like(above), above)


def cispo(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> TokenLoss:
    """-sg(min(ρ, cap)) A log π per token: the weight is clipped, the gradient is not (MiniMax-M1 2025, eq. 4)."""
    return _capped_score(log_probs, log_ratio, advantages, options.clip.high)


def reinforce(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> TokenLoss:
    """-sg(min(ρ, cap)) A log π per token: REINFORCE (Williams 1992) with a truncated importance weight."""
    return _capped_score(log_probs, log_ratio, advantages, options.reinforce_cap)


def sapo(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> TokenLoss:
    """-(4/τ) σ(τ (ρ - 1)) A per token, τ by the sign of A: a soft gate instead of the clip (Gao et al. 2025, SAPO)."""
    ratio = log_ratio.exp()
    positive = advantages > 0
    of_positive, of_negative = options.sapo_temperatures
    temperature = torch.full_like(ratio, of_negative).masked_fill(positive, of_positive)
    never = torch.zeros_like(positive)
    return TokenLoss(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages, never, never)


def dppo(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> TokenLoss:
    """-ρ A per token while |π - π_old| of the token is small, else 0 if A would increase the difference: a trust region
    by the total variation of "this token or another" (Qi et al. 2026, DPPO, binary TV, arXiv 2602.04879).

    The threshold is ε_high if A is positive and ε_low if it is negative.
    """
    ratio, probability = log_ratio.exp(), log_probs.detach().exp()
    moved = probability - probability * (-log_ratio.detach()).exp()
    high = (moved > options.clip.high) & (advantages > 0)
    low = (moved < -options.clip.low) & (advantages < 0)
    return TokenLoss(torch.where(high | low, 0.0, -ratio * advantages), low, high)


def gmpo(
    log_probs: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    options: ObjectiveOptions,
    sequences: Sequences,
) -> TokenLoss:
    """-(Π min(ρ, 1 + ε_high))^(1/length) A of its sequence, per token; with max(ρ, 1 - ε_low) if A is negative: the
    geometric mean of individually clipped token ratios (Zhao et al. 2025, GMPO, arXiv 2507.20673)."""
    clip = options.clip
    lowest, highest = math.log(1 - clip.low) if clip.low < 1 else -math.inf, math.log(1 + clip.high)
    high, low = (log_ratio > highest) & (advantages > 0), (log_ratio < lowest) & (advantages < 0)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=highest), log_ratio.clamp(min=lowest))
    return TokenLoss(-sequences.spread(sequences.means(clipped)).exp() * advantages, low, high)


def per_token(lengths: list[int], max_length: int) -> list[float]:
    """Every token of the batch has the same weight (DAPO, Yu et al. 2025, section 3.3)."""
    total = sum(lengths)
    return [1.0 / max(total, 1)] * len(lengths)


def per_sequence(lengths: list[int], max_length: int) -> list[float]:
    """Every sequence has the same weight, which its tokens share (GRPO, Shao et al. 2024, eq. 3)."""
    active = sum(1 for length in lengths if length > 0)
    return [1.0 / (max(active, 1) * length) if length else 0.0 for length in lengths]


def per_constant(lengths: list[int], max_length: int) -> list[float]:
    """A constant budget of sequences × longest completion (Dr. GRPO, Liu et al. 2025, section 3.2)."""
    return [1.0 / (max(len(lengths), 1) * max_length)] * len(lengths)


NORMALIZERS: dict[str, Normalizer] = {"token": per_token, "sequence": per_sequence, "constant": per_constant}


@dataclass(frozen=True)
class Objective:
    """A per-token loss and the weighting of tokens; ratio and local are explained in config/objectives.py."""

    token_loss: TokenLossFunction
    token_weights: Normalizer
    ratio: str = "token"
    local: bool = False
    """token_weights is computed per micro-batch, and micro-batches have equal weight"""

    @property
    def sees_sequences(self) -> bool:
        """Whether a token's loss depends on the other tokens of its sequence."""
        return self.ratio != "token" or takes_sequences(self.token_loss)

    def ratio_of(self, log_ratio: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """log ρ [N] from log π - log π_old [N]."""
        if self.ratio == "token":
            return log_ratio
        mean = sequences.spread(sequences.means(log_ratio))
        return mean if self.ratio == "sequence" else mean.detach() + log_ratio - log_ratio.detach()

    def loss_of(
        self,
        log_probs: torch.Tensor,
        log_ratio: torch.Tensor,
        advantages: torch.Tensor,
        options: ObjectiveOptions,
        sequences: Sequences,
    ) -> TokenLoss:
        """Return the loss of every token. Raises UserError if a user's function does not return it."""
        more = {"sequences": sequences} if takes_sequences(self.token_loss) else {}
        result = self.token_loss(log_probs, log_ratio, advantages, options, **more)
        if isinstance(result, torch.Tensor):
            never = torch.zeros_like(log_ratio, dtype=torch.bool)
            result = TokenLoss(result, never, never)
        if not isinstance(result, TokenLoss) or result.loss.shape != log_ratio.shape:
            raise UserError(
                f"grpo.loss_type must return a loss per token, of shape {list(log_ratio.shape)}, or a TokenLoss"
            )
        return result


TOKEN_LOSSES: dict[str, TokenLossFunction] = {
    **dict.fromkeys(("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "gspo_token"), clipped_surrogate),
    "gmpo": gmpo,
    "dppo": dppo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def _described(name: str, function: TokenLossFunction) -> Objective:
    known = describe(name)
    return Objective(function, NORMALIZERS[known.normalizer], known.ratio, known.local)


OBJECTIVES = {name: _described(name, function) for name, function in TOKEN_LOSSES.items()}


def load_objective(name: str, normalization: str = "auto") -> Objective:
    """Return an objective by name, or a user's token loss by `package.module:function` (weighted per token).

    normalization: token, sequence or constant, instead of the objective's own.
    Raises UserError if the function cannot be found.
    """
    found = OBJECTIVES.get(name) or _described(name, load_function(name, "grpo.loss_type"))
    if normalization == "auto":
        return found
    return replace(found, token_weights=NORMALIZERS[normalization], local=False)
