"""What finished groups depend on in the configuration, besides prompts and weights: a run that goes on with other
values samples those anew that were left over."""

from __future__ import annotations

import json
from typing import Any

from torchtitan.config.job_config import JobConfig, value_at

# By table. Prompts are compared apart (prompt_stream.py), and time limits or numbers of workers change no sample.
KEYS = {
    "training": ("seq_len",),
    "job": ("stage",),
    "grpo": ("group_size", "routing_replay"),
    "rollout": (
        "temperature", "top_p", "top_k", "min_p", "max_completion_tokens", "stop_token_ids", "chat_template",
        "system_prompt", "chat_template_kwargs",
    ),
    "rewards": ("functions", "weights", "answer_column"),
    "environment": (
        "factory", "tools", "agent", "verifiers.id", "verifiers.harness", "tool_parser", "max_turns", "on_failure",
    ),
    "distill": (
        "teacher", "server.url", "divergence", "hint", "hint_template", "add_rewards",
    ),
}  # fmt: skip


def sampled_as(config: JobConfig) -> dict[str, Any]:
    """Return these keys with their values, as JSON has them. config: that of one source."""
    values = {f"{table}.{key}": value_at(config, f"{table}.{key}") for table, keys in KEYS.items() for key in keys}
    return dict(json.loads(json.dumps(values, default=str)))


def changed_since(before: dict[str, Any] | None, config: JobConfig) -> dict[str, str]:
    """Return the keys that had other values when groups were sampled -> both values; before: sampled_as() of then, or
    None where a checkpoint of an earlier release does not say it."""
    now = sampled_as(config)
    return {
        key: f"{before[key]!r} -> {value!r}"
        for key, value in now.items()
        if before is not None and key in before and before[key] != value
    }
