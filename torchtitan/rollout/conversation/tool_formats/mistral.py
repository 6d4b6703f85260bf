"""The special tokens of Mistral: `[TOOL_CALLS]name[ARGS]{…}` for each call, before that one JSON list of all."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.tool_formats.format import (
    SPACE,
    WRONG,
    Call,
    Schemas,
    ToolFormat,
    UnreadableCall,
    call_of_object,
    make_call,
    read_json,
)

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME = re.compile(
    r"\s*(?P<name>[^\s\[\]{}][^\[\]{}\n]{0,199}?)\s*(?:\[CALL_ID\][^\[\]{}\n]{0,200})?(?:\[ARGS\]|(?=\{))"
)


class Mistral(ToolFormat):
    name = "mistral"
    template_mark = BEGIN
    marks = ((BEGIN, ARGUMENTS, CALL_ID),)
    opening = re.compile(re.escape(BEGIN))

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        named = NAME.match(text, found.end())
        try:
            value, place = read_json(text, found.end() if named is None else named.end())
            place = SPACE.match(text, place).end()  # type: ignore[union-attr]
            if place < len(text) and not text.startswith(BEGIN, place):
                raise UnreadableCall(WRONG)
        except UnreadableCall as error:
            following = text.find(BEGIN, found.end())
            return [error], following if following >= 0 else len(text)
        if named is not None:
            return [make_call(plain(named["name"]), value)], place
        return [call_of_object(one) for one in (value if isinstance(value, list) else [value])], place
