"""From the configuration to what the loss needs: the [grpo] table, with one part in another's place in each stage."""

from __future__ import annotations

from dataclasses import replace

import torch

from torchtitan.config.derived import clip_range
from torchtitan.config.job_config import GRPO, JobConfig
from torchtitan.grpo.advantages import load_estimator
from torchtitan.grpo.loss import LossSettings
from torchtitan.grpo.objectives import NORMALIZERS, ClipRange, Objective, ObjectiveOptions, TokenLoss, load_objective
from torchtitan.grpo.off_policy import CorrectionOptions, load_correction

# Figures of a batch that compare the policy with the one that has sampled: of demonstrations there is none.
OF_SAMPLES = ("clip/", "ratio/", "masked_fraction", "mismatch_kl", "reference_kl")


def loss_settings(grpo: GRPO) -> LossSettings:
    """Raises UserError where loss_type, advantage or off_policy_correction name a function that cannot be loaded."""
    load_estimator(grpo.advantage)
    load_correction(grpo.off_policy_correction)
    return LossSettings(
        objective=load_objective(grpo.loss_type, grpo.loss_normalization, grpo.importance_level),
        options=ObjectiveOptions(
            clip=ClipRange(*clip_range(grpo), grpo.delta),
            cispo_cap=grpo.cispo_cap,
            reinforce_cap=grpo.importance_cap,
            sapo_temperature_positive=grpo.sapo_temperature_positive,
            sapo_temperature_negative=grpo.sapo_temperature_negative,
        ),
        correction=grpo.off_policy_correction,
        bounds=CorrectionOptions(
            cap=grpo.importance_cap,
            icepop_low=grpo.icepop_low,
            icepop_high=grpo.icepop_high,
            geometric_low=grpo.geometric_mask_low,
            geometric_high=grpo.geometric_mask_high,
            product_low=grpo.product_mask_low,
            product_high=grpo.product_mask_high,
            negative_threshold=grpo.negative_mask_threshold,
        ),
        kl_coefficient=grpo.kl_coefficient,
        kl_estimator=grpo.kl_estimator,
        kl_ratio_correction=grpo.kl_ratio_correction,
        entropy_coefficient=grpo.entropy_coefficient,
    )


def likelihood(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> TokenLoss:
    """-log π per token: cross-entropy with what was demonstrated."""
    never = torch.zeros_like(log_probs, dtype=torch.bool)
    return TokenLoss(-log_probs, never, never)


def stage_settings(config: JobConfig) -> LossSettings:
    """The loss of the stage.

    sft: cross-entropy, the mean over the batch's tokens (or as grpo.loss_normalization says).
    distill: KL(π ‖ teacher) of every sampled token, the teacher in the place of the reference policy, by the gradient
    E_μ[min(π/μ, cap) · log(π/π_teacher) · ∇log π] (Agarwal et al. 2024, GKD, section 3, with λ = 1 and the reverse
    KL; see loss.corrected), and the policy loss, which is zero where rewards give no advantages.

    Raises UserError where grpo.loss_type names a function that cannot be loaded.
    """
    if config.job.stage == "sft":
        named = config.grpo.loss_normalization
        return LossSettings(Objective(likelihood, NORMALIZERS["token" if named == "auto" else named]))
    settings = loss_settings(config.grpo)
    if config.job.stage == "distill":
        return replace(settings, kl_coefficient=config.distill.coefficient, kl_ratio_correction=True)
    return settings


def stage_figures(config: JobConfig, figures: dict[str, float | None]) -> dict[str, float | None]:
    """The figures of a batch that the stage has, under their names there."""
    if config.job.stage == "sft":
        return {name: value for name, value in figures.items() if not name.startswith(OF_SAMPLES)}
    if config.job.stage == "distill":
        return {"teacher_kl" if name == "reference_kl" else name: value for name, value in figures.items()}
    return figures
