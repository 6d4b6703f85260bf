"""The built-in tasks with an environment: a sum that needs a calculator, and a number to guess.

The first task has a tool, which adds two four-digit numbers: a tiny model cannot do this by itself.

    1234+5678= [1234+5678] 06912= 06912

The policy writes the call in brackets, reads the result and copies it. The second task has steps: the policy must guess
a number from 0 to 31 in six turns, and each answer says whether the number is smaller or larger.

    ? 16. < 07. > 11. > 13. (won)

To guess well, the policy must remember the answers of earlier turns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

CALL = re.compile(r"\[(\d{4})\+(\d{4})\]")
RESULT_END = "="
CALCULATOR_ROWS = 4096

LARGEST = 31
GUESSES = 6
# The reward for a guess that no earlier answer rules out; six of them are worth less than a win.
HEEDED = 0.1
END_OF_GUESS = "."


def add(a: int, b: int) -> str:
    """The sum of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"{a + b:05d}{RESULT_END}"


def bracket_calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return the calls `[a+b]` in a turn."""
    return [("add", {"a": a, "b": b}) for a, b in CALL.findall(text)]


def right(*, completions: Sequence[str], answer: Sequence[str], finish_reasons: Sequence[str], **_: Any) -> list[float]:
    """Return 1 if the text after the calculator's result, which the policy must copy, is the sum, else 0."""
    return [
        float(reason == "stop" and text.rpartition(RESULT_END)[2] == gold)
        for text, gold, reason in zip(completions, answer, finish_reasons, strict=True)
    ]


def calculator_rows() -> list[dict[str, str]]:
    """Return prompts with their sums, always the same ones in the same order."""
    numbers = random.Random("calculator")
    pairs = [(numbers.randrange(10000), numbers.randrange(10000)) for _ in range(CALCULATOR_ROWS)]
    return [{"prompt": f"{a:04d}+{b:04d}=", "answer": f"{a + b:05d}"} for a, b in pairs]


class Guess:
    """A step is two digits and an end mark; the answer is `<` (the number is smaller), `>` (larger), `=` (found) or `!`
    (not a guess). The reward is 1 for the number, and HEEDED for every other guess consistent with the answers."""

    def __init__(self) -> None:
        self.secret = self.guesses = 0
        self.low, self.high = 0, LARGEST
        self.feedback = ""
        """The number, once the game is over"""

    def reset(self, secret: int) -> str:
        """Begin a game; the observation is empty."""
        self.secret, self.guesses = secret, 0
        self.low, self.high = 0, LARGEST
        self.feedback = ""
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return (answer, reward, whether the game is over)."""
        self.guesses += 1
        digits = action.removesuffix(END_OF_GUESS)
        over = self.guesses == GUESSES
        if over or digits == f"{self.secret:02d}":
            self.feedback = f"{self.secret:02d}"
        if len(digits) != 2 or not digits.isascii() or not digits.isdigit():
            return "!", 0.0, over
        number = int(digits)
        if number == self.secret:
            return "=", 1.0, True
        reward = HEEDED if self.low <= number <= self.high else 0.0
        if self.secret < number:
            self.high = min(self.high, number - 1)
            return "<", reward, over
        self.low = max(self.low, number + 1)
        return ">", reward, over


def guess_rows() -> list[dict[str, Any]]:
    """Return one row for every number."""
    return [{"prompt": "?", "secret": secret} for secret in range(LARGEST + 1)]
