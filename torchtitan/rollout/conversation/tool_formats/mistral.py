"""The special tokens of Mistral: `[TOOL_CALLS]name[ARGS]{…}` for each call, before that one JSON list of all."""

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
    calls_of_list,
    make_call,
    read_json,
)

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME = re.compile(
    r"\s*(?P<name>[^\s\[\]{}][^\[\]{}\n]{0,199}?)\s*(?:\[CALL_ID\](?P<id>[^\[\]{}\n]{0,200}))?(?:\[ARGS\]|(?=\{))"
)


class Mistral(ToolFormat):
    name = "mistral"
    template_mark = BEGIN
    marks = ((BEGIN, ARGUMENTS, CALL_ID),)
    opening = re.compile(re.escape(BEGIN))

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        named = NAME.match(text, found.end())
        if named is None:
            calls, end = calls_of_list(text, found.end())
        else:
            try:
                value, end = read_json(text, named.end())
                calls = [IdentifiedCall.of(make_call(plain(named["name"]), value), (named["id"] or "").strip())]
            except UnreadableCall as error:
                calls, end = [error], None
        if end is not None:
            end = SPACE.match(text, end).end()  # type: ignore[union-attr]
            if end == len(text) or text.startswith(BEGIN, end):
                return calls, end
            calls = [UnreadableCall(WRONG)]
        following = text.find(BEGIN, found.end())
        return calls, following if following >= 0 else len(text)
