"""JSON in `<tool_call>` tags, as Qwen, Hermes and many others write it, or as the whole answer, as Llama 3 does."""

from __future__ import annotations

import re

from torchtitan.rollout.conversation.thoughts import Turn
from torchtitan.rollout.conversation.tool_formats.format import (
    SPACE,
    WRONG,
    Call,
    Schemas,
    ToolFormat,
    UnreadableCall,
    call_of_object,
    read_json,
)

END = "</tool_call>"
# Llama 3 writes this token before a call, or nothing.
PYTHON_TAG = "<|python_tag|>"
SEPARATOR = re.compile(r"\s*;?\s*")


class Hermes(ToolFormat):
    name = "hermes"
    marks = ((PYTHON_TAG,), ("<tool_call>", END))
    opening = re.compile(rf"<tool_call>|{END}|{re.escape(PYTHON_TAG)}(?=\s*\{{\s*\")")

    def read(self, text: str, opened: str = "", tools: Schemas = ()) -> Turn:
        turn = super().read(text, opened, tools)
        answers = [part for part in turn.parts if part.kind == "answer" and part.text.strip()]
        if turn.calls or len(answers) != 1 or (calls := _calls_alone(answers[0].text)) is None:
            return turn
        (answer,) = answers
        call = answer._replace(kind="call", calls=calls)
        parts = list(turn.parts)
        parts[parts.index(answer)] = call
        return Turn(parts, turn.well_formed, turn.channels)

    def read_call(self, text: str, found: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        if found[0] == PYTHON_TAG:
            return _calls_in_a_row(text, found.end())
        if found[0] == END:
            return [UnreadableCall(f"{END} without <tool_call> before it: {WRONG}")], found.end()
        try:
            value, end = read_json(text, found.end())
        except UnreadableCall as error:
            value, end, problem = None, found.end(), error
        else:
            problem = UnreadableCall(WRONG)
        behind = SPACE.match(text, end).end()  # type: ignore[union-attr]
        if value is not None and text.startswith(END, behind):
            return [call_of_object(value)], behind + len(END)
        if value is not None and behind == len(text):  # without the closing tag, the call ends with the text
            return [call_of_object(value)], behind
        closing = text.find(END, end)
        return [problem], closing + len(END) if closing >= 0 else len(text)


def _calls_in_a_row(text: str, begin: int) -> tuple[list[Call], int]:
    """Return the objects at `begin`, which semicolons may separate, as calls, and where they end."""
    calls: list[Call] = []
    place = begin
    while place < len(text):
        try:
            value, place = read_json(text, place)
        except UnreadableCall as error:
            return [*calls, error], len(text)
        calls.append(call_of_object(value))
        place = SEPARATOR.match(text, place).end()  # type: ignore[union-attr]
    return calls, place


def _calls_alone(text: str) -> list[Call] | None:
    """Return the calls that are the whole of an answer; None if it is something else, such as an answer in JSON."""
    if not text.lstrip().startswith("{"):
        return None
    place, calls = 0, list[Call]()
    while place < len(text):
        try:
            value, place = read_json(text, place)
        except UnreadableCall:
            return None
        call = call_of_object(value)
        if isinstance(call, UnreadableCall) or not {"arguments", "parameters"} & value.keys():
            return None
        calls.append(call)
        place = SEPARATOR.match(text, place).end()  # type: ignore[union-attr]
    return calls
