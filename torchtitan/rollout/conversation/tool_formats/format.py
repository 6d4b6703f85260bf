"""What a format of tool calls is, and what its calls are."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchtitan.rollout.conversation.harmony import Message
from torchtitan.rollout.conversation.marks import Group, plain
from torchtitan.rollout.conversation.thoughts import Turn, read_turn

Schemas = Sequence[dict[str, Any]]
"""JSON schemas of functions, as OpenAI's API and chat templates have them"""

# Arguments with more levels of objects and lists are no call: what reads them further on would fail of them.
DEEPEST_ARGUMENTS = 100
WRONG = 'a tool call must be {"name": …, "arguments": {…}} in JSON'


class ToolCall(NamedTuple):
    """A call of a tool, by name."""

    name: str
    arguments: dict[str, Any]


class IdentifiedCall(ToolCall):
    """A call to which the policy itself gave an id, which its template repeats beside the result."""

    id: str = ""

    @classmethod
    def of(cls, call: Call, call_id: object) -> Call:
        """Return a call with an id; as it is, if it cannot be read or if that is no id."""
        if isinstance(call, UnreadableCall) or not isinstance(call_id, str) or not CALL_ID.fullmatch(call_id):
            return call
        identified = cls(*call)
        identified.id = call_id
        return identified


class UnreadableCall(ValueError):
    """A call that cannot be read. The message is for the policy."""


Call = ToolCall | UnreadableCall


class ToolFormat(ABC):
    """A way of writing calls in the text of a turn."""

    name: str
    template_mark: str = ""
    """What shows it in a chat template; empty for the format of templates that show no other"""
    other_template_marks: tuple[str, ...] = ()
    """What shows it in others"""
    marks: tuple[Group, ...] = ()
    """Its tokens that have a meaning of their own (marks.py)"""
    opening: re.Pattern[str] = re.compile(r"(?!)")
    """What begins a call; the default begins none"""

    def read(self, text: str, opened: str = "", tools: Schemas = ()) -> Turn:
        """Return a turn with its calls, each a ToolCall or an UnreadableCall. Thoughts have none.

        text: marked text (marks.py); opened: what the prompt has of the turn (thoughts.opened_by); tools: the schemas
        of the functions, which say the types of arguments.
        """
        return read_turn(text, opened, _Reader(self, tools))

    @abstractmethod
    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        """Return the calls at `found`, a match of `opening`, and where the text goes on behind them."""

    def read_message(self, message: Message) -> list[Call]:
        """Return the calls of a message of gpt-oss that has a recipient."""
        return []


class _Reader:
    """A format with the tools of a turn, as thoughts.py needs it."""

    def __init__(self, form: ToolFormat, tools: Schemas):
        self.opening, self._form, self._tools = form.opening, form, tools

    def read_call(self, text: str, found: re.Match[str]) -> tuple[list[Call], int]:
        return self._form.read_call(text, found, self._tools)

    def read_message(self, message: Message) -> list[Call]:
        return self._form.read_message(message)


def read_json(text: str, begin: int = 0) -> tuple[Any, int]:
    """Return (the JSON value in marked text behind `begin` and white space, where it ends). Line breaks in its strings
    need no escape. Raises UnreadableCall."""
    try:
        value, end = DECODER.raw_decode(text, SPACE.match(text, begin).end())  # type: ignore[union-attr]
        part = text[begin:end]
        return (value if plain(part) == part else DECODER.decode(plain(part))), end
    except (ValueError, RecursionError):
        raise UnreadableCall(WRONG) from None


def make_call(name: Any, arguments: Any) -> Call:
    """Return a call, if its name is text and its arguments are an object that JSON can represent."""
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        return UnreadableCall(WRONG)
    if _is_deeper(arguments, DEEPEST_ARGUMENTS):
        return UnreadableCall(f"the arguments of a tool call must not have more than {DEEPEST_ARGUMENTS} levels")
    try:
        # JSON can express lone surrogates, which cannot be encoded as UTF-8, and numbers that become infinite.
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return UnreadableCall(WRONG)
    return ToolCall(name, arguments)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value consists of more levels of objects and lists."""
    level = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
    return any(isinstance(item, dict | list) for item in level)


def call_of_object(value: Any) -> Call:
    """Return the call that a JSON value with a name and arguments (Llama 3: parameters) describes."""
    if not isinstance(value, dict):
        return UnreadableCall(WRONG)
    call = make_call(value.get("name"), value.get("arguments", value.get("parameters", {})))
    return IdentifiedCall.of(call, value.get("id"))


def calls_of_list(text: str, begin: int) -> tuple[list[Call], int | None]:
    """Return the calls that a JSON list of objects in marked text describes, and where it ends; None if that cannot be
    told. Items are read one by one, so that one that breaks off leaves those before it."""
    calls: list[Call] = []
    if (bracket := LIST_BEGIN.match(text, begin)) is None:
        try:
            value, end = read_json(text, begin)
        except UnreadableCall as error:
            return [error], None
        return [call_of_object(value)], end
    place = bracket.end()
    while (closing := LIST_END.match(text, place)) is None or not calls:
        try:
            value, place = read_json(text, place)
        except UnreadableCall as error:
            return [*calls, error], None
        calls.append(call_of_object(value))
        comma = COMMA.match(text, place)
        if comma is None and LIST_END.match(text, place) is None:
            return [*calls, UnreadableCall(WRONG)], None
        place = comma.end() if comma else place
    return calls, closing.end()


def refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def finite_number(text: str) -> float:
    """Return the number that a JSON text says. Raises ValueError for one that would become infinite, as 1e999 does:
    JavaScript cannot read what Python would write for it."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value


DECODER = json.JSONDecoder(strict=False, parse_constant=refuse_constant, parse_float=finite_number)
SPACE = re.compile(r"\s*")
LIST_BEGIN, COMMA, LIST_END = re.compile(r"\s*\["), re.compile(r"\s*,"), re.compile(r"\s*\]")
# Longer ones, or ones with other characters, are not what a model was trained to write.
CALL_ID = re.compile(r"[\w.:-]{1,64}")
