"""Reward functions with TRL's call convention, and the worker processes that run them.

A reward function is called with the keyword arguments ``prompts, completions, completion_ids, finish_reasons,
max_completion_tokens`` and every other column of the dataset, so it must accept ``**kwargs``. All of them are lists
with one entry per completion, except the token limit. It returns one float per completion, or None for a completion
that it does not judge; it may be async.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.errors import UserError, load_object, nearest

BUILTIN: dict[str, str] = {
    "accuracy": "torchtitan.rollout.rewards.builtin_rewards:accuracy",
    "arithmetic": "torchtitan.rollout.rewards.builtin_rewards:arithmetic",
    "cosine_length": "torchtitan.rollout.rewards.builtin_rewards:cosine_length",
    "exact_match": "torchtitan.rollout.rewards.builtin_rewards:exact_match",
    "format": "torchtitan.rollout.rewards.builtin_rewards:format",
    "length": "torchtitan.rollout.rewards.builtin_rewards:length",
    "repetition": "torchtitan.rollout.rewards.builtin_rewards:repetition",
    "soft_overlong": "torchtitan.rollout.rewards.builtin_rewards:soft_overlong",
}

NEEDS_ANSWER = frozenset({"accuracy", "arithmetic", "cosine_length", "exact_match", "length"})
"""Built-in functions that compare with the reference answer (rewards.answer_column)"""

PASSING_REWARD = 1.0
"""The least reward of a sample that counts as a success"""

ARGUMENTS = frozenset(
    {
        "prompts", "completions", "completion_ids", "finish_reasons", "max_completion_tokens", "prefill",
        "thoughts", "final_texts", "environments", "trainer_state", "log_extra", "log_metric",
    }
)  # fmt: skip
"""What a function gets beside the dataset's columns, which therefore have other names"""

CHECKS_MATHEMATICS = frozenset({"accuracy", "cosine_length", "length"})
"""Built-in functions that may need math-verify, which takes seconds to load"""


def is_built_in(name: str) -> bool:
    return name in BUILTIN


def load_reward(name: str) -> Callable[..., Any]:
    """Return the reward function of a built-in name or of `package.module:function`.

    Raises:
        UserError: there is no such built-in, module or function; the message names the nearest known one.
    """
    name_of = BUILTIN.get(name, name)
    if not all(name_of.partition(":")):
        raise UserError(
            f"unknown reward function {name!r}{nearest(name, BUILTIN)}: it must be one of "
            f"{', '.join(BUILTIN)}, or `package.module:function`"
        )
    return load_object(name_of, "reward function")
