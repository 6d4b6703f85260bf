"""What the calls of one session leave: branches of tokens for training, and the conversations that can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.trajectory import Branch, Given, add_turn
from torchtitan.inference.types import Completion, SamplingParameters
from torchtitan.rollout.tokenizer import ChatRenderer, Messages

Canonical = tuple[Any, ...]


@dataclass
class _Turn:
    """A conversation up to an answer of the policy."""

    messages: list[Canonical]
    tools: str
    token_ids: list[int]


@dataclass
class Session:
    """One episode's calls.

    `failed` holds the prompts of calls that the system could not answer, and has not answered since: how an episode
    went that had to go on without an answer says nothing of the policy.
    """

    name: str
    sampling: SamplingParameters
    """Of every call: a call derives its seed from this one, and may ask for fewer tokens"""
    longest: int
    """Tokens of a branch, prompt and completion"""
    min_version: int = 0
    shares: str = ""
    """See InferencePool.generate"""
    calls: int = 0
    failed: set[int] = field(default_factory=set)
    cut: bool = False
    """Whether a limit ended the last answer, or left no room for one"""
    branches: list[Branch] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)

    def prompt(self, renderer: ChatRenderer, messages: Messages, tools: Messages) -> list[int]:
        """Tokens of a conversation: those of the longest one that it goes on from, and its new messages; where it goes
        on from none, or its history was rewritten, all of it anew. Raises UserError where the template refuses it."""
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
                continue  # the program wrote it: what the template makes of it depends on the rest
            try:
                return turn.token_ids + renderer.following(turn.token_ids, new, tools)
            except UserError:
                break  # the template does not show them alone
        return renderer.whole(messages, tools)

    def record(self, prompt_ids: list[int], completion: Completion) -> None:
        """A call has been answered with this."""
        extended = add_turn(self.branches, prompt_ids, completion)
        # The one that ended last stands last.
        self.branches = [*(one for one in self.branches if one is not extended), extended]
        self.cut = completion.finish_reason == "length"
        self.failed.discard(hash(tuple(prompt_ids)))

    def remember(
        self,
        messages: Messages,
        tools: Messages,
        said: Mapping[str, Any],
        prompt_ids: list[int],
        completion: Completion,
    ) -> None:
        """The conversation `messages`, with what the policy said then, is these tokens."""
        canonical = [canonical_message(message) for message in (*messages, said)]
        self._turns.append(_Turn(canonical, _canonical_tools(tools), prompt_ids + completion.token_ids))

    def branches_to_json(self) -> list[list[Any]]:
        """For `branches_from_json`."""
        return [
            [one.token_ids if isinstance(one, Given) else one.to_json() for one in branch.segments]
            for branch in self.branches
        ]


def branches_from_json(data: Sequence[Sequence[Any]]) -> list[Branch]:
    return [
        Branch([Given(one) if isinstance(one, list) else Completion.from_json(one) for one in branch])
        for branch in data
    ]


def canonical_message(message: Mapping[str, Any]) -> Canonical:
    """What makes a message the same one, whatever a program or its library has done to its form: role, text, calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    calls = tuple(
        (one["function"].get("name"), _canonical_json(one["function"].get("arguments")))
        for one in message.get("tool_calls") or ()
        if isinstance(one, dict) and isinstance(one.get("function"), dict)
    )
    return message.get("role"), content, calls, message.get("tool_call_id"), message.get("name")


def _canonical_tools(tools: Messages) -> str:
    return json.dumps(tools, sort_keys=True) if tools else ""


def _canonical_json(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments
    return json.dumps(arguments, sort_keys=True)
