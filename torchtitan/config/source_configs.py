"""The configuration of every source: what a [[source]] gives is in the tables, and everything else is the run's. And
what a run has to know of all of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan.config.job_config import JobConfig, with_values
from torchtitan.config.sources import Source


def source_configs(config: JobConfig) -> list[tuple[str, JobConfig]]:
    """The name of every source, and the run's configuration as it is for that source: what the source gives is in the
    tables, and `source` has only it. A run without [[source]] has one source, whose name is empty."""
    return [(source.name, config_for_source(config, source)) for source in config.source] or [("", config)]


def config_for_source(config: JobConfig, source: Source) -> JobConfig:
    """The configuration with what this source gives in the tables."""
    values = source.values
    implied: dict[str, Any] = {}
    if "rewards.functions" in values:
        implied["rewards.weights"] = []
    if "distill.teacher" in values:
        implied["distill.server.url"] = ""
    if values.get("distill.teacher") == "":
        implied["distill.hint"] = ""
    source_config = with_values(config, implied | values)
    source_config.source = [source]
    return source_config


def source_name(config: JobConfig) -> str:
    """The name of the source whose configuration this is, as source_configs() made it."""
    return config.source[0].name if config.source else ""


def source_weights(config: JobConfig, rows: Sequence[int]) -> dict[str, float]:
    """The weight of every source by its name. rows: the number of training rows of each."""
    if not config.source:
        return {"": 1.0}
    weights: dict[str, float] = {}
    for source, count in zip(config.source, rows, strict=True):
        weights[source.name] = count * source.epochs if source.epochs else source.weight or 1.0
    return weights


def stop_tokens(config: JobConfig) -> list[int]:
    """The tokens that end completions of any source, besides the checkpoint's own end tokens."""
    tokens: dict[int, None] = {}
    for _, source_config in source_configs(config):
        tokens |= dict.fromkeys(source_config.rollout.stop_token_ids)
    return list(tokens)


def longest_completion(config: JobConfig) -> int:
    """The most tokens that a completion of any source may have."""
    return max(source_config.rollout.max_completion_tokens for _, source_config in source_configs(config))
