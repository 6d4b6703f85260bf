"""Which references the reward `accuracy` cannot read, found when a dataset is loaded.

Run as a program, it reads a JSON list of references and prints for each whether math-verify can: 1 or 0. It is a
process of its own because sympy takes seconds to load, and a strange formula may take it down.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.rewards import CHECKS_MATHEMATICS
from torchtitan.rollout.rewards.answers import gold_answer, reference_text
from torchtitan.rollout.rewards.comparison import compare

logger = logging.getLogger(__name__)

# A thousand formulas take some six seconds of a processor.
READING_SECONDS = 60.0
AT_ONCE = 100
SHOWN_ROWS = 5


def check_references(references: Sequence[Any], where: str, functions: Sequence[str]) -> None:
    """Warn of references that no answer can equal in one of these built-in functions, so that it gives no reward.

    Raises:
        UserError: that is so of all references.
    """
    wrong = unreadable(references, as_mathematics=not CHECKS_MATHEMATICS.isdisjoint(functions))
    if not wrong:
        return
    count = sum(reference is not None for reference in references)
    rows = ", ".join(str(i + 1) for i in wrong[:SHOWN_ROWS])
    if len(wrong) > SHOWN_ROWS:
        rows += ", …"
    message = (
        f"{where}: {len(wrong)} of {count} references are nothing that {', '.join(functions)} can read "
        f"(rows {rows}; such as {str(references[wrong[0]])[:60]!r}): a reference is a number, words, a "
        "sequence or a formula, as text"
    )
    if len(wrong) == count:
        raise UserError(message)
    logger.warning("%s; completions for them get no such reward", message)


def unreadable(references: Sequence[Any], as_mathematics: bool) -> list[int]:
    """Return the positions of references that are not null and that no answer can equal: NaN, a list of several, an
    object, bytes; as mathematics also empty text, or a formula that math-verify cannot parse or does not find equal to
    itself."""
    if not as_mathematics:
        return [
            i for i, reference in enumerate(references) if reference is not None and reference_text(reference) is None
        ]
    answers = {i: gold_answer(reference) for i, reference in enumerate(references) if reference is not None}
    formulas = dict.fromkeys(answer for answer in answers.values() if answer and compare(answer, answer) != 1.0)
    wrong: set[str | None] = {None, *_unreadable_formulas(list(formulas))}
    return [i for i, answer in answers.items() if answer in wrong]


def _unreadable_formulas(formulas: list[str]) -> list[str]:
    if not formulas:
        return []
    command = [sys.executable, "-m", "torchtitan.rollout.rewards.references"]
    request = json.dumps(formulas).encode()
    try:
        verdicts = subprocess.run(command, input=request, stdout=subprocess.PIPE, timeout=READING_SECONDS).stdout
    except subprocess.TimeoutExpired as late:
        verdicts = late.stdout or b""
    if len(verdicts) < len(formulas):
        logger.warning(
            "of %d formulas in references, %d were not checked", len(formulas), len(formulas) - len(verdicts)
        )
    return [formula for formula, verdict in zip(formulas, verdicts.decode(), strict=False) if verdict == "0"]


def main() -> None:
    from torchtitan.rollout.rewards.mathematics import same_mathematics

    formulas = json.load(sys.stdin)
    for begin in range(0, len(formulas), AT_ONCE):
        verdicts = same_mathematics([(formula, formula) for formula in formulas[begin : begin + AT_ONCE]])
        print("".join(str(int(verdict == 1.0)) for verdict in verdicts), end="", flush=True)


if __name__ == "__main__":
    main()
