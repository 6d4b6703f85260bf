"""The HTTP server of one actor: authorisation, pause and sleep, weights from a trainer, health and errors.

Behind it is an engine in this process (embedded/server.py) or another server (agent/server.py).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from aiohttp import web
from pydantic import Field

from torchtitan.inference.actor_client import Offers
from torchtitan.inference.types import TAGS, Body, Tag
from torchtitan.utils.http_site import HttpSite, has_token
from torchtitan.utils.prometheus import CONTENT_TYPE, Figure, exposition, numbers_in
from torchtitan.utils.typed_json import Object, WrongForm, decode
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.actor_state import UPDATING, ActorState
from torchtitan.weight_sync.memory.staging import StagedVersion
from torchtitan.weight_sync.wire import runtime as wire

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
SHUTDOWN_SECONDS = 2.0
POLL_SECONDS = 0.2

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Asked = TypeVar("Asked", bound=Body)


class WrongRequest(ValueError):
    """No actor can serve the request; the message says what is wrong."""


class OtherJob(Exception):
    """Another live job gives this server its weights; the message says which."""


class PauseBody(Body):
    mode: Literal["keep", "abort"] = "keep"
    """whether running requests are kept for after the pause, or dropped"""


class SleepBody(Body):
    level: int = Field(1, ge=1, le=2)
    finish_s: float = Field(0.0, ge=0)
    """Seconds that running requests get to finish"""


class WakeBody(Body):
    tags: list[Tag] = list(TAGS)
    """The parts of its memory that the engine should take back"""


class ConnectBody(Body):
    registry: str = Field(min_length=1)
    """host:port"""
    actor: str = Field(min_length=1)
    epoch: str = Field(min_length=1)
    key: str = Field(min_length=1)
    """Key of that actor name (handshake.role_key)"""
    relay: bool = False
    """Pass versions on to other actors"""


class EngineCommands(Protocol):
    """What the routes do to an engine. Every method may block and is called in a thread."""

    @property
    def holds(self) -> tuple[str, int] | None:
        """(epoch, version) that the engine certainly holds completely."""

    def pause(self, abort: bool, /) -> None:
        """Pause the engine; `abort` drops running requests."""

    def resume(self) -> None: ...

    def sleep(self, level: int, finish_s: float, /) -> object:
        """Give back memory once nothing runs, within `finish_s` seconds; otherwise change nothing."""

    def wake(self, tags: list[Tag], /) -> None: ...

    def new_connection(self) -> int:
        """Return a number for a new connection to a trainer. From here on, `apply` refuses what older connections
        bring."""

    def apply(self, connection: int, staged: StagedVersion, /) -> dict[str, float]:
        """Apply a version for this connection; called in a thread of its own. Returns the costs in seconds."""


class ActorServer(abc.ABC):
    """The routes that all actors have.

    Args:
        commands: what the routes do to the engine.
        token: clients must send it as `Authorization: Bearer …`.
        relay_host: address on which versions are passed on to other actors if the trainer wants that.
    """

    body_limit: ClassVar[int] = 1024 * 1024
    statuses: ClassVar[dict[type[Exception], int]] = {WrongRequest: 400, OtherJob: 409}
    """The HTTP status of each exception that a request may raise; any other exception is a defect and gives 500"""

    def __init__(self, commands: EngineCommands, token: str, relay_host: str):
        self._commands = commands
        self._token, self._relay_host = token, relay_host
        self._turn = asyncio.Lock()
        self._connecting = threading.Lock()
        self._weights: SyncActor | None = None
        """Pulls the weights of the trainer that was named last"""
        self._lost: str | None = None
        """Why that connection has to be replaced"""
        self.describe: Callable[[bool], Offers] | None = None
        """What this actor says of itself, with a digest of its weights if that is asked for"""
        self._site: HttpSite | None = None
        self._leaves = False
        self._in_progress = 0
        """Requests that have no answer yet"""
        self._released = asyncio.Event()

    # For subclasses to override

    def weights_options(self) -> dict[str, Any]:
        """Return further options for the SyncActor that pulls the weights."""
        return {}

    def connected(self, weights: SyncActor) -> None:  # noqa: B027 nothing, unless a subclass has to know
        """Called when a connection has begun."""

    @abc.abstractmethod
    def engine_state(self) -> tuple[ActorState, str | None]:
        """Return READY and None, or what else the engine is doing and, as a sentence, why nothing is served."""

    @abc.abstractmethod
    def details(self) -> dict[str, Any]:
        """Return what else /health reports: the served epoch and version, engine_age_s, asleep, …"""

    # Server

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises UserError if the address cannot be bound."""
        app = web.Application(middlewares=[self._guard], client_max_size=self.body_limit)
        app.add_routes(self.routes())
        self._site = HttpSite(app, SHUTDOWN_SECONDS)
        return await self._site.start(host, port)

    async def leave(self, timeout_s: float, has_joined: Callable[[], bool]) -> None:
        """Ask for no more requests, and return when the run has the answers to all, or after `timeout_s`.

        has_joined(): whether the run's registry is there. While it is not, the run may have ended, or never begun: then
        it is enough that all requests are answered.
        """
        self._leaves, deadline = True, time.monotonic() + timeout_s
        while (has_joined() or self._in_progress) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), min(left, POLL_SECONDS))
                return

    async def close(self) -> None:
        """Stop pulling and listening."""
        if self._weights is not None:
            await asyncio.to_thread(self._weights.close, SHUTDOWN_SECONDS)
        if self._site is not None:
            await self._site.close()

    def routes(self) -> list[web.RouteDef]:
        """Return all routes. Errors are {"error": reason} with status 400, 401, 404, 409, 500, or those of
        `statuses`."""
        return [
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/sleep", self._sleep),
            web.post("/wake", self._wake),
            web.post("/weights/connect", self._connect),
            web.post("/release", self._release),
            web.get("/health", self._health),
            web.get("/offers", self._offers),
            web.get("/metrics", self._metrics),
        ]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the token, and turn exceptions into answers."""
        if not has_token(request, self._token):
            return answer({"error": "the bearer token is missing or wrong"}, 401)
        if self._site is not None:
            self._site.trust(request)
        self._in_progress += 1
        try:
            return await handler(request)
        except web.HTTPException as error:
            return answer({"error": f"{error.reason}: {request.method} {request.path}"}, error.status)
        except Exception as error:
            for kind, status in self.statuses.items():
                if isinstance(error, kind):
                    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {}
                    text = f"the engine: {error}" if status == 502 else str(error)
                    return answer({"error": text}, status, **headers)
            logger.exception("%s %s failed", request.method, request.path)
            return answer({"error": repr(error)}, 500)
        finally:
            self._in_progress -= 1

    def state(self) -> dict[str, Any]:
        """Return what /health reports."""
        state, reason = (ActorState.LEAVING, "it ends soon") if self._leaves else self.engine_state()
        weights = None
        if self._weights is not None:
            weights = self._weights.status()
            weights["failure"] = self._lost or weights["failure"]
            state = _with_weights(state, weights["state"])
        about = {"state": state, "serves": reason is None, "reason": reason}
        return {**about, "pid": os.getpid(), "weights": weights, **self.details()}

    def figures(self) -> list[Figure]:
        """Return what /metrics reports: the numbers of /health."""
        return numbers_in(self.state(), "actor_")

    # Routes

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=exposition(self.figures()).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _pause(self, request: web.Request) -> web.Response:
        body = await parse_body(request, PauseBody)
        await asyncio.to_thread(self._commands.pause, body.mode == "abort")
        return answer(self.state())

    async def _resume(self, _request: web.Request) -> web.Response:
        await asyncio.to_thread(self._commands.resume)
        return answer(self.state())

    async def _sleep(self, request: web.Request) -> web.Response:
        body = await parse_body(request, SleepBody)
        await asyncio.to_thread(self._commands.sleep, body.level, body.finish_s)
        return answer(self.state())

    async def _wake(self, request: web.Request) -> web.Response:
        body = await parse_body(request, WakeBody)
        await asyncio.to_thread(self._commands.wake, body.tags)
        return answer(self.state())

    async def _connect(self, request: web.Request) -> web.Response:
        """From now on, pull weights from the given trainer."""
        body = await parse_body(request, ConnectBody)
        try:
            wire.parse_address(body.registry)
        except wire.ProtocolError as error:
            raise WrongRequest(str(error)) from None
        # This lock keeps requests in order without a thread for each waiting one. The thread of a cancelled request
        # goes on, so _replace_weights() needs a lock of its own.
        async with self._turn:
            await asyncio.to_thread(self._replace_weights, body)
        return answer(self.state())

    def _replace_weights(self, body: ConnectBody) -> None:
        with self._connecting:
            old = self._weights
            if old is not None:
                if old.status()["connected"] and (old.registry, old.epoch) != (body.registry, body.epoch):
                    other_job = f"job {old.epoch}, whose registry is at {old.registry}"
                    raise OtherJob(f"this server gets its weights from {other_job}: end that job first")
                old.close()
            number = self._commands.new_connection()
            served = None if old is None else old.served
            if served is not None and (served.epoch, served.version) != self._commands.holds:
                # An apply outlasted the old connection, which does not know what the engine holds now.
                served = None
            apply = functools.partial(self._commands.apply, number)
            options = {"relay_host": self._relay_host if body.relay else "", **self.weights_options()}
            weights = SyncActor(body.registry, body.actor, body.epoch, body.key, apply, served=served, **options)
            self._weights, self._lost = weights, None
            weights.start()
            self.connected(weights)

    async def _release(self, _request: web.Request) -> web.Response:
        """What a run tells an actor that leaves, once it has all answers."""
        if self._leaves:
            self._released.set()
        return answer(self.state())

    async def _offers(self, request: web.Request) -> web.Response:
        """What this actor is, for the run that is about to use it; with ?weights=1 also a digest of its weights."""
        if self.describe is None:
            raise web.HTTPNotFound(reason="this server does not know how it was started")
        with_weights = request.query.get("weights") == "1"
        return answer(asdict(await asyncio.to_thread(self.describe, with_weights)))

    async def _health(self, _request: web.Request) -> web.Response:
        return answer(self.state())


def _with_weights(state: ActorState, weights: ActorState) -> ActorState:
    """What an actor does whose engine is in `state` while its weight sync is in the state `weights`."""
    if weights not in UPDATING:
        return state
    # An engine may pause in order to apply a version.
    pauses = state is ActorState.PAUSED and weights is ActorState.APPLYING
    if pauses or state in (ActorState.JOINING, ActorState.READY):
        return weights
    return state


def answer(data: dict[str, Any], status: int = 200, **headers: str) -> web.Response:
    """Return a JSON answer without spaces, because completions are long."""
    text = json.dumps(data, separators=(",", ":"))
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


async def parse_body(request: web.Request, kind: type[Asked]) -> Asked:
    """Parse a body, which may be missing. Raises WrongRequest."""
    body = await request.read() or b"{}"
    try:
        data = decode(Object, body, len(body))
    except WrongForm as error:
        raise WrongRequest(f"the body is not JSON or not an object: {error}") from None
    return kind.read(data, WrongRequest)
