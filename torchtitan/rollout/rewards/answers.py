"""Which answer a text gives: in a box, behind GSM8K's mark, announced in words, or the last expression."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from torchtitan.rollout.rewards.comparison import CHOICE, elements, is_text
from torchtitan.rollout.rewards.quantities import FOLLOWING, MAX_ANSWER_CHARACTERS, TEXT_MACRO, as_number, tidy

GSM8K_MARK = "####"

# Braces and boxes; escaped characters such as \{ and \\ are matched so that they do not count as braces.
BOX = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)

# Of completions without a box: an answer that is announced and ends its line or sentence, formulas, and the borders,
# signs and words by which the last expression of a line is joined.
EXPRESSION = re.compile(r"\d|\\(?!f?boxed)[a-zA-Z]|[½¼¾⅓⅔]")
TAG = re.compile(r"</?\w+>|<\|\w+\|>|\\f?boxed\s*\{?")
ANNOUNCED = re.compile(
    r"(?i:nswer(?:\s+is)?\b)[\s:*=]*(?P<said>[^\s:*=][^\n]{0,60}?)"
    r"(?:[.!]\s|[.!]?\s*$|,?\s+(?:because|since)\b|,\s+(?:as|so|which|where|not)\b|\s+\((?!mod)[a-z]{3,}\s)", re.M
)  # fmt: skip
# Of completions whose answer is words: what announces them, in some languages too, and what may stand around them.
_LINK = r"[*_\s]*(?:(?i:is|are|was|were|(?:would|should|must) be|es|est|ist|è|é)\b|[:：=]|是|为|為|は|[—–-]\s|\n)"
_ADVERB = r"[\W_]*(?:(?:therefore|thus|then|indeed|simply|clearly|that)\b)?"
SAID = re.compile(
    r"(?:####|(?:(?i:nswer)(?:\s+to\b[^.:\n]{0,100}?)?|答案|答え|твет|espuesta|éponse|ntwort|isposta|esposta)"
    rf"{_LINK})(?={_ADVERB}(?P<said>[^\n]{{1,200}}))"
)
CHOSEN = re.compile(rf"(?i:final|correct|right|best)\s+(?i:choice|option){_LINK}(?={_ADVERB}(?P<said>[^\n]{{1,200}}))")
EMPHASISED = re.compile(r"\*\*([^*\n]{1,200})\*\*|\$([^$\n]{1,200})\$|\\\((.{1,200}?)\\\)")
# After an initial: another one, or a word that ends the sentence. "C. The others are wrong" is choice C and a sentence.
_NAME = r"\.\s+(?:[A-Z]\.|[^\W\d_]+(?:\W*$|[.!?]|\s+(?:because|since)\b))"
SENTENCE_END = re.compile(
    rf"(?<!\bDr)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bSt)(?<!\bMt)(?:(?<!\b[A-Z])|(?!{_NAME}))[.!?][\"'*_)]*(?=\s|$)|[。！？]"
)
REASON = re.compile(
    r",?\s+(?:because|since)\b|,\s+(?:as|so|which|where|not)\b|\s+\(\w|(?:(?<=^yes)|(?<=^no))(?:\s*[,;:—]|\s+-\s)", re.I
)
COPULA = re.compile(r".*\b(?:is|are|was|were|be|has|have)\s+|\W*(?:so|thus|hence|therefore|finally)\b[\s,:]*", re.I)
YES_OR_NO = re.compile(r"\W*(?:yes|no)\b(?=\W*$|[,.;:!])", re.I)
LEADING = re.compile(r"^[^\w\\(]+")
FORMULA_END = re.compile(r"\\[\])]\W*$")
HEADING = re.compile(r"\d+[.)]\s+[a-zA-Z]")  # "#### 2. Add them", a heading of Markdown
FORMULA = re.compile(
    r"\$\$(.{1,1000}?)\$\$|(?<!\\)\$(?=\S)([^$\n]{0,999}[^$\s])\$(?!\d)|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.S
)
BREAK = re.compile(r"\\approx\b|(?<!\d):|[=≈→⇒|]|->")
BORDER = re.compile(r"^[^\w\\(\[{+.^-]+|[^\w\\)\]}!%]+$|!$|^_+|_+$")
JOINING = re.compile(r"[-+*/^]|\\times|\\cdot")
OPERAND = re.compile(r"[\d)}]$|^[a-zA-Z]$")
CONTINUES = re.compile(r"[-+*/^\\]|\d+/\d")  # an operand: 2 1/2, 3 \pi


def final_answer(text: str, in_words: bool = False) -> str | None:
    """Return the answer in a completion's text without its thoughts, tidied: the last boxed expression, or else what is
    marked or announced as the answer, or else the last formula or number; with `in_words`, or else the last words."""
    boxed = last_boxed(text)
    if boxed is not None:
        return tidy(boxed)
    text = text[-MAX_ANSWER_CHARACTERS:]
    answer = _last_words(text) if in_words else None
    return answer or _last_expression(text)


def reference_text(gold: Any) -> str | None:
    """Return a reference as text, also if it is alone in a list; None for null, and for what is neither text nor a
    number: NaN, bytes, a longer list, an object."""
    if isinstance(gold, list) and len(gold) == 1:
        gold = gold[0]
    if isinstance(gold, str):
        return gold
    if gold is None or isinstance(gold, Iterable):  # bytes too
        return None
    if isinstance(gold, float) and not math.isfinite(gold):
        return None
    return str(gold)


def gold_answer(gold: Any) -> str | None:
    """Return the answer in a reference, tidied; None if it has none."""
    text = reference_text(gold)
    if text is None:
        return None
    if GSM8K_MARK in text:
        text = text.rpartition(GSM8K_MARK)[2].strip().partition("\n")[0]
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
    mark, announcement = text.rfind(GSM8K_MARK), max(text.rfind("nswer"), text.rfind("NSWER"))
    if mark > announcement:
        line = text[mark + len(GSM8K_MARK) :].partition("\n")[0]
        answer = tidy(_bare(line.strip()))
        if not HEADING.match(answer) and (as_number(answer) or _lists_numbers(answer)):
            return answer
    announced = ANNOUNCED.match(text, announcement) if announcement >= 0 else None
    if announced is not None:
        answer = tidy(_bare(FORMULA_END.sub("", announced["said"])))
        if as_number(answer) or CHOICE.fullmatch(answer) or _lists_numbers(answer):
            return answer
    if "$" in text or "\\" in text:
        formulas = list(FORMULA.finditer(text))
        if formulas and not re.search(r"\d", text[formulas[-1].end() :]):
            formula = formulas[-1]
            inside = tidy(formula[formula.lastindex or 0])
            left, equals, right = inside.rpartition("=")
            named = re.fullmatch(r"\s*[a-zA-Z]*\s*|[^a-zA-Z]*", re.sub(r"\\[a-zA-Z]+", "", TEXT_MACRO.sub("", left)))
            if equals and named and as_number(right):
                return right
            return inside
    for line in reversed(text.splitlines()):
        if EXPRESSION.search(line):
            words = BREAK.sub(" = ", tidy(TAG.sub(" ", line))).split()
            last = next((i for i in reversed(range(len(words))) if EXPRESSION.search(words[i])), None)
            if last is not None:
                return _joined(words, last)
    return None


def _lists_numbers(text: str) -> bool:
    sequence = elements(text)
    return sequence is not None and all(as_number(element) for element in sequence.elements)


def _last_words(text: str) -> str | None:
    """Return the words that are marked or announced as the answer, or else the last formula, bold words or line."""
    candidates = [match["said"] for match in SAID.finditer(text)][-1:]
    candidates = candidates or [match["said"] for match in CHOSEN.finditer(text)][-1:]
    if not candidates:
        line = TAG.sub(" ", next((line for line in reversed(text.splitlines()) if line.strip()), ""))
        candidates = [next(filter(None, match.groups())) for match in EMPHASISED.finditer(line)][-1:]
        yes_or_no = YES_OR_NO.match(line)
        candidates.append(yes_or_no[0] if yes_or_no else _after_copula(line))
    for candidate in candidates:
        answer = SENTENCE_END.split(candidate.strip(), maxsplit=1)[0]
        answer = REASON.split(LEADING.sub("", TAG.sub(" ", answer)), maxsplit=1)[0]
        answer = tidy(_bare(FORMULA_END.sub("", answer)))
        if is_text(answer):
            return answer
    return None


def _after_copula(line: str) -> str:
    found = COPULA.match(line)
    return line[found.end() :] if found else line


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
        before, word = words[first - 1], words[first]
        operator, operand = JOINING.fullmatch(before), OPERAND.search(before)
        if not operator and not (operand and CONTINUES.match(word)):
            break
        before = _bare(before) or before
        if operand and not JOINING.match(word) and not before.lstrip("+-").isdigit():
            break
        first -= 1
        words[first] = before
    if JOINING.fullmatch(words[first]):
        first += 1
    following = FOLLOWING.match(" ".join(words[last + 1 : last + 3]))
    return " ".join(words[first : last + 1]) + (f" {following[0]}" if following else "")
