"""The rewards of a run, those of functions and those that environments give: their weights, what they are called, and
which one judges a sample."""

from __future__ import annotations

from collections import Counter

from torchtitan.config.job_config import JobConfig
from torchtitan.config.source_configs import source_configs


def learns_from_rewards(config: JobConfig) -> bool:
    """Whether samples have advantages. Demonstrations have none, and a teacher's log-probs do without."""
    return config.job.stage == "grpo" or (config.job.stage == "distill" and config.distill.add_rewards)


def reward_weights(config: JobConfig) -> dict[str, float]:
    """The weight of every reward of all sources by its name: those of the functions, and the environment's own with
    weight 1."""
    weights: dict[str, float] = {}
    for _, source_config in source_configs(config):
        functions = source_config.rewards.functions
        weights |= dict(zip(functions, source_config.rewards.weights or [1.0] * len(functions), strict=True))
        if source_config.environment.reward_name:
            weights[source_config.environment.reward_name] = 1.0
    return weights


def reward_labels(config: JobConfig) -> dict[str, str]:
    """What curves and completions call every reward: a function of a module by its own name, if no other has that."""
    short_names = {name: name.rpartition(":")[2] for name in reward_weights(config)}
    bearers = Counter(short_names.values())
    return {name: short if bearers[short] == 1 else name for name, short in short_names.items()}


def judging_reward(config: JobConfig) -> str:
    """The reward by which an evaluation decides whether a sample passes."""
    return config.eval.reward_function or [*config.rewards.functions, config.environment.reward_name][0]
