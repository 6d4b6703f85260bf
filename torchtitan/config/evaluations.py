"""[[eval.set]]: what a run is evaluated on, by name. A configuration without such tables has one set for each source,
which is what [eval] says of it; what a set does not give, it has from there.

A set has keys of [eval] as they are, and of other tables as sources have them (sources.py)."""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import dataclass

from torchtitan.config.job_config import JobConfig, with_values
from torchtitan.config.source_configs import config_for_source, source_configs, source_name
from torchtitan.config.sources import OF_PROMPTS, Source, Task
from torchtitan.config.values import TABLE

EVAL_KEYS = (
    "dataset", "num_prompts", "samples_per_prompt", "interval", "temperature", "greedy",
    "reward_function",
)  # fmt: skip
"""Keys of [eval] that a set may have"""
# Before the name of a set, in what prompts say of their source: a source may have the same name.
OF_SETS = "eval/"
SET_KEYS = (*OF_PROMPTS, *(f"eval.{key}" for key in EVAL_KEYS))


@dataclass(config=TABLE)
class EvalSet(Task):
    source: str = ""
    """Name of the source whose prompts, environment and rewards it has; empty: those of [rollout], [environment] and
    [rewards]"""


def built_set(given: dict[str, Any]) -> EvalSet:
    """Return a set of eval.set, which has been checked."""
    fields = {key: value for key, value in given.items() if key in ("name", "source")}
    return EvalSet(**fields, values={key: value for key, value in given.items() if key not in fields})


def eval_configs(config: JobConfig) -> list[tuple[str, JobConfig]]:
    """The name of every set, and the run's configuration as it is for that set: what it gives is in the tables. A run
    without [[eval.set]] has one set for each source, by the source's name."""
    sources = dict(source_configs(config))
    eval_sets = [built_set(given) for given in config.eval.set]
    if not eval_sets:
        return source_configs(config)
    return [(eval_set.name, _for_set(sources.get(eval_set.source, config), eval_set)) for eval_set in eval_sets]


def sampled_dataset(config: JobConfig) -> tuple[str, str]:
    """(key, dataset) of the rows that this source is trained on, or that this set of eval_configs() is evaluated on."""
    if source_name(config).startswith(OF_SETS) and config.eval.dataset:
        return "eval.dataset", config.eval.dataset
    return "rollout.dataset", config.rollout.dataset


def task_configs(config: JobConfig) -> dict[str, JobConfig]:
    """The configuration of every source and every set that is evaluated, by what prompts say of their source."""
    sets = eval_configs(config) if config.eval.is_used else []
    return {source_name(task_config): task_config for _, task_config in (*source_configs(config), *sets)}


def _for_set(base: JobConfig, eval_set: EvalSet) -> JobConfig:
    values = eval_set.values
    without_sets = with_values(base, {"eval.set": [], "distill.server.url": "", **values})
    set_config = config_for_source(without_sets, Source(eval_set.name))
    set_config.source[0].name = f"{OF_SETS}{eval_set.name}"
    if "eval.reward_function" not in values and any(key.startswith("environment.") for key in values):
        set_config.eval.reward_function = set_config.environment.reward_name
    return set_config
