"""What is known of each objective (grpo.loss_type) besides its formula, in one place. Configurations are checked
against it, without torch; the formulas are in grpo/objectives.py. To add one, see docs/adding_an_objective.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


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
    bounded_by: Literal["", "delta", "epsilon_high", "importance_cap"] = ""
    """Key of [grpo] that bounds the weight of a token for every ρ and advantage. Without one, and without
    largest_weight, it counts as unbounded, and a run on samples of older policies is refused"""
    largest_weight: float = math.inf
    """The largest weight of a token for every ρ and advantage, where no key decides it"""
    caps_weight: bool = False
    """epsilon_high is the cap of the importance weight, not a range around 1, and epsilon_low is not used"""
    separable: bool = True
    """A token's weight follows from its own ρ, so that a mask of single tokens bounds it, too"""


# DAPO's range, and GSPO's (section 5.1).
DAPO_CLIP, GSPO_CLIP = (0.2, 0.28), (3e-4, 4e-4)
# Where the advantage is positive and where it is negative (SAPO, section 4).
SAPO_TEMPERATURES = (1.0, 1.05)
# SAPO's weight is ρ / cosh²(τ (ρ - 1) / 2) = (1 + 2u/τ) / cosh² u, and u / cosh² u never exceeds 0.448.
SAPO_LARGEST = 1 + 2 * 0.448 / min(SAPO_TEMPERATURES)
OBJECTIVES: dict[str, Descriptor] = {
    "grpo": Descriptor("Shao et al. 2024, eq. 3", DAPO_CLIP, "sequence", bounded_by="delta"),
    "dapo": Descriptor("Yu et al. 2025, section 3.3", DAPO_CLIP, bounded_by="delta"),
    # Kept for parity with TRL: the result depends on how the batch is split into micro-batches.
    "bnpo": Descriptor("TRL", DAPO_CLIP, local=True, bounded_by="delta"),
    "dr_grpo": Descriptor("Liu et al. 2025, section 3.2", DAPO_CLIP, "constant", bounded_by="delta"),
    "gspo": Descriptor("Zheng et al. 2025, eq. 7", GSPO_CLIP, "sequence", ratio="sequence", bounded_by="delta"),
    "gspo_token": Descriptor(
        "Zheng et al. 2025, eq. 14", GSPO_CLIP, "sequence", ratio="sequence_token", bounded_by="delta"
    ),
    # The clip is one-sided, and the ratio of one token moves the weight of all others of its sequence.
    "gmpo": Descriptor("Zhao et al. 2025, GMPO", (1 - math.exp(-0.4), math.exp(0.4) - 1), "sequence", separable=False),
    # The range is of probabilities, as in prime-rl.
    "dppo": Descriptor("Qi et al. 2026, binary TV", (0.2, 0.2)),
    # The cap as in TRL and in ScaleRL (Khatri et al. 2025).
    "cispo": Descriptor("MiniMax-M1 2025, eq. 4", (0.0, 5.0), caps_weight=True, bounded_by="epsilon_high"),
    "sapo": Descriptor("Gao et al. 2025", None, "sequence", largest_weight=SAPO_LARGEST),
    "reinforce": Descriptor("Williams 1992, truncated weight", None, bounded_by="importance_cap"),
}


TEACHER_DIVERGENCES: dict[str, str] = {
    "forward_kl": "Hinton et al. 2015, section 2",
    "reverse_kl": "Agarwal et al. 2024, section 2",
    "jsd": "Agarwal et al. 2024, eq. 1",
}
"""distill.divergence over the whole vocabulary, and where its formula stands (models/head/divergence_head.py).
Nothing has to bound the weight of a token: each term is exact at its position, whichever policy sampled the token
there"""


def describe(loss_type: str) -> Descriptor:
    """The descriptor of an objective by its name; that of a function of the user's own says that nothing is known."""
    return OBJECTIVES.get(loss_type) or Descriptor("the user's own", None)
