"""The calls of a session, and the branches of tokens that they produce for training."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, SamplingParameters, add_turn
from torchtitan.rollout.conversation.messages import ASSISTANT, Messages, read_message
from torchtitan.rollout.conversation.tokenizer import ChatRenderer
from torchtitan.rollout.gateway.calls import Call, Choice, WrongCall
from torchtitan.rollout.gateway.conversation import settle
from torchtitan.rollout.gateway.known_conversations import Held, KnownConversations

# What is counted of the answers of a session; see Session.counts.
COUNTS = ("stops_cut", "tool_choices_missed", "tools_left_out", "histories_rewritten")
# Differences of a session that are kept for its record.
MAX_DIFFERENCES = 3


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
    tools of calls that the policy did not see (tools_left_out), and calls whose conversation began a branch although it
    has answers already (histories_rewritten)"""
    branches: list[Branch] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """Where the conversations of histories_rewritten first differ from those before them, the first few"""
    _known: KnownConversations = field(default_factory=KnownConversations)
    _answers: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """By an answer's name: the hash of its conversation, and the number of messages at the beginning that a later call
    does not continue"""
    _answer_of_call: dict[str, str] = field(default_factory=dict)
    """The name of the answer that each call of a tool belongs to, by the call's id"""

    def settled(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages of a call in the order that templates read, see conversation.settle."""
        return settle(messages, self._answer_of_call)

    def prompt(self, renderer: ChatRenderer, messages: Messages, tools: Messages, header: int = 0) -> list[int]:
        """Return the tokens of a conversation: those of the longest known conversation that it continues, then those of
        its new messages. If it continues none, or its history was rewritten, all of it is rendered. header: see
        calls.Call. Raises UserError if the template refuses it."""
        known = self._known.longest(messages, tools, header)
        if known is not None:
            number, held = known
            token_ids, new = held.token_ids, messages[number:]
            # How the template renders an answer that the program has written depends on the other messages.
            if not any(message["role"] == ASSISTANT for message in new):
                with contextlib.suppress(UserError):  # the template does not render the new messages separately
                    return token_ids + renderer.following(token_ids, new, tools)
        return renderer.whole(messages, tools)

    def record(self, prompt_ids: list[int], completion: Completion) -> None:
        """Record the answer to a call."""
        extended = add_turn(self.branches, prompt_ids, completion)
        # The branch that ended last is the last in the list.
        self.branches = [*(one for one in self.branches if one is not extended), extended]
        self.cut = completion.finish_reason == "length"
        self.failed.discard(hash(tuple(prompt_ids)))

    def remember(self, name: str, call: Call, choice: Choice) -> None:
        """Remember the conversation of a call and a recorded answer to it, and by the answer's name where it stands."""
        branch = next(one for one in self.branches if any(part is choice.completion for part in one.segments))
        begins_branch = len(branch.sampled) == 1 and len(self.branches) > 1
        if begins_branch and any(message["role"] == ASSISTANT for message in call.messages):
            difference = self._known.first_difference(call.messages, call.tools, call.header)
            self.counts["histories_rewritten"] += bool(difference)
            if difference and len(self.differences) < MAX_DIFFERENCES:
                self.differences.append(difference)
        messages = [*call.messages, read_message(choice.message)]
        key = self._known.add(messages, call.tools, Held(branch, len(branch)), call.header)
        self._answers[name] = key, call.preamble
        self._answer_of_call |= {one["id"]: name for one in choice.calls}
        self.counts["tools_left_out"] += call.tools_left_out
        self.counts["stops_cut"] += choice.stopped_by is not None
        if call.must_call is not None:
            names = {one["function"]["name"] for one in choice.calls}
            self.counts["tool_choices_missed"] += not (call.must_call in names if call.must_call else names)

    def recall(self, name: str) -> list[dict[str, Any]]:
        """Return the conversation that ended with an answer. Raises WrongCall if there is none."""
        if name not in self._answers:
            raise WrongCall(f"there is no answer {name!r} in this session", "previous_response_not_found")
        key, preamble = self._answers[name]
        return self._known.conversation(key)[preamble:]
