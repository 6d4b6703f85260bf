"""The calls of a session, and the branches of tokens that they produce for training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, SamplingParameters, add_turn
from torchtitan.rollout.conversation.messages import Messages, plain_message
from torchtitan.rollout.conversation.tokenizer import ChatRenderer
from torchtitan.rollout.gateway.calls import Call, Choice, WrongCall

# What is counted of the answers of a session; see Session.counts.
COUNTS = ("stops_cut", "tool_choices_missed", "tools_left_out")
Canonical = tuple[Any, ...]


@dataclass
class _Turn:
    """A conversation up to and including an answer of the policy."""

    messages: list[Canonical]
    tools: str
    token_ids: list[int]


@dataclass
class Session:
    """The calls of one session.

    `failed` has hashes of the prompts that the system could not answer and has not answered since. An episode that
    had to continue without an answer says nothing about the policy.
    """

    name: str
    sampling: SamplingParameters
    """For every call; a call derives its seed from this one and may ask for fewer tokens"""
    longest: int
    """Maximum tokens of a branch, prompt and completion together"""
    min_version: int = 0
    shares: str = ""
    """See InferencePool.generate"""
    calls: int = 0
    failed: set[int] = field(default_factory=set)
    cut: bool = False
    """Whether a limit truncated the last answer, or left no room for one"""
    counts: Counter[str] = field(default_factory=Counter)
    """Answers that end at a stop text (stops_cut), those without the call that was asked for (tool_choices_missed),
    and tools of calls that the policy did not see (tools_left_out)"""
    branches: list[Branch] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)
    _conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By the name of the answer that each ends with"""

    def prompt(self, renderer: ChatRenderer, messages: Messages, tools: Messages) -> list[int]:
        """Return the tokens of a conversation: those of the longest known conversation that it continues, then those of
        its new messages. If it continues none, or its history was rewritten, all of it is rendered. Raises UserError if
        the template refuses it."""
        canonical = [canonical_message(message) for message in messages]
        known = [
            turn
            for turn in self._turns
            if turn.tools == _canonical_tools(tools)
            and len(turn.messages) < len(canonical)
            and canonical[: len(turn.messages)] == turn.messages
        ]
        for turn in sorted(known, key=lambda turn: len(turn.messages), reverse=True):
            new = messages[len(turn.messages) :]
            if any(message.get("role") == "assistant" for message in new):
                continue  # written by the program: how the template renders it depends on the other messages
            try:
                return turn.token_ids + renderer.following(turn.token_ids, new, tools)
            except UserError:
                break  # the template does not render the new messages separately
        return renderer.whole(messages, tools)

    def record(self, prompt_ids: list[int], completion: Completion) -> None:
        """Record the answer to a call."""
        extended = add_turn(self.branches, prompt_ids, completion)
        # The branch that ended last is the last in the list.
        self.branches = [*(one for one in self.branches if one is not extended), extended]
        self.cut = completion.finish_reason == "length"
        self.failed.discard(hash(tuple(prompt_ids)))

    def remember(self, name: str, call: Call, prompt_ids: list[int], choice: Choice) -> None:
        """Remember the tokens of a call's conversation with an answer, and the conversation by the answer's name."""
        said = choice.message
        canonical = [canonical_message(message) for message in (*call.messages, said)]
        token_ids = prompt_ids + choice.completion.token_ids
        self._turns.append(_Turn(canonical, _canonical_tools(call.tools), token_ids))
        self._conversations[name] = [*call.messages[call.preamble :], plain_message(said)]
        self.counts["tools_left_out"] += call.tools_left_out
        self.counts["stops_cut"] += choice.stopped_by is not None
        if call.must_call is not None:
            names = {one["function"]["name"] for one in choice.calls}
            self.counts["tool_choices_missed"] += not (call.must_call in names if call.must_call else names)

    def recall(self, name: str) -> list[dict[str, Any]]:
        """Return the conversation that ended with an answer. Raises WrongCall if there is none."""
        if name not in self._conversations:
            raise WrongCall(f"there is no answer {name!r} in this session", "previous_response_not_found")
        return self._conversations[name]


def canonical_message(message: Mapping[str, Any]) -> Canonical:
    """Return what identifies a plain message even if a program reformatted it: role, text, calls, call id and name."""
    calls = tuple(
        (one["function"].get("name"), _canonical_json(one["function"].get("arguments")))
        for one in message.get("tool_calls") or ()
        if isinstance(one, dict) and isinstance(one.get("function"), dict)
    )
    return message.get("role"), message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")


def _canonical_tools(tools: Messages) -> str:
    return json.dumps(tools, sort_keys=True) if tools else ""


def _canonical_json(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments
    return json.dumps(arguments, sort_keys=True)
