"""Tools whose argument is a text of any form, OpenAI's "custom" ones: for the policy, functions with one parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

TEXT = "input"
PARAMETERS = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}


def is_freeform(tool: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a tool takes any text. A grammar for it is nothing that the run could hold the policy to.

    about: where the tool's name and format stand.
    """
    return tool.get("type") == "custom" and about.get("format") in (None, {"type": "text"})


def as_function(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function that stands for such a tool."""
    return {"name": about.get("name"), "description": about.get("description") or "", "parameters": PARAMETERS}


def text_of(arguments: str) -> str:
    """Return the text of a call, whose arguments are JSON; all of them where the policy left the parameter out."""
    text = json.loads(arguments).get(TEXT)
    return text if isinstance(text, str) else arguments
