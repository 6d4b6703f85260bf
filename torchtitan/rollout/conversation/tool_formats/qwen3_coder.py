"""The tags of Qwen3-Coder, Qwen3.5 and others: `<function=name>` with a `<parameter=name>` for each argument."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.tagged import CALL_END, TaggedFormat


class Qwen3Coder(TaggedFormat):
    name = "qwen3_coder"
    template_mark = "<function="
    marks = (("<tool_call>", CALL_END),)
    # Policies leave out the first tag now and then.
    opening = re.compile(rf"<tool_call>|<function=|{CALL_END}")
    header = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]{1,200})>")
    end = re.compile(rf"\s*(?:</function>(?:\s*{CALL_END})?|{CALL_END}|\Z)")
    shape = "<tool_call><function=name><parameter=name>value</parameter></function></tool_call>"

    def __init__(self) -> None:
        super().__init__(
            key=r"<parameter=(?P<key>[^>\n]{1,200})>\n?",
            closing=r"\n?</parameter>",
            begins_next="<parameter=",
            end=rf"(?:</function>\s*(?:{CALL_END}|\Z)|{CALL_END})",
        )
