"""An answer on its way to a program as server-sent events, which begin before it has been sampled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from aiohttp import web

from torchtitan.rollout.gateway.calls import Answer, Call, WrongCall
from torchtitan.rollout.gateway.dialects.dialect import Dialect

# Programs and proxies give up on a connection that says nothing, the most impatient ones after half a minute.
PING_S = 5.0
# What a proxy would keep back would not be heard.
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Sampled = TypeVar("Sampled")


class AnswerStream:
    """The stream of one answer.

    Args:
        answer: what is known of it before sampling; it has no choices yet.
        write_timeout_s: time that the program has to take what is sent.
    """

    def __init__(self, dialect: Dialect, call: Call, answer: Answer, write_timeout_s: float):
        self._dialect, self._call, self._answer = dialect, call, answer
        self._write_timeout_s = write_timeout_s
        self._numbers = itertools.count()
        self.response = web.StreamResponse(headers=HEADERS)

    async def begin(self, request: web.Request) -> None:
        """Send the headers, and the events that need no answer."""
        frames = self._frames(self._dialect.opening(self._call, self._answer))  # whose failure can still be a status
        await self.response.prepare(request)
        await self._write(frames)

    async def keep_alive(self, sampling: Awaitable[Sampled]) -> Sampled:
        """Return the result of sampling, and show the program regularly that it is under way."""
        task = asyncio.ensure_future(sampling)
        try:
            while not (await asyncio.wait({task}, timeout=PING_S))[0]:
                await self._write(self._frames(self._dialect.waiting(self._call, self._answer)))
            return task.result()
        finally:
            task.cancel()

    async def finish(self, answer: Answer, sent: Callable[[], None]) -> None:
        """Send the answer and end the stream. sent: called once the answer is on its way, with which a program may end
        the connection."""
        await self._write(self._frames(self._dialect.events(self._call, answer)), sent)
        await self._end()

    async def fail(self, message: str, status: int, code: str | None) -> None:
        """End the stream with an error: a status can no longer be sent."""
        await self._write(self._frames(self._dialect.failure(self._call, self._answer, message, status, code)))
        await self._end()

    def _frames(self, events: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(self._dialect.frame(event, next(self._numbers)) for event in events)

    async def _write(self, frames: bytes, sent: Callable[[], None] = lambda: None) -> None:
        async def write() -> None:
            await self.response.write(frames)
            sent()

        await asyncio.wait_for(write(), self._write_timeout_s)

    async def _end(self) -> None:
        if self._dialect.last_frame:
            await self._write(self._dialect.last_frame)
        await self.response.write_eof()


class RefusedInStream(Exception):
    """A call is refused in the stream that it asked for."""

    def __init__(self, refusal: WrongCall, stream: AnswerStream):
        super().__init__(str(refusal))
        self.refusal, self.stream = refusal, stream
