"""Is the final answer mathematically equal to the reference? math-verify decides wherever numbers alone do not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from torchtitan.rollout.rewards.text import Completion, texts

# One number: 1,234.5 or 12 or .5, or a plain fraction of whole numbers.
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+")
# A sign between two operands belongs to neither (the last number of "10-3" is 3).
OPERATOR = re.compile(r"(?<=[\w)\]])[-+](?=\.?\d)")
# Prose: two plain words in a row. math-verify would read them as a product of letters.
PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
GSM8K_MARK = "####"
# Seconds that math-verify may take for reading or comparing one answer.
MATH_VERIFY_SECONDS = 5


def accuracy(*, completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1 where the completion's final answer equals the reference, else 0; None where the reference cannot be read.

    The final answer is the last \\boxed{…} behind the last </think>, or else the last number there. References may be
    plain, boxed, LaTeX, or GSM8K's worked solutions that end in `#### 72`.
    """
    return [_is_right(text, gold) for text, gold in zip(texts(completions), answer, strict=True)]


def final_answer(text: str) -> str | None:
    """What a completion gives as its answer: the last boxed expression, or else the last number."""
    text = text.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    numbers = NUMBER.findall(OPERATOR.sub(" ", text))
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
    """Content of the last complete \\boxed{…} (or \\fbox{…}), braces balanced."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))):
        depth = 1
        for i in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[match.end() : i].strip()
    return None


def as_number(text: str) -> Fraction | None:
    """The exact value of a plain number; currency, per cent signs, units of LaTeX and a final full stop are let go."""
    bare = text.strip().strip("$").replace("\\$", "").replace("\\%", "").replace("{,}", ",").strip()
    bare = bare.removeprefix("$").removesuffix("%").removesuffix(".").strip()
    if not NUMBER.fullmatch(bare):
        return None
    try:
        return Fraction(bare.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _is_right(text: str, gold: Any) -> float | None:
    expected = gold_answer(gold)
    if expected is None:
        return None
    answer = final_answer(text)
    wanted = as_number(expected)
    if wanted is not None and answer is not None:
        given = as_number(answer)
        if given is not None:
            return float(given == wanted)
    return _math_verify(expected, answer)


def _math_verify(expected: str, answer: str | None) -> float | None:
    # Slow to import (sympy), and not needed for plain numbers.
    from math_verify import parse, verify

    prose = PROSE.search(LATEX_TEXT.sub(" ", expected))
    gold = parse(expected if prose else f"\\boxed{{{expected}}}", parsing_timeout=MATH_VERIFY_SECONDS)
    if all(isinstance(reading, str) for reading in gold):  # nothing but the text itself
        return None
    if answer is None:
        return 0.0
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=MATH_VERIFY_SECONDS)
    return float(bool(given) and verify(gold, given, timeout_seconds=MATH_VERIFY_SECONDS))
