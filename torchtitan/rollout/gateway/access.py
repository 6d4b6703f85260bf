"""The access of an episode's program to the gateway: its key's sessions, its requests, and the record of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from torchtitan.inference.types import Branch, SamplingParameters
from torchtitan.rollout.gateway.exchange import INTERNAL, Exchange, Ledger
from torchtitan.rollout.gateway.main_conversation import Conversation, main_conversation
from torchtitan.rollout.gateway.record import branches_to_json
from torchtitan.rollout.gateway.session import Session


@dataclass
class Access:
    """The access of one key: to an episode's only session or, with `many`, to sessions that calls name in a header."""

    name: str
    many: bool
    sampling: SamplingParameters
    min_version: int
    shares: str
    sessions: dict[str, Session] = field(default_factory=dict)
    under_way: dict[asyncio.Task[Any], Exchange] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    ended: bool = False
    reported: bool = False
    """Whether the run has been told of a call after the end"""

    def take_back(self, exchange: Exchange) -> None:
        """The program has ended its connection before the answer had reached it."""
        exchange.unread = True
        if exchange.outcome and not self.ended:
            self.ledger.take_back(exchange)

    def end(self, strangers: Ledger) -> dict[str, Any]:
        """Abort the requests under way, and return the record of the sessions (see SessionRecord).

        strangers: requests that had no key of an open episode.
        """
        self.ended = True
        for task, exchange in list(self.under_way.items()):
            # What was sampled for it may have been received; otherwise the program has ended without it.
            exchange.outcome = exchange.outcome or ("answered" if exchange.answers else "ended")
            self.ledger.settle(exchange)
            task.cancel()
        sessions, self.sessions = list(self.sessions.values()), {}
        counts = Counter(self.ledger.counts)
        conversations: list[Conversation] = []
        branches: list[Branch] = []
        calls = failed = 0
        for session in sessions:
            conversations += session.conversations.all
            branches += session.branches
            counts += session.counts
            calls += session.calls
            failed += len(session.failed)
        counts["calls_without_key"] = strangers.counts["calls"]
        main = main_conversation(conversations)
        of_main = [] if main is None else main.branches
        main_ids = set(map(id, of_main))
        side = [branch for branch in branches if id(branch) not in main_ids]
        ending = self.ledger.ending_refusal(main)
        # An error of the gateway itself says no more about the policy than an engine that gives no answer.
        breaks = ending is not None and ending.kind == INTERNAL
        ended_by = ""
        if ending is not None and not breaks:
            ended_by = f"{ending.path}: {ending.reason}"
        return {
            "branches": branches_to_json([*side, *of_main]),
            "calls": calls,
            "failed": failed + breaks,
            "truncated": main is not None and main.truncated,
            "counts": counts,
            "side": len(side),
            "refusals": [*self.ledger.reasons(), *strangers.reasons()],
            "ended_by": ended_by,
        }


def keys_of(request: web.Request) -> list[str]:
    """Return the keys that a request brings: programs send a stale one beside the right one in another header."""
    given = [value.strip().partition(" ") for value in request.headers.getall("Authorization", [])]
    bearers = [key.strip() for scheme, _, key in given if scheme.lower() == "bearer"]
    return [*bearers, *(key.strip() for key in request.headers.getall("X-Api-Key", []))]
