"""What a program asks for and what it gets, whatever API it speaks.

The folder `dialects/` translates between this and the JSON of each API.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.types import Completion
from torchtitan.rollout.conversation.harmony import MESSAGE, has_channels, read_messages
from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.thoughts import Part
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_formats.format import IdentifiedCall, ToolCall
from torchtitan.rollout.conversation.tool_formats.registry import DEFAULT
from torchtitan.rollout.conversation.turns import reader_of

CONTEXT_FULL = "context_length_exceeded"


class WrongCall(Exception):
    """An error by the program. `code` is OpenAI's error code, if there is one."""

    def __init__(self, message: str, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Call:
    """A call for the next turn of a conversation. Temperature and similar options are the run's, whatever the program
    sends."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """As chat templates expect them"""
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    n: int = 1
    must_call: str | None = None
    """The tool that the answer should call, "" for any; nothing forces the policy to"""
    parallel_calls: bool = True
    """Whether an answer may have more than one call"""
    freeform: frozenset[str] = frozenset()
    """Names of tools whose argument is a text of any form (dialects/freeform.py)"""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """What an API repeats of the request in its answers"""
    tools_left_out: int = 0
    """Number of the program's tools that the policy does not see, because they would run at a provider"""
    template_values: dict[str, Any] = field(default_factory=dict)
    log_probs: bool = False
    stream: bool = False
    usage_in_stream: bool = False
    preamble: int = 0
    """Number of first messages that do not belong to the conversation, which a later call may name and continue"""
    header: int = 0
    """Number of characters at the beginning of the first message that are a line of its own, whose numbers may change
    from call to call (known_conversations.message_identity); the policy reads what the first call of a conversation has
    there"""
    token_ids: list[int] = field(default_factory=list)
    """In place of messages, from a program that renders them itself"""


@dataclass(frozen=True)
class Choice:
    """One answer of the policy."""

    message: dict[str, Any]
    """The assistant's message in the form of chat completions"""
    completion: Completion
    stopped_by: str | None = None
    """The program's stop text that ended it"""
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    """Of each call that cannot be read: the number of readable ones before it, and what the policy is told"""
    calls_left_out: int = 0
    """Readable calls behind the only one that the program takes"""
    log_probs: list[dict[str, Any]] | None = None

    @property
    def calls(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return found

    @property
    def finish(self) -> str:
        return "tool_calls" if self.calls else self.completion.finish_reason


@dataclass(frozen=True)
class Answer:
    """The answers to one call."""

    name: str
    model: str
    created: int
    prompt_tokens: int
    choices: list[Choice]

    @property
    def generated(self) -> int:
        """Number of sampled tokens"""
        return sum(len(choice.completion.token_ids) for choice in self.choices)


def stop_ids(call: Call, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens at which an engine can end the answer: stop_token_ids, and stop texts of one token each.

    Raises WrongCall for a token that does not exist.
    """
    given = [*call.token_ids, *call.stop_token_ids]
    size = tokenizer.vocab_size
    wrong = [token for token in given if token >= size]
    if wrong:
        raise WrongCall(f"stop_token_ids or token_ids: {wrong[0]} is not in 0..{size - 1}")
    encoded = [tokenizer.encode(text) for text in call.stop]
    return list(dict.fromkeys([*call.stop_token_ids, *(ids[0] for ids in encoded if len(ids) == 1)]))


def cut(
    completion: Completion,
    call: Call,
    tokenizer: Tokenizer,
    tool_format: str = DEFAULT,
    prompt_ids: Sequence[int] = (),
) -> tuple[Completion, int]:
    """Return (a completion up to where the program has it end, the number of parts with calls that this cuts off). It
    ends with the first token that completes a stop text, and with its only call where the program takes no other.

    Each token was sampled given those before it, so the rest of them can be dropped like what was never sampled.
    """
    completion = cut_at_stop(completion, call.stop, tokenizer)
    if call.parallel_calls or not call.tools:
        return completion, 0
    turns, ids = reader_of(tokenizer, tool_format), completion.token_ids
    opened, marked = turns.opened(prompt_ids), turns.marked(ids)
    called = [part for part in turns.read_marked(opened, marked, call.tools).parts if part.calls]
    readable = [part for part in called if _has_readable_call(part)]
    if not readable or readable[0] is called[-1]:
        return completion, 0
    kept_text = marked[: readable[0].end - len(opened)]
    length = bisect.bisect_left(range(len(ids)), True, key=lambda end: turns.marked(ids[:end]).startswith(kept_text))
    return completion.first(length), len(called) - called.index(readable[0]) - 1


def _has_readable_call(part: Part) -> bool:
    return any(isinstance(parsed, ToolCall) for parsed in part.calls)


def cut_at_stop(completion: Completion, stops: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """Return a completion up to the first token with which its text contains one of `stops`."""
    turns = reader_of(tokenizer)

    def stopped(tokens: int) -> bool:
        text = _searched_text(turns.marked(completion.token_ids[:tokens]))
        return any(stop in text for stop in stops)

    length = len(completion.token_ids)
    if not stops or not stopped(length):
        return completion
    return completion.first(bisect.bisect_left(range(length), True, key=stopped))


def _searched_text(marked: str) -> str:
    """Return the part of a turn in which a stop text may stand: of gpt-oss, what its messages say, without the names of
    channels and functions."""
    if not has_channels(marked):
        return plain(marked)
    return "\n".join(plain(message.content or "") for message in read_messages(marked))


def _before_stop(marked: str, stop: str) -> str:
    """Return a turn without the stop text with which it ends."""
    about, mark, content = marked.rpartition(MESSAGE) if has_channels(marked) else ("", "", marked)
    return f"{about}{mark}{content.partition(stop)[0]}"


def make_choice(
    completion: Completion,
    call: Call,
    tokenizer: Tokenizer,
    name: str,
    tool_format: str = DEFAULT,
    prompt_ids: Sequence[int] = (),
) -> Choice:
    """Return the policy's answer to a prompt, without the program's stop text or token.

    Its text is what `Turn.shown` says. Calls are those outside of thoughts that can be read; others stay text. A
    truncated answer has no calls.
    """
    ids = completion.token_ids
    ended = completion.finish_reason == "stop"
    if ended and ids[-1] in call.stop_token_ids:
        ids = ids[:-1]
    # Without tools, and where the answer was cut off, nothing is a call.
    turns = reader_of(tokenizer, tool_format if ended and call.tools else "")
    marked = turns.marked(ids)
    text = _searched_text(marked)
    stopped_by = min((stop for stop in call.stop if stop in text), key=text.find, default=None)
    if stopped_by is not None:
        marked = _before_stop(marked, stopped_by)
    turn = turns.read_marked(turns.opened(prompt_ids), marked, call.tools)
    readable: list[ToolCall] = []
    unreadable: list[tuple[int, str]] = []
    for found in turn.calls:
        if isinstance(found, ToolCall):
            readable.append(found)
        else:
            unreadable.append((len(readable), str(found)))
    taken = readable if call.parallel_calls else readable[:1]
    text = turn.shown(turns.hidden)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if taken:
        message["content"] = text or None
        message["tool_calls"] = _named_calls(taken, name, call)
    log_probs = log_prob_entries(completion, tokenizer) if call.log_probs else None
    return Choice(message, completion, stopped_by, unreadable, len(readable) - len(taken), log_probs)


def _named_calls(found: Sequence[ToolCall], name: str, call: Call) -> list[dict[str, Any]]:
    """Return calls in the form of chat completions. An id that the policy gave itself stays, unless the conversation
    has it already: programs find a result's call by its id."""
    used = {earlier.get("id") for message in call.messages for earlier in message.get("tool_calls", ())}
    calls = []
    for number, parsed in enumerate(found):
        call_id = parsed.id if isinstance(parsed, IdentifiedCall) else ""
        if not call_id or call_id in used:
            # Mistral's templates accept only ids of nine characters.
            call_id = hashlib.blake2b(f"{name}-{number}".encode()).hexdigest()[:9]
        used.add(call_id)
        function = {"name": parsed.name, "arguments": json.dumps(parsed.arguments, ensure_ascii=False)}
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def log_prob_entries(completion: Completion, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the text, the bytes and the log-prob of each token in OpenAI's format."""
    found = tokenizer.token_bytes(completion.token_ids)
    return [
        {
            "token": tokenizer.decode([token], skip_special=False),
            "logprob": log_prob,
            "bytes": list(token_bytes),
            "top_logprobs": [],
        }
        for token, token_bytes, log_prob in zip(completion.token_ids, found, completion.log_probs, strict=True)
    ]
