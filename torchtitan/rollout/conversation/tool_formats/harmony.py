"""gpt-oss: a call is a message in the commentary channel whose recipient is a function."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.harmony import CHANNEL, CHANNEL_MARKS, Message
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


class Harmony(ToolFormat):
    name = "harmony"
    template_mark = CHANNEL
    marks = (CHANNEL_MARKS,)

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        raise AssertionError("a call of gpt-oss is a message")

    def read_message(self, message: Message) -> list[Call]:
        if message.channel == "analysis":
            # A draft in its thoughts, unless the turn ends with it.
            call = UnreadableCall("a call of a tool must be in the channel commentary, not in analysis")
            return [call] if message.end == "<|call|>" else []
        try:
            content = message.content or ""
            arguments, end = read_json(content)
            if content[end:].strip():
                raise UnreadableCall(WRONG)
        except UnreadableCall as error:
            return [error]
        return [make_call(plain(message.recipient), arguments)]
