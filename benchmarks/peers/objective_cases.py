"""What objectives_vs_peers.py compares: settings of ours, and what TRL and Liger call the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtitan.grpo.advantages import group_advantages, normalized_each

# Samples of a group, and the most tokens of one.
GENERATIONS, LONGEST = 4, 9
Batch = dict[str, Any]
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
# Ours differs by default: a range for gspo by its paper, a bound of the ratio where the advantage is negative.
AS_THEIRS = {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 0.0}
# TRL's torch.where rounds sapo's 1.05 to single precision, whatever the ratios are in.
SAPO_TEMPERATURES_AS_THEIRS = (1.0, float(np.float32(1.05)))
SEQUENCE = {"importance_sampling_level": "sequence"}
DECOUPLED = {"recompute_old_log_probs": True}
# TRL's name of an option that Liger has too -> Liger's.
LIGER_NAMES = {"epsilon": "epsilon_low"} | {
    name: name
    for name in (
        "loss_type",
        "epsilon_high",
        "delta",
        "beta",
        "importance_sampling_level",
        "use_bias_correction_kl",
    )
}


class Case:
    """Settings of our [grpo] table and what TRL and Liger call the same."""

    def __init__(
        self,
        name: str,
        ours: dict[str, Any],
        peer_options: dict[str, Any] | None = None,
        *,
        liger: bool = True,
        scale: float = 1.0,
        reason: str = "",
    ):
        """theirs: options of GRPOConfig; without a loss_type they have ours. liger: False where Liger cannot do it.
        scale: ours times this is theirs. reason: why definitions differ, where they do."""
        self.name, self.ours, self.scale, self.reason = name, ours, scale, reason
        self.trl = {"loss_type": ours["loss_type"], "use_bias_correction_kl": True, **CLIP, **(peer_options or {})}
        self.liger = {LIGER_NAMES[key]: value for key, value in self.trl.items() if key in LIGER_NAMES}
        self.has_liger = liger
        self.decoupled = bool(ours.get("recompute_old_log_probs"))

    def for_peers(self) -> dict[str, Any]:
        liger = self.liger if self.has_liger else None
        return {"trl": self.trl, "liger": liger, "decoupled": self.decoupled, "rloo": False}


def corrected(name: str, mode: str, low: float | None, high: float, **ours: Any) -> Case:
    """Decoupled mode with an off-policy correction. The ratio that Liger is given is the one that TRL computes."""
    options = {"mode": mode, "clip_min": low, "clip_max": high}
    return Case(
        f"dapo, {name}",
        {"loss_type": "dapo", **DECOUPLED, **ours},
        {f"vllm_importance_sampling_{key}": value for key, value in options.items()},
    )


EQUAL = [
    *(Case(name, {"loss_type": name}) for name in ("dapo", "grpo")),
    Case("bnpo, one micro-batch", {"loss_type": "bnpo"}),
    Case("dr_grpo", {"loss_type": "dr_grpo"}),
    Case("gspo", {"loss_type": "gspo"}, {"loss_type": "grpo", **SEQUENCE}),
    Case("cispo, epsilon_high = 1.15", {"loss_type": "cispo", "epsilon_high": 1.15}, {"epsilon_high": 1.15}),
    Case("sapo", {"loss_type": "sapo"}),
    Case(
        "reinforce, importance_cap = 1.1 (theirs: cispo)",
        {"loss_type": "reinforce", "importance_cap": 1.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    *(
        Case(
            f'gspo, loss_normalization = "{normalization}" (theirs: {loss_type})',
            {"loss_type": "gspo", "loss_normalization": normalization},
            {"loss_type": loss_type, **SEQUENCE},
        )
        for normalization, loss_type in (("token", "dapo"), ("constant", "dr_grpo"))
    ),
    Case(
        'their luspo: gspo, loss_normalization = "constant", × longest completion',
        {"loss_type": "gspo", "loss_normalization": "constant"},
        {"loss_type": "luspo", **SEQUENCE},
        scale=LONGEST,
    ),
    Case(
        "dapo, clip range 0.1 / 0.3",
        {"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.3},
        {"epsilon": 0.1, "epsilon_high": 0.3},
    ),
    Case("dapo, delta = 1.3", {"loss_type": "dapo", "delta": 1.3}, {"delta": 1.3}),
    Case("grpo, delta = 1.3", {"loss_type": "grpo", "delta": 1.3}, {"delta": 1.3}),
    Case("gspo, delta = 1.05", {"loss_type": "gspo", "delta": 1.05}, {"loss_type": "grpo", "delta": 1.05, **SEQUENCE}),
    Case("dapo, kl_coefficient = 0.1", {"loss_type": "dapo", "kl_coefficient": 0.1}, {"beta": 0.1}),
    Case(
        "dapo, entropy_coefficient = 0.05",
        {"loss_type": "dapo", "entropy_coefficient": 0.05},
        {"entropy_coef": 0.05},
        liger=False,
    ),
    *(
        Case(
            f"{name}, mask_truncated", {"loss_type": name, "mask_truncated": True}, {"mask_truncated_completions": True}
        )
        for name in ("dapo", "dr_grpo")
    ),
    Case(
        "dapo, negative_mask_threshold = 0.01",
        {"loss_type": "dapo", "negative_mask_threshold": 0.01},
        {"off_policy_mask_threshold": 0.01},
        liger=False,
    ),
    Case(
        "dapo, entropy_top_share = 0.5, decoupled",
        {
            "loss_type": "dapo",
            **DECOUPLED,
            "off_policy_correction": "none",
            "entropy_top_share": 0.5,
        },
        {"vllm_importance_sampling_correction": False, "top_entropy_quantile": 0.5},
        liger=False,
    ),
    Case(
        "dapo, no correction, decoupled",
        {"loss_type": "dapo", **DECOUPLED, "off_policy_correction": "none"},
        {"vllm_importance_sampling_correction": False},
    ),
    corrected("truncate, importance_cap = 1.1", "token_truncate", None, 1.1, importance_cap=1.1),
    corrected("mask, importance_cap = 1.1", "token_mask", None, 1.1, off_policy_correction="mask", importance_cap=1.1),
    corrected(
        "icepop 0.9 to 1.2",
        "token_mask",
        0.9,
        1.2,
        off_policy_correction="icepop",
        icepop_band=[0.9, 1.2],
    ),
]

DIFFERENT = [
    Case(
        "grpo, mask_truncated",
        {"loss_type": "grpo", "mask_truncated": True},
        {"mask_truncated_completions": True},
        reason="TRL divides by all completions, we divide by those that are trained: masking must not shrink the step. "
        "The two differ by that factor alone.",
    ),
    Case(
        "grpo, entropy_coefficient = 0.05",
        {"loss_type": "grpo", "entropy_coefficient": 0.05},
        {"entropy_coef": 0.05},
        liger=False,
        reason="TRL takes the mean over the micro-batch's tokens, which depends on how a batch is split; we use the "
        "token weights of the objective. Both are equal for dapo on one micro-batch.",
    ),
    Case(
        "gspo, kl_coefficient = 0.1",
        {"loss_type": "gspo", "kl_coefficient": 0.1},
        {"loss_type": "grpo", "beta": 0.1, **SEQUENCE},
        reason="TRL multiplies a token's KL by its sequence's ratio, we multiply it by the token's own, without which "
        "the gradient is not that of the KL.",
    ),
    Case(
        "dapo, negative_mask_threshold = 0.01, decoupled",
        {"loss_type": "dapo", **DECOUPLED, "off_policy_correction": "none", "negative_mask_threshold": 0.01},
        {"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.01},
        liger=False,
        reason="TRL looks at π/μ in every optimizer step, we look at π_old/μ, which is known before the forward, so "
        "that one pass is enough; the clip bounds what π does after that.",
    ),
]


@dataclass
class AdvantageCase:
    """Advantages of two reward functions with the weights 1 and 0.5, of which the second says None to some samples."""

    name: str
    ours: dict[str, str]
    """Arguments of group_advantages or normalized_each"""
    trl: dict[str, Any]
    each: bool = False
    rloo: bool = False
    reason: str = ""

    def for_peers(self) -> dict[str, Any]:
        trl = {"reward_weights": [1.0, 0.5], **self.trl}
        return {"trl": trl, "liger": None, "decoupled": False, "rloo": self.rloo}

    def advantages(self, batch: Batch) -> torch.Tensor:
        samples = [{"a": a, "b": b} for a, b in zip(*batch["rewards"], strict=True)]
        groups = [samples[i : i + GENERATIONS] for i in range(0, len(samples), GENERATIONS)]
        if self.each:
            values = normalized_each(groups, {"a": 1.0, "b": 0.5}, **self.ours)
        else:
            sums = [[sample["a"] + 0.5 * (sample["b"] or 0.0) for sample in group] for group in groups]
            values = group_advantages(sums, **self.ours)
        return torch.tensor(values, dtype=torch.float64).flatten()


ADVANTAGES = [
    AdvantageCase('advantage = "group"', {}, {}),
    AdvantageCase('advantage = "rloo" (theirs: RLOOTrainer)', {"estimator": "rloo"}, {"beta": 0.0}, rloo=True),
    AdvantageCase('scale_rewards = "group"', {"scale_rewards": "group"}, {"scale_rewards": "group"}),
    AdvantageCase('scale_rewards = "batch"', {"scale_rewards": "batch"}, {"scale_rewards": "batch"}),
    AdvantageCase(
        'reward_aggregation = "normalize_each", scale_rewards = "group"',
        {"scale_rewards": "group"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        each=True,
    ),
]
