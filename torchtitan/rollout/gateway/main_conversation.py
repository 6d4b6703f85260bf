"""The conversations of a session: which calls belong together, and which of them is the main one.

A program does more than its task's conversation: it asks for a title, has sub-agents, shortens its history. All answers
are trained, but one conversation alone decides how the episode ended and what reward functions read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.types import Branch, Completion
from torchtitan.rollout.conversation.messages import ASSISTANT, INSTRUCTING
from torchtitan.rollout.gateway.calls import Call

# Of a system message, its end is compared: programs put what changes with each call (a date, a session) first.
COMPARED_CHARACTERS = 2000


@dataclass(frozen=True)
class Opening:
    """How a call's conversation begins."""

    tools: frozenset[str]
    """Names of the tools that the policy may call"""
    system: str
    first: str
    """The first message that is not the system's"""
    max_tokens: int | None


@dataclass
class Conversation:
    """Calls that continue each other, also where the program has rewritten or summarised what came before."""

    opening: Opening
    branches: list[Branch] = field(default_factory=list)
    """In the order of their last answers"""
    answers: list[Completion] = field(default_factory=list)
    answer_hashes: set[int] = field(default_factory=set)
    """Hashes of the texts of its answers, and of the ids of their calls"""
    last_text: str = ""
    answered_at: float = 0.0
    """When its last answer came (time.monotonic)"""
    out_of_room: bool = False
    """A limit left no room for an answer since then"""

    @property
    def truncated(self) -> bool:
        """Whether a limit truncated its last answer, or left no room for a further one."""
        return self.out_of_room or (bool(self.answers) and self.answers[-1].finish_reason == "length")

    def is_continued_by(self, call: Call) -> bool:
        """Whether a call belongs to it whose tokens do not begin with those of one of its branches."""
        opening = opening_of(call)
        if not call.messages or opening.tools != self.opening.tools:
            return False
        same_system = opening.system == self.opening.system
        if (opening.tools or same_system) and self._is_repeated_by(call):
            return True  # its history was shortened or changed
        if not same_system:
            return False
        if opening.tools or opening.first == self.opening.first:
            return True  # its history was replaced by a summary
        summarised = bool(self.last_text) and self.last_text in opening.first
        return summarised and opening.max_tokens == self.opening.max_tokens

    def _is_repeated_by(self, call: Call) -> bool:
        """Whether a call's history has one of its answers."""
        return not self.answer_hashes.isdisjoint(_answer_hashes(call.messages))


class Conversations:
    """The conversations of a session, in the order of their first answers."""

    def __init__(self) -> None:
        self.all: list[Conversation] = []

    def find(self, branch: Branch | None, call: Call) -> Conversation | None:
        """Return the conversation of a call; branch: the one that its answer extends, if there is one."""
        for conversation in self.all:
            if any(other is branch for other in conversation.branches):
                return conversation
        return next((conversation for conversation in self.all if conversation.is_continued_by(call)), None)

    def add(self, branch: Branch, completion: Completion, call: Call) -> None:
        """Add an answer, with which `branch` ends now."""
        conversation = self.find(branch, call)
        if conversation is None:
            conversation = Conversation(opening_of(call))
            self.all.append(conversation)
        conversation.branches = [*(other for other in conversation.branches if other is not branch), branch]
        conversation.answers.append(completion)
        conversation.answered_at, conversation.out_of_room = time.monotonic(), False

    def note_text(self, completion: Completion, message: Mapping[str, Any]) -> None:
        """Remember what an answer says, by which later calls can be recognised."""
        for conversation in self.all:
            if any(answer is completion for answer in conversation.answers):
                conversation.answer_hashes.update(_answer_hashes([message]))
                conversation.last_text = _text(message)

    def remove(self, branch: Branch, completion: Completion, shorter: Branch | None) -> None:
        """Remove an answer with which `branch` ended; shorter: what is left of the branch."""
        for conversation in self.all:
            conversation.answers = [answer for answer in conversation.answers if answer is not completion]
            conversation.branches = replaced(conversation.branches, branch, shorter)
        self.all = [conversation for conversation in self.all if conversation.answers]


def replaced(branches: Sequence[Branch], branch: Branch, shorter: Branch | None) -> list[Branch]:
    """The branches with `shorter`, if it is one, in place of `branch`."""
    found: list[Branch] = []
    for other in branches:
        if other is not branch:
            found.append(other)
        elif shorter is not None:
            found.append(shorter)
    return found


def main_conversation(conversations: Sequence[Conversation]) -> Conversation | None:
    """Return the conversation that decides an episode; None if there is none.

    It is the first one among those that offer tools (among all, if none does). Where the program never went on with
    that one, it is the longest of them.
    """
    candidates = [conversation for conversation in conversations if conversation.opening.tools] or list(conversations)
    if not candidates:
        return None
    first = candidates[0]
    if len(first.answers) > 1:
        return first
    return max(candidates, key=lambda conversation: len(conversation.answers))


def opening_of(call: Call) -> Opening:
    """Return how a call's conversation begins."""
    functions = [tool.get("function") for tool in call.tools]
    names = frozenset(str(function.get("name")) for function in functions if isinstance(function, dict))
    is_system = [message.get("role") in INSTRUCTING for message in call.messages]
    begin = is_system.index(False) if False in is_system else len(is_system)
    system = "\n".join(_text(message) for message in call.messages[:begin])
    if begin:
        system = system[call.header :]
    first = _text(call.messages[begin]) if begin < len(call.messages) else ""
    return Opening(names, system[-COMPARED_CHARACTERS:], first, call.max_tokens)


def _answer_hashes(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return hashes of what assistants' messages say, and of the ids of their calls."""
    found = []
    for message in messages:
        if message.get("role") == ASSISTANT:
            text = _text(message).strip()
            found += [hash(("text", text))] if text else []
            calls = [
                tool_call
                for tool_call in message.get("tool_calls") or ()
                if isinstance(tool_call, dict) and tool_call.get("id")
            ]
            found += [hash(("call", tool_call["id"])) for tool_call in calls]
    return found


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
