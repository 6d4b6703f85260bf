"""The GRPO loss of one packed micro-batch, in direct and in decoupled mode, and its settings from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from torchtitan.config.job_config import GRPO, JobConfig
from torchtitan.grpo import off_policy
from torchtitan.grpo.advantages import load_estimator
from torchtitan.grpo.objectives import (
    NORMALIZERS,
    ClipRange,
    Objective,
    ObjectiveOptions,
    Sequences,
    TokenLoss,
    load_objective,
)
from torchtitan.grpo.off_policy import CorrectionOptions, load_correction

# Log-ratios are bounded before exp, because inf times a mask of 0 would be NaN. e^20 is far outside any clip range.
LARGEST_LOG_RATIO = 20.0
# Figures of a batch that compare the policy with the one that sampled it; demonstrations have none.
OF_SAMPLES = ("clip/", "ratio/", "masked_fraction", "mismatch_kl", "reference_kl")


def k3(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r [N] with r = π_ref / π: unbiased for KL(π ‖ π_ref) and never negative (GRPO, Shao et al. 2024,
    eq. 4)."""
    log_ratio = reference - log_probs
    return log_ratio.expm1() - log_ratio


def reference_divergence(
    estimate: torch.Tensor, log_probs: torch.Tensor, reference: torch.Tensor, ratio: torch.Tensor
) -> torch.Tensor:
    """ratio × estimate [N] with the gradient of KL(π ‖ π_ref) in expectation; ratio: π/μ [N] without gradient.

    That gradient is E_μ[π/μ · log(π/π_ref) · ∇log π] (DeepSeek-V3.2 2025, section 3.1), whatever the estimate of the
    value is: half the squared log-ratio has the slope log(π/π_ref) · ∇log π at every token.
    """
    slope = 0.5 * (log_probs - reference).square()
    return ratio * (estimate.detach() + (slope - slope.detach()))


class TrainedTokens(Protocol):
    """The A trained tokens of a packed micro-batch, from a number of sequences."""

    @property
    def num_sequences(self) -> int: ...

    sequence: torch.Tensor
    """[A] int64: which sequence each token belongs to"""
    advantages: torch.Tensor
    """[A]"""
    behaviour_log_probs: torch.Tensor
    """[A]"""
    weights: torch.Tensor
    """[A] the objective's token weights, normalised over the whole minibatch of all ranks"""


@dataclass(frozen=True)
class LossSettings:
    """The settings that the loss needs."""

    objective: Objective
    options: ObjectiveOptions = field(default_factory=lambda: ObjectiveOptions(ClipRange(0.2, 0.28)))
    correction: str = "truncate"
    bounds: CorrectionOptions = field(default_factory=CorrectionOptions)
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference, which each token adds times min(π/μ, bounds.cap)"""
    entropy_coefficient: float = 0.0


@dataclass
class FixedLogProbs:
    """Log-probs [A] from one forward before the first optimizer step of a batch; None if not needed."""

    old: torch.Tensor | None = None
    """Those of the proximal policy, in decoupled mode"""
    reference: torch.Tensor | None = None
    trained: torch.Tensor | None = None
    """[A] 0 or 1: 0 for tokens that the policy loss leaves out (low entropy)"""


class MicroBatchLoss:
    """The loss of every active token as a function of the policy's log-prob and entropy at that token.

    Direct mode (no old log-probs): the behaviour policy μ is the proximal policy, the clip acts on π/μ, and masks use
    π/μ. Decoupled mode: the clip acts on π/π_old, and each token is weighted by the correction of π_old/μ (Hilton et
    al. 2021; Fu et al. 2025, AReaL, eq. 5), which masks use, too. The KL and entropy terms are not masked.

    Call it with all tokens at once, or, if `separable`, with slices that together make up all of them, as a head does
    that forms gradients tile by tile. `sums` collects what the metrics need over the calls.
    """

    def __init__(self, micro_batch: TrainedTokens, fixed: FixedLogProbs, settings: LossSettings):
        self.micro_batch, self.fixed, self.settings = micro_batch, fixed, settings
        behaviour = micro_batch.behaviour_log_probs
        self._proximal = behaviour if fixed.old is None else fixed.old
        self._masks_sequences = off_policy.uses_sequences(settings.bounds)
        self._correction = off_policy.load_correction(settings.correction)
        self._sequences = Sequences(micro_batch.sequence, micro_batch.num_sequences)
        # This part is known before the forward.
        self._factor = torch.ones_like(behaviour)
        self._mask = torch.ones_like(behaviour)
        if fixed.old is not None:
            drift = (fixed.old - behaviour).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
            self._factor = self._correction(drift.exp(), settings.bounds, self._sequences)
            self._mask = self._sequence_mask(drift) * (self._factor > 0)
            self._factor = self._factor * self._mask
        if fixed.trained is not None:
            self._factor = self._factor * fixed.trained
        zero = behaviour.new_zeros(())
        names = ("tokens", "entropy", "clip/low", "clip/high", "masked", "ratio", "reference_kl", "compared")
        self.sums = {name: zero.clone() for name in names}
        self.ratio_max = zero.clone()

    @property
    def separable(self) -> bool:
        """Whether a token's loss depends only on its own log-prob and entropy."""
        masks_see = self._masks_sequences or self._correction.sees_sequences
        return not (self.settings.objective.sees_sequences or (self.fixed.old is None and masks_see))

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, rows: slice, divergence: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The losses [n] of the tokens `rows`, already normalised: their sum is minimised. divergence [n]: from the
        teacher over the vocabulary, in place of an estimate from the sampled token."""
        micro_batch, settings, fixed = self.micro_batch, self.settings, self.fixed
        weights, advantages = micro_batch.weights[rows], micro_batch.advantages[rows]
        log_ratio = (log_probs - self._proximal[rows]).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        level = settings.objective.ratio_of(log_ratio, self._sequences)
        token = settings.objective.loss_of(log_probs, level, advantages, settings.options, self._sequences)
        factor, mask = self._factor[rows], self._mask[rows]
        if fixed.old is None:
            mask = self._masks_in_direct_mode(log_ratio.detach(), rows)
            factor = factor * mask
        loss = token.loss * factor * weights
        if fixed.reference is not None:
            reference = fixed.reference[rows]
            kl = k3(log_probs, reference)
            self._compare(kl)
            # The ratio is to the sampling policy, even in decoupled mode; no clip bounds it, so the cap must.
            sampled_ratio = (log_probs.detach() - micro_batch.behaviour_log_probs[rows]).exp()
            kl = reference_divergence(kl, log_probs, reference, sampled_ratio.clamp(max=settings.bounds.cap))
            loss = loss + settings.kl_coefficient * kl * weights
        if divergence is not None:
            self._compare(divergence)
            loss = loss + settings.kl_coefficient * divergence * weights
        if settings.entropy_coefficient:
            loss = loss - settings.entropy_coefficient * entropy * weights
        with torch.no_grad():
            ratio = level.exp()
            self.sums["tokens"] += len(ratio)
            self.sums["entropy"] += entropy.sum()
            self.sums["clip/low"] += token.clipped_low.sum()
            self.sums["clip/high"] += token.clipped_high.sum()
            self.sums["masked"] += (1 - mask).sum()
            self.sums["ratio"] += ratio.sum()
            if len(ratio):
                self.ratio_max = torch.maximum(self.ratio_max, ratio.max())
        return loss

    def _compare(self, divergence: torch.Tensor) -> None:
        self.sums["reference_kl"] += divergence.detach().sum()
        self.sums["compared"] += len(divergence)

    def _masks_in_direct_mode(self, log_ratio: torch.Tensor, rows: slice) -> torch.Tensor:
        mask = torch.ones_like(log_ratio)
        if self._correction.masks:
            weights = self._correction(log_ratio.exp(), self.settings.bounds, self._sequences)
            mask = (weights > 0).to(log_ratio.dtype)
        return mask * self._sequence_mask(log_ratio) if self._masks_sequences else mask

    def _sequence_mask(self, log_ratio: torch.Tensor) -> torch.Tensor:
        return off_policy.sequence_mask(log_ratio, self.micro_batch.advantages, self._sequences, self.settings.bounds)


class WithObservations:
    """The loss of a micro-batch's A active tokens, and behind them the cross-entropy of its O observed ones, which
    environments wrote (ECHO, arXiv 2605.24517): -weight · log π of each. It is called like a MicroBatchLoss, with rows
    of the A + O tokens."""

    def __init__(self, policy_loss: MicroBatchLoss, active: int, weight: float):
        self._policy_loss, self._active, self._weight = policy_loss, active, weight
        self.sum = policy_loss.ratio_max.new_zeros(())
        """Of the observed tokens' -log π so far"""

    def __call__(self, log_probs: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        cut = min(max(self._active - rows.start, 0), len(log_probs))
        policy_loss = self._policy_loss(log_probs[:cut], entropy[:cut], slice(rows.start, rows.start + cut))
        self.sum -= log_probs[cut:].detach().sum()
        return torch.cat((policy_loss, -self._weight * log_probs[cut:]))


def as_band(values: list[float]) -> tuple[float, float]:
    low, high = values
    return low, high


def loss_settings(grpo: GRPO) -> LossSettings:
    """Raises UserError if loss_type, advantage or off_policy_correction names a function that cannot be loaded."""
    load_estimator(grpo.advantage)
    load_correction(grpo.off_policy_correction)
    return LossSettings(
        objective=load_objective(grpo.loss_type, grpo.loss_normalization),
        options=ObjectiveOptions(
            clip=ClipRange(*grpo.clip_range, grpo.delta),
            reinforce_cap=grpo.importance_cap,
        ),
        correction=grpo.off_policy_correction,
        bounds=CorrectionOptions(
            cap=grpo.importance_cap,
            icepop_band=as_band(grpo.icepop_band),
            geometric_band=as_band(grpo.geometric_mask) if grpo.geometric_mask else None,
            negative_threshold=grpo.negative_mask_threshold,
        ),
        kl_coefficient=grpo.kl_coefficient,
        entropy_coefficient=grpo.entropy_coefficient,
    )


def likelihood(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> TokenLoss:
    """-log π per token: cross-entropy with the demonstrations."""
    never = torch.zeros_like(log_probs, dtype=torch.bool)
    return TokenLoss(-log_probs, never, never)


def stage_settings(config: JobConfig) -> LossSettings:
    """Return the loss settings of the stage.

    sft: cross-entropy, averaged over the batch's tokens (or according to grpo.loss_normalization).
    distill: with distill.divergence = sampled, KL(π ‖ teacher) of every sampled token, with the teacher as the
    reference policy, by the gradient
    E_μ[min(π/μ, cap) · log(π/π_teacher) · ∇log π] (Agarwal et al. 2024, GKD, section 3, with λ = 1 and the reverse KL;
    see reference_divergence). Otherwise the divergence over the vocabulary, which needs no ratio
    (models/head/divergence_head.py).
    In either case plus the policy loss, which is zero if rewards give no advantages.

    Raises UserError if grpo.loss_type names a function that cannot be loaded.
    """
    if config.job.stage == "sft":
        named = config.grpo.loss_normalization
        return LossSettings(Objective(likelihood, NORMALIZERS["token" if named == "auto" else named]))
    settings = loss_settings(config.grpo)
    if config.job.stage == "distill":
        return replace(settings, kl_coefficient=config.distill.coefficient)
    return settings


def stage_figures(config: JobConfig, figures: dict[str, float | None]) -> dict[str, float | None]:
    """Select the figures of a batch that exist in this stage, under the stage's names."""
    if config.job.stage == "sft":
        return {name: value for name, value in figures.items() if not name.startswith(OF_SAMPLES)}
    if config.job.stage == "distill":
        names = {"reference_kl": "teacher_kl"}
        return {names.get(name, name): value for name, value in figures.items()}
    return figures
