"""Chat messages and tools of datasets and of agents' calls, in the one form that chat templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[dict[str, Any]]
ASSISTANT, TOOL = "assistant", "tool"
# Roles whose text is the run's own or the program's: only there may a text spell special tokens. Elsewhere it was
# written outside, or by the policy, and stays plain text.
INSTRUCTING = ("system", "developer")
# Many templates write a role as it is, so one with other characters could spell a control token.
ROLE = re.compile(r"[\w .-]{1,64}")
# The keys under which datasets and templates have the thought before an answer.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Types of the parts of a content that are one.
THOUGHT_PARTS = ("thinking", "reasoning")


def plain_message(message: Any) -> dict[str, Any]:
    """Return a message of a dataset as chat templates expect it, see `read_message`. Null keys are removed at any depth
    (except inside arguments that are JSON text), because files of datasets add them.

    Raises ValueError if that is impossible.
    """
    if isinstance(message, dict):
        message = {key: _without_nulls(value) for key, value in message.items()}
    return read_message(message)


def read_message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates expect it: content is text, a thought is `reasoning_content`, tool call
    arguments are objects, the older role `function` is `tool`, and null keys are removed. A null in the arguments of a
    call is a value and stays.

    Raises ValueError if that is impossible.
    """
    plain = _without_null_keys(message) if isinstance(message, dict) else {}
    # A content may be null, beside calls or in an empty answer; a role may not.
    if "role" not in plain or not message.keys() & {"content", "tool_calls", "function_call"}:
        raise ValueError("a chat message needs the keys 'role' and 'content'")
    if not isinstance(plain["role"], str) or not ROLE.fullmatch(plain["role"]):
        raise ValueError(f"a message's role must be a name: {plain['role']!r:.80}")
    plain["role"] = TOOL if plain["role"] == "function" else plain["role"]
    content, thought = _read_content(plain.get("content", ""))
    if plain["role"] == ASSISTANT:
        given = {key: plain.pop(key) for key in THOUGHTS if isinstance(plain.get(key), (str, list, dict))}
        thoughts = [_read_thought(key, value) for key, value in given.items()] + [thought] * bool(thought)
        if len({text.strip() for text in thoughts if text}) > 1:
            raise ValueError(f"a message has thoughts that differ, in {', '.join(given)} or its content: keep one")
        if thoughts:
            plain["reasoning_content"] = next(filter(None, thoughts), "")
    elif thought:
        raise ValueError(f"a message of the role {plain['role']!r} has a thought in its content")
    plain["content"] = content
    calls, call = plain.pop("tool_calls", None), plain.pop("function_call", None)
    if calls and call:
        raise ValueError("a message has tool_calls and a function_call, the older form of it: keep one")
    if calls := calls or [call] * bool(call):
        plain["tool_calls"] = _plain_calls(calls)
    return plain


def _read_content(content: Any) -> tuple[str, str]:
    """Return (text, thought) of a message's content: text, or a list of texts and of parts that have a type."""
    texts, thoughts = [], []
    for part in content if isinstance(content, list) else [content]:
        kind, text = "", part
        if isinstance(part, dict) and isinstance(content, list):
            kind, text = str(part.get("type", "")), part.get("text")
        if kind in THOUGHT_PARTS:
            thoughts.append(_read_thought(kind, part.get(kind, text)))
        elif isinstance(text, str):
            texts.append(text)
        else:
            found = f", but a part is of type {kind!r}" if kind else ""
            raise ValueError(f"text only: a message's content must be text{found}")
    return "".join(texts), "".join(thoughts)


def _read_thought(key: str, value: Any) -> str:
    """Return the text of a thought: text, or a list of texts and parts with a text."""
    text = ""
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict) and "text" in part:
            part = part["text"]
        if not isinstance(part, str):
            raise ValueError(f"a message's {key} must be text: {value!r:.200}")
        text += part
    return text


def thoughts_as_keys(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's thought under every key that templates read, as transformers does."""
    if "reasoning_content" not in message:
        return message
    return {**message, **dict.fromkeys(THOUGHTS, message["reasoning_content"])}


def thoughts_as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's thought as the first part of its content."""
    if not (thought := message.get("reasoning_content")):
        return message
    rest = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [{"type": "thinking", "thinking": thought}, *rest]}


CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content|from)\1\s*:""")


def read_chat(value: Any) -> Any:
    """Return the messages that a column holds as JSON text, whole or one by one, as `plain_tools` reads tools; any
    other value as it is. Raises ValueError for text that looks like messages and is no JSON."""
    if isinstance(value, list) and any(isinstance(item, str) for item in value):
        try:
            return [_decoded(item) for item in value]
        except ValueError:
            return value  # whoever checks the messages names the one that is none
    if not isinstance(value, str) or not CHAT_TEXT.match(value):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"text that looks like chat messages is no JSON ({error}): {value[:80]!r}") from None


def _decoded(value: Any) -> Any:
    """JSON text as what it means, any other value as it is."""
    return json.loads(value) if isinstance(value, str) else value


def plain_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools from a `tools` column as in TRL: a list, None, or JSON text for all or any item.

    Raises ValueError for anything else.
    """
    try:
        plain = [_without_nulls(_decoded(tool)) for tool in _decoded(tools) or []]
    except (TypeError, ValueError):
        plain = [tools]
    if not all(isinstance(tool, dict) for tool in plain):
        raise ValueError(f"tools must be a list of JSON schemas: {tools!r:.200}")
    return plain


def _without_nulls(value: Any) -> Any:
    """Remove null keys, as TRL does. Parquet files and Hugging Face datasets add a key to all objects of a column if
    one of them has it."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _without_null_keys(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if inner is not None}


def _plain_calls(calls: Any) -> list[dict[str, Any]]:
    plain = []
    try:
        for call in json.loads(calls) if isinstance(calls, str) else calls:
            call = _without_null_keys(call)
            function = _without_null_keys(call.get("function", call))
            # For a tool without parameters, arguments may be missing or an empty text.
            arguments = function.get("arguments") or {}
            function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
            function["name"]  # raises KeyError if it is missing
            plain.append({**call, "function": function} if "function" in call else function)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"a tool call must have a function with a name and arguments: {calls!r:.500}") from None
    return plain
