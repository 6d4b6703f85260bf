"""A built-in task with a tool: add two numbers of four digits, which a tiny model cannot do but a calculator can.

    1234+5678= [1234+5678] 06912= 06912

The policy writes the call in brackets, reads the result and copies it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

CALL = re.compile(r"\[(\d{4})\+(\d{4})\]")
RESULT_END = "="
ROWS = 4096


def add(a: int, b: int) -> str:
    """The sum of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"{a + b:05d}{RESULT_END}"


def bracket_calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """The calls `[a+b]` of a turn."""
    return [("add", {"a": a, "b": b}) for a, b in CALL.findall(text)]


def right(*, completions: Sequence[str], answer: Sequence[str], finish_reasons: Sequence[str], **_: Any) -> list[float]:
    """1 where the text behind the calculator's result, which the policy has to copy, is the sum; else 0."""
    return [
        float(reason == "stop" and text.rpartition(RESULT_END)[2] == gold)
        for text, gold, reason in zip(completions, answer, finish_reasons, strict=True)
    ]


def rows() -> list[dict[str, str]]:
    """Prompts with their sums, always the same ones, in the same order."""
    numbers = random.Random("calculator")
    pairs = [(numbers.randrange(10000), numbers.randrange(10000)) for _ in range(ROWS)]
    return [{"prompt": f"{a:04d}+{b:04d}=", "answer": f"{a + b:05d}"} for a, b in pairs]
