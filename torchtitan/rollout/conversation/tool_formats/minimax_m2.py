"""The tags of MiniMax-M2: `<invoke name="…">` with a `<parameter name="…">` for each argument, all in one block."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.tagged import TaggedFormat

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


class MiniMaxM2(TaggedFormat):
    name = "minimax_m2"
    template_mark = BEGIN
    marks = ((BEGIN, END),)
    opening = re.compile(rf"{BEGIN}|<invoke\b|{END}")
    header = re.compile(rf'(?:{BEGIN}\s*)?<invoke name="(?P<name>[^">\n]{{1,200}})"\s*>')
    end = re.compile(rf"\s*(?:</invoke>(?:\s*{END})?|{END}|\Z)")
    call_end = END
    shape = f'{BEGIN}<invoke name="name"><parameter name="name">value</parameter></invoke>{END}'

    def __init__(self) -> None:
        super().__init__(
            key=r'<parameter name="(?P<key>[^">\n]{1,200})"\s*>',
            closing="</parameter>",
            begins_next='<parameter name="',
            end=rf"(?:</invoke>\s*(?:{END}|(?=<invoke\b)|\Z)|{END})",
            following=rf"{BEGIN}|<invoke\b",
        )
