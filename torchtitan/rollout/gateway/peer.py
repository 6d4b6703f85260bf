"""Concurrent calls between the run and its gateway, in both directions, over one WebSocket."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from torchtitan.errors import UserError

logger = logging.getLogger(__name__)

# A whole trajectory is one message.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
LOOPBACK = ("127.0.0.1", "::1", "localhost")

WebSocket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse
Answer = Callable[..., Awaitable[Any]]
"""Takes the arguments of a call by name; the result must be representable as JSON"""


class PeerFailed(Exception):
    """The other side raised an exception, which the message describes."""


class Peer:
    """One end of the connection; `run` serves the other. Belongs to one asyncio loop.

    answers: name of a call -> coroutine function. The caller gets its exceptions as PeerFailed; if the caller is
    cancelled, so is the coroutine.
    """

    def __init__(self, socket: WebSocket, answers: dict[str, Answer]):
        self._socket, self._answers = socket, answers
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Return the other side's answer. The caller sets the deadline.

        Raises PeerFailed, or ConnectionError if the other side is gone.
        """
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"call": name, "number": number, "with": arguments})
            return await future
        except asyncio.CancelledError:
            if not self._socket.closed:
                await self._send({"cancel": number})
            raise
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Serve until the connection ends; all calls in progress then fail, in both directions."""
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._take(json.loads(message.data))
        finally:
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(ConnectionError("the other process has gone"))
            tasks = list(self._answering.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, message: dict[str, Any]) -> None:
        if "call" in message:
            number = message["number"]
            self._answering[number] = asyncio.ensure_future(self._answer(number, message["call"], message["with"]))
        elif "cancel" in message:
            task = self._answering.get(message["cancel"])
            if task is not None:
                task.cancel()
        else:
            future = self._asked.get(message["answered"])
            if future is None or future.done():
                return
            if "failed" in message:
                future.set_exception(PeerFailed(message["failed"]))
            else:
                future.set_result(message["result"])

    async def _answer(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            reply = {"answered": number, "result": await self._answers[name](**arguments)}
        except Exception as error:  # any exception is reported to the caller
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            reply = {"answered": number, "failed": text}
        finally:
            del self._answering[number]
        try:
            await self._send(reply)
        except ConnectionError as error:
            logger.debug("the answer to %s came too late: %s", name, error)

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._socket.send_str(json.dumps(message, separators=(",", ":")))
        except (aiohttp.ClientError, RuntimeError) as error:
            raise ConnectionError(f"the other process has gone: {error!r}") from error
