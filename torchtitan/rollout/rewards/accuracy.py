"""Is the final answer mathematically equal to the reference? math-verify decides wherever numbers alone do not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from torchtitan.rollout.rewards.math_check import same_mathematics
from torchtitan.rollout.rewards.text import Completion, texts

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
