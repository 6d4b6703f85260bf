"""A built-in environment: guess a number from 0 to 31 in six turns, each answered by where the number is.

    ? 16. < 07. > 11. > 13. (won)

To guess well, the policy has to remember what it was told, turns ago.
"""

from __future__ import annotations

from typing import Any

LARGEST = 31
GUESSES = 6
END_OF_GUESS = "."


class Guess:
    """A step is two digits and an end mark; the answer is `<` (the number is smaller), `>` (it is larger), or `!` for
    what is no guess. The reward is 1 for the number, 0 for every other guess."""

    def __init__(self) -> None:
        self.secret = self.guesses = 0

    def reset(self, secret: int) -> str:
        """Begin; there is nothing to see yet."""
        self.secret, self.guesses = secret, 0
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """(answer, reward, whether the game is over)."""
        self.guesses += 1
        number = action.removesuffix(END_OF_GUESS)
        over = self.guesses == GUESSES
        if len(number) != 2 or not number.isascii() or not number.isdigit():
            return "!", 0.0, over
        if int(number) == self.secret:
            return "=", 1.0, True
        return "<" if self.secret < int(number) else ">", 0.0, over


def rows() -> list[dict[str, Any]]:
    """One for every number."""
    return [{"prompt": "?", "secret": secret} for secret in range(LARGEST + 1)]
