"""The built-in rewards: is the answer right, how is it written, and how long is it."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any

from torchtitan.rollout.rewards.math_check import same_mathematics

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


# One number: 1,234.5 or 12 or .5 or 1e5, or a plain fraction of whole numbers. Longer exponents would take years.
_NUMBER = r"(?:[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w)|/\d+)?|[-+]?\.\d+)"
_PERCENT = r"\\?%|per\s?cent\b|\\text\s*\{\s*per\s?cent\s*\}"
NUMBER = re.compile(rf"{_NUMBER}(?:\s*\\?%)?")
# A number with its unit in plain words; words of one or two letters may be variables.
QUANTITY = re.compile(
    rf"(?P<number>{_NUMBER})(?:\s*(?P<percent>{_PERCENT})|\s+(?P<unit>[a-zA-Z]{{3,}}(?:\s+[a-zA-Z]+)*))?"
)
# Words behind a number that change its value, or are mathematics: math-verify decides.
NOT_A_UNIT = re.compile(
    r"\b(hundred|thousand|million|billion|trillion|dozen|hal(f|ves)|thirds?|fourths?|quarters?|fifths?|tenths?|"
    r"hundredths?|thousandths?|times|plus|minus|over|mod|squared|cubed|and|sqrt|sin|cos|tan|log|exp|factorial)\b", re.I
)  # fmt: skip
# \, and its like between groups of digits: 1\,234.
THIN_SPACE = re.compile(r"(?:(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])+|(?<=,)\\!)(?=\d{3}(?!\d))")
# A sign between two operands belongs to neither (the last number of "10-3" is 3).
OPERATOR = re.compile(r"(?<=[\w)\]])(?<!\d[eE])[-+](?=\.?\d)")
# What braces and boxes are made of; \{ and \\ are no braces.
BOX = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
GSM8K_MARK = "####"


def accuracy(
    *, completions: Sequence[Completion], answer: Sequence[Any], prefill: str = "", **kwargs: Any
) -> list[float | None]:
    """1 where the completion's final answer equals the reference, else 0; None where the reference cannot be read.

    The final answer is the last \\boxed{…} outside of <think>…</think>, or else the last number there; a thought that
    is never closed holds none. References may be plain, boxed, LaTeX, or GSM8K's worked solutions that end in
    `#### 72`. An answer that takes too long to compare is wrong.
    """
    rewards: list[float | None] = []
    unclear: dict[int, tuple[str, str | None]] = {}
    for number, (text, gold) in enumerate(zip(texts(completions, prefill), answer, strict=True)):
        wanted, given = gold_answer(gold), final_answer(text)
        rewards.append(None if wanted is None else _same_number(wanted, given))
        if wanted is not None and rewards[-1] is None:
            unclear[number] = (wanted, given)
    for number, verdict in zip(unclear, same_mathematics(list(unclear.values())), strict=True):
        rewards[number] = verdict
    return rewards


def final_answer(text: str) -> str | None:
    """What a completion gives as its answer: the last boxed expression, or else the last number."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    numbers = NUMBER.findall(OPERATOR.sub(" ", THIN_SPACE.sub("", text)))
    return numbers[-1] if numbers else None


def gold_answer(gold: Any) -> str | None:
    """The answer itself of a reference, None for an empty one."""
    if gold is None:
        return None
    text = str(gold)
    if GSM8K_MARK in text:
        text = text.rpartition(GSM8K_MARK)[2]
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip() or None


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{…} (or \\fbox{…}), braces balanced, in one pass over the text."""
    opened: list[int] = []  # where the content of each open brace begins; -1 where it is no box
    start, end = -1, -1
    for match in BOX.finditer(text):
        if match[0] == "}":
            begin = opened.pop() if opened else -1
            if begin > start:
                start, end = begin, match.start()
        elif match[0].endswith("{") and match[0] != "\\{":
            opened.append(match.end() if len(match[0]) > 1 else -1)
    return text[start:end].strip() if start >= 0 else None


def as_number(text: str) -> tuple[Fraction, bool] | None:
    """The exact value of a plain number and whether it is in per cent; currency, units in words and a final full stop
    are let go."""
    bare = THIN_SPACE.sub("", text.strip().strip("$").replace("\\$", "").replace("{,}", ",")).strip()
    match = QUANTITY.fullmatch(bare.removeprefix("$").removesuffix(".").strip())
    if match is None or NOT_A_UNIT.search(match["unit"] or ""):
        return None
    try:
        return Fraction(match["number"].replace(",", "")), bool(match["percent"])
    except (ValueError, ZeroDivisionError):
        return None


def _same_number(expected: str, answer: str | None) -> float | None:
    """1 or 0; None where one of them is no plain number. Where only one is in per cent, 50 % is 50 as well as 1/2."""
    wanted, given = as_number(expected), as_number(answer or "")
    if wanted is None or given is None:
        return None
    (a, a_percent), (b, b_percent) = wanted, given
    return float(a == b or (a_percent != b_percent and (a / 100 == b if a_percent else a == b / 100)))


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
