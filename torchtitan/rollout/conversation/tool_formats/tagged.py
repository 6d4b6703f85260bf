"""Formats that write the arguments of a call as text between tags, which the text itself may contain too."""

from __future__ import annotations

import functools
import re

from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.tool_formats.format import (
    SPACE,
    Call,
    Schemas,
    ToolFormat,
    UnreadableCall,
    make_call,
)
from torchtitan.rollout.conversation.tool_formats.schema import parameters_of, typed_arguments

CALL_END = "</tool_call>"


@functools.lru_cache(maxsize=1)
def _last_end(bounds: re.Pattern[str], text: str) -> int:
    """Return the end of the last tag that ends a value for certain, or 0. It is found once for all values of a text:
    looking through the rest of the text for each of them would take quadratic time."""
    return max((found.end() for found in bounds.finditer(text) if found["next"] is None), default=0)


class TaggedFormat(ToolFormat):
    """A call is its name and then arguments, each with a tag before and behind its value.

    A closing tag ends a value only if the call goes on or ends behind it; any other is part of the value. Where it is
    missing, the value ends at the next argument that the tool has, or with the call. Patterns are regular expressions.
    """

    header: re.Pattern[str]
    """The beginning of a call, with the group `name`"""
    key: re.Pattern[str]
    """What stands before a value, with the group `key`"""
    end: re.Pattern[str]
    """The end of a call"""
    shape: str
    """What a call must look like, for the policy"""
    call_end: str = CALL_END
    """The tag that ends a call or a block of calls"""

    def __init__(self, key: str, closing: str, begins_next: str, end: str, following: str = "<tool_call>"):
        """closing: what closes a value; begins_next: the beginning of a key; end: the last closing tags of a call;
        following: what begins another call behind one."""
        self.key = re.compile(key)
        self._bounds = re.compile(
            rf"(?P<closed>{closing}(?=\s*(?:{begins_next}|{end}|\Z)))"
            rf"|(?P<next>\n?{key})"
            # A missing closing tag: text behind the end of a call would make it a part of the value.
            rf"|(?P<end>\n?{end}(?=\s*(?:\Z|{following})))"
        )
        self._any_end = re.compile(rf"\n?{end}")

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        header = self.header.match(text, found.start())
        if header is None or not header["name"].strip():
            return self._unreadable(text, found, found.end())
        name, place = header["name"].strip(), header.end()
        known = parameters_of(name, tools).get("properties")
        pairs: dict[str, str] = {}
        while (key := self.key.match(text, SPACE.match(text, place).end())) is not None:  # type: ignore[union-attr]
            label = key["key"].strip()
            if label in pairs or (bounds := self._end_of_value(text, key.end(), known, {*pairs, label})) is None:
                return self._unreadable(text, found, place)
            pairs[label] = plain(text[key.end() : bounds[0]])
            place = bounds[1]
        if (end := self.end.match(text, place)) is None:
            return self._unreadable(text, found, place)
        return [make_call(name, typed_arguments(name, list(pairs.items()), tools))], end.end()

    def _end_of_value(self, text: str, begin: int, known: object, given: set[str]) -> tuple[int, int] | None:
        """Return where a value ends and where the call goes on; None if that cannot be told."""
        last = None
        if begin >= _last_end(self._bounds, text):  # No tag ends this value: it ends with the call.
            last = self._any_end.search(text, begin)
        for bound in self._bounds.finditer(text, begin):
            if last is not None and bound.start() >= last.start():
                break
            if bound["closed"] is not None:
                return bound.span()
            if bound["end"] is not None:
                return bound.start(), bound.start()
            label = bound["key"].strip()
            if label not in given and (label in known if isinstance(known, dict) else bound[0].startswith("\n")):
                return bound.start(), bound.start()
        last = last or self._any_end.search(text, begin)
        return None if last is None else (last.start(), last.start())

    def _unreadable(self, text: str, found: re.Match[str], place: int) -> tuple[list[Call], int]:
        """place: up to where the call could be read; what its values took is not read again as other calls."""
        closing = found.start() if found[0] == self.call_end else text.find(self.call_end, place)
        end = closing + len(self.call_end) if closing >= 0 else len(text)
        return [UnreadableCall(f"a tool call must be {self.shape}")], end
