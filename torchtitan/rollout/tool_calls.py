"""Tool calls in what a policy has written, in the forms that chat templates teach."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# Qwen, Hermes and their kin; the call ends with the text where the last mark is missing.
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Llama 3 writes the call alone, sometimes behind a mark.
ALONE = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by its name."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """(the text beside the calls, the calls). A text in which a call cannot be read has none: it is all text."""
    bodies = TAGGED.findall(text)
    rest = TAGGED.sub("", text).strip()
    if not bodies and (alone := ALONE.match(text)):
        bodies, rest = [alone[1]], ""
    calls = [_read(body) for body in bodies]
    found = [call for call in calls if call is not None]
    return (rest, found) if found and len(found) == len(calls) else (text, [])


def _read(body: str) -> ToolCall | None:
    try:
        data = json.loads(body)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    return ToolCall(data["name"], arguments) if isinstance(arguments, dict) else None
