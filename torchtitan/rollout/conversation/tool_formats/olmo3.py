"""OLMo 3: calls as Python writes them, one in a line, between `<function_calls>` and `</function_calls>`."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.pythonic import PythonicFormat

BEGIN, END = "<function_calls>", "</function_calls>"


class Olmo3(PythonicFormat):
    name = "olmo3"
    template_mark = BEGIN
    marks = ((BEGIN, END),)
    opening = re.compile(rf"{BEGIN}|{END}")
    begin, end = BEGIN, END
