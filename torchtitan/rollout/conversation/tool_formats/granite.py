"""Granite 3: a JSON list of calls behind `<|tool_call|>`, or behind `<tool_call>` in text. Granite 4 writes hermes."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.tool_formats.json_list import JsonListFormat

BEGIN = "<|tool_call|>"


class Granite(JsonListFormat):
    name = "granite"
    template_mark = BEGIN
    marks = ((BEGIN,),)
    opening = re.compile(rf"{re.escape(BEGIN)}|<tool_call>(?=\s*[\[{{])")
