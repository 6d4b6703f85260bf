"""Whether an answer is the reference: numbers exactly, words as text, sequences element by element.

What none of these decides, such as x^2 + 1 against 1 + x^2, is left to a function that the caller gives.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan.rollout.rewards.quantities import (
    ASSIGNED,
    MAX_ANSWER_CHARACTERS,
    TEXT_MACRO,
    UNITS,
    Quantity,
    as_number,
)

Decide = Callable[[str, str | None], float | None]
"""Returns 1 or 0 for (reference, answer), or None if it cannot tell"""

DIMENSIONS = {"", *(dimension for dimension, _ in UNITS.values())}
CHOICE = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?\(?(?P<letter>[A-Z])"
    # But not the initials of a name: J. K. Rowling.
    r"(?:(?:\)\s*|(?P<mark>[.:])\s+(?![A-Z]\.))(?P<rest>\S.*)|[).]?)",
    re.DOTALL,
)
# Several choices: BD, B and D, (B), (D).
CHOICES = re.compile(r"\(?[A-J]\)?(?:(?:\s|[,;&]|\b(?:and|or)\b)*\(?[A-J]\)?)*")
JOINED_BY = re.compile(r"and|or|[^A-J]")

# Words of one text. A longer text is no answer that a policy could repeat.
MAX_WORDS = 12
NUMBERED_WORDS = 3
LETTERS = re.compile(r"[^\W\d_]+")
TOKENS = re.compile(r"[^\W\d_]+|\d+")
NO_WORDS = re.compile(r"[\\^_{}=<>+*/|~@]|\w\(|\d[a-zA-Z]|[a-zA-Z]\d|(?<!\w)[-\d]+(?!\w)\s*[-+]")
SPACES = re.compile(r"\\[ ,;:!]|\\q?quad\b|~|[$\u200b]")
# Words joined by a stroke: true/false.
STROKE = re.compile(r"(?<=[^\W\d_]{4})/(?=[^\W\d_]{3})|(?<=[^\W\d_]{3})/(?=[^\W\d_]{4})")
# The point between the parts of a foreign name, as tidied: 卡尔·马克思.
_FOREIGN = r"[^\W\d_a-zA-Z\u00c0-\u024f\u0370-\u03ff\u1f00-\u1fff]"
NAME_POINT = re.compile(rf"(?<={_FOREIGN})\\cdot (?={_FOREIGN})")
ABBREVIATION = re.compile(r"[a-zA-Z][.&][A-Z]")  # Ph.D., AT&T
ARTICLE = re.compile(r"(?:the|an?) (?=\w)")
# Names in formulas, which are no words though they are spelled with letters.
MATHEMATICS = frozenset(
    [
        "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "exp",
        "lim", "max", "min", "sup", "inf", "mod", "gcd", "lcm", "det", "sqrt", "alpha", "beta", "gamma", "delta",
        "theta", "lambda", "sigma", "omega", "infty", "infinity", "plus", "minus", "times", "over", "squared",
    ]
)  # fmt: skip

INFINITY = frozenset(["infty", "infinity"])

OPEN, CLOSE = "([{<", ")]}>"
BRACKET = {
    r"\{": "{", r"\}": "}", r"\lbrace": "{", r"\rbrace": "}", r"\langle": "<", r"\rangle": ">", r"\lbrack": "[",
    r"\rbrack": "]",
}  # fmt: skip
# Sequences without commas: with arrows, letters with hyphens, whole numbers with spaces.
ARROW = re.compile(r"→|⟶|->|\\(?:long)?(?:to|rightarrow)\b")
CHAIN = re.compile(r"[A-Z](?:\s*[-–]\s*[A-Z]){2,}|\d+(?:\s+\d+){2,}")
LINK = re.compile(r"\s*[-–]\s*|\s+")
IN_ORDER = "→"
DOTS = re.compile(r"\\[lc]?dots[bcm]?\b|\.\.\.|…")
MEMBER = re.compile(r"\s*\\?[a-zA-Z]\w*\s*(?:\\in\b|∈|=(?=\s*(?:\(|\[|\\\{|\\lbrace|\\langle)))\s*")
SIZES = re.compile(r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|textstyle)\b")
CONJUNCTION = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*(,?\s*(?:and|or)|\W*)\s*\}")
# Braces and brackets; separators; backslashes with what they escape; the comma of 1,234 is no separator.
STRUCTURE = re.compile(
    r"\\(?:[lr]brac[ek]|[lr]angle)\b|\\.|[()\[\]{}]|(?P<digits>(?<=\d),(?=\d{3}(?!\d)))"
    r"|(?P<separator>[,;]?\s*\b(?:and|or)\b|[,;，；、])", re.DOTALL
)  # fmt: skip
FULL_STOP = re.compile(r"(?<!\.)\.\s*$")
# The name of a value: x =, x_1 =, f(x) =.
NAMED = re.compile(r"^\s*\\?[a-zA-Z]+(?:_\w|_\{\w+\})?(?:\([a-z]\))?\s*=\s*")
THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")


@dataclass(frozen=True)
class Elements:
    """A sequence, set, tuple or interval."""

    kind: str
    """The brackets around it, such as "()" or "[)"; empty if there are none; IN_ORDER for elements in a row"""

    elements: tuple[str, ...]

    @property
    def has_dots(self) -> bool:
        return any(DOTS.fullmatch(element) for element in self.elements)

    @property
    def is_ordered(self) -> bool:
        return self.kind not in ("", "{}") or self.has_dots


def undecided(expected: str, answer: str | None) -> float | None:
    return None


def compare(expected: str, answer: str | None, decide: Decide = undecided) -> float | None:
    """Return 1 if a tidied answer equals a tidied reference, else 0; `decide` is asked for what is neither a plain
    number, a choice such as (C), words nor a sequence of these.

    Numbers are equal if their exact values are; if only one is a percentage, 50 % equals both 50 and 1/2. Words are
    equal if their letters and digits are. Tuples and sequences with dots have an order; sets and bare lists have none.
    """
    if answer is not None and len(answer) > MAX_ANSWER_CHARACTERS:
        answer = None
    if (verdict := _numbers(expected, answer)) is not None:
        return verdict
    if (verdict := _choices(expected, answer)) is not None:
        return verdict
    if (verdict := _sequences(expected, answer, decide)) is not None:
        return verdict
    if (verdict := _texts(expected, answer)) is not None:
        return verdict
    if DOTS.search(expected) and elements(expected) is None:
        # Of a sum with dots, nothing can tell what they stand for.
        return float(_without_spaces(expected) == _without_spaces(answer or ""))
    return decide(expected, answer)


def _without_spaces(text: str) -> str:
    return "".join(DOTS.sub("…", SPACES.sub(" ", text)).split())


def is_text(expected: str) -> bool:
    """Whether a reference is made of words or of choices, which are announced rather than computed."""
    return words(expected) is not None or bool(CHOICES.fullmatch(expected) or CHOICE.fullmatch(expected))


def _numbers(expected: str, answer: str | None) -> float | None:
    wanted = as_number(expected)
    text = answer or ""
    given = as_number(ASSIGNED.sub("", text, count=1) if wanted else text)
    if wanted and not answer:
        return 0.0
    if wanted is None or given is None:
        wanted_choice, given_choice = _choice(expected), _choice(text)
        if wanted_choice and given_choice:
            return float(_same_choice(wanted_choice, given_choice))
        if wanted_choice:
            wanted = as_number(wanted_choice["rest"] or "")
        if given_choice:
            given = as_number(given_choice["rest"] or "")
    if wanted is None or given is None:
        return None
    return _quantities(wanted, given)


def _choice(text: str) -> re.Match[str] | None:
    return CHOICE.fullmatch(TEXT_MACRO.sub(r"\1 ", text).strip())


def _same_choice(wanted: re.Match[str], given: re.Match[str]) -> bool:
    if wanted["letter"] != given["letter"]:
        return False
    # E. coli and E. faecalis are names, and no choice E.
    are_names = wanted["mark"] and given["mark"] and wanted["rest"] and given["rest"]
    return not (are_names and _differ(wanted["rest"], given["rest"]))


def _differ(wanted: str, given: str) -> bool:
    """Whether numbers or words differ; formulas are not compared."""
    numbers = as_number(wanted), as_number(given)
    if numbers[0] and numbers[1]:
        return _quantities(numbers[0], numbers[1]) != 1.0
    return words(wanted) is not None and words(wanted) != words(given)


def _quantities(wanted: Quantity, given: Quantity) -> float | None:
    a, b, kinds = wanted.value, given.value, {wanted.kind, given.kind}
    if kinds == {"", "%"}:
        percentage, number = (a, b) if wanted.kind == "%" else (b, a)
        return float(number in (percentage, percentage / 100))
    if kinds & {"date", "day"}:
        return float((a, wanted.kind) == (b, given.kind))
    if kinds <= DIMENSIONS:
        if "" in kinds:  # a unit may be left out
            return float(a == b)
        return float(len(kinds) == 1 and a * wanted.unit == b * given.unit)
    if wanted.kind[:1] != given.kind[:1]:
        return None
    return float((a, wanted.kind) == (b, given.kind))


def _choices(expected: str, answer: str | None) -> float | None:
    """Compare several choices: in order if the reference lists at least three that are not sorted."""
    found = [CHOICES.fullmatch(TEXT_MACRO.sub(r" \1 ", text).strip()) for text in (expected, answer or "")]
    if not all(found):
        return None
    wanted_letters, given_letters = (JOINED_BY.sub("", match[0]) for match in found if match)
    if max(len(wanted_letters), len(given_letters)) < 2 or len(set(wanted_letters)) < len(wanted_letters):
        return None
    has_order = len(wanted_letters) > 2 and list(wanted_letters) != sorted(wanted_letters)
    if has_order:
        return float(wanted_letters == given_letters)
    return float(sorted(wanted_letters) == sorted(given_letters))


def _texts(expected: str, answer: str | None) -> float | None:
    wanted, given = words(expected), words(answer or "")
    if wanted is None:
        return None
    if wanted == given:
        return 1.0
    return None if _may_be_product(expected) else 0.0


@functools.lru_cache(256)
def words(text: str) -> str | None:
    """Return the words of a text in lower case, without punctuation, marks and a leading article; None for a formula.

    A text is words if it has a letter that is neither Latin nor Greek, a run of three letters that is no name in
    formulas, an abbreviation such as Ph.D., or is one run of two letters; numbers may stand beside at most three words
    in all.
    """
    if len(text) > MAX_ANSWER_CHARACTERS or not LETTERS.search(text):
        return None
    bare = SPACES.sub(" ", NAME_POINT.sub(" ", text))
    inside = [part for part in TEXT_MACRO.findall(bare) if LETTERS.search(part)]
    bare = STROKE.sub(" ", TEXT_MACRO.sub(r" \1 ", bare))
    if NO_WORDS.search(bare):
        return None
    abbreviated = ABBREVIATION.search(bare)
    bare = unicodedata.normalize("NFKC", bare).casefold()
    if bare.isascii():
        tokens = TOKENS.findall(bare)
    else:  # marks are vowels in some scripts
        tokens = "".join(map(_letter_or_space, bare)).split()
    runs = [token for token in tokens if not token.isdigit()]
    most = MAX_WORDS if len(runs) == len(tokens) else NUMBERED_WORDS
    spelled = any(map(_is_word, runs)) or (len(tokens) == 1 and len(tokens[0]) == 2)
    marked = any(len(part.strip()) > 1 for part in inside)
    if not (spelled or abbreviated or marked):
        return None
    if len(tokens) > most or _is_mathematics(tokens, runs):
        return None
    return ARTICLE.sub("", " ".join(tokens), count=1) if len(tokens) > 1 else tokens[0]


def _is_mathematics(tokens: list[str], runs: list[str]) -> bool:
    """Whether names in formulas stand beside numbers or only variables, as in log 2 and sin x, not in gamma rays."""
    if len(tokens) == 1:
        return not INFINITY.isdisjoint(runs)
    if MATHEMATICS.isdisjoint(runs):
        return False
    has_numbers = len(runs) < len(tokens)
    has_words = any(_is_word(run) and run not in MATHEMATICS for run in runs)
    return has_numbers or not has_words


def _letter_or_space(character: str) -> str:
    """Letters, marks and numbers stay."""
    return character if unicodedata.category(character)[0] in "LMN" else " "


def _is_word(run: str) -> bool:
    if run.isascii():
        return len(run) > 2
    return len(run) > 1 or "GREEK" not in unicodedata.name(run, "GREEK")


def _may_be_product(text: str) -> bool:
    """Whether the letters may be factors, as in xy or abc: two or neighbours in the alphabet without e, i, o and u,
    or more without any vowel."""
    letters = set(text.lower())
    in_one_case = text.islower() or text.isupper()
    if not (text.isascii() and text.isalpha() and in_one_case) or len(letters) < len(text):
        return False
    if letters & set("eiou"):
        return False
    neighbours = max(map(ord, letters)) - min(map(ord, letters)) == len(letters) - 1
    # Beside x, y is a variable.
    vowels = {"a"} if "x" in letters else {"a", "y"}
    return neighbours or len(letters) == 2 or letters.isdisjoint(vowels)


def _sequences(expected: str, answer: str | None, decide: Decide) -> float | None:
    wanted, given = elements(expected), elements(answer or "")
    # 1,234 is a number and 1,234,567 too, unless the other side shows that it is a list.
    if wanted is None and given is not None and not given.kind and THOUSANDS.fullmatch(expected):
        wanted = Elements("", tuple(expected.split(","))) if expected.count(",") > 1 else None
    if given is None and wanted is not None and THOUSANDS.fullmatch(answer or ""):
        given = Elements("", tuple((answer or "").split(",")))
    if wanted is None or given is None:
        if (wanted and wanted.has_dots) or (given and given.has_dots):
            return 0.0
        if wanted is None or answer is None or not (as_number(answer) or words(answer)):
            return None
        # A single number is not the two of the reference, for which math-verify would take one of them.
        differs = any(compare(element, answer) == 0.0 for element in wanted.elements)
        return 0.0 if differs else None
    kinds, pair = {wanted.kind, given.kind}, len(wanted.elements) == 2
    if len(kinds) == 2 and "<>" not in kinds:
        # Brackets may be left out. Of two elements, [1, 2] and (1, 2) are intervals; of more, they are the same vector.
        if "" in kinds and pair and kinds & {"[]", "[)", "(]"}:
            return None
        if "" not in kinds and (pair or kinds != {"()", "[]"}):
            return 0.0
    if len(wanted.elements) != len(given.elements):
        return 0.0
    ordered = wanted.is_ordered or given.is_ordered or _name_variables(wanted) != _name_variables(given)
    return _all_equal(wanted.elements, given.elements, ordered, decide)


def _name_variables(sequence: Elements) -> bool:
    """Whether the elements are values of different variables, as in x = 1, y = 2."""
    matches = filter(None, map(NAMED.match, sequence.elements))
    return len({match[0] for match in matches}) > 1


def _all_equal(wanted: Sequence[str], given: Sequence[str], ordered: bool, decide: Decide) -> float | None:
    """Return 1 if each element equals that in its place, or without an order another one each; None if it depends on
    what `decide` cannot tell."""
    left = list(given)
    unclear = False
    for element in wanted:
        for candidate in left[:1] if ordered else list(left):
            verdict = _element_equal(element, candidate, decide)
            unclear = unclear or verdict is None
            if verdict == 1.0:
                left.remove(candidate)
                break
        else:
            return None if unclear else 0.0
    return 1.0


def _element_equal(wanted: str, given: str, decide: Decide) -> float | None:
    if DOTS.fullmatch(wanted) or DOTS.fullmatch(given):
        return float(bool(DOTS.fullmatch(wanted) and DOTS.fullmatch(given)))
    if bool(NAMED.match(wanted)) != bool(NAMED.match(given)):
        wanted, given = NAMED.sub("", wanted), NAMED.sub("", given)
    return compare(wanted, given, decide)


@functools.lru_cache(64)
def elements(text: str) -> Elements | None:
    """Return the elements of a set, tuple, interval or list; None for anything else."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    arrows = "{" not in text and ARROW.search(text)  # a limit has its arrow in braces
    if arrows or CHAIN.fullmatch(text.strip()):
        separator = ARROW if arrows else LINK
        parts = [part.strip(" $") for part in separator.split(text.strip())]
        return Elements(IN_ORDER, tuple(parts)) if all(parts) else None
    if not any(mark in text for mark in (",", ";", "and", "or", "，", "；", "、")):
        return None
    text = CONJUNCTION.sub(r" \1 ", SIZES.sub("", text.replace("$", " ")))
    text = FULL_STOP.sub("", MEMBER.sub("", text, count=1)).strip()
    wrapped = _wrapping(text)
    kind, inside = ("", text) if wrapped is None else wrapped
    parts = [SPACES.sub(" ", part).strip() for part in _split(inside)]
    parts = list(filter(None, parts))
    return Elements(kind, tuple(parts)) if len(parts) > 1 else None


def _wrapping(text: str) -> tuple[str, str] | None:
    """Return the brackets around the whole text, and what they contain."""
    depth, start = 0, 0
    for match in STRUCTURE.finditer(text):
        mark = BRACKET.get(match[0], match[0])
        if mark in OPEN:
            if match.start() == 0:
                start, opened = match.end(), mark
            depth += 1
        elif mark in CLOSE:
            depth -= 1
            if depth == 0 and start:
                return (opened + mark, text[start : match.start()]) if match.end() == len(text) else None
        if depth == 0 and not start:
            return None
    return None


def _split(text: str) -> list[str]:
    """Split at the separators outside brackets."""
    parts, depth, begin = [], 0, 0
    for match in STRUCTURE.finditer(text):
        mark = BRACKET.get(match[0], match[0])
        if mark in OPEN:
            depth += 1
        elif mark in CLOSE:
            depth -= 1
        elif match["separator"] and depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    return [*parts, text[begin:]]
