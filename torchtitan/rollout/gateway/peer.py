"""Concurrent calls between the run and its gateway, in both directions, over one WebSocket.

A message is a line of JSON that says what it is, and behind it JSON with the arguments or the result. Who asked reads
the result, which may be long (see record.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from torchtitan.errors import UserError
from torchtitan.utils.typed_json import Object, decode

logger = logging.getLogger(__name__)

# A whole trajectory is one message; the arguments of a call have a conversation.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_ARGUMENTS_BYTES = 16 * 1024 * 1024
# The line that says what a message is, with what an exception says.
MAX_HEAD_BYTES, MAX_FAILED_CHARACTERS = 1 << 16, 4000
LOOPBACK = ("127.0.0.1", "::1", "localhost")

WebSocket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse
Answer = Callable[..., Awaitable[Any]]
"""Takes the arguments of a call by name; the result must be representable as JSON"""


class _Head(msgspec.Struct, omit_defaults=True):
    """What a message is: a call, the end of one, or the answer to one."""

    call: str = ""
    number: int = -1
    cancel: int = -1
    answered: int = -1
    failed: str | None = None
    """What the other side's exception says"""


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
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def call(self, name: str, /, **arguments: Any) -> bytes:
        """Return the other side's answer, as JSON. The caller sets the deadline.

        Raises PeerFailed, or ConnectionError if the other side is gone.
        """
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(_Head(call=name, number=number), arguments)
            return await future
        except asyncio.CancelledError:
            if not self._socket.closed:
                await self._send(_Head(cancel=number))
            raise
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Serve until the connection ends; all calls in progress then fail, in both directions."""
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._take(message.data)
        finally:
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(ConnectionError("the other process has gone"))
            tasks = list(self._answering.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, data: bytes) -> None:
        end = data.find(b"\n", 0, MAX_HEAD_BYTES)
        head, body = decode(_Head, data[:end]), data[end + 1 :]
        if head.call:
            self._answering[head.number] = asyncio.ensure_future(self._answer(head.number, head.call, body))
        elif head.cancel >= 0:
            task = self._answering.get(head.cancel)
            if task is not None:
                task.cancel()
        else:
            future = self._asked.get(head.answered)
            if future is None or future.done():
                return
            if head.failed is not None:
                future.set_exception(PeerFailed(head.failed))
            else:
                future.set_result(body)

    async def _answer(self, number: int, name: str, body: bytes) -> None:
        result: Any = None
        try:
            result = await self._answers[name](**decode(Object, body, MAX_ARGUMENTS_BYTES))
            head = _Head(answered=number)
        except Exception as error:  # any exception is reported to the caller
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            head = _Head(answered=number, failed=text[:MAX_FAILED_CHARACTERS])
        finally:
            del self._answering[number]
        try:
            await self._send(head, result)
        except ConnectionError as error:
            logger.debug("the answer to %s came too late: %s", name, error)

    async def _send(self, head: _Head, body: Any = None) -> None:
        try:
            await self._socket.send_bytes(msgspec.json.encode(head) + b"\n" + msgspec.json.encode(body))
        except (aiohttp.ClientError, RuntimeError) as error:
            raise ConnectionError(f"the other process has gone: {error!r}") from error
