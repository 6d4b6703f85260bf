"""What a program asks for and what it gets, whatever API it speaks.

The folder `dialects/` translates between this and the JSON of each API.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.types import Completion
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_formats.format import ToolCall
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
    tools_left_out: int = 0
    """Number of the program's tools that the policy does not see, because they would run at a provider"""
    template_values: dict[str, Any] = field(default_factory=dict)
    log_probs: bool = False
    stream: bool = False
    usage_in_stream: bool = False
    preamble: int = 0
    """Number of first messages that do not belong to the conversation, which a later call may name and continue"""
    header: int = 0
    """Number of characters at the beginning of the first message that change from call to call and mean nothing to the
    policy, such as a line for the provider's bills; what the first call of a conversation has of it stays"""
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
    if wrong := [one for one in given if one >= size]:
        raise WrongCall(f"stop_token_ids or token_ids: {wrong[0]} is not in 0..{size - 1}")
    encoded = [tokenizer.encode(text) for text in call.stop]
    return list(dict.fromkeys([*call.stop_token_ids, *(ids[0] for ids in encoded if len(ids) == 1)]))


def cut_at_stop(completion: Completion, stops: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """Return a completion up to the first token with which its text contains one of `stops`.

    Each token was sampled given those before it, so the rest of them can be dropped like what was never sampled.
    """

    def stopped(tokens: int) -> bool:
        text = tokenizer.decode(completion.token_ids[:tokens])
        return any(stop in text for stop in stops)

    length = len(completion.token_ids)
    if not stops or not stopped(length):
        return completion
    return completion.first(bisect.bisect_left(range(length), True, key=stopped))


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
    marked, text = turns.marked(ids), tokenizer.decode(ids)
    stopped_by = min((stop for stop in call.stop if stop in text), key=text.find, default=None)
    if stopped_by is not None:
        marked = marked.partition(stopped_by)[0]
    turn = turns.read_marked(turns.opened(prompt_ids), marked, call.tools)
    calls = [
        {
            # Mistral's templates accept only ids of nine characters.
            "id": hashlib.blake2b(f"{name}-{number}".encode()).hexdigest()[:9],
            "type": "function",
            "function": {"name": one.name, "arguments": json.dumps(one.arguments, ensure_ascii=False)},
        }
        for number, one in enumerate(one for one in turn.calls if isinstance(one, ToolCall))
    ]
    text = turn.shown(turns.hidden)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    message |= {"tool_calls": calls} if calls else {}
    log_probs = log_prob_entries(completion, tokenizer) if call.log_probs else None
    return Choice(message, completion, stopped_by, log_probs)


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
