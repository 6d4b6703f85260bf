"""Parsing of tool calls in the policy's text, in the formats of common chat templates."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

# The format of Qwen, Hermes and similar models; without the closing tag, the call ends with the text.
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Llama 3 writes the call alone, sometimes after a special token.
ALONE = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL)
ARGUMENTS = re.compile(r'"(arguments|parameters)"')


class ToolCall(NamedTuple):
    """A call of a tool, by name."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return (the text without the calls, the calls).

    Raises:
        ValueError: text that is marked as a call cannot be parsed; the message is for the policy.
    """
    if bodies := TAGGED.findall(text):
        return TAGGED.sub("", text).strip(), [_read(body) for body in bodies]
    if (alone := ALONE.match(text)) and ARGUMENTS.search(text):
        try:
            return "", [_read(alone[1])]
        except ValueError:
            pass  # not a call: an answer in JSON, or in braces
    return text, []


def _read(body: str) -> ToolCall:
    try:
        data = json.loads(body)
        # JSON can express lone surrogates, which cannot be encoded as UTF-8.
        json.dumps(data, ensure_ascii=False).encode()
        call = ToolCall(data["name"], data.get("arguments", data.get("parameters", {})))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        call = ToolCall("", {})
    if not call.name or not isinstance(call.name, str) or not isinstance(call.arguments, dict):
        raise ValueError('a tool call must be {"name": …, "arguments": {…}} in JSON')
    return call
