"""Formats that write all calls of a turn as one JSON list behind a mark."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.format import (
    SPACE,
    WRONG,
    Call,
    Schemas,
    ToolFormat,
    UnreadableCall,
    calls_of_list,
)


class JsonListFormat(ToolFormat):
    """A list of calls that goes on to a closing mark, to the next list or to the end of the text."""

    closing: str = ""
    """The mark behind a list, which policies leave out now and then; empty if there is none"""

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        if self.closing and found[0] == self.closing:
            return [UnreadableCall(WRONG)], found.end()
        calls, end = calls_of_list(text, found.end())
        if end is not None:
            behind = SPACE.match(text, end).end()  # type: ignore[union-attr]
            if self.closing and text.startswith(self.closing, behind):
                return calls, behind + len(self.closing)
            if behind == len(text) or self.opening.match(text, behind):
                return calls, behind
            if not self.closing:  # the answer goes on
                return calls, end
            calls = [*calls, UnreadableCall(WRONG)]
        places = [text.find(self.closing, found.end())] if self.closing else []
        if following := self.opening.search(text, found.end()):
            places.append(following.start())
        next_place = min((place for place in places if place >= 0), default=len(text))
        if self.closing and text.startswith(self.closing, next_place):
            next_place += len(self.closing)
        return calls, next_place
