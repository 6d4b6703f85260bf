"""From the [grpo] table to what the loss needs."""

from __future__ import annotations

from torchtitan.config.derived import clip_range
from torchtitan.config.job_config import GRPO
from torchtitan.grpo.advantages import load_estimator
from torchtitan.grpo.loss import LossSettings
from torchtitan.grpo.objectives import ClipRange, ObjectiveOptions, load_objective
from torchtitan.grpo.off_policy import CorrectionOptions, load_correction


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
