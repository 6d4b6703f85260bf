"""The calls of a session, and the branches of tokens that they produce for training."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, SamplingParameters, add_turn
from torchtitan.rollout.conversation.messages import ASSISTANT, TOOL, Messages, read_message
from torchtitan.rollout.conversation.template_checks import CALL_ID
from torchtitan.rollout.conversation.tokenizer import ChatRenderer
from torchtitan.rollout.gateway.calls import Call, Choice, WrongCall
from torchtitan.rollout.gateway.conversation_reader import settle
from torchtitan.rollout.gateway.known_conversations import Held, KnownConversations
from torchtitan.rollout.gateway.main_conversation import Conversations, replaced

# What is counted of the answers of a session; see Session.counts.
COUNTS = (
    "stops_cut",
    "tool_choices_missed",
    "tools_left_out",
    "histories_rewritten",
    "answers_repeated",
    "calls_unreadable",
    "calls_cut",
)
NO_CALL = Call()


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
    asked: int = 0
    """Answers that were asked for: the number of the next one, which decides its name and its random numbers"""
    under_way: int = 0
    """Those that are being sampled"""
    calls: int = 0
    """Those that the program has got: what max_turns counts"""
    failed: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    """Answers that end at a stop text (stops_cut), those without the call that was asked for (tool_choices_missed),
    tools of calls that the policy did not see (tools_left_out), calls whose conversation began a branch although it has
    answers already (histories_rewritten), answers that the program threw away to ask for the same again
    (answers_repeated), calls of tools that nobody could read (calls_unreadable), and calls behind the only one that the
    program takes (calls_cut)"""
    branches: list[Branch] = field(default_factory=list)
    conversations: Conversations = field(default_factory=Conversations)
    _latest: dict[int, tuple[Completion, int | None]] = field(default_factory=dict)
    """By the hash of its prompt, the latest answer, and the most tokens that its call allowed"""
    _known: KnownConversations = field(default_factory=KnownConversations)
    _answers: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """By an answer's name: the hash of its conversation, and the number of messages at the beginning that a later call
    does not continue"""
    _answer_of_call: dict[str, str] = field(default_factory=dict)
    """The name of the answer that each call of a tool belongs to, by the call's id"""

    def settled(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages of a call in the order that templates read, see conversation_reader.settle."""
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
                for following in [held.with_errors(new), new] if held.errors else [new]:
                    with contextlib.suppress(UserError):  # the template does not render the new messages separately
                        return token_ids + renderer.following(token_ids, following, tools)
        return renderer.render_prompt(messages, tools)

    def record(self, prompt_ids: list[int], completion: Completion, call: Call = NO_CALL) -> None:
        """Record the answer to a call."""
        extended = add_turn(self.branches, prompt_ids, completion)
        # The branch that ended last is the last in the list.
        self.branches = [*(other for other in self.branches if other is not extended), extended]
        self.conversations.add(extended, completion, call)
        self.calls += 1
        self.failed.discard(hash(tuple(prompt_ids)))
        self._latest[hash(tuple(prompt_ids))] = completion, call.max_tokens

    def find_discarded(self, prompt_ids: list[int], retries: bool) -> Completion | None:
        """Return the answer that the program has thrown away if it sends a call with these tokens once more.

        Some programs repeat a call to get another answer. retries: the program says that it does not. Nor does it where
        a limit of the run truncated the answer: it takes that for a broken one.
        """
        completion, most = self._latest.get(hash(tuple(prompt_ids)), (None, None))
        if completion is None or not any(branch.segments[-1] is completion for branch in self.branches):
            return None
        truncated = completion.finish_reason == "length" and len(completion.token_ids) != most
        return completion if retries or truncated else None

    def discard(self, completion: Completion) -> None:
        """Forget an answer that the program has thrown away, now that it gets another one to the same call."""
        if self.withdraw(completion):
            self.counts["answers_repeated"] += 1

    def withdraw(self, completion: Completion) -> bool:
        """Forget an answer that nobody has used; return False where a later call has continued it."""
        branch = next((branch for branch in self.branches if branch.segments[-1] is completion), None)
        if branch is None:
            return False
        left = branch.segments[:-1]
        if isinstance(left[-1], Given):
            left = left[:-1]
        # What is known of the conversation goes on to hold the branch as it was.
        shorter = Branch(left) if left else None
        self.branches = replaced(self.branches, branch, shorter)
        self.conversations.remove(branch, completion, shorter)
        self.calls -= 1
        return True

    def run_out(self, prompt_ids: list[int], call: Call) -> None:
        """A limit leaves no room for the answer to a call."""
        held = [branch for branch in self.branches if prompt_ids[: len(branch)] == branch.token_ids]
        conversation = self.conversations.find(max(held, key=len, default=None), call)
        if conversation is not None:
            conversation.out_of_room = True

    def remember(self, name: str, call: Call, choice: Choice) -> str:
        """Remember the conversation of a call and a recorded answer to it, and by the answer's name where it stands.

        Returns where the conversation first differs from one before it, if it has answers already and begins a branch
        all the same; else nothing.
        """
        branch = next(branch for branch in self.branches if _holds(branch, choice.completion))
        begins_branch = len(branch.sampled) == 1 and len(self.branches) > 1
        difference = ""
        if begins_branch and any(message["role"] == ASSISTANT for message in call.messages):
            difference = self._known.first_difference(call.messages, call.tools, call.header)
            self.counts["histories_rewritten"] += bool(difference)
        message = read_message(choice.message)
        self.conversations.note_text(choice.completion, message)
        messages = [*call.messages, message]
        errors = [(number, _error_result(text)) for number, text in choice.unreadable]
        key = self._known.add(messages, call.tools, Held(branch, choice.completion, errors), call.header)
        self._answers[name] = key, call.preamble
        self._answer_of_call |= {tool_call["id"]: name for tool_call in choice.calls}
        self.counts["tools_left_out"] += call.tools_left_out
        self.counts["calls_unreadable"] += len(choice.unreadable)
        self.counts["calls_cut"] += choice.calls_left_out
        self.counts["stops_cut"] += choice.stopped_by is not None
        if call.must_call is not None:
            names = {tool_call["function"]["name"] for tool_call in choice.calls}
            self.counts["tool_choices_missed"] += not (call.must_call in names if call.must_call else names)
        return difference

    def recall(self, name: str) -> list[dict[str, Any]]:
        """Return the conversation that ended with an answer. Raises WrongCall if there is none."""
        if name not in self._answers:
            raise WrongCall(f"there is no answer {name!r} in this session", "previous_response_not_found")
        key, preamble = self._answers[name]
        return self._known.conversation(key)[preamble:]


def _holds(branch: Branch, completion: Completion) -> bool:
    return any(segment is completion for segment in branch.segments)


def _error_result(text: str) -> dict[str, Any]:
    """Return what the policy is told of a call that cannot be read, as environments tell it."""
    content = json.dumps({"error": text}, ensure_ascii=False)
    return {"role": TOOL, "tool_call_id": CALL_ID, "name": "", "content": content}
