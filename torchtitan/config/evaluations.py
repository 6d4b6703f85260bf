"""[[eval.set]]: what a run is evaluated on, by name. A configuration without such tables has one set for each source,
which is what [eval] says of it; what a set does not give, it has from there.

A set has keys of [eval] as they are, and of other tables as sources have them (sources.py)."""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import dataclass

from torchtitan.config.derived import for_source, source_name, sources_of
from torchtitan.config.job_config import JobConfig, with_values
from torchtitan.config.sources import OF_PROMPTS, Source, Task
from torchtitan.config.values import TABLE

EVAL_KEYS = (
    "dataset", "num_prompts", "samples_per_prompt", "interval", "temperature", "greedy",
    "reward_function",
)  # fmt: skip
"""Keys of [eval] that a set may have"""
SET_KEYS = (*OF_PROMPTS, *(f"eval.{key}" for key in EVAL_KEYS))


@dataclass(config=TABLE)
class EvalSet(Task):
    source: str = ""
    """Name of the source whose prompts, environment and rewards it has; empty: those of [rollout], [environment] and
    [rewards]"""


def built_set(given: dict[str, Any]) -> EvalSet:
    """Return a set of eval.set, which has been checked."""
    own = {key: value for key, value in given.items() if key in ("name", "source")}
    return EvalSet(**own, values={key: value for key, value in given.items() if key not in own})


def sets_of(config: JobConfig) -> list[tuple[str, JobConfig]]:
    """The name of every set, and the run's configuration as it is for that set: what it gives is in the tables. A run
    without [[eval.set]] has one set for each source, by the source's name."""
    sources = dict(sources_of(config))
    sets = [built_set(given) for given in config.eval.set]
    return [(given.name, _for_set(sources.get(given.source, config), given)) for given in sets] or sources_of(config)


def tasks_of(config: JobConfig) -> dict[str, JobConfig]:
    """The configuration of every source and every set that is evaluated, by what prompts say of their source."""
    sets = sets_of(config) if config.eval.enable else []
    return {source_name(own): own for _, own in (*sources_of(config), *sets)}


def _for_set(base: JobConfig, eval_set: EvalSet) -> JobConfig:
    values = eval_set.values
    # A source may have the same name.
    own = for_source(with_values(base, {"eval.set": [], "distill.server.url": "", **values}), Source(eval_set.name))
    own.source[0].name = f"eval/{eval_set.name}"
    if "eval.reward_function" not in values and any(key.startswith("environment.") for key in values):
        own.eval.reward_function = own.environment.reward_name
    return own
