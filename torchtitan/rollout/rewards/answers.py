"""Which answer a text gives, and its exact value if it is a plain number: signs, currencies, units, mixed numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

# Characters. A longer answer is wrong, and without a box the answer is looked for among so many at the end.
MAX_ANSWER_CHARACTERS = 4000
GSM8K_MARK = "####"

# Braces and boxes; escaped characters such as \{ and \\ are matched so that they do not count as braces.
BOX = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "—": " ", "×": r"\times ", "÷": "/", "²": "^2", "³": "^3"}
    | {"°": r"^\circ ", "√": r"\sqrt", "π": r"\pi "}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"}
    | dict.fromkeys("£€¥₹¢") | dict.fromkeys("\u00a0\u2009\u202f", " ")
)  # fmt: skip
SHORT_UNIT = r"(?:[kcm]?m|[mk]?g|[mk]?[lL]|lbs?|oz|ft|in|yds?|mi|mph|km/?h|m/s|hrs?|h|mins?|secs?|s|[ap]m)"
# What all of the following need; most texts have none of it.
UNTIDY = re.compile(r"[\\'_~^{]|\d(?: \d{3}|st|nd|rd|th)|\b(?:minus|negative|USD|EUR|GBP|US\$)")
TIDY: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\\$|\b(?:USD|EUR|GBP|US(?=\$))\b"), ""),
    # 1\,234, 1'234 and 1_234; with a space between the groups, 1 234 but not 12345 678.
    (re.compile(r"(?:(?<=\d)(?:\\[,;:! ]|[~'_])+|(?<=,)\\!)(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<![\d.,/^_])\d{1,3}(?: \d{3})+(?![\d/])"), lambda match: match[0].replace(" ", "")),
    (re.compile(r"(?<=\d)(?:st|nd|rd|th)\b"), ""),
    (re.compile(r"(?<![\d)}] )\b(?:minus|negative)\s+(?=[\d.])"), "-"),
    (re.compile(r"(?<=\d)\s*(?:[x*]|\\times|\\cdot)\s*(?=10\^)"), r"\\times"),
    (re.compile(rf"(?<=\d)(?:\s|\\[ ,])*{SHORT_UNIT}\^(?:[23]|\{{[23]\}})(?!\w)"), ""),
)  # fmt: skip

INTEGER = re.compile(r"-?(?:\d{1,20}|\d{1,3}(?:,\d{3}){1,6})")
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# Longer exponents would take years.
NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\$?(?P<minus>-?)\s*(?:(?P<mixed>\d+)\s+(?P<over>\d+)/(?P<under>\d+)"
    rf"|(?P<top>{_WHOLE})/(?P<bottom>-?\d+)"
    rf"|(?P<decimal>{_WHOLE}(?:\.\d*)?|\.\d+)(?:[eE](?P<e>[-+]?\d{{1,3}})(?!\w)"
    rf"|\s*\\times\s*10\^(?:(?P<digit>\d)|\{{(?P<power>[-+]?\d{{1,3}})\}}))?)"
)
# Words of one or two letters after a number may be variables, unless they are known as units.
UNIT = re.compile(
    rf"\s*(?:(?P<percent>\\?%|per\s?cent\b)|\^\s*(?:\{{\s*\\circ\s*\}}|\\circ)\s*[CF]?"
    rf"|(?:[ap]\.m\.|{SHORT_UNIT})|(?:(?<=\s)|[-/])(?P<words>[a-zA-Z]{{3,}}(?:[\s/-]+[a-zA-Z]+)*))"
    r"(?:\^[23]|\^\{[23]\})?\s*"
)
SCALE = {
    "tens": 10, "dozen": 12, "hundred": 100, "k": 1000, "thousand": 1000, "million": 10**6, "bn": 10**9,
    "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
SCALED = re.compile(rf"(?:(?<=\d)\s*|\s+)(?P<scale>{'|'.join(SCALE)})\b", re.I)
FOLLOWING = re.compile(rf"(?:{'|'.join(SCALE)}|per\s?cent)\b|\\?%", re.I)
# Words after a number that change its value or are mathematics, for which math-verify decides.
NOT_A_UNIT = re.compile(
    rf"\b({'|'.join(SCALE)}|times\s+\w+|hal(f|ves)|thirds?|fourths?|quarters?|fifths?|tenths?|hundredths?|thousandths?|"
    r"plus|minus|over|mod|squared|cubed|and|or|not|than|to|by|divided|choose|score|below|negative|sqrt|pi|sin|cos|tan|"
    r"log|exp|factorial)\b", re.I
)  # fmt: skip
TEXT_MACRO = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)\s*(?:([ap])\.?m\.?)?", re.I)
IN_BASE = re.compile(r"(\d+)_(?:(\d)|\{(\d{1,2})\})")
ASSIGNED = re.compile(r"^\s*[a-zA-Z]\s*=\s*")
CHOICE = re.compile(r"\(?(?P<letter>[A-Z])(?:\)\s*(?P<rest>\S.*)|\)?)", re.DOTALL)
# Of completions without a box: an answer that is announced and ends its line or sentence, formulas, and the borders,
# signs and words by which the last expression of a line is joined.
EXPRESSION = re.compile(r"\d|\\(?!f?boxed)[a-zA-Z]|[½¼¾⅓⅔]")
TAG = re.compile(r"</?\w+>|<\|\w+\|>|\\f?boxed\s*\{?")
ANNOUNCED = re.compile(r"(?i:nswer(?:\s+is)?\b)[\s:*=]*(?P<said>[^\s:*=][^\n]{0,60}?)(?:[.!]\s|[.!]?\s*$)", re.M)
FORMULA = re.compile(
    r"\$\$(.{1,1000}?)\$\$|(?<!\\)\$(?=\S)([^$\n]{0,999}[^$\s])\$(?!\d)|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.S
)
BREAK = re.compile(r"\\approx\b|(?<!\d):|[=≈→⇒|]|->")
BORDER = re.compile(r"^[^\w\\(\[{+.^-]+|[^\w\\)\]}!%]+$|!$|^_+|_+$")
JOINING = re.compile(r"[-+*/^]|\\times|\\cdot")
OPERAND = re.compile(r"[\d)}]$|^[a-zA-Z]$")
CONTINUES = re.compile(r"[-+*/^\\]|\d+/\d")  # an operand: 2 1/2, 3 \pi


def tidy(text: str) -> str:
    """Write signs, spaces between digits, ordinals and powers of units in one way, and drop currencies."""
    if INTEGER.fullmatch(text) or len(text) > MAX_ANSWER_CHARACTERS:
        return text
    if not text.isascii():
        text = text.translate(CHARACTERS)
    if UNTIDY.search(text):
        for pattern, replacement in TIDY:
            text = pattern.sub(replacement, text)
    return text.strip()


def final_answer(text: str) -> str | None:
    """Return a completion's answer, tidied: the last boxed expression, or else what is announced as the answer, or else
    the last formula or number."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    boxed = last_boxed(text)
    return _last_expression(text[-MAX_ANSWER_CHARACTERS:]) if boxed is None else tidy(boxed)


def gold_answer(gold: Any) -> str | None:
    """Return the answer in a reference, tidied; None for an empty one."""
    if gold is None:
        return None
    text = str(gold)
    if GSM8K_MARK in text:
        text = text.rpartition(GSM8K_MARK)[2]
    boxed = last_boxed(text)
    return tidy(text if boxed is None else boxed) or None


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete \\boxed{…} or \\fbox{…} with balanced braces, in one pass."""
    opened: list[int] = []  # where the content of each open brace begins; -1 if it is not a box
    start, end = -1, -1
    for match in BOX.finditer(text):
        if match[0] == "}":
            begin = opened.pop() if opened else -1
            if begin > start:
                start, end = begin, match.start()
        elif match[0].endswith("{") and match[0] != "\\{":
            opened.append(match.end() if len(match[0]) > 1 else -1)
    return text[start:end].strip() if start >= 0 else None


def _last_expression(text: str) -> str | None:
    announced = ANNOUNCED.match(text, text.rfind("nswer")) if "nswer" in text else None
    if announced is not None:
        said = tidy(_bare(announced["said"]))
        if as_number(said) or CHOICE.fullmatch(said):
            return said
    if "$" in text or "\\" in text:
        formulas = list(FORMULA.finditer(text))
        if formulas and not re.search(r"\d", text[formulas[-1].end() :]):
            formula = formulas[-1]
            inside = tidy(formula[formula.lastindex or 0])
            left, equals, right = inside.rpartition("=")
            named = re.fullmatch(r"\s*[a-zA-Z]*\s*|[^a-zA-Z]*", re.sub(r"\\[a-zA-Z]+", "", TEXT_MACRO.sub("", left)))
            return right if equals and named and as_number(right) else inside
    for line in reversed(text.splitlines()):
        if EXPRESSION.search(line):
            words = BREAK.sub(" = ", tidy(TAG.sub(" ", line))).split()
            last = next((i for i in reversed(range(len(words))) if EXPRESSION.search(words[i])), None)
            if last is not None:
                return _joined(words, last)
    return None


def _bare(word: str) -> str:
    word = BORDER.sub("", word)
    for opened, closed in ("()", "[]", "{}"):
        if word.count(opened) != word.count(closed) or (
            word.startswith(opened) and word.endswith(closed) and re.search(r",(?!\d{3}\b)", word) is None
        ):
            word = BORDER.sub("", word.strip(opened + closed))
    return word


def _joined(words: list[str], last: int) -> str:
    """Return the expression that ends with the word at `last`, and what scales it: 2 1/2, 3 + 4, 3 \\pi, 5 million."""
    first = last
    words[last] = _bare(words[last])
    while first:
        before, here = words[first - 1], words[first]
        operator, operand = JOINING.fullmatch(before), OPERAND.search(before)
        if not operator and not (operand and CONTINUES.match(here)):
            break
        before = _bare(before) or before
        if operand and not JOINING.match(here) and not before.lstrip("+-").isdigit():
            break
        first -= 1
        words[first] = before
    if JOINING.fullmatch(words[first]):
        first += 1
    following = FOLLOWING.match(" ".join(words[last + 1 : last + 3]))
    return " ".join(words[first : last + 1]) + (f" {following[0]}" if following else "")


@functools.lru_cache(64)
def as_number(text: str) -> tuple[Fraction, str] | None:
    """Return the exact value of a plain number and its kind: "" or "%", ":" with a or p for a time of day in minutes,
    "_2" for digits in base 2. Currencies and units are ignored."""
    if INTEGER.fullmatch(text):
        return Fraction(int(text.replace(",", ""))), ""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    bare = text
    if "\\" in text:
        bare = TEXT_MACRO.sub(r" \1 ", text).replace("\\ ", " ").replace("\\,", " ")
        bare = FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]}", bare)
    bare = bare.strip(" \n$").removesuffix(".").rstrip()
    if clock := CLOCK.fullmatch(bare):
        return Fraction(int(clock[1]) * 60 + int(clock[2])), f":{(clock[3] or '').lower()}"
    if in_base := IN_BASE.fullmatch(bare):
        return Fraction(in_base[1]), f"_{in_base[2] or in_base[3]}"
    match = NUMBER.match(bare)
    if match is None:
        return None
    scale = SCALED.match(bare, match.end())
    unit = UNIT.fullmatch(bare, (scale or match).end())
    if (unit is None and (scale or match).end() < len(bare)) or (unit and NOT_A_UNIT.search(unit["words"] or "")):
        return None
    try:
        value = _value(match) * (SCALE[scale["scale"].lower()] if scale else 1)
    except (ValueError, ZeroDivisionError):
        return None
    return value, "%" if unit and unit["percent"] else ""


def _value(match: re.Match[str]) -> Fraction:
    """Raises ValueError for an improper mixed number or too many digits, ZeroDivisionError for a zero denominator."""
    if match["mixed"]:
        part = Fraction(int(match["over"]), int(match["under"]))
        if part >= 1:
            raise ValueError("not a mixed number")
        value = int(match["mixed"]) + part
    elif match["top"]:
        value = Fraction(match["top"].replace(",", "")) / int(match["bottom"])
    else:
        power = int(match["e"] or match["digit"] or match["power"] or 0)
        value = Fraction(match["decimal"].replace(",", "").removesuffix(".")) * Fraction(10) ** power
    return -value if (match["sign"] + match["minus"]).count("-") == 1 else value


def compare(expected: str, answer: str | None) -> float | None:
    """Return 1 or 0; None if either is neither a plain number nor a choice such as (C) or (C) 5. If only one is a
    percentage, 50 % equals both 50 and 1/2."""
    wanted = as_number(expected)
    given = as_number(ASSIGNED.sub("", answer or "", count=1) if wanted else answer or "")
    if wanted and not answer:
        return 0.0
    if wanted is None or given is None:
        right, said = (CHOICE.fullmatch(TEXT_MACRO.sub(r"\1 ", text).strip()) for text in (expected, answer or ""))
        if right and said:
            return float(right["letter"] == said["letter"])
        wanted, given = (as_number(one["rest"] or "") if one else it for one, it in ((right, wanted), (said, given)))
    if wanted is None or given is None:
        return None
    (a, of_a), (b, of_b) = wanted, given
    if {of_a, of_b} == {"", "%"}:
        return float(a == b or (a / 100 == b if of_a else a == b / 100))
    return float((a, of_a) == (b, of_b)) if of_a[:1] == of_b[:1] else None
