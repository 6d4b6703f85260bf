"""Arguments that a format writes as text, with the types that the tool's JSON schema says."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchtitan.rollout.conversation.tool_formats.format import DECODER, Schemas

# Schemas come from programs, so they may have any form; what lies deeper than this says nothing.
DEEPEST = 16
# In this order a value is tried as the types that its schema allows; text comes last, because everything is text.
TYPES = ("null", "integer", "number", "boolean", "object", "array", "string")


def parameters_of(name: str, tools: Schemas) -> dict[str, Any]:
    """Return the schema of a function's parameters; an empty one if it is not among the tools."""
    functions = [tool.get("function", tool) for tool in tools]
    found = next(
        (function for function in functions if isinstance(function, dict) and function.get("name") == name), {}
    )
    parameters = found.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def typed_arguments(name: str, pairs: Sequence[tuple[str, str]], tools: Schemas) -> dict[str, Any]:
    """Return a call's arguments with the types of its tool's schema.

    A value that fits none of its types stays text, so that the tool itself refuses it and says why.
    """
    parameters = parameters_of(name, tools)
    properties = parameters.get("properties")
    known = properties if isinstance(properties, dict) else {}
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        arguments[key] = _typed(text, known[key], parameters) if key in known else text
    return arguments


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    parts = list(_alternatives(schema, root, set(), DEEPEST))
    for value in (value for part in parts for value in _constants(part)):
        if text == value or text == json.dumps(value, ensure_ascii=False):
            return value
    types = {name for part in parts for name in _types(part)}
    for kind in TYPES:
        if kind in types:
            try:
                return READERS[kind](text, "string" in types)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return text


def _alternatives(schema: Any, root: Mapping[str, Any], seen: set[str], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that may hold for a value, with combinations and references resolved, each of these once."""
    if not isinstance(schema, dict) or depth == 0:
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if reference in seen:
            return
        seen.add(reference)
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        yield from _alternatives(target, root, seen, depth - 1)
        return
    combined = [*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf")), *_listed(schema.get("allOf"))]
    for alternative in combined:
        yield from _alternatives(alternative, root, seen, depth - 1)
    if not combined:
        yield schema


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    return [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the types that a schema allows: all if it names none, and constants do not tell."""
    kind = schema.get("type")
    if kind is None:
        return () if _constants(schema) else TYPES
    kinds = kind if isinstance(kind, list) else [kind]
    return [name for name in kinds if isinstance(name, str)]


def _null(text: str, may_be_text: bool) -> None:
    # Where the value may be text, "None" is a word.
    if text.strip() != "null" and (may_be_text or text.strip() not in ("None", "")):
        raise ValueError(text)


def _integer(text: str, _may_be_text: bool) -> int:
    value = _number(text, False)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _number(text: str, _may_be_text: bool) -> int | float:
    value = DECODER.decode(text.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value


def _boolean(text: str, may_be_text: bool) -> bool:
    # Policies also write Python's True and False. Where the value may be text, those are words.
    word = text.strip() if may_be_text else text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError(text)
    return word == "true"


def _container(kind: type) -> Callable[[str, bool], Any]:
    def read(text: str, _may_be_text: bool) -> Any:
        try:
            value = DECODER.decode(text.strip())
        except ValueError:
            value = ast.literal_eval(text.strip())  # as Python writes it
            json.dumps(value, allow_nan=False)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


READERS: dict[str, Callable[[str, bool], Any]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _container(dict),
    "array": _container(list),
    "string": lambda text, _may_be_text: text,
}
