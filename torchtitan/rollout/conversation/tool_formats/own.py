"""A parser of the user's own, from the text of a turn outside of its thoughts to `[(name, arguments)]`, as a format.

It runs in a process of its own: that of its environment, or one that the gateway has for it (parser_process.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from torchtitan.errors import UserError, load_object
from torchtitan.rollout.conversation.thoughts import Part, Turn, read_turn
from torchtitan.rollout.conversation.tool_formats.format import Call, Schemas, ToolFormat, UnreadableCall, make_call

SETTING = "environment.tool_parser"


def load_parser(name: str) -> Callable[[str], Iterable[Any]]:
    """Load a parser, `package.module:function`. Raises UserError if there is none, or if it is async."""
    parser = load_object(name, SETTING)
    if inspect.iscoroutinefunction(parser):
        raise UserError(f"{SETTING} {name!r}: it must not be an async function")
    return parser


class ParserUnavailable(Exception):
    """There is no process in which the parser could run, whatever the text is."""


class OwnFormat(ToolFormat):
    """Reads what a function finds. It does not say where, so calls stay in the text of the turn."""

    def __init__(self, name: str, parse: Callable[[str], Iterable[Any]]):
        self.name, self._parse = name, parse

    def read(self, text: str, opened: str = "", tools: Schemas = ()) -> Turn:
        turn = read_turn(text, opened)
        calls = self._calls(turn.beside_thoughts)
        return Turn(
            [*turn.parts, *([Part("call", "", "", calls=calls)] if calls else [])], turn.well_formed, turn.channels
        )

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        raise AssertionError("a parser reads the whole text of a turn")

    def _calls(self, text: str) -> list[Call]:
        try:
            return [make_call(name, arguments) for name, arguments in self._parse(text)]
        except ParserUnavailable:
            raise
        except Exception as error:  # raised by user code; an environment tells the policy of it in the same way
            return [UnreadableCall(str(error) or type(error).__name__)]
