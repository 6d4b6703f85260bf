"""How numbers are written in an answer, and the exact value of a plain one: signs, currencies, units, mixed numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import date
from fractions import Fraction
from typing import NamedTuple

# Characters. A longer answer is wrong, and without a box the answer is looked for among so many at the end.
MAX_ANSWER_CHARACTERS = 4000

CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "—": " ", "×": r"\times ", "÷": "/", "²": "^2", "³": "^3"}
    | {"°": r"^\circ ", "√": r"\sqrt", "π": r"\pi "}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
    | {"±": r"\pm ", "·": r"\cdot ", "⋅": r"\cdot ", "∅": r"\emptyset ", "…": r"\ldots ", "⋯": r"\cdots "}
    | dict.fromkeys("£€¥₹¢") | dict.fromkeys("\u00a0\u2009\u202f", " ")
    | {0xFEE0 + ascii_code: chr(ascii_code) for ascii_code in range(0x21, 0x7F)}  # full-width forms
)  # fmt: skip
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "₀₁₂₃₄₅₆₇₈₉₋"
# Exponents and indices, but for ² and ³ alone, which often belong to a unit.
SCRIPTS = re.compile(rf"(?P<raised>[{_RAISED}]{{2,}}|[⁰¹⁴-⁹])|(?P<lowered>[{_LOWERED}]+)")
TO_DIGITS = str.maketrans(_RAISED + _LOWERED, "0123456789-" * 2)
SHORT_UNIT = r"(?:[kcm]?m|[mk]?g|[mk]?[lL]|lbs?|oz|ft|in|yds?|mi|mph|km/?h|m/s|hrs?|h|mins?|secs?|s|[ap]m)"
# What all of the following need; most texts have none of it.
UPRIGHT = "text|textrm|mathrm|mathit|mathbf|operatorname|mathsf"
_NO_UNIT = "[a-fijknp-rt-zBDEGILMO-RUX-Z]"
UNTIDY = re.compile(r"[\\'_~^{]|\d(?: \d{3}|st|nd|rd|th)|\b(?:minus|negative|USD|EUR|GBP|US\$)")
TIDY: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    # Upright letters, but not those that are units: 2\mathrm{i}, \mathrm{e}^x.
    (re.compile(rf"(?<=\w)\\(?:{UPRIGHT})(?=\s*\{{\s*{_NO_UNIT}\s*\}})"), r" \g<0>"),
    (re.compile(rf"\\(?:{UPRIGHT})\s*\{{\s*({_NO_UNIT})\s*\}}(?!\w)"), r"\1"),
    (re.compile(rf"\\(?:{UPRIGHT})\s*\{{\s*({_NO_UNIT})\s*\}}"), r"\1 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\\$|\b(?:USD|EUR|GBP|US(?=\$))\b"), ""),
    # 1\,234, 1'234, 1_234 and 1,\! 234; with a space between the groups, 1 234 but not 12345 678.
    (re.compile(r"(?:(?<=\d)(?:\\[,;:! ]|[~'_])+|(?<=,)\\!\s*)(?=\d{3}(?!\d))"), ""),
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
# With the marks that are vowels in the scripts of India and Thailand, and the points of Hebrew and Arabic.
_LETTER = r"(?:(?!\d)(?:[^\W_]|[\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0e7f]))"
# Words of one or two letters after a number may be variables, unless they are known as units.
UNIT = re.compile(
    rf"\s*(?:(?P<percent>\\?%|per\s?cent\b)|\^\s*(?:\{{\s*\\circ\s*\}}|\\circ)\s*[CF]?"
    rf"|(?:[ap]\.m\.|(?P<short>{SHORT_UNIT}))|(?:(?<=\s)|[-/])(?P<words>{_LETTER}{{3,}}(?:[\s/-]+{_LETTER}+)*)"
    # Neither Latin nor Greek letters, with or without a space: 24小时, 5 км.
    rf"|(?P<script>(?![a-zA-Z\u00c0-\u024f\u0370-\u03ff\u1f00-\u1fff]){_LETTER}{{1,20}}(?:[\s/-]+{_LETTER}+)*))"
    r"(?P<power>\^[23]|\^\{[23]\})?\s*"
)
SCALE = {
    "tens": 10, "dozen": 12, "hundred": 100, "k": 1000, "thousand": 1000, "million": 10**6, "bn": 10**9,
    "billion": 10**9, "trillion": 10**12, "百万": 10**6, "千万": 10**7, "百": 100, "千": 1000, "万": 10**4,
    "萬": 10**4, "亿": 10**8, "億": 10**8,
}  # fmt: skip
# "a": otherwise ſ and ı would match s and i, though lower() leaves them.
SCALED = re.compile(rf"(?:(?<=\d)\s*|\s+)(?P<scale>(?ai:{'|'.join(SCALE)}))(?:\b|(?<=[^\x00-\x7f])(?![米克瓦]))", re.I)
FOLLOWING = re.compile(rf"(?:{'|'.join(SCALE)}|per\s?cent)\b|\\?%", re.I)
# Words after a number that change its value or are mathematics, for which math-verify decides.
NOT_A_UNIT = re.compile(
    rf"\b({'|'.join(SCALE)}|times\s+\w+|hal(f|ves)|thirds?|fourths?|quarters?|fifths?|tenths?|hundredths?|thousandths?|"
    r"plus|minus|over|mod|squared|cubed|and|or|not|than|to|by|divided|choose|score|below|negative|sqrt|pi|sin|cos|tan|"
    r"log|exp|factorial)\b|[半或和与到至多余]|分之", re.I
)  # fmt: skip
# Dimension -> names of units, which may end with s -> their size in one of them.
_NAMES: dict[str, dict[str, str]] = {
    "time": {
        "s sec second 秒 秒钟 секунда секунд": "1", "min minute 分 分钟 分鐘 分間 минута минут": "60",
        "h hr hour 小时 小時 時間 час часа часов": "3600",
        "day 天 日 день дня дней": "86400", "week 周 星期 недель": "604800",
    },
    "months": {"month 月 个月 個月 месяц месяцев": "1", "year yr 年 год года лет": "12"},
    "length": {
        "mm millimeter millimetre 毫米": "1/1000", "cm centimeter centimetre 厘米 公分 см": "1/100",
        "m meter metre 米 公尺 м": "1", "km kilometer kilometre 千米 公里 км": "1000", "in inch inche": "0.0254",
        "ft foot feet": "0.3048", "yd yard": "0.9144", "mi mile": "1609.344",
    },
    "mass": {
        "mg milligram 毫克": "1/1000", "g gram 克 г": "1", "kg kilogram 千克 公斤 кг": "1000", "lb pound": "453.59237",
        "oz ounce": "28.349523125",
    },
    "volume": {"ml milliliter millilitre 毫升 мл": "1/1000", "l liter litre 升 л": "1"},
    "speed": {"m/s": "1", "km/h kmh": "1/3.6", "mph": "0.44704"},
    "dollars": {"dollar": "1", "cent": "1/100"},
    "euros": {"euro": "1"},
}  # fmt: skip


def _units() -> dict[str, tuple[str, Fraction]]:
    """Return the dimension and the size of each unit, by its names in singular and plural."""
    units: dict[str, tuple[str, Fraction]] = {}
    for dimension, sizes in _NAMES.items():
        for names, size in sizes.items():
            top, _, bottom = size.partition("/")
            for name in names.split():
                units[name] = units[f"{name}s"] = dimension, Fraction(top) / Fraction(bottom or "1")
    return units


UNITS = _units()
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"(?P<month>(?ai:{'|'.join(_MONTHS)}))[a-z]*\.?"
DATES = (
    re.compile(
        r"(?P<year>\d{4})(?:(?P<by>[-/])(?P<number>\d\d)(?P=by)(?P<day>\d\d)|年(?P<n>\d\d?)月(?P<d>\d\d?)[日号])"
    ),
    re.compile(r"(?P<year>(?!))?(?P<n>\d\d?)月(?P<day>\d\d?)[日号]"),
    re.compile(rf"{_MONTH}\s+(?P<day>\d\d?)(?:\s*,\s*|\s+)?(?P<year>\d{{4}})?", re.I),
    re.compile(rf"(?P<day>\d\d?)\s+(?:of\s+)?{_MONTH}(?:\s*,\s*|\s+)?(?P<year>\d{{4}})?", re.I),
)
# A leap year, for dates without a year.
_ANY_YEAR = 4

TEXT_MACRO = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:rm|bf|it)|mbox|emph|operatorname)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)\s*(?:([ap])\.?m\.?)?", re.I)
IN_BASE = re.compile(r"(\d+)_(?:(\d)|\{(\d{1,2})\})")
ASSIGNED = re.compile(r"^\s*[a-zA-Z]\s*=\s*")


def tidy(text: str) -> str:
    """Write signs, spaces between digits, ordinals and powers of units in one way, and drop currencies."""
    if INTEGER.fullmatch(text) or len(text) > MAX_ANSWER_CHARACTERS:
        return text
    if not text.isascii():
        text = SCRIPTS.sub(_in_braces, text)
        text = text.translate(CHARACTERS)
    if UNTIDY.search(text):
        for pattern, replacement in TIDY:
            text = pattern.sub(replacement, text)
    return text.strip()


def _in_braces(script: re.Match[str]) -> str:
    """Return raised or lowered digits as LaTeX writes them: ^{12} or _{12}."""
    sign = "^" if script["raised"] else "_"
    return f"{sign}{{{script[0].translate(TO_DIGITS)}}}"


class Quantity(NamedTuple):
    value: Fraction
    """The number as it is written; minutes for a time of day, days for a date"""

    kind: str = ""
    """"%"; ":" with a or p for a time of day; "_2" for digits in base 2; "date" and "day" with and without a year; or
    the dimension of a known unit. Empty for all else, since currencies and other units are ignored"""

    unit: Fraction = Fraction(1)
    """The size of a known unit"""


@functools.lru_cache(64)
def as_number(text: str) -> Quantity | None:
    """Return the exact value of a plain number, a time or a date; None for anything else."""
    if INTEGER.fullmatch(text):
        return Quantity(Fraction(int(text.replace(",", ""))))
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    bare = text
    if "\\" in text:
        bare = TEXT_MACRO.sub(r" \1 ", text).replace("\\ ", " ").replace("\\,", " ")
        bare = FRACTION.sub(_with_slash, bare)
    bare = bare.strip(" \n$").removesuffix(".").rstrip()
    if clock := CLOCK.fullmatch(bare):
        return Quantity(Fraction(int(clock[1]) * 60 + int(clock[2])), f":{(clock[3] or '').lower()}")
    if in_base := IN_BASE.fullmatch(bare):
        return Quantity(Fraction(in_base[1]), f"_{in_base[2] or in_base[3]}")
    if (day := _date(bare)) is not None:
        return day
    match = NUMBER.match(bare)
    if match is None:
        return None
    scale = SCALED.match(bare, match.end())
    unit = UNIT.fullmatch(bare, (scale or match).end())
    if unit is None and (scale or match).end() < len(bare):
        return None
    if unit and NOT_A_UNIT.search(unit["words"] or unit["script"] or ""):
        return None
    try:
        value = _value(match) * (SCALE[scale["scale"].lower()] if scale else 1)
    except (ValueError, ZeroDivisionError):
        return None
    if unit is not None and unit["percent"]:
        return Quantity(value, "%")
    if unit is None or unit["power"]:
        return Quantity(value)
    name = unit["short"] or unit["words"] or unit["script"] or ""
    known = UNITS.get(name) or UNITS.get(name.casefold())
    return Quantity(value, *known) if known else Quantity(value)


def _with_slash(fraction: re.Match[str]) -> str:
    top, bottom = fraction[1] or fraction[2], fraction[3] or fraction[4]
    return f" {top}/{bottom}"


def _date(text: str) -> Quantity | None:
    """Return the days since year 1 in a date, or a day of any year."""
    found = next(filter(None, (pattern.fullmatch(text) for pattern in DATES)), None)
    if found is None:
        return None
    parts = found.groupdict()
    month = parts.get("number") or parts.get("n") or 1 + _MONTHS.index(parts["month"].lower())
    try:
        day = date(int(parts["year"] or _ANY_YEAR), int(month), int(parts["day"] or parts["d"]))
    except ValueError:
        return None
    return Quantity(Fraction(day.toordinal()), "date" if parts["year"] else "day")


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
