"""LFM2: a list of calls as Python writes them, between `<|tool_call_start|>` and `<|tool_call_end|>`."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.pythonic import PythonicFormat

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(PythonicFormat):
    name = "lfm2"
    template_mark = BEGIN
    # The first templates do not write calls at all, only the tools.
    other_template_marks = ("<|tool_list_start|>",)
    marks = ((BEGIN, END),)
    opening = re.compile(rf"{re.escape(BEGIN)}|{re.escape(END)}")
    begin, end = BEGIN, END
