"""The tags of GLM-4.5 and later: the name, and then pairs of `<arg_key>` and `<arg_value>`, in `<tool_call>`."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.tagged import CALL_END, TaggedFormat


class Glm(TaggedFormat):
    name = "glm"
    template_mark = "<arg_key>"
    marks = (("<tool_call>", CALL_END), ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
    opening = re.compile(rf"<tool_call>|{CALL_END}")
    header = re.compile(r"<tool_call>\s*(?P<name>[^<\n]{1,200})")
    end = re.compile(rf"\s*(?:{CALL_END}|\Z)")
    shape = "<tool_call>name<arg_key>name</arg_key><arg_value>value</arg_value></tool_call>"

    def __init__(self) -> None:
        super().__init__(
            key=r"<arg_key>(?P<key>[^<\n]{1,200})</arg_key>\s{0,20}<arg_value>",
            closing="</arg_value>",
            begins_next="<arg_key>",
            end=CALL_END,
        )
