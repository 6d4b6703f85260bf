"""An HTTP server where strangers may come: who has not authenticated holds few connections, for a short time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import resource
import socket
import struct
import sys
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from torchtitan.errors import UserError
from torchtitan.utils.logs import RateLimit, escaped

# The most connections that have not authenticated, and their share of the descriptors; another one drops the oldest.
MAX_STRANGERS, SHARE = 1024, 4
# This share of them is accepted in one turn of the loop. A client that speaks at once needs a few turns to be known.
TURN_SHARE = 8
STRANGER_SECONDS = 10.0
BACKLOG = 1024
# Of what aiohttp logs, so many lines pass per so many seconds, with so many characters of a stranger's request.
MAX_LINES, LINES_SECONDS, MAX_SHOWN = 10, 60.0, 100
# The state of a connection, which is closed once the other side has refused what it was sent, and how many segments it
# has not acknowledged (linux/tcp.h).
UNACKNOWLEDGED, TCP_CLOSE = struct.Struct("=B23xI"), 7


def has_token(request: web.Request, token: str, in_query: bool = False) -> bool:
    """Whether a request has the bearer token, compared in constant time. in_query: without one, `?token=` counts."""
    given = request.headers.get("Authorization", "")
    if in_query and not given.startswith("Bearer "):
        given = f"Bearer {request.query.get('token', '')}"
    return hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {token}".encode())


class StrangersLines(RateLimit):
    """What aiohttp says of requests that are no HTTP is one short line, without the traceback that quotes them. Of all
    its lines, which strangers can cause, few pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = f"a request is refused: {escaped(str(error), MAX_SHOWN)}", ()
            record.exc_info = record.exc_text = None
        return super().filter(record)


def _has_unread(transport: asyncio.BaseTransport | None) -> bool:
    """Whether the other side has not taken all that it was sent, as Linux knows it (struct tcp_info); elsewhere, or
    where there is no connection any longer, it is not known."""
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None or sys.platform != "linux":
        return False
    with contextlib.suppress(OSError):
        about = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNACKNOWLEDGED.size)
        state, unacknowledged = UNACKNOWLEDGED.unpack(about)
        return bool(state == TCP_CLOSE or unacknowledged)
    return False


logging.getLogger("aiohttp.server").addFilter(StrangersLines(MAX_LINES, LINES_SECONDS))


class HttpSite:
    """Serves an application at one address. The application calls trust() for a request that has authenticated; a
    connection without one is closed after STRANGER_SECONDS, or earlier where there are many.

    Args:
        shutdown_s: time for running requests when the site closes.
        decompress: decompress bodies; what cannot be is refused in plain text before the application sees it.
    """

    def __init__(self, app: web.Application, shutdown_s: float = 60.0, decompress: bool = True):
        # handler_cancellation: a client that hangs up ends its handler, which aborts the request.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=shutdown_s,
            auto_decompress=decompress,
        )
        self._server: asyncio.Server | None = None
        self._most = min(MAX_STRANGERS, max(TURN_SHARE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE))
        self._strangers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        """Connections that have not authenticated, the oldest first, and what closes them"""
        self._on_reset: dict[asyncio.BaseProtocol, Callable[[], None]] = {}
        """Connections, and what to call if their clients break them off"""

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises UserError if the address cannot be bound."""
        await self._runner.setup()
        assert self._runner.server is not None
        lost = functools.partial(self._lost, self._runner.server.connection_lost)
        self._runner.server.connection_lost = lost  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connect, host, port, backlog=self._most // TURN_SHARE)
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error}") from None
        for listener in self._server.sockets:
            with listener.dup() as same:
                same.listen(BACKLOG)  # create_server() has one number for what may wait and what is accepted in a turn
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and end all requests."""
        if self._server is not None:
            self._server.close()
        for stranger in list(self._strangers):
            self._drop(stranger)
        await self._runner.cleanup()

    def trust(self, request: web.BaseRequest) -> None:
        """Keep the connection of this request as long as its client likes."""
        self._forget(request.protocol)

    def on_reset(self, request: web.BaseRequest, callback: Callable[[], None]) -> None:
        """Call back if the client ends the connection of this request before all that was sent has reached it. This
        replaces what was to be called before."""
        self._on_reset[request.protocol] = callback

    def _lost(
        self,
        forget: Callable[[RequestHandler, BaseException | None], None],
        protocol: RequestHandler,
        error: BaseException | None = None,
    ) -> None:
        callback = self._on_reset.pop(protocol, None)
        if callback is not None and (isinstance(error, ConnectionError) or _has_unread(protocol.transport)):
            callback()
        forget(protocol, error)

    def _connect(self) -> asyncio.BaseProtocol:
        assert self._runner.server is not None
        if len(self._strangers) >= self._most:
            self._drop(next(iter(self._strangers)))
        protocol = self._runner.server()
        loop = asyncio.get_running_loop()
        self._strangers[protocol] = loop.call_later(STRANGER_SECONDS, self._drop, protocol)
        return protocol

    def _forget(self, protocol: asyncio.BaseProtocol) -> None:
        timer = self._strangers.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _drop(self, protocol: asyncio.BaseProtocol) -> None:
        self._forget(protocol)
        if isinstance(protocol, RequestHandler) and protocol.transport is not None:
            protocol.transport.abort()
