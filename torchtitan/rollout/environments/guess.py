"""A built-in environment: guess a number from 0 to 31 in six turns, each answered by where the number is.

    ? 16. < 07. > 11. > 13. (won)

To guess well, the policy has to remember what it was told, turns ago.
"""

from __future__ import annotations

from typing import Any

LARGEST = 31
GUESSES = 6
# For a guess that no earlier answer rules out; all of them together are less than a win.
HEEDED = 0.1
END_OF_GUESS = "."


class Guess:
    """A step is two digits and an end mark; the answer is `<` (the number is smaller), `>` (it is larger), or `!` for
    what is no guess. The reward is 1 for the number, and a little for every guess that is in line with the answers."""

    def __init__(self) -> None:
        self.secret = self.guesses = 0
        self.low, self.high = 0, LARGEST

    def reset(self, secret: int) -> str:
        """Begin; there is nothing to see yet."""
        self.secret, self.guesses = secret, 0
        self.low, self.high = 0, LARGEST
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """(answer, reward, whether the game is over)."""
        self.guesses += 1
        digits = action.removesuffix(END_OF_GUESS)
        over = self.guesses == GUESSES
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


def rows() -> list[dict[str, Any]]:
    """One for every number."""
    return [{"prompt": "?", "secret": secret} for secret in range(LARGEST + 1)]
