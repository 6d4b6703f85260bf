"""An HTTP server where strangers may come: who has not authenticated holds few connections, for a short time."""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource

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

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises UserError if the address cannot be bound."""
        await self._runner.setup()
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
