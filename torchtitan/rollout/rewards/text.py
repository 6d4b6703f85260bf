"""Rewards that look at characters and tokens alone: is it the reference answer, and how is it written."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

PARTIAL_CREDIT = 0.5
THINK_THEN_ANSWER = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
REPETITION_NGRAM = 4

Completion = str | list[dict[str, Any]]
"""Text, or chat messages where the prompt was a chat"""


def texts(completions: Sequence[Completion], prefill: str = "") -> list[str]:
    """The text of every completion, behind what the prompt began it with; of a chat, the last message's content."""
    return [prefill + (one if isinstance(one, str) else one[-1]["content"]) for one in completions]


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
