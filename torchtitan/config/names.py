"""Names of the objectives, for the configuration, which is checked without importing torch."""

LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "sapo", "reinforce")
"""The keys of objectives.OBJECTIVES"""

ADVANTAGES = ("group", "rloo", "batch", "reinforce_pp")
"""The keys of advantages.ESTIMATORS"""

CORRECTIONS = ("truncate", "mask", "icepop", "none")
"""The keys of off_policy.CORRECTIONS"""

DIVERGENCES = ("k1", "k2", "k3")
"""The keys of divergence.ESTIMATORS"""
