"""The agent's HTTP server: the routes of an actor, without generation, which the engine's own server does."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from torchtitan.inference.agent.applying import Applier
from torchtitan.inference.agent.control import EngineControl, EngineError
from torchtitan.inference.agent.hand_over import HandOver
from torchtitan.inference.agent.watch import Watch
from torchtitan.inference.client import Capabilities
from torchtitan.inference.sleeping import parse_sleep, parse_wake
from torchtitan.inference.types import TAGS
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.receiver import Receiver

logger = logging.getLogger(__name__)

BODY_LIMIT = 1024 * 1024
SHUTDOWN_S = 2.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parsed = TypeVar("Parsed")


class WrongRequest(ValueError):
    """The message says what is wrong."""


@dataclass(frozen=True)
class EnginePlace:
    """Where clients find the engine, and what it can do. token_env: the variable in which they find its token; None
    where it is the agent's own."""

    url: str
    capabilities: Capabilities
    token_env: str | None = None

    def to_json(self) -> dict[str, Any]:
        capabilities = self.capabilities.to_json()
        named = {"name": self.capabilities.engine, "version": self.capabilities.version}
        return {"url": self.url, **named, "capabilities": capabilities, "token_env": self.token_env}


class AgentServer:
    """One engine's agent behind HTTP.

    Args:
        place: of the engine.
        token: what clients must send as `Authorization: Bearer …`, and what the weight coordinator gets unless a
            connection names another one.
        data_host: address on which weights are received.
        timeout_s: for all workers of the engine to apply what they staged.
    """

    def __init__(
        self,
        place: EnginePlace,
        control: EngineControl,
        hand_over: HandOver,
        applier: Applier,
        token: str,
        data_host: str,
        timeout_s: float,
    ):
        self._place, self._hand_over, self._applier, self._token = place, hand_over, applier, token
        self._data_host, self._timeout_s = data_host, timeout_s
        self.stopped = asyncio.Event()
        self._watch = Watch(control, applier, self._weights_lost)
        self._receiver: Receiver | None = None
        self._connecting = asyncio.Lock()
        self._lost: str | None = None
        """Why the receiver there is has to be replaced"""
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError where the address cannot be bound."""
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_LIMIT)
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self._watch.start()
        return int(self._runner.addresses[0][1])

    @property
    def engine_closed_s(self) -> float:
        """Seconds for which the engine's port has been closed; 0 while it is open."""
        return self._watch.closed_s

    async def close(self) -> None:
        """Stop receiving and listening."""
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close, SHUTDOWN_S)
        await asyncio.to_thread(self._watch.close, SHUTDOWN_S)
        if self._runner is not None:
            await self._runner.cleanup()

    def routes(self) -> list[web.RouteDef]:
        """All routes. Errors are {"error": reason} with status 400, 401, 404, 500, or 502 for what the engine did."""
        return [
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/sleep", self._sleep),
            web.post("/wake", self._wake),
            web.post("/weights/connect", self._connect),
            web.get("/weights", self._weights),
            web.get("/health", self._health),
        ]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets in who knows the token, and turns exceptions into answers."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return web.json_response({"error": "the bearer token is missing or wrong"}, status=401)
        try:
            return await handler(request)
        except WrongRequest as error:
            return web.json_response({"error": str(error)}, status=400)
        except EngineError as error:
            return web.json_response({"error": f"the engine: {error}"}, status=502)
        except web.HTTPException as error:
            return web.json_response({"error": f"{error.reason}: {request.path}"}, status=error.status)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return web.json_response({"error": repr(error)}, status=500)

    # Pauses

    async def _pause(self, request: web.Request) -> web.Response:
        """{"mode": "keep"} (default) keeps what is running for after the pause, "abort" drops it."""
        body = await request.read()
        mode = (_parse_object(body) if body else {}).get("mode", "keep")
        if mode not in ("keep", "abort"):
            raise WrongRequest(f"mode must be keep or abort, got {mode!r}")
        await asyncio.to_thread(self._applier.pause, mode == "abort")
        return web.json_response(self._state())

    async def _resume(self, _request: web.Request) -> web.Response:
        await asyncio.to_thread(self._applier.resume)
        return web.json_response(self._state())

    async def _sleep(self, request: web.Request) -> web.Response:
        """{"level", "finish_s"}: give the engine's memory back once nothing runs; within that time, or not."""
        level, finish_s = await _parse(request, parse_sleep)
        await asyncio.to_thread(self._applier.sleep, level, finish_s)
        return web.json_response(self._state())

    async def _wake(self, request: web.Request) -> web.Response:
        """{"tags"}: take these parts of the memory again, all by default."""
        tags = await _parse(request, parse_wake)
        await asyncio.to_thread(self._applier.wake, tags)
        return web.json_response(self._state())

    # Weights

    async def _connect(self, request: web.Request) -> web.Response:
        """{"coordinator": "host:port", "actor", "epoch"}: fetch weights from there from now on."""
        body = _parse_object(await request.read())
        values = [body.get(name) for name in ("coordinator", "actor", "epoch")]
        if not all(isinstance(value, str) and value for value in values):
            raise WrongRequest("coordinator (host:port), actor and epoch must be non-empty strings")
        coordinator, actor, epoch = (str(value) for value in values)
        token = body.get("token", self._token)
        if not isinstance(token, str):
            raise WrongRequest("token must be a string")
        try:
            wire.parse_address(coordinator)
        except wire.ProtocolError as error:
            raise WrongRequest(str(error)) from None
        async with self._connecting:
            await asyncio.to_thread(self._replace_receiver, coordinator, actor, epoch, token)
        return web.json_response(self._state())

    def _replace_receiver(self, coordinator: str, actor: str, epoch: str, token: str) -> None:
        old = self._receiver
        if old is not None:
            old.close()
        # What an older receiver orders from here on is refused.
        number = self._applier.new_receiver()
        served = None if old is None else old.served
        if served is not None and (served.epoch, served.version) != self._applier.holds:
            # An apply outlasted the old receiver: it does not know what the engine holds now.
            served = None
        apply = functools.partial(self._applier.apply, number)
        receiver = Receiver(
            coordinator, actor, epoch, token, apply,
            host=self._data_host, served=served, workers=self._hand_over.workers, workers_timeout_s=self._timeout_s,
            trust_workers=self._applier.holds is not None,
        )  # fmt: skip
        self._receiver, self._lost = receiver, None
        receiver.start()
        leader = receiver.workers_address if self._hand_over.workers else ""
        try:
            self._hand_over.connected(leader, actor, epoch, token)
        except EngineError as error:
            self._lost = f"the engine could not be connected: {error}"
            raise

    def _weights_lost(self, reason: str) -> None:
        # Whoever put the receiver there reads this and connects anew: then the engine gets a version in full.
        self._lost = reason

    # What it is doing

    def _status(self) -> tuple[str, str | None]:
        applier = self._applier
        if applier.asleep:
            return "asleep", "the engine is asleep"
        if applier.poisoned is not None:
            return "poisoned", applier.poisoned
        if applier.holds is None:
            return "not_ready", self._lost or "no weights version has been applied yet"
        if applier.paused:
            return "paused", "the engine is paused"
        if applier.unsettled is not None:
            return "paused", f"the engine may stand still: {applier.unsettled}"
        if applier.draining:
            # vLLM has new requests wait up to 0.32 and answers 503 since: either way others have them sooner.
            return "paused", "running requests finish before new weights come"
        return "ok", None

    def _state(self) -> dict[str, Any]:
        status, reason = self._status()
        held = self._applier.holds
        weights = None
        if self._receiver is not None:
            weights = self._receiver.status().to_json()
            weights["failure"] = self._lost or weights["failure"]
        return {
            "status": status,
            "reason": reason,
            "asleep": [tag for tag in TAGS if tag in self._applier.asleep],
            "epoch": None if held is None else held[0],
            "version": None if held is None else held[1],
            "engine_age_s": round(self._watch.age_s, 3),
            "answered_age_s": round(self._watch.answered_age_s, 3),
            "engine_trouble": self._watch.trouble,
            "pid": os.getpid(),
            "weights": weights,
            "engine": self._place.to_json(),
        }

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response(self._state())

    async def _weights(self, _request: web.Request) -> web.Response:
        return web.json_response({"weights": self._state()["weights"]})


async def _parse(request: web.Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """What a body that may be missing says. Raises WrongRequest."""
    body = await request.read()
    try:
        return parse(_parse_object(body) if body else {})
    except ValueError as error:
        raise WrongRequest(str(error)) from None


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except ValueError as error:
        raise WrongRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise WrongRequest("the body must be a JSON object")
    return data
