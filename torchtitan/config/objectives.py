"""What is known of each objective (grpo.loss_type) besides its formula, in one place. Configurations are checked
against it, without torch; the formulas are in grpo/objectives.py. To add one, see docs/adding_an_objective.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Descriptor:
    """One objective."""

    source: str
    """Where its formula stands"""
    clip: tuple[float, float] | None
    """epsilon_low and epsilon_high by default; None: it does not clip"""
    normalizer: Literal["token", "sequence", "constant"] = "token"
    """How tokens are weighted, see grpo.loss_normalization"""
    local: bool = False
    """The normalizer applies to each micro-batch by itself, and micro-batches have equal weight"""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """`sequence`: ρ is one number per sequence, the geometric mean over its tokens (GSPO, Zheng et al. 2025, eq. 7).
    `sequence_token`: ρ has that value, but each token has its own gradient, sg(ρ) π/sg(π) (GSPO-token, eq. 14)"""
    bounded_by: tuple[str, ...] = ()
    """Keys of [grpo] that together bound the weight of a token for every ρ and advantage. Without any it counts as
    unbounded, and a run on samples of older policies is refused"""
    separable: bool = True
    """A token's weight follows from its own ρ, so that a mask of single tokens bounds it, too"""


# DAPO's range, and GSPO's (section 5.1).
DAPO_CLIP, GSPO_CLIP = (0.2, 0.28), (3e-4, 4e-4)
OBJECTIVES: dict[str, Descriptor] = {
    "grpo": Descriptor("Shao et al. 2024, eq. 3", DAPO_CLIP, "sequence", bounded_by=("delta",)),
    "dapo": Descriptor("Yu et al. 2025, section 3.3", DAPO_CLIP, bounded_by=("delta",)),
    # Kept for parity with TRL: the result depends on how the batch is split into micro-batches.
    "bnpo": Descriptor("TRL", DAPO_CLIP, local=True, bounded_by=("delta",)),
    "dr_grpo": Descriptor("Liu et al. 2025, section 3.2", DAPO_CLIP, "constant", bounded_by=("delta",)),
    "gspo": Descriptor("Zheng et al. 2025, eq. 7", GSPO_CLIP, "sequence", ratio="sequence", bounded_by=("delta",)),
    "gspo_token": Descriptor(
        "Zheng et al. 2025, eq. 14", GSPO_CLIP, "sequence", ratio="sequence_token", bounded_by=("delta",)
    ),
    # The clip is one-sided, and the ratio of one token moves the weight of all others of its sequence.
    "gmpo": Descriptor("Zhao et al. 2025, GMPO", (1 - math.exp(-0.4), math.exp(0.4) - 1), "sequence", separable=False),
    # The range is of probabilities, as in prime-rl.
    "dppo": Descriptor("Qi et al. 2026, binary TV", (0.2, 0.2)),
    "cispo": Descriptor("MiniMax-M1 2025, eq. 4", None, bounded_by=("cispo_cap",)),
    "sapo": Descriptor(
        "Gao et al. 2025", None, "sequence", bounded_by=("sapo_temperature_positive", "sapo_temperature_negative")
    ),
    "reinforce": Descriptor("Williams 1992, truncated weight", None, bounded_by=("importance_cap",)),
}


TEACHER_DIVERGENCES: dict[str, str] = {
    "forward_kl": "Hinton et al. 2015, section 2",
    "reverse_kl": "Agarwal et al. 2024, section 2",
    "jsd": "Agarwal et al. 2024, eq. 1",
}
"""distill.divergence over the whole vocabulary, and where its formula stands (models/head/divergence_head.py).
Nothing has to bound the weight of a token: each term is exact at its position, whichever policy sampled the token
there"""


def _gate(temperature: float) -> float:
    # SAPO's weight is ρ / cosh²(τ (ρ - 1) / 2) = (1 + 2u/τ) / cosh² u, and u / cosh² u never exceeds 0.448.
    return 1 + 2 * 0.448 / temperature


# The largest weight that a key of bounded_by allows, by its value; other keys are caps.
_ALLOWED: Mapping[str, Callable[[float], float]] = {
    "delta": lambda delta: delta or math.inf,
    "sapo_temperature_positive": _gate,
    "sapo_temperature_negative": _gate,
}


def describe(loss_type: str) -> Descriptor:
    """The descriptor of an objective by its name; that of a function of the user's own says that nothing is known."""
    return OBJECTIVES.get(loss_type) or Descriptor("the user's own", None)


def largest_weight(grpo: Mapping[str, Any]) -> tuple[str, float]:
    """(the key of [grpo] that decides it, the largest weight that the objective gives a token for any ρ); infinity and
    loss_type where nothing is known to bound it. grpo: the values of that table."""
    keys = describe(grpo["loss_type"]).bounded_by
    weights = [(_ALLOWED.get(key, float)(grpo[key]), key) for key in keys]
    weight, key = max(weights, default=(math.inf, "loss_type"))
    return key, weight
