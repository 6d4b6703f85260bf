"""[[eval.set]]: what a run is evaluated on, by name. A configuration without such tables has one set for each source,
which is what [eval] says of it; what a set does not give, it has from there."""

from __future__ import annotations

import copy
from typing import Any

from pydantic.dataclasses import dataclass

from torchtitan.config.derived import environment_name, for_source, source_name, sources_of
from torchtitan.config.job_config import JobConfig
from torchtitan.config.sources import IN_TABLE, Source, Task
from torchtitan.config.values import TABLE, Count, CountOrZero, PathText, Positive


@dataclass(config=TABLE)
class EvalSet(Task):
    source: str = ""
    """Name of the source whose prompts, environment and rewards it has; empty: those of [rollout], [environment] and
    [rewards]"""

    dataset: PathText | None = None
    """As eval.dataset; if nothing is given there either, the held-out share of the training rows"""

    dataset_split: str | None = None
    """As eval.dataset_split"""

    rewards: list[str] | None = None
    """As rewards.functions; the first of them decides whether a sample passes (at 1.0)"""

    prompts: Count | None = None
    """As eval.num_prompts"""

    samples: Count | None = None
    """As eval.samples_per_prompt"""

    k: list[int] | None = None
    """As eval.pass_at_k; without it, those of eval.pass_at_k for which there are enough samples"""

    interval: CountOrZero | None = None
    """As eval.interval"""

    temperature: Positive | None = None
    """As eval.temperature"""

    greedy: bool | None = None
    """As eval.greedy"""

    def given(self) -> dict[str, Any]:
        """What the set gives, as its table in TOML has it."""
        return {name: value for name, value in vars(self).items() if value not in (None, "")}


OF_EVAL = {
    "dataset": "dataset", "dataset_split": "dataset_split", "prompts": "num_prompts", "samples": "samples_per_prompt",
    "k": "pass_at_k", "interval": "interval", "temperature": "temperature", "greedy": "greedy",
}  # fmt: skip
"""A key of a set -> the key of [eval] whose place its value takes"""


def sets_of(config: JobConfig) -> list[tuple[str, JobConfig]]:
    """The name of every set, and the run's configuration as it is for that set: what it gives is in the tables. A run
    without [[eval.set]] has one set for each source, by the source's name."""
    sources = dict(sources_of(config))
    sets = [EvalSet(**given) for given in config.eval.set]
    return [(given.name, _for_set(sources.get(given.source, config), given)) for given in sets] or sources_of(config)


def tasks_of(config: JobConfig) -> dict[str, JobConfig]:
    """The configuration of every source and every set that is evaluated, by what prompts say of their source."""
    sets = sets_of(config) if config.eval.enable else []
    return {source_name(own): own for _, own in (*sources_of(config), *sets)}


def _for_set(base: JobConfig, eval_set: EvalSet) -> JobConfig:
    values = eval_set.given()
    shared = {key: value for key, value in values.items() if key in (*IN_TABLE, "environment") and key not in OF_EVAL}
    shared.pop("rewards", None)
    own = for_source(base, Source(eval_set.name, **shared))
    # A source may have the same name.
    own.source[0].name = f"eval/{eval_set.name}"
    own.eval, own.distill = copy.copy(base.eval), copy.copy(base.distill)
    own.eval.set, own.distill.teacher_url = [], ""
    for key, value in values.items():
        if key in OF_EVAL:
            setattr(own.eval, OF_EVAL[key], value)
    if eval_set.k is None:
        own.eval.pass_at_k = [k for k in own.eval.pass_at_k if k <= own.eval.samples_per_prompt] or [1]
    if eval_set.rewards or eval_set.environment:
        own.eval.reward_function = eval_set.rewards[0] if eval_set.rewards else environment_name(own)
    return own
