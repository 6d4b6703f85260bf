"""The special tokens of DeepSeek: V3 and R1 write a kind, the name and fenced arguments, V3.1 name and arguments."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.tool_formats.format import (
    WRONG,
    Call,
    Schemas,
    ToolFormat,
    UnreadableCall,
    make_call,
    read_json,
)

BEGIN, SEPARATOR, END = (f"<｜tool▁{tag}｜>" for tag in ("call▁begin", "sep", "call▁end"))
FIRST, LAST = (f"<｜tool▁calls▁{tag}｜>" for tag in ("begin", "end"))
HEADER = re.compile(
    rf"{BEGIN}\s*(?:function{SEPARATOR})?(?P<name>[^<\n]{{1,200}})(?:{SEPARATOR}|\n)\s*(?:```(?:json)?\n)?"
)
FENCE = re.compile(r"\s*(?:```\s*)?")
FOLLOWING = re.compile(rf"\s*(?:{LAST})?")


class DeepSeek(ToolFormat):
    name = "deepseek"
    template_mark = BEGIN
    marks = ((BEGIN, SEPARATOR, END, FIRST, LAST),)
    opening = re.compile(rf"(?:{FIRST}\s*)?{BEGIN}|{FIRST}|{LAST}|{END}")

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        if not found[0].endswith(BEGIN):
            return [UnreadableCall(WRONG)], found.end()
        header = HEADER.match(text, found.end() - len(BEGIN))
        try:
            if header is None:
                raise UnreadableCall(WRONG)
            arguments, place = read_json(text, header.end())
            place = FENCE.match(text, place).end()  # type: ignore[union-attr]
            if not text.startswith(END, place) and place < len(text):
                raise UnreadableCall(WRONG)
            call = make_call(plain(header["name"]).strip(), arguments)
        except UnreadableCall as error:
            call, place = error, text.find(END, found.end())
        if place < 0:
            return [call], len(text)
        place = min(place + len(END), len(text))
        return [call], FOLLOWING.match(text, place).end()  # type: ignore[union-attr]
