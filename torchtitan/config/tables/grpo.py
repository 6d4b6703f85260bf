"""The objective."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import (
    TABLE,
    Count,
    Names,
    NotNegative,
    Positive,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
)

LOSS_TYPES = (
    "grpo", "dapo", "bnpo", "dr_grpo", "gspo", "gspo_token", "gmpo", "dppo", "cispo", "sapo", "reinforce",
)  # fmt: skip
"""The keys of objectives.OBJECTIVES"""

ADVANTAGES = ("group", "rloo", "batch", "reinforce_pp", "reinforce_pp_no_baseline", "opo")
"""The keys of advantages.ESTIMATORS"""

CORRECTIONS = ("truncate", "mask", "icepop", "none")
"""The keys of off_policy.CORRECTIONS"""

DIVERGENCES = ("k1", "k2", "k3")
"""The keys of divergence.ESTIMATORS"""


@dataclass(config=TABLE)
class GRPO:
    async_weight_update: bool = True
    """true: no step waits for an actor. false: every step waits until all live actors have the new version"""

    group_size: Annotated[int, Range(2)] = 8
    """Completions per prompt"""

    loss_type: Annotated[str, Names(LOSS_TYPES, own_function=True)] = "dapo"
    """Objective: grpo, dapo, bnpo, dr_grpo, gspo, gspo_token, gmpo, dppo, cispo, sapo or reinforce, or one's own as
    package.module:function"""

    loss_normalization: Literal["auto", "token", "sequence", "constant"] = "auto"
    """How tokens are weighted: as the objective does, all alike, by sequence, or by sequences × longest completion"""

    importance_level: Literal["auto", "token", "sequence", "sequence_token"] = "auto"
    """Importance ratio of every token, one per sequence, or of that value with every token's own gradient; auto is what
    the objective uses"""

    advantage: Annotated[str, Names(ADVANTAGES, own_function=True)] = "group"
    """Baseline: group (mean of the group), rloo (mean of the others), batch, reinforce_pp (group, then normalised over
    the batch), reinforce_pp_no_baseline (only normalised), opo (mean of the group by length), or one's own as
    package.module:function"""

    group_filter: str = ""
    """Own function as package.module:function: which scored groups are trained on, besides drop_zero_variance"""

    recompute_old_log_probs: bool = False
    """Decoupled mode: the proximal policy is recomputed before the first optimizer step of a batch"""

    epsilon_low: Annotated[float, Range(0, 1, also=-1)] = -1.0
    """Lower clip range of the ratio; -1 is 0.2, 3e-4 where a ratio is a sequence's (gspo), 0.33 for gmpo"""

    epsilon_high: Annotated[float, Range(0, also=-1)] = -1.0
    """Upper clip range of the ratio; -1 is 0.28, 4e-4 where a ratio is a sequence's (gspo), 0.49 for gmpo, 0.2 for
    dppo, where both bound the change of the token's probability"""

    delta: Annotated[float, Range(1, low_open=True, also=0)] = 3.0
    """Upper bound of the ratio where the advantage is negative, which epsilon_high does not bound; 0 turns it off"""

    off_policy_correction: Annotated[str, Names(CORRECTIONS, own_function=True)] = "truncate"
    """Decoupled mode: weight of a token by π_old/μ: truncate (cap), mask (0 above the cap), icepop (0 outside of a
    band), none, or one's own as package.module:function. Direct mode: mask, icepop and one's own leave out tokens of
    weight 0, by π/μ; truncate does nothing"""

    importance_cap: Positive = 2.0
    """Cap of truncate and mask, of the weight of loss_type reinforce, and of kl_ratio_correction"""

    icepop_low: NotNegative = 0.5
    """Lower end of the icepop band"""

    icepop_high: Positive = 5.0
    """Upper end of the icepop band"""

    cispo_cap: Positive = 5.0
    """Cap of the importance weight of loss_type cispo"""

    sapo_temperature_positive: Positive = 1.0
    """Steepness of loss_type sapo's gate where the advantage is positive"""

    sapo_temperature_negative: Positive = 1.05
    """Steepness of loss_type sapo's gate where the advantage is negative"""

    allow_uncorrected: bool = False
    """Start an asynchronous run although nothing bounds how far off policy a sample counts"""

    geometric_mask_low: Share = 0.0
    """Sequences whose geometric mean ratio π/μ lies below are masked; 0 turns it off"""

    geometric_mask_high: Annotated[float, Range(1, also=0)] = 0.0
    """Sequences whose geometric mean ratio π/μ lies above are masked; 0 turns it off"""

    product_mask_low: Share = 0.0
    """Sequences whose product of ratios lies below are masked (hard on long answers); 0 turns it off"""

    product_mask_high: Annotated[float, Range(1, also=0)] = 0.0
    """Sequences whose product of ratios lies above are masked (hard on long answers); 0 turns it off"""

    negative_mask_threshold: NotNegative = 0.0
    """Sequences with a negative advantage are masked where the mean of log μ/π exceeds this; 0 turns it off"""

    kl_coefficient: NotNegative = 0.0
    """Weight of the divergence from the reference policy; 0 loads none"""

    kl_estimator: Annotated[str, Names(DIVERGENCES)] = "k3"
    """Per-token estimate of that divergence: k1, k2 or k3"""

    kl_ratio_correction: bool = True
    """Weight the divergence by min(π/μ, importance_cap): the gradient is that of the KL, off policy too"""

    reference_ema_decay: ShareBelowOne = 0.0
    """Reference policy: 0 keeps the initial weights; else it follows the policy, keeping this share at every sync"""

    reference_sync_interval: Count = 1
    """Steps between two syncs of a reference policy that follows"""

    reference_cpu_offload: bool = False
    """Keep the reference policy's weights in host memory"""

    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus"""

    entropy_top_share: ShareAboveZero = 1.0
    """Decoupled mode: only this share of a batch's tokens, those of highest entropy, enters the policy loss"""

    routing_replay: bool = False
    """Mixtures of experts: train every token with the experts that the engine has sampled it with. Without, the two
    choose otherwise for what is mere rounding, and most runs of such models collapse"""

    num_minibatches: Count = 1
    """Optimizer steps per pass over a batch, each on its share of the groups"""

    num_iterations: Count = 1
    """Passes over a batch"""

    scale_rewards: Literal["none", "group", "batch", "mean"] = "none"
    """Divide advantages by the standard deviation of the rewards in the group or batch, or by the group's mean reward
    (MaxRL)"""

    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """One advantage for an episode; or one for each turn, from the rewards that its steps have still brought"""

    reward_aggregation: Literal["sum", "normalize_each"] = "sum"
    """Several reward functions: sum, then advantages; or the advantages of each, then their weighted sum"""

    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal, so that every advantage is zero (counted). With advantage = batch,
    reinforce_pp_no_baseline or one's own none is;
    with reward_aggregation = normalize_each, those in which every function's rewards are equal"""

    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss"""

    mismatch_kl_alarm: NotNegative = 0.1
    """Warn when the trainer's log-probs diverge from the engine's by more than this and staleness explain; 0: never"""

    mismatch_kl_stop: NotNegative = 0.0
    """Save a checkpoint and stop the run after a step whose mismatch_kl is above; 0: never"""
