"""Comparison of answers with math-verify, which decides where numbers, words and sequences do not.

It works in a child process: sympy evaluates towers of powers in C code, which can only be stopped by killing the
process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import select
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.rollout.rewards.comparison import compare
from torchtitan.rollout.rewards.quantities import MAX_ANSWER_CHARACTERS, UNITS

# Prose: two plain words in a row. math-verify would read them as a product of letters.
PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
SCIENTIFIC = re.compile(r"(?<=\d)[eE]([-+]?\d{1,3})(?!\w)")
# Of functions that are written without a backslash, it would multiply the letters.
FUNCTION = re.compile(r"(?<![\\a-zA-Z{])(arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)(?=[\s(\d^])")
UPRIGHT_FUNCTION = re.compile(r"\\(?:operatorname|mathrm)\s*\{\s*((?:arc)?(?:sin|cos|tan)|cot|sec|csc|ln|log|exp)\s*\}")
_LONG = [name for name in UNITS if len(name) > 1 and name.isascii()]
_NAMES = "|".join(sorted(["degree", "unit", *_LONG], reverse=True))
UNIT_AT_END = re.compile(
    r"(?<=[\w)}\]])(?:\s|\\[ ,;])*(?:\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}"
    rf"|(?<=[\s\d}})])(?:(?:square|sq|cubic|cu)\.?\s+)?(?:{_NAMES})s?)(?:\^[23]|\^\{{[23]\}})?\s*$"
)
# Seconds of a processor for one answer; where a call has already had so many slow ones, for each further one, which is
# still more than ordinary answers take.
ANSWER_SECONDS = 1.0
MANY_SLOW = 3
HURRIED_SECONDS = 0.25
# On a busy machine, one CPU second takes longer; this bounds the wall-clock time.
WALL_FACTOR = 5
# Digits to which a decimal has to agree with a number that has no finite one, such as 1.41421 with the root of 2.
SIGNIFICANT_DIGITS = 6
INTEGRAL_DIGITS = 10
# Digits that are computed of the difference of two irrational numbers. They are equal if half of them are 0.
MAX_DIGITS = 1000
VERDICTS: dict[bytes, float | None] = {b"1": 1.0, b"0": 0.0, b"?": None}
# Compared once before the first fork, so that children inherit the parser's and simplifier's tables, slow to fill.
EXAMPLES = (
    (r"\frac{1}{2}", "0.5"),
    ("x^2+1=y", "y=1+x^2"),
    (r"2\sqrt{3}\pi", r"\sqrt{12}\pi"),
    (r"x \in [0,1)", "[0,1)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
)


def same_mathematics(pairs: Sequence[tuple[str, str | None]]) -> list[float | None]:
    """For every (reference, answer), return 1 if they are equal, else 0; None if the reference cannot be parsed.

    An answer that takes more than ANSWER_SECONDS of CPU time, or crashes the process, is wrong.
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
    """Run the child: write one byte for each pair, which may take at most `seconds` of CPU time; never return."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for expected, answer in pairs:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.alarm(1 + int(WALL_FACTOR * seconds))  # the last resort, if the parent has died
            os.write(writer, check(expected, answer))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@functools.cache
def checker() -> Callable[[str, str | None], bytes]:
    # Slow to import (sympy), and not needed for plain numbers.
    import sympy
    from math_verify import LatexExtractionConfig, grader, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limit is off
    # It compares to 15 places after the decimal point, for which 2^{-60} and 2^{-70} are the same.
    grader.sympy_numeric_eq = numerically_equal
    # Of the whole text alone: otherwise it takes the last number of what it cannot parse.
    # And it drops letters at the end that may be a unit, such as t.
    form = dataclasses.replace(LatexExtractionConfig().normalization_config, units=False)
    extraction = [LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=form)]

    @functools.lru_cache(16)
    def read(text: str) -> list[Any]:
        text = FUNCTION.sub(r"\\\1 ", SCIENTIFIC.sub(r"\\cdot 10^{\1}", text))
        text = UPRIGHT_FUNCTION.sub(r"\\\1 ", UNIT_AT_END.sub("", text, count=1))
        readings = parse(f"\\boxed{{{text}}}", extraction, parsing_timeout=None)
        return [
            _with_unit(reading) if isinstance(reading, (sympy.Basic, sympy.MatrixBase)) else reading
            for reading in readings
        ]

    def decide(expected: str, answer: str | None) -> float | None:
        prose = PROSE.search(LATEX_TEXT.sub(" ", UNIT_AT_END.sub("", expected)))
        gold = parse(expected, parsing_timeout=None) if prose else read(expected)
        if all(isinstance(reading, str) for reading in gold):  # it could not parse the text
            return None
        short = answer is not None and len(answer) <= MAX_ANSWER_CHARACTERS
        given = read(answer or "") if short else []
        return float(bool(given) and verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None))

    def check(expected: str, answer: str | None) -> bytes:
        verdict = compare(expected, answer, decide)
        if verdict is None:
            return b"?"
        return b"1" if verdict else b"0"

    for expected, answer in EXAMPLES:
        check(expected, answer)
    return check


def _with_unit(parsed: Any) -> Any:
    """Return what math-verify parsed with i as the imaginary unit and real symbols: it takes i as a symbol, and other
    symbols as complex in some texts with an i."""
    from sympy import I, Symbol
    from sympy.core.relational import Relational

    free = getattr(parsed, "free_symbols", ())
    replaced: dict[Any, Any] = {}
    for symbol in free:
        if symbol.name == "i" and not isinstance(parsed, Relational):
            replaced[symbol] = I
        elif not symbol.is_real:
            replaced[symbol] = Symbol(symbol.name, real=True)
    return parsed.xreplace(replaced) if replaced else parsed


def _exact(number: Any) -> Any:
    """The same with its decimals as fractions."""
    from sympy import Float, Rational

    return number.xreplace({decimal: Rational(str(decimal)) for decimal in number.atoms(Float)})


def numerically_equal(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Whether two parsed numbers or matrices are equal, as math-verify's function of the same signature, whose numbers
    of places are not used.

    Numbers are compared exactly; to SIGNIFICANT_DIGITS if one is written as a decimal and the other has no finite one;
    and to INTEGRAL_DIGITS if they are sums or integrals, which are evaluated numerically.
    """
    from math_verify.grader import get_pct_val, safe_sympy_doit
    from sympy import Basic, Float, Integral, Limit, MatrixBase, Product, Rational, Sum

    if isinstance(a, MatrixBase) and isinstance(b, MatrixBase):
        pairs = zip(a.flat(), b.flat(), strict=True) if a.shape == b.shape else ()
        return a.shape == b.shape and all(numerically_equal(x, y, float_rounding, numeric_precision) for x, y in pairs)
    if not (isinstance(a, Basic) and isinstance(b, Basic)):
        return False
    if (get_pct_val(a) is None) != (get_pct_val(b) is None) and numerically_equal(
        get_pct_val(a, a), get_pct_val(b, b), float_rounding, numeric_precision
    ):  # 50 % equals both 50 and 1/2
        return True
    rounded = a.has(Float) or b.has(Float)
    a, b = _exact(a), _exact(b)
    estimated = a.has(Integral, Limit, Product, Sum) or b.has(Integral, Limit, Product, Sum)
    if not estimated:
        a, b = safe_sympy_doit(a), safe_sympy_doit(b)
    if a == b:
        return True
    if not (a.is_number and b.is_number) or a.is_infinite or b.is_infinite:
        return False
    if a.is_Rational and b.is_Rational and not (rounded and not (_is_decimal(a) and _is_decimal(b))):
        return False
    size = max(abs(a.evalf(15)), abs(b.evalf(15)))
    difference = abs((a - b).evalf(15, maxn=15 if estimated else MAX_DIGITS))
    digits = MAX_DIGITS // 2
    if rounded:
        digits = SIGNIFICANT_DIGITS
    elif estimated:
        digits = INTEGRAL_DIGITS
    # Half a unit of the last of so many digits of the larger number.
    return bool(difference <= Rational(10) ** (_place(size) - digits + 1) / 2)


def _place(size: Any) -> int:
    """Return the place of the first digit: 2 for 314, -3 for 0.005."""
    from sympy import floor, log

    return int(floor(log(size, 10))) if size else 0


def _is_decimal(number: Any) -> bool:
    """Whether a rational number has finitely many digits."""
    rest = number.q
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1
