"""The special tokens of Kimi-K2: an id such as `functions.look:0`, which holds the name, and the arguments as JSON."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.tool_formats.format import (
    SPACE,
    WRONG,
    Call,
    IdentifiedCall,
    Schemas,
    ToolFormat,
    UnreadableCall,
    make_call,
    read_json,
)

FIRST, LAST = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
FIRST_MARK, LAST_MARK, BEGIN_MARK, ARGUMENTS_MARK, END_MARK = map(re.escape, (FIRST, LAST, BEGIN, ARGUMENTS, END))
HEADER = re.compile(
    rf"(?:{FIRST_MARK}\s*)?(?:{BEGIN_MARK})?\s*(?P<id>(?:functions\.)?(?P<name>[^<\s:]{{1,200}})(?::\d{{1,9}})?)\s*"
    rf"{ARGUMENTS_MARK}"
)
FOLLOWING = re.compile(rf"\s*{LAST_MARK}")


class KimiK2(ToolFormat):
    name = "kimi_k2"
    template_mark = BEGIN
    marks = ((BEGIN, FIRST, LAST, ARGUMENTS, END),)
    opening = re.compile(rf"(?:{FIRST_MARK}\s*)?{BEGIN_MARK}|{FIRST_MARK}|{LAST_MARK}|{END_MARK}")

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        header = HEADER.match(text, found.start())
        try:
            if header is None or found[0] in (LAST, END):
                raise UnreadableCall(WRONG)
            arguments, end = read_json(text, header.end())
            end = SPACE.match(text, end).end()  # type: ignore[union-attr]
            if text.startswith(END, end):
                end += len(END)
            elif end < len(text) and not text.startswith((LAST, BEGIN), end):
                raise UnreadableCall(WRONG)
            call = IdentifiedCall.of(make_call(plain(header["name"]), arguments), plain(header["id"]))
        except UnreadableCall as error:
            call, end = error, self._end_of_unreadable(text, found)
        behind = FOLLOWING.match(text, end)
        return [call], behind.end() if behind else end

    def _end_of_unreadable(self, text: str, found: re.Match[str]) -> int:
        """Return where the text goes on behind a call that cannot be read: at its end, or where another begins."""
        if found[0] in (LAST, END):
            return found.end()
        next_mark = re.compile(rf"{END_MARK}|(?={BEGIN_MARK})|{LAST_MARK}").search(text, found.end())
        return next_mark.end() if next_mark else len(text)
