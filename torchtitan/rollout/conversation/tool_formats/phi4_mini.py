"""Phi-4-mini: a JSON list of calls behind the word `functools`, or between `<|tool_call|>` and `<|/tool_call|>`."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.json_list import JsonListFormat

BEGIN, END = "<|tool_call|>", "<|/tool_call|>"


class Phi4Mini(JsonListFormat):
    name = "phi4_mini"
    template_mark = "functools["
    other_template_marks = (END, "<|/tool|>")
    marks = ((BEGIN, END),)
    opening = re.compile(rf"{re.escape(BEGIN)}|{re.escape(END)}|\bfunctools(?=\s*\[)")
    closing = END
