"""The engine's HTTP server: token ids in and out, weights, pause and sleep, health and metrics. See `routes`."""

from __future__ import annotations

import asyncio
import functools
import hmac
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from torchtitan.inference.activity import ActivityLog
from torchtitan.inference.embedded import api
from torchtitan.inference.embedded.engine import Engine, NonFiniteLogits
from torchtitan.inference.embedded.loop import CALL_SECONDS, EngineLoop, Unavailable
from torchtitan.inference.embedded.requests import InvalidRequest, TooLong, check_request
from torchtitan.inference.embedded.rescore import score
from torchtitan.inference.embedded.verification import MOST_TORN, Verifier
from torchtitan.inference.sleeping import parse_sleep, parse_wake
from torchtitan.inference.types import TAGS, Completion, GenerateRequest, SamplingParameters
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.receiver import Receiver
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)

BODY_LIMIT = 64 * 1024 * 1024
RETRY_AFTER_SECONDS = 1
SHUTDOWN_SECONDS = 2.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parsed = TypeVar("Parsed")


def _encode(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _answer(data: dict[str, Any], status: int = 200, **headers: str) -> web.Response:
    return web.Response(text=_encode(data), status=status, headers=headers, content_type="application/json")


async def _parse(request: web.Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """What a body that may be missing says. Raises InvalidRequest."""
    body = await request.read()
    try:
        return parse(api.parse_object(body) if body else {})
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


class EngineServer:
    """One engine behind HTTP.

    Args:
        engine: handed over.
        model: name that clients see.
        token: what clients must send as `Authorization: Bearer …`; None lets everybody in.
        threads: of the engine; 0 leaves torch's choice.
        require_version: answer 503 until a first version was applied.
        data_host: address on which weights are received.
        drain_timeout_s: so long may what runs finish before weights change; 0: they change in flight.
        activity_file: gets notes of when the engine worked.
        verify_every: versions from one check of the weights in use to the next; 0 checks none.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        token: str | None,
        threads: int = 0,
        require_version: bool = False,
        data_host: str = "127.0.0.1",
        drain_timeout_s: float = 0.0,
        activity_file: Path | None = None,
        verify_every: int = 1,
    ):
        self.engine, self.model, self._token, self._data_host = engine, model, token, data_host
        self.stopped = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        self._vocabulary, self._longest = engine.args.vocab_size, engine.max_length + 1
        activity = ActivityLog(activity_file)
        self.loop = EngineLoop(engine, threads, require_version, self._engine_failed, drain_timeout_s, activity)
        self.verifier = Verifier(verify_every, engine.live_parameters, self._found_torn)
        self._receiver: Receiver | None = None
        self._receivers = 0
        self._applying = threading.Lock()
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count()
        self._begun = time.monotonic()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError where the address cannot be bound."""
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_LIMIT)
        app.add_routes(self.routes())
        # handler_cancellation: a client that hangs up ends its handler, which aborts the request.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.loop.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Abort everything and stop listening."""
        await asyncio.to_thread(self.loop.close, SHUTDOWN_SECONDS)
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close, SHUTDOWN_SECONDS)
        if self._runner is not None:
            await self._runner.cleanup()

    def routes(self) -> list[web.RouteDef]:
        """All routes. Errors are {"error": reason} with status 400, 401, 404, 413, 500 or 503 (try again later)."""
        return [
            web.post("/v1/generate", self._generate),
            web.post("/v1/completions", self._completions),
            web.post("/v1/score", self._score),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/sleep", self._sleep),
            web.post("/wake", self._wake),
            web.post("/weights/connect", self._connect),
            web.get("/weights", self._weights),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
        ]

    def _engine_failed(self, _error: BaseException) -> None:
        # Whoever supervises this process starts a fresh one.
        self._event_loop.call_soon_threadsafe(self.stopped.set)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets in who knows the token, and turns exceptions into answers."""
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return _answer({"error": "the bearer token is missing or wrong"}, 401)
        try:
            return await handler(request)
        except TooLong as error:
            return _answer({"error": str(error)}, 413)
        except InvalidRequest as error:
            return _answer({"error": str(error)}, 400)
        except Unavailable as error:
            return _answer({"error": str(error)}, 503, **{"Retry-After": str(RETRY_AFTER_SECONDS)})
        except NonFiniteLogits as error:
            return _answer({"error": str(error)}, 500)
        except web.HTTPException as error:
            return _answer({"error": f"{error.reason}: {request.method} {request.path}"}, error.status)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return _answer({"error": repr(error)}, 500)

    # Generation

    async def _run(self, request: GenerateRequest) -> list[Completion]:
        reason = self.loop.why_unavailable()
        if reason is not None:
            raise Unavailable(reason)
        # A retry of a request may come before its lost first try was noticed: ids are our own.
        own = GenerateRequest(f"{next(self._numbers)}:{request.request_id}", request.prompt_ids, request.sampling)
        return await self.loop.generate(own)

    async def _generate(self, request: web.Request) -> web.Response:
        completions = await self._run(api.parse_generate(api.parse_object(await request.read())))
        return _answer({"completions": [one.to_json() for one in completions]})

    async def _completions(self, request: web.Request) -> web.Response:
        wanted = api.parse_completions(api.parse_object(await request.read()))
        return _answer(api.completions_answer(self.model, wanted, await self._run(wanted)))

    async def _score(self, request: web.Request) -> web.Response:
        """{"token_ids"}: log-probs at temperature 1 of all but the first, and the version they are under."""
        token_ids = api.parse_score(api.parse_object(await request.read()))
        check_request(GenerateRequest("score", token_ids, SamplingParameters(1)), self._vocabulary, self._longest)

        def work() -> dict[str, Any]:
            # In the engine's thread: weights that are there when it is asked need not be when it is its turn.
            if (reason := self.loop.why_unavailable()) is not None:
                raise Unavailable(reason)
            log_probs = score(self.engine.policy, token_ids)
            return {"log_probs": log_probs, "epoch": self.engine.epoch, "version": self.engine.version}

        return _answer(await asyncio.wait_for(asyncio.wrap_future(self.loop.call(work)), CALL_SECONDS))

    async def _pause(self, request: web.Request) -> web.Response:
        """{"mode": "keep"} (default) keeps what is running for after the pause, "abort" drops it."""
        body = await request.read()
        mode = (api.parse_object(body) if body else {}).get("mode", "keep")
        if mode not in ("keep", "abort"):
            raise InvalidRequest(f"mode must be keep or abort, got {mode!r}")
        await asyncio.wrap_future(self.loop.call(self.engine.pause))
        if mode == "abort":
            await asyncio.wrap_future(self.loop.abort_all())
        return _answer(self._state())

    async def _resume(self, _request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.loop.call(self.engine.resume))
        return _answer(self._state())

    # Memory

    async def _sleep(self, request: web.Request) -> web.Response:
        """{"level", "finish_s"}: give memory back (see Engine.sleep) once nothing runs; within that time, or not."""
        level, finish_s = await _parse(request, parse_sleep)
        await asyncio.to_thread(self._fall_asleep, level, finish_s)
        return _answer(self._state())

    def _fall_asleep(self, level: int, finish_s: float) -> None:
        with self._applying:
            if level == 2:
                # It reads the weights from a thread of its own.
                self.verifier.settle()
            self.loop.sleep(level, finish_s)

    async def _wake(self, request: web.Request) -> web.Response:
        """{"tags"}: take these parts of the memory again, all by default."""
        tags = await _parse(request, parse_wake)
        await asyncio.wrap_future(self.loop.call(lambda: self.engine.wake(tags)))
        return _answer(self._state())

    # Weights

    async def _connect(self, request: web.Request) -> web.Response:
        """{"coordinator": "host:port", "actor", "epoch"}: fetch weights from there from now on."""
        body = api.parse_object(await request.read())
        values = [body.get(name) for name in ("coordinator", "actor", "epoch")]
        if not all(isinstance(value, str) and value for value in values):
            raise InvalidRequest("coordinator (host:port), actor and epoch must be non-empty strings")
        coordinator, actor, epoch = (str(value) for value in values)
        token = body.get("token", self._token)
        if not isinstance(token, str):
            raise InvalidRequest("this server runs without a token: send the job's as token")
        try:
            wire.parse_address(coordinator)
        except wire.ProtocolError as error:
            raise InvalidRequest(str(error)) from None
        async with self._connecting:
            old = self._receiver
            if old is not None:
                await asyncio.to_thread(old.close)
            # Counted in the engine's thread: what an older receiver orders from here on is refused there.
            number = await asyncio.wait_for(asyncio.wrap_future(self.loop.call(self._count_receiver)), CALL_SECONDS)
            served = None if old is None else old.served
            holds = None if self.engine.poisoned else (self.engine.epoch, self.engine.version)
            if served is not None and (served.epoch, served.version) != holds:
                # An apply outlasted the old receiver: it does not know what the engine holds now.
                served = None
            apply = functools.partial(self._apply, number)
            where = str(self.engine.device)
            self._receiver = Receiver(
                coordinator, actor, epoch, token, apply, host=self._data_host, served=served, where=where
            )
            self._receiver.start()
        return _answer(self._state())

    def _count_receiver(self) -> int:
        self._receivers += 1
        return self._receivers

    def _apply(self, receiver: int, staged: StagedVersion) -> dict[str, float]:
        """Called by receiver number `receiver` in a thread of its own."""

        def check() -> None:
            if receiver != self._receivers:
                raise WeightsRefused("another receiver has taken this one's place")

        # A receiver may still apply while another takes its place.
        with self._applying:
            self.verifier.settle()
            cost = self.loop.apply(staged.epoch, staged.version, staged.tensors, check)
            self.verifier.applied(staged)
        return cost._asdict() | self.engine.adapter_figures

    def _found_torn(self, epoch: str, version: int, reason: str, in_a_row: int) -> None:
        """Called by the verifier: nothing more is sampled with these weights, and everybody is told."""
        self.loop.poison(epoch, version, reason)
        receiver = self._receiver
        if receiver is not None and receiver.epoch == epoch:
            receiver.found_torn(version, reason)
        if in_a_row >= MOST_TORN:
            # Whoever supervises this process starts a fresh one.
            logger.error("%d versions in a row did not arrive whole: this process ends", in_a_row)
            self.loop.fail(RuntimeError(reason))

    # What it is doing

    def _state(self) -> dict[str, Any]:
        reason = self.loop.why_unavailable()
        has_version = bool(self.engine.statistics.versions_applied)
        status = "ok"
        if reason is not None:
            status = "poisoned" if self.engine.poisoned else "paused" if self.engine.paused else "not_ready"
        if self.engine.asleep:
            status = "asleep"
        return {
            "status": status,
            "reason": reason,
            "asleep": [tag for tag in TAGS if tag in self.engine.asleep],
            "epoch": self.engine.epoch or None,
            "version": self.engine.version if has_version else None,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
            "draining": self.engine.held_back,
            "engine_age_s": round(self.loop.turn_age, 3),
            "pid": os.getpid(),
            "verifies": self.verifier.verifies,
            "verified": self.verifier.status.to_json(),
            "weights": None if self._receiver is None else self._receiver.status().to_json(),
        }

    async def _health(self, _request: web.Request) -> web.Response:
        return _answer(self._state())

    async def _weights(self, _request: web.Request) -> web.Response:
        return _answer({"weights": self._state()["weights"]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        statistics = self.engine.statistics
        gauges = {
            "running_sequences": self.engine.running,
            "waiting_sequences": self.engine.waiting,
            "policy_version": self.engine.version,
            "verified_version": -1 if (verified := self.verifier.status).version is None else verified.version,
            "uptime_seconds": round(time.monotonic() - self._begun, 3),
        }
        lines = [f"# TYPE engine_{name} gauge\nengine_{name} {value}" for name, value in gauges.items()]
        counters = {f"{name}_total": value for name, value in vars(statistics).items()}
        counters |= {f"versions_{name}_total": getattr(verified, name) for name in ("whole", "torn", "unfinished")}
        counters["verify_seconds_total"] = verified.seconds
        lines += [f"# TYPE engine_{name} counter\nengine_{name} {value}" for name, value in counters.items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")
