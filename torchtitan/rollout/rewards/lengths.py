"""Rewards for the length of a completion, in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchtitan.rollout.rewards.accuracy import accuracy
from torchtitan.rollout.rewards.text import Completion

# DAPO punishes within the last 4,096 of 20,480 tokens.
OVERLONG_SHARE = 0.2


def soft_overlong(
    *, completion_ids: Sequence[Sequence[int]], max_completion_tokens: int, **kwargs: Any
) -> list[float | None]:
    """DAPO's soft overlong punishment: 0 up to 80 % of the token limit, then linearly down to -1 at the limit."""
    free = (1.0 - OVERLONG_SHARE) * max_completion_tokens
    span = max_completion_tokens - free
    return [-min(1.0, max(0.0, (len(ids) - free) / span)) for ids in completion_ids]


def cosine_length(
    *,
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[Any],
    max_completion_tokens: int,
    prefill: str = "",
    **kwargs: Any,
) -> list[float | None]:
    """Correctness scaled by length (Yeo et al. 2025, equation 1), along a cosine: a right answer earns 1 (short) to 0.5
    (long), a wrong one -1 (short) to -0.5, and any completion that reaches the token limit -1. None where the reference
    answer cannot be read."""
    rewards: list[float | None] = []
    for right, ids in zip(
        accuracy(completions=completions, answer=answer, prefill=prefill), completion_ids, strict=True
    ):
        size = 0.75 + 0.25 * math.cos(math.pi * len(ids) / max_completion_tokens)
        value = -1.0 if len(ids) >= max_completion_tokens else size if right == 1.0 else -size
        rewards.append(None if right is None else value)
    return rewards


def length(
    *,
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[Any],
    prefill: str = "",
    **kwargs: Any,
) -> list[float | None]:
    """The length reward of Kimi k1.5: 0.5 for the shortest completion of the group to -0.5 for the longest; wrong
    answers earn at most 0. None where the reference answer cannot be read."""
    counts = [len(ids) for ids in completion_ids]
    shortest, spread = min(counts), max(counts) - min(counts)
    rewards: list[float | None] = []
    for right, count in zip(accuracy(completions=completions, answer=answer, prefill=prefill), counts, strict=True):
        value = 0.5 - (count - shortest) / spread if spread else 0.0
        rewards.append(None if right is None else value if right == 1.0 else min(0.0, value))
    return rewards
