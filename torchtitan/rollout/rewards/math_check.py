"""math-verify in a child process: sympy computes towers of powers in C, which only the end of the process stops."""

from __future__ import annotations

import functools
import logging
import os
import re
import select
import signal
import traceback
from collections.abc import Callable, Sequence

# Prose: two plain words in a row. math-verify would read them as a product of letters.
PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
# Characters; a longer answer is wrong.
LONGEST_ANSWER = 4000
# Seconds of a processor for one answer; where a call has already had so many slow ones, for each further one, which is
# still more than ordinary answers take.
ANSWER_SECONDS = 1.0
MANY_SLOW = 3
HURRIED_SECONDS = 0.25
# On a busy machine a second of a processor takes longer, but not for ever.
WALL_FACTOR = 5
VERDICTS: dict[bytes, float | None] = {b"1": 1.0, b"0": 0.0, b"?": None}
# Compared once before the first child starts: its tables of grammar and simplifier, slow to fill, are then there.
EXAMPLES = (
    (r"\frac{1}{2}", "0.5"),
    ("x^2+1=y", "y=1+x^2"),
    (r"2\sqrt{3}\pi", r"\sqrt{12}\pi"),
    (r"x \in [0,1)", "[0,1)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
)


def same_mathematics(pairs: Sequence[tuple[str, str | None]]) -> list[float | None]:
    """For every (reference, answer): 1 where they are equal, else 0; None where the reference cannot be read.

    An answer that takes more than ANSWER_SECONDS of a processor, or breaks the process, is wrong.
    """
    verdicts: list[float | None] = []
    slow = 0
    while len(verdicts) < len(pairs):
        check = checker()
        seconds = ANSWER_SECONDS if slow < MANY_SLOW else HURRIED_SECONDS
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _answer(check, pairs[len(verdicts) :], writer, seconds)
        os.close(writer)
        try:
            while len(verdicts) < len(pairs) and select.select([reader], [], [], WALL_FACTOR * seconds)[0]:
                if not (verdict := os.read(reader, 1)):
                    break
                verdicts.append(VERDICTS[verdict])
        finally:
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if len(verdicts) < len(pairs):
            verdicts.append(0.0)
            slow += 1
    return verdicts


def _answer(
    check: Callable[[str, str | None], bytes], pairs: Sequence[tuple[str, str | None]], writer: int, seconds: float
) -> None:
    """The child: one byte for each pair, of which none may take longer; never returns."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for expected, answer in pairs:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.alarm(1 + int(WALL_FACTOR * seconds))  # where nothing else ends it: its parent has died
            os.write(writer, check(expected, answer))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@functools.cache
def checker() -> Callable[[str, str | None], bytes]:
    # Slow to import (sympy), and not needed for plain numbers.
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit of its own

    def check(expected: str, answer: str | None) -> bytes:
        prose = PROSE.search(LATEX_TEXT.sub(" ", expected))
        gold = parse(expected if prose else f"\\boxed{{{expected}}}", parsing_timeout=None)
        if all(isinstance(reading, str) for reading in gold):  # nothing but the text itself
            return b"?"
        short = answer is not None and len(answer) <= LONGEST_ANSWER
        given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None) if short else []
        return b"1" if given and verify(gold, given, timeout_seconds=None) else b"0"

    for expected, answer in EXAMPLES:
        check(expected, answer)
    return check
