"""The one place where what a program sends, in the form of any API, becomes the conversation that is rendered.

A dialect says what the pieces of its messages are. Here they become messages as chat templates read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan.rollout.conversation.messages import ASSISTANT, INSTRUCTING, TOOL, Messages, read_message
from torchtitan.rollout.conversation.results import settle_results
from torchtitan.rollout.gateway.calls import WrongCall


class Text(NamedTuple):
    text: str


class Thought(NamedTuple):
    text: str


class ToolUse(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: Any
    """An object, or one as JSON text"""


class ToolResult(NamedTuple):
    """What a tool returned."""

    call_id: str
    text: str


Piece = Text | Thought | ToolUse | ToolResult


# Of what the system says, a first block of one line that may change with every call: Claude Code has one for the
# provider's bills, `x-anthropic-billing-header: cc_version=2.1; cch=5a1c0;`, others the time or a number.
FIRST_LINE = re.compile(r"\s*[^\n]{1,256}\s*")
BILLING_LINE = re.compile(r"x-[\w-]+:[^\n]*\n")


class ConversationReader:
    """Makes messages of pieces.

    A turn of the assistant is one message, in however many messages or items an API has it. What stands before or
    behind the result of a tool stays there, as a message of its own.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's message that its next pieces belong to"""
        self._instructions: list[str] = []
        """The blocks of text before the first message that is not the system's"""
        self._leading = True
        """Whether all messages are the system's so far"""

    def add(self, role: str, pieces: Sequence[Piece]) -> None:
        """Add a message, or an item, of an API."""
        self._note_instructions(role, [piece.text for piece in pieces if isinstance(piece, Text)])
        message = self._turn if role == ASSISTANT else None
        if message is not None and any(message["content"]) and any(isinstance(piece, Text) for piece in pieces):
            message = None  # two texts are two messages
        if message is None and not any(isinstance(piece, ToolResult) for piece in pieces):
            message = self._begin(role)
        for piece in pieces:
            if isinstance(piece, ToolResult):
                self._messages.append({"role": TOOL, "tool_call_id": piece.call_id, "content": piece.text})
                message = self._turn = None
            else:
                message = message or self._begin(role)
                _add_piece(message, piece)

    def add_message(self, message: dict[str, Any]) -> None:
        """Add a message that has the form of OpenAI's chat completions already."""
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        self._note_instructions(
            str(message.get("role")), [str(part.get("text")) for part in parts if isinstance(part, dict)]
        )
        self._messages.append(message)
        self._turn = None

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages. Raises WrongCall if one cannot be read."""
        try:
            return [read_message(message) for message in self._messages]
        except ValueError as error:
            raise WrongCall(str(error)) from None

    @property
    def header(self) -> int:
        """See calls.Call: the length of a line of its own before all that the system says."""
        if not self._instructions:
            return 0
        first, *others = self._instructions
        line = BILLING_LINE.match(first)
        if any(others):
            line = FIRST_LINE.fullmatch(first) or line
        return line.end() if line else 0

    def _note_instructions(self, role: str, texts: Sequence[str]) -> None:
        self._leading = self._leading and role in INSTRUCTING
        if self._leading:
            self._instructions += texts

    def _begin(self, role: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role, "content": []}
        self._messages.append(message)
        self._turn = message if role == ASSISTANT else None
        return message


def _add_piece(message: dict[str, Any], piece: Text | Thought | ToolUse) -> None:
    if isinstance(piece, ToolUse):
        function = {"name": piece.name, "arguments": piece.arguments}
        message.setdefault("tool_calls", []).append({"id": piece.id, "type": "function", "function": function})
    else:
        key = "content" if isinstance(piece, Text) else "reasoning_content"
        message.setdefault(key, []).append(piece.text)


def settle(messages: Messages, answers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return messages in the one order that templates read: the calls of an answer in one message, and then their
    results in the order of the calls, with the names of the functions.

    answers: the name of the answer that each call belongs to, by the call's id. Some programs put the result of a call
    before the next call of the same answer.
    """
    joined: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    """The last message of the assistant, if nothing but results stands behind it"""
    for message in messages:
        if message["role"] == ASSISTANT:
            if turn is not None and _continues(turn, message, turn is joined[-1], answers):
                turn["tool_calls"] += message["tool_calls"]
                continue
            # Calls are added to it, and the caller's message stays as it is.
            turn = message = {**message, "tool_calls": [*message.get("tool_calls", ())]}
        elif message["role"] != TOOL:
            turn = None
        joined.append(message)
    for message in joined:
        if message.get("tool_calls") == []:
            del message["tool_calls"]
    return settle_results(joined)


def _continues(turn: dict[str, Any], message: dict[str, Any], adjacent: bool, answers: Mapping[str, str]) -> bool:
    """Whether a message has nothing but further calls of the answer that another message begins. adjacent: no result
    stands between them."""
    if not message.get("tool_calls") or message["content"].strip():
        return False
    names = {answers.get(str(call.get("id"))) for call in [*turn["tool_calls"][:1], *message["tool_calls"]]}
    return adjacent or (bool(turn["tool_calls"]) and len(names) == 1 and None not in names)


def refuse_prefill(messages: Messages) -> None:
    """Raise WrongCall if the last message is the assistant's, which a template would close before the policy's turn."""
    if messages and messages[-1]["role"] == ASSISTANT:
        raise WrongCall(
            "the last message is the assistant's: beginning the policy's answer (prefill, `prefix`, `partial`) is not "
            "supported, and neither are calls without their results; end the messages with one of a user or a tool"
        )
