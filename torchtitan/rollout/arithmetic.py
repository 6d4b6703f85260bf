"""The built-in task: two-digit addition with the digits of the sum reversed, so that the carry runs left to right."""

from __future__ import annotations

LARGEST_OPERAND = 99


def arithmetic_rows() -> list[dict[str, str]]:
    """All 5,050 pairs a <= b as rows {"prompt": "12+34=", "answer": "640"}, always in the same order.

    Operands are padded to two digits, the sum to three and then reversed (12 + 34 = 046, reversed 640). A pair stands
    here in one order only, so that its mirror image cannot leak from training into evaluation.
    """
    return [
        {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"[::-1]}
        for a in range(LARGEST_OPERAND + 1)
        for b in range(a, LARGEST_OPERAND + 1)
    ]
