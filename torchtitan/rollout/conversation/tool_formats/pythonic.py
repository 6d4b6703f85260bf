"""Formats that write calls as Python does: `look(at="here", deep=True)`, several of them between two marks."""

from __future__ import annotations

import ast
import re
from typing import Any

from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.tool_formats.format import (
    DECODER,
    Call,
    Schemas,
    ToolFormat,
    UnreadableCall,
    calls_of_list,
    make_call,
)

NAME = re.compile(r"\s*(?P<name>[A-Za-z_][\w.-]{0,199})\(")
KEY = re.compile(r"\s*(?P<key>\w{1,200})\s*=\s*")
SEPARATOR = re.compile(r"[\s,;]*")
LIST_OF_OBJECTS = re.compile(r"\s*\[?\s*\{")
# As Python and as JSON write them.
NAMED_VALUES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
CLOSING = {"(": ")", "[": "]", "{": "}"}
QUOTED = re.compile(r"(?P<quote>\"\"\"|'''|\"|')(?:\\.|(?!(?P=quote)).)*(?P=quote)", re.DOTALL)


class PythonicFormat(ToolFormat):
    """Calls between `begin` and `end`, each of them a name and arguments that have names, too. A list of JSON objects
    stands for the same."""

    begin: str
    end: str

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        if found[0] == self.end:
            return [self._unreadable()], found.end()
        if LIST_OF_OBJECTS.match(text, found.end()):
            calls, place = calls_of_list(text, found.end())
            return calls, self._end_of_block(text, found.end() if place is None else place)
        bracket = re.compile(r"\s*\[").match(text, found.end())
        calls, place = list[Call](), bracket.end() if bracket else found.end()
        while True:
            place = SEPARATOR.match(text, place).end()  # type: ignore[union-attr]
            closed = place + 1 if bracket and text.startswith("]", place) else place
            closed = SEPARATOR.match(text, closed).end()  # type: ignore[union-attr]
            if closed == len(text) or text.startswith(self.end, closed):
                calls = calls or [self._unreadable()]
                return calls, min(closed + len(self.end), len(text))
            name = NAME.match(text, place)
            arguments = None if name is None else _arguments(text, name.end())
            if name is None or arguments is None:
                return [*calls, self._unreadable()], self._end_of_block(text, place)
            values, place = arguments
            calls.append(self._unreadable() if values is None else make_call(plain(name["name"]), values))

    def _end_of_block(self, text: str, place: int) -> int:
        closing = text.find(self.end, place)
        return closing + len(self.end) if closing >= 0 else len(text)

    def _unreadable(self) -> UnreadableCall:
        return UnreadableCall(f'a tool call must be {self.begin}name(argument="value"){self.end}')


def _arguments(text: str, begin: int) -> tuple[dict[str, Any] | None, int] | None:
    """Return (the arguments behind an opening parenthesis, where the call ends). The first is None if they cannot be
    read; None altogether if the call does not end."""
    values: dict[str, Any] | None = {}
    place = begin
    while not text.startswith(")", place := SEPARATOR.match(text, place).end()):  # type: ignore[union-attr]
        key = KEY.match(text, place)
        value_begin = place if key is None else key.end()
        if (value_end := _end_of_value(text, value_begin)) is None:
            return None
        try:
            value = _literal(plain(text[value_begin:value_end]))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            values = None
        if key is None or values is None or key["key"] in values:
            values = None
        else:
            values[key["key"]] = value
        place = value_end
    return values, place + 1


def _end_of_value(text: str, begin: int) -> int | None:
    """Return where a value ends: at the next comma or bracket that belongs to the call; None if nothing ends it."""
    expected: list[str] = []
    place = begin
    while place < len(text):
        character = text[place]
        if character in "\"'":
            if (quoted := QUOTED.match(text, place)) is None:
                return None
            place = quoted.end()
            continue
        if not expected and character in ",)":
            return place
        if character in CLOSING:
            expected.append(CLOSING[character])
        elif character in ")]}" and (not expected or expected.pop() != character):
            return None
        place += 1
    return None


def _literal(text: str) -> Any:
    """Return the value that a literal of JSON or Python describes. Raises ValueError or SyntaxError."""
    try:
        return DECODER.decode(text.strip())
    except ValueError:
        return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in NAMED_VALUES:
        return NAMED_VALUES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if isinstance(value, int | float):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = [_value(key) for key in node.keys if key is not None]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise ValueError("this is no literal")
