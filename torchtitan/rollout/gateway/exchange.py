"""What becomes of each request of a program: every one is counted once, and nothing that goes wrong is silent.

A request with an open key is `answered`, `refused` (the program's error, or a limit), `failed` (the system's),
`hung_up` (the program went before its answer was there), `unseen` (it went while its answer was sent) or `ended` (the
episode was over meanwhile).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torchtitan.inference.types import Completion
from torchtitan.rollout.gateway.calls import CONTEXT_FULL, WrongCall
from torchtitan.rollout.gateway.main_conversation import Conversation
from torchtitan.rollout.gateway.session import Session

OUTCOMES = ("answered", "refused", "failed", "hung_up", "unseen", "ended")
# Refusals that say that a limit is reached: the episode is cut there.
TURNS_USED_UP = "max_turns_reached"
LIMITS = (CONTEXT_FULL, TURNS_USED_UP)
# What a refusal without a code of its own is called, by its status.
INTERNAL = "internal_error"
KINDS = {
    400: "invalid_request", 404: "unknown_url", 408: "slow_body", 413: "request_too_large", 415: "unknown_encoding",
    500: INTERNAL,
}  # fmt: skip
# Items of /v1/responses that come from an answer, or say what its calls returned.
ITEMS_OF_ANSWERS = (
    "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
)  # fmt: skip
# The reasons that a record has, at most, and their characters.
MAX_REASONS, MAX_REASON_CHARACTERS = 5, 500


def without_answer(counts: Mapping[str, int]) -> dict[str, int]:
    """Return those counts of an episode that are of requests without an answer, refused ones by their kinds."""
    names = {f"calls_{outcome}" for outcome in OUTCOMES if outcome not in ("answered", "refused")}
    names.add("calls_without_key")
    found: dict[str, int] = {}
    for name, count in counts.items():
        is_failure = name in names or name.startswith("calls_refused/")
        if count and is_failure:
            found[name] = count
    return found


class NoAnswer(Exception):
    """The system could not answer a call. The message says why."""


@dataclass
class Refusal:
    """A request that was refused."""

    kind: str
    path: str
    reason: str
    at: float
    continues: bool
    """Whether it may have continued a conversation with an answer, rather than begun one"""
    offers_tools: bool

    def ends(self, conversation: Conversation) -> bool:
        """Whether the program has got no answer in this conversation since it was refused one there."""
        belongs = self.continues and (self.offers_tools or not conversation.opening.tools)
        return self.kind not in LIMITS and belongs and self.at > conversation.answered_at


@dataclass
class Exchange:
    """One request of a program."""

    path: str
    asks_policy: bool = True
    """Whether it asks for an answer of the policy"""
    retries: bool = False
    """Whether the program says that it repeats a call whose answer it did not get"""
    body: Mapping[str, Any] | None = None
    """What it says, once that has been read"""
    number: int = 0
    """Of its answer among those that its session was asked for"""
    discards: Completion | None = None
    """The answer that its own is to replace"""
    answers: list[tuple[Session, Completion]] = field(default_factory=list)
    """What was sampled and recorded for it"""
    outcome: str = ""
    unread: bool = False
    """The connection has ended before all that was sent had reached the program"""
    refusal: Refusal | None = None

    def answer(self) -> None:
        """What it asked for is on its way to the program."""
        self.outcome = self.outcome or "answered"

    def fail(self, error: Exception, status: int, code: str | None) -> None:
        """It gets an error, and what was sampled for it is not an answer."""
        self.withdraw()
        if isinstance(error, NoAnswer):
            self.outcome = "failed"
            return
        kind = code or KINDS.get(status, f"status_{status}")
        text = str(error) if isinstance(error, WrongCall) else f"{type(error).__name__}: {error}"
        reason = text[:MAX_REASON_CHARACTERS]
        continues = self.asks_policy and (self.body is None or _has_history(self.body))
        offers_tools = self.body is None or bool(self.body.get("tools"))
        self.outcome = "refused"
        self.refusal = Refusal(kind, self.path, reason, time.monotonic(), continues, offers_tools)

    def break_off(self) -> None:
        """The program has gone: what it did not receive is not an answer."""
        if not self.outcome:
            self.outcome = "unseen" if self.answers else "hung_up"
            self.withdraw()

    def withdraw(self) -> bool:
        """Forget its answers, and return whether there were any that no later call has continued."""
        withdrawn = [session.withdraw(completion) for session, completion in self.answers]
        return any(withdrawn)


class Ledger:
    """What has become of the requests of an episode."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._latest: dict[tuple[str, bool, bool], Refusal] = {}
        """The latest refusal of each sort"""

    def settle(self, exchange: Exchange) -> None:
        """Count a request that is over."""
        if exchange.unread and exchange.outcome == "answered" and exchange.withdraw():
            exchange.outcome = "unseen"
        self.counts.update(["calls", f"calls_{exchange.outcome}"])
        if exchange.refusal is not None:
            self.counts[f"calls_refused/{exchange.refusal.kind}"] += 1
            sort = exchange.refusal.kind, exchange.refusal.continues, exchange.refusal.offers_tools
            self._latest[sort] = exchange.refusal

    def take_back(self, exchange: Exchange) -> None:
        """What was sent for a request has not been received."""
        if exchange.outcome == "answered" and exchange.withdraw():
            self.counts["calls_answered"] -= 1
            self.counts["calls_unseen"] += 1

    def ending_refusal(self, main: Conversation | None) -> Refusal | None:
        """Return the refusal on which the main conversation ended, if it did."""
        if main is None:
            return None
        ending = [refusal for refusal in self._latest.values() if refusal.ends(main)]
        return max(ending, key=attrgetter("at"), default=None)

    def reasons(self) -> list[dict[str, str]]:
        """Return the latest refusal of each kind."""
        in_order = sorted(self._latest.values(), key=attrgetter("at"))
        latest = list({refusal.kind: refusal for refusal in in_order}.values())[-MAX_REASONS:]
        return [{"kind": refusal.kind, "path": refusal.path, "reason": refusal.reason} for refusal in latest]


def _has_history(body: Mapping[str, Any]) -> bool:
    """Whether a body of any API has an earlier answer of the policy, or names one."""
    if body.get("previous_response_id"):
        return True
    messages = body.get("messages", body.get("input"))
    if not isinstance(messages, list):
        return "token_ids" in body
    return any(map(_is_of_policy, messages))


def _is_of_policy(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return message.get("role") == "assistant" or message.get("type") in ITEMS_OF_ANSWERS
