"""Tool calls in what a policy has written, in the forms that chat templates teach."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

# Qwen, Hermes and their kin; the call ends with the text where the last mark is missing.
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Llama 3 writes the call alone, sometimes behind a mark.
ALONE = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL)
ARGUMENTS = re.compile(r'"(arguments|parameters)"')


class ToolCall(NamedTuple):
    """A call of a tool by its name."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """(the text beside the calls, the calls).

    Raises:
        ValueError: what is marked as a call cannot be read; in words for the policy.
    """
    if bodies := TAGGED.findall(text):
        return TAGGED.sub("", text).strip(), [_read(body) for body in bodies]
    if (alone := ALONE.match(text)) and ARGUMENTS.search(text):
        try:
            return "", [_read(alone[1])]
        except ValueError:
            pass  # an answer in JSON, or in braces
    return text, []


def _read(body: str) -> ToolCall:
    try:
        data = json.loads(body)
        # Half of a character, which JSON can spell, is nothing that could be sent on.
        json.dumps(data, ensure_ascii=False).encode()
        call = ToolCall(data["name"], data.get("arguments", data.get("parameters", {})))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        call = ToolCall("", {})
    if not call.name or not isinstance(call.name, str) or not isinstance(call.arguments, dict):
        raise ValueError('a tool call must be {"name": …, "arguments": {…}} in JSON')
    return call
