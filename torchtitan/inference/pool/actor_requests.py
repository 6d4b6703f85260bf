"""The requests that one actor has: they end when the actor is lost, and their answers are checked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Coroutine
from typing import Any, TypeVar

from torchtitan.inference.actor_client import ActorError
from torchtitan.inference.answer_checks import MixtureShape, check_experts
from torchtitan.inference.types import Completion, GenerateRequest

# So many answers in a row that cannot be right evict an actor, and so many such evictions in a row give it up. An event
# tells of such an answer at most once within so many seconds.
MAX_REFUSED = 3
TELL_REFUSED_S = 60.0

Result = TypeVar("Result")


class ActorRequests:
    """mixture: whose experts the actor names where a request asks for them. write(kind, level, …) writes an event of
    this actor. Belongs to one asyncio loop."""

    def __init__(self, epoch: str, mixture: MixtureShape | None, write: Callable[..., None]):
        self._epoch, self._mixture, self._write = epoch, mixture, write
        self.published: Container[int] | None = None
        """The versions that the actor may say it serves; None: any"""
        self.in_progress = self.failed = 0
        """Requests without an answer yet, and requests that failed since the actor was last seen alive"""
        self.refused_answers = 0
        """In a row"""
        self._told_refused_at = -TELL_REFUSED_S
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def unfinished(self) -> int:
        """How many have no answer."""
        return self.in_progress + self.failed

    async def unless_lost(self, phase: str, request: Coroutine[Any, Any, Result]) -> Result:
        """Return the request's answer. Raises ActorError if the actor is lost first."""
        lost, work = self._lost, asyncio.ensure_future(request)
        try:
            either: set[asyncio.Future[Any]] = {work, lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ActorError(phase, f"evicted: {lost.result()}")
            return work.result()
        finally:
            work.cancel()

    def interrupt(self, reason: str) -> None:
        """End all requests to the actor with an ActorError."""
        lost, self._lost = self._lost, asyncio.get_running_loop().create_future()
        lost.set_result(reason)

    def check(self, request: GenerateRequest, completions: list[Completion]) -> None:
        """Raise ActorError unless this run has published what they were sampled with."""
        for completion in completions:
            if request.sampling.routes and self._mixture is not None:
                check_experts(completion, len(request.prompt_ids) + len(completion.token_ids), self._mixture)
            for span in completion.spans:
                if span.epoch != self._epoch:
                    raise ActorError("generate", f"sampled under epoch {span.epoch!r}, but this one is {self._epoch!r}")
                if not self.is_published(span.version):
                    raise ActorError("generate", f"sampled under version {span.version}, which was not published")

    def is_published(self, version: int) -> bool:
        """Whether an actor may serve this version."""
        return self.published is None or version in self.published

    def refuse(self, reason: str) -> str:
        """Tell that an answer cannot be right. Returns why the actor is to be evicted, with the third in a row."""
        self.refused_answers += 1
        now = time.monotonic()
        if now - self._told_refused_at >= TELL_REFUSED_S:
            self._told_refused_at = now
            self._write("answer_refused", level=logging.ERROR, reason=reason, in_a_row=self.refused_answers)
        if self.refused_answers % MAX_REFUSED:
            return ""
        return f"{self.refused_answers} answers in a row cannot be right; the last: {reason}"

    @property
    def hopeless(self) -> bool:
        """Whether it was evicted for its answers several times in a row."""
        return self.refused_answers >= MAX_REFUSED * MAX_REFUSED
