"""Reward functions with TRL's call convention, and the worker processes that run them.

A reward function is called with the keyword arguments ``prompts, completions, completion_ids, finish_reasons,
max_completion_tokens`` and every other column of the dataset (lists, one entry per completion, but for the token
limit), so it takes ``**kwargs``. It returns one float per completion, or None where it has no opinion; it may be async.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from torchtitan.errors import UserError

__all__ = ["BUILTIN", "CHECKS_MATHEMATICS", "NEEDS_ANSWER", "load_reward"]

BUILTIN: dict[str, str] = {
    "accuracy": "torchtitan.rollout.rewards.accuracy:accuracy",
    "arithmetic": "torchtitan.rollout.rewards.text:arithmetic",
    "cosine_length": "torchtitan.rollout.rewards.lengths:cosine_length",
    "exact_match": "torchtitan.rollout.rewards.text:exact_match",
    "format": "torchtitan.rollout.rewards.text:format",
    "length": "torchtitan.rollout.rewards.lengths:length",
    "repetition": "torchtitan.rollout.rewards.text:repetition",
    "soft_overlong": "torchtitan.rollout.rewards.lengths:soft_overlong",
}

NEEDS_ANSWER = frozenset({"accuracy", "arithmetic", "cosine_length", "exact_match", "length"})
"""Built-in functions that compare with the reference answer (rewards.answer_column)"""

CHECKS_MATHEMATICS = frozenset({"accuracy", "cosine_length", "length"})
"""Built-in functions that may need math-verify, which takes seconds to load"""


def load_reward(name: str) -> Callable[..., Any]:
    """The reward function of a built-in name or of `package.module:function`.

    Raises:
        UserError: no such built-in, module or function; names the nearest known one.
    """
    module_name, colon, function_name = BUILTIN.get(name, name).partition(":")
    if not colon or not module_name or not function_name:
        raise UserError(
            f"unknown reward function {name!r}{_nearest(name, list(BUILTIN))}: it must be one of "
            f"{', '.join(BUILTIN)}, or `package.module:function`"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise UserError(
            f"reward function {name!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = "has no function" if function is None else "has something that is not a function under the name"
        raise UserError(
            f"reward function {name!r}: {module_name} {what} {function_name!r}{_nearest(function_name, known)}"
        )
    return function


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
