"""Names of the objectives, for the configuration, which is checked without importing torch."""

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")
"""The keys of objectives.OBJECTIVES"""
