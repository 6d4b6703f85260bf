"""Parsing of tool calls in the policy's text, in the formats of common chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# The tag of Qwen, Hermes, GLM and similar models; without the closing tag, the call ends with the text.
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Llama 3 writes the call alone, sometimes after a special token.
ALONE = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL)
ARGUMENTS = re.compile(r'"(arguments|parameters)"')
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
WRONG = 'a tool call must be {"name": …, "arguments": {…}} in JSON'
SEPARATOR = "<｜tool▁sep｜>"
FENCE = re.compile(r"\A```(?:json)?\n|\n```\s*\Z")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>\s*\Z")


class ToolCall(NamedTuple):
    """A call of a tool, by name."""

    name: str
    arguments: dict[str, Any]


Parsed = tuple[str, list[ToolCall]]
Schemas = Sequence[dict[str, Any]]


def find_format(parser: str, template: str) -> str:
    """Return environment.tool_parser, or instead of "auto" the format that a chat template shows."""
    return next((name for mark, name in MARKS.items() if mark in template), "hermes") if parser == "auto" else parser


def parse_tool_calls(text: str, form: str = "hermes", tools: Schemas = ()) -> Parsed:
    """Return (the text without the calls, the calls).

    Args:
        form: a name of FORMATS; for those of SPECIAL, the text has its special tokens.
        tools: their JSON schemas, which say the types of arguments.

    Raises:
        ValueError: text that is marked as a call cannot be parsed; the message is for the policy.
    """
    return FORMATS[form](text, tools)


def _hermes(text: str, _tools: Schemas) -> Parsed:
    if bodies := TAGGED.findall(text):
        return TAGGED.sub("", text).strip(), [_read(body) for body in bodies]
    if (alone := ALONE.match(text)) and ARGUMENTS.search(text):
        try:
            return "", [_read(alone[1])]
        except ValueError:
            pass  # not a call: an answer in JSON, or in braces
    return text, []


def _qwen3_coder(text: str, tools: Schemas) -> Parsed:
    calls = []
    for body in (bodies := TAGGED.findall(text)):
        if (found := FUNCTION.fullmatch(body)) is None:
            raise ValueError("a tool call must be <function=name><parameter=name>value</parameter></function>")
        calls.append(_typed(found[1].strip(), PARAMETER.findall(found[2]), tools))
    return TAGGED.sub("", text).strip() if bodies else text, calls


def _glm(text: str, tools: Schemas) -> Parsed:
    bodies = TAGGED.findall(text)
    calls = [_typed(body.partition("<arg_key>")[0].strip(), ARGUMENT.findall(body), tools) for body in bodies]
    return TAGGED.sub("", text).strip() if bodies else text, calls


def _deepseek(text: str, _tools: Schemas) -> Parsed:
    calls = []
    for body in DEEPSEEK.findall(text):
        # V3 and R1 write the kind of call first, and a fence around the arguments; V3.1 writes neither.
        kind, _, rest = body.partition(SEPARATOR)
        name, _, arguments = rest.partition("\n") if kind == "function" else (kind, "", rest)
        calls.append(_call(name.strip(), FENCE.sub("", arguments.strip())))
    return text.partition("<｜tool▁calls▁begin｜>")[0].strip() if calls else text, calls


def _mistral(text: str, _tools: Schemas) -> Parsed:
    said, *parts = text.split("[TOOL_CALLS]")
    calls = []
    for part in parts:
        name, newer, arguments = part.partition("[ARGS]")
        if newer:
            calls.append(_call(name.partition("[CALL_ID]")[0].strip(), arguments))
        else:
            listed = _json(part)
            calls += [_read(json.dumps(one)) for one in (listed if isinstance(listed, list) else [listed])]
    return said.strip() if parts else text, calls


def _harmony(text: str, _tools: Schemas) -> Parsed:
    """Of gpt-oss: messages with a channel each, of which the final one is the answer, and thoughts are left out."""
    said, calls = "", []
    for message in text.split("<|start|>assistant"):
        header, written, body = message.partition("<|message|>")
        body = HARMONY_END.sub("", body)
        if found := RECIPIENT.search(header):
            calls.append(_call(found[1], body))
        elif "analysis" not in header:
            said += body if written else header
    return said, calls


FORMATS: dict[str, Callable[[str, Schemas], Parsed]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "deepseek": _deepseek,
    "mistral": _mistral,
    "harmony": _harmony,
}
# Their calls are marked by special tokens.
SPECIAL = ("deepseek", "mistral", "harmony")
# What shows a format in a chat template, the more specific first.
MARKS = {
    "<|channel|>": "harmony",
    "<｜tool▁call▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm",
}


def _typed(name: str, pairs: list[tuple[str, str]], tools: Schemas) -> ToolCall:
    """Return a call whose arguments are written as text, unless the tool's schema says that they are JSON."""
    functions = [one.get("function", one) for one in tools]
    schema = next((one.get("parameters") or {} for one in functions if one.get("name") == name), {})
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        kind = (schema.get("properties") or {}).get(key.strip(), {}).get("type", "string")
        try:
            arguments[key.strip()] = value if kind == "string" else _json(value)
        except ValueError:
            arguments[key.strip()] = value
    return _call(name, arguments)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(WRONG) from None


def _call(name: Any, arguments: Any) -> ToolCall:
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(WRONG)
    try:
        # JSON can express lone surrogates, which cannot be encoded as UTF-8.
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError(WRONG) from None
    return ToolCall(name, arguments)


def _read(body: str) -> ToolCall:
    data = _json(body)
    if not isinstance(data, dict):
        raise ValueError(WRONG)
    arguments = data.get("arguments", data.get("parameters", {}))
    return _call(data.get("name"), None if isinstance(arguments, str) else arguments)
