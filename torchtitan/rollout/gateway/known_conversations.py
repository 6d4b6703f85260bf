"""The one place where a conversation is compared with those that a session holds.

A conversation is known by a hash of all its messages, so that one which begins a thousand others is kept once.
Two messages are the same if what they say is, in whatever form a program gives it back.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.types import Branch, Completion
from torchtitan.rollout.conversation.messages import ASSISTANT, TOOL, Messages
from torchtitan.rollout.conversation.results import call_numbers
from torchtitan.rollout.conversation.thoughts import split_thought

NAMED_VALUE = re.compile(r"\s*[\w.-]+[ \t]*[:=]")
WORD_WITH_DIGIT = re.compile(r"\S*\d\S*")
# Characters of each of two texts that a difference shows, and how many of them stand before the place.
SHOWN, SHOWN_BEFORE = 48, 16


@dataclass
class Held:
    """An answer, and the branch whose beginning are the tokens of its conversation."""

    branch: Branch
    completion: Completion
    errors: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """What the policy is told of each call of the answer that nobody could read, as the result of a tool, and how many
    readable calls stand before it"""

    def with_errors(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages behind the answer, with its errors among the results of its calls."""
        with_errors = list(messages)
        results = next(
            (place for place, message in enumerate(with_errors) if message["role"] != TOOL), len(with_errors)
        )
        for already, (number, error) in enumerate(self.errors):
            with_errors.insert(min(number, results) + already, error)
        return with_errors

    @property
    def token_ids(self) -> list[int]:
        """The tokens up to the end of the answer; empty if the branch no longer has it."""
        token_ids: list[int] = []
        for segment in self.branch.segments:
            token_ids += segment.token_ids
            if segment is self.completion:
                return token_ids
        return []


@dataclass
class Known:
    """A message behind those before it, by the hash of all of them."""

    message: dict[str, Any]
    before: bytes = b""
    """The hash of those before it"""
    held: Held | None = None
    """If it is an answer"""
    latest: bytes = b""
    """The hash with the message that came behind it last"""


class KnownConversations:
    """What a session has sampled, by hashes of the conversations that led to it.

    header: in all methods, see calls.Call.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}
        self._latest_tools = b""

    def add(self, messages: Messages, tools: Messages, held: Held, header: int = 0) -> bytes:
        """Hold a conversation that ends with an answer. Returns its hash."""
        before, *hashes = _hashes(messages, tools, header)
        self._latest_tools = before
        self._known.setdefault(before, Known({"tools": list(tools)}))
        for message, message_hash in zip(messages, hashes, strict=True):
            self._known.setdefault(message_hash, Known(message, before))
            self._known[before].latest = message_hash
            before = message_hash
        self._known[before].held = held
        return before

    def longest(self, messages: Messages, tools: Messages, header: int = 0) -> tuple[int, Held] | None:
        """Return (number of messages, what is held) of the longest conversation that these messages continue."""
        beginning = list(enumerate(self._beginning(messages, tools, header)))
        for number, known in reversed(beginning):
            if known.held is not None and number < len(messages) and known.held.token_ids:
                return number, known.held
        return None

    def conversation(self, last: bytes) -> list[dict[str, Any]]:
        """Return the messages of a conversation by the hash that `add` returned."""
        messages = []
        known = self._known[last]
        while known.before:
            messages.append(known.message)
            known = self._known[known.before]
        return messages[::-1]

    def first_difference(self, messages: Messages, tools: Messages, header: int = 0) -> str:
        """Return in words where a conversation first differs from one that is held; empty if there is none to compare
        it with, or if it is the beginning of one."""
        beginning = self._beginning(messages, tools, header)
        if not self._known or len(beginning) > len(messages):
            return ""
        if not beginning:
            return f"the tools differ: {_tools_difference(self._known[self._latest_tools].message['tools'], tools)}"
        number = len(beginning)
        where = f"message {number} ({messages[number - 1]['role']})"
        if not (latest := beginning[-1].latest):
            return f"{where} is an answer's that the policy did not give, or of another conversation"
        return f"{where}: {_message_difference(self._known[latest].message, messages[number - 1])}"

    def _beginning(self, messages: Messages, tools: Messages, header: int) -> list[Known]:
        """Return the tools and then the messages, as far as they are known together."""
        beginning = []
        for key in _hashes(messages, tools, header):
            if key not in self._known:
                break
            beginning.append(self._known[key])
        return beginning


def _hashes(messages: Messages, tools: Messages, header: int) -> Iterator[bytes]:
    """Yield the hash of the tools, and then for each message that of the conversation up to its end."""
    key = _hash(b"", json.dumps(list(tools), sort_keys=True))
    yield key
    numbers = call_numbers(messages)
    for place, message in enumerate(messages):
        key = _hash(key, repr(message_identity(message, numbers[place], header if place == 0 else 0)))
        yield key


def _hash(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "replace"), digest_size=16).digest()


def message_identity(message: dict[str, Any], number: int | None = None, header: int = 0) -> tuple[Any, ...]:
    """Return what identifies a message.

    - Of the assistant: its thoughts, its text and its calls. It does not matter whether a thought stands in the content
      or beside it, nor white space at the ends of both, nor a name, nor the ids of calls.
    - Of a tool: its text, and `number`, that of its call among those of the turn; the ids of calls may change.
    - Of others: role, name and text. Of the first `header` characters words with a digit do not matter, nor any if they
      are a name and its value.
    """
    role, content = message["role"], message["content"]
    if role == ASSISTANT:
        thought, text = split_thought(content)
        given = message.get("reasoning_content", "").strip()
        thoughts = [given] if thought in ("", given) else [thought, given]
        calls = [call.get("function", call) for call in message.get("tool_calls", ())]
        called = [(function["name"], arguments_key(function["arguments"])) for function in calls]
        return role, "\n\n".join(filter(None, thoughts)), text, called
    if role == TOOL and number is not None:
        return role, content, number
    line = "" if NAMED_VALUE.match(content[:header]) else WORD_WITH_DIGIT.sub("#", content[:header])
    return role, line.strip(), content[header:], message.get("name"), message.get("tool_call_id")


def arguments_key(arguments: Any) -> str:
    """Return arguments as JSON in which equal numbers are equal: a program in JavaScript has only doubles. Null stands
    for an argument that is not there, which some clients leave out."""
    return json.dumps(_plain(arguments), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return None
    # JavaScript writes -0 as 0, and what is infinite as null.
    return number + 0.0 if math.isfinite(number) else None


def _message_difference(held: dict[str, Any], given: dict[str, Any]) -> str:
    if held["role"] != given["role"]:
        return f"the role was {held['role']}"
    for name, before, now in (
        ("thought", _thought(held), _thought(given)),
        ("text", _text(held), _text(given)),
        ("calls", _calls_text(held), _calls_text(given)),
        ("name", str(held.get("name")), str(given.get("name"))),
        ("tool_call_id", str(held.get("tool_call_id")), str(given.get("tool_call_id"))),
    ):
        if before != now:
            return f"its {name} {_text_difference(before, now)}"
    return "it stands at another place"


def _thought(message: dict[str, Any]) -> str:
    return message_identity(message)[1] if message["role"] == ASSISTANT else ""


def _text(message: dict[str, Any]) -> str:
    return split_thought(message["content"])[1] if message["role"] == ASSISTANT else message["content"]


def _calls_text(message: dict[str, Any]) -> str:
    functions = [call.get("function", call) for call in message.get("tool_calls", ())]
    return "; ".join(f"{function['name']} {arguments_key(function['arguments'])}" for function in functions)


def _tools_difference(held: Sequence[dict[str, Any]], given: Messages) -> str:
    held_names, given_names = list(map(_tool_name, held)), list(map(_tool_name, given))
    if held_names != given_names:
        return f"they were {', '.join(held_names) or 'none'}, and are {', '.join(given_names) or 'none'}"
    changed = [name for name, before, now in zip(held_names, held, given, strict=True) if before != now]
    return f"{changed[0]} is described in another way"


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))


def _text_difference(held: str, given: str) -> str:
    """Say where two texts differ first."""
    shorter = min(len(held), len(given))
    place = bisect.bisect_left(range(shorter), True, key=lambda end: held[: end + 1] != given[: end + 1])
    begin = max(0, place - SHOWN_BEFORE)
    before, now = held[begin : begin + SHOWN], given[begin : begin + SHOWN]
    return f"was {before!r} and is {now!r} (at character {place})"
