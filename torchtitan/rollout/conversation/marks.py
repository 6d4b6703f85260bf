"""Marked text: the text of a turn in which the tokens that structure it are spelled out.

A mark such as `[THINK]` or `<|channel|>` is a token of its own. Ordinary tokens may spell the same characters, for
instance where a policy explains a format. In marked text such characters are shielded: two noncharacters, which no text
contains, surround them. A mark that stands bare is therefore a token. `turns.py` makes marked text of tokens.

Literal marks such as `<think>` count however they are tokenised, because policies also write them without such tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

SHIELD = ("\U0010fffe", "\U0010ffff")
LITERAL = re.compile(r"</?\w+>")

Group = tuple[str, ...]
"""Marks that belong together; a tokenizer has them if it has the first"""


def plain(text: str) -> str:
    """Return marked text without its shields."""
    return text.replace(SHIELD[0], "").replace(SHIELD[1], "")


def shield(text: str, pattern: re.Pattern[str] | None) -> str:
    """Surround what the pattern finds with the shield. Shields that the text has by itself are replaced."""
    clean = text.replace(SHIELD[0], "\ufffd").replace(SHIELD[1], "\ufffd")
    if pattern is None:
        return clean
    return pattern.sub(lambda found: f"{SHIELD[0]}{found[0]}{SHIELD[1]}", clean)


def shielded(pattern: re.Pattern[str] | None) -> re.Pattern[str] | None:
    """Return the pattern for what `shield` has surrounded; its group is the text within."""
    return re.compile(f"{SHIELD[0]}({pattern.pattern}){SHIELD[1]}") if pattern else None


def bare(*patterns: str) -> re.Pattern[str]:
    """Return a pattern for any of these that is not shielded."""
    return re.compile(f"(?<!{SHIELD[0]})(?:{'|'.join(patterns)})", re.DOTALL)


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of these texts, the longest first; None for none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def known_marks(groups: Iterable[Group], tokens: Collection[str]) -> frozenset[str]:
    """Return the marks that a tokenizer with these added tokens has."""
    return frozenset(mark for group in groups if group[0] in tokens for mark in group if mark in tokens)


def only_tokens(marks: Iterable[str]) -> frozenset[str]:
    """Return the marks that count only as tokens, not as text that spells them."""
    return frozenset(mark for mark in marks if not LITERAL.fullmatch(mark))
