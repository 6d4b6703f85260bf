"""Rewards for how a completion is written."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from torchtitan.rollout.rewards.text import Completion, texts

THINK_THEN_ANSWER = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
REPETITION_NGRAM = 4


def format(*, completions: Sequence[Completion], prefill: str = "", **kwargs: Any) -> list[float | None]:
    """1 where the completion is `<think>…</think>` once and then an answer, else 0. `<think>` may end the prompt."""
    return [float(_thinks_then_answers(text)) for text in texts(completions, prefill)]


def _thinks_then_answers(text: str) -> bool:
    match = THINK_THEN_ANSWER.fullmatch(text)
    if match is None or text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return bool(match["answer"].strip())


def repetition(*, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float | None]:
    """Minus the share of the completion's token 4-grams that occurred before in it: 0 (none) to almost -1 (a loop)."""
    return [-_repeated_share(ids) for ids in completion_ids]


def _repeated_share(ids: Sequence[Hashable]) -> float:
    grams = [tuple(ids[i : i + REPETITION_NGRAM]) for i in range(len(ids) - REPETITION_NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
