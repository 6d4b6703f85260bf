"""Rewards that compare a completion with the reference answer, character by character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan.rollout.rewards.text import Completion, texts

PARTIAL_CREDIT = 0.5


def exact_match(*, completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1 where the completion is the answer, white space around both aside, else 0; None where there is no answer."""
    return [
        None if gold is None else float(text.strip() == str(gold).strip())
        for text, gold in zip(texts(completions), answer, strict=True)
    ]


def arithmetic(
    *, completions: Sequence[Completion], answer: Sequence[str], finish_reasons: Sequence[str], **kwargs: Any
) -> list[float | None]:
    """1 for the exact answer, else half the share of right digits; 0 without the right length and an end token."""
    return [
        _digits_right(text, gold) if reason == "stop" else 0.0
        for text, gold, reason in zip(texts(completions), answer, finish_reasons, strict=True)
    ]


def _digits_right(text: str, gold: str) -> float:
    if len(text) != len(gold):
        return 0.0
    if text == gold:
        return 1.0
    return PARTIAL_CREDIT * sum(a == b for a, b in zip(text, gold, strict=True)) / len(gold)
