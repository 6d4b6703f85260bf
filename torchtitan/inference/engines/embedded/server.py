"""The engine's HTTP server: what every actor has (actor_server.py), and token ids in and out. See `routes`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from torchtitan.inference.engines.embedded.engine import Engine, NonFiniteLogits
from torchtitan.inference.engines.embedded.forwards import likeliest, score
from torchtitan.inference.engines.embedded.loop import CALL_SECONDS, EngineLoop, Unavailable
from torchtitan.inference.engines.embedded.sequences import (
    GenerateBody,
    InvalidRequest,
    ScoreBody,
    TooLong,
    check_request,
)
from torchtitan.inference.engines.embedded.weights import Verifier
from torchtitan.inference.serving.actor_server import SHUTDOWN_SECONDS, ActorServer, answer, parse_body
from torchtitan.inference.serving.weight_verification import MAX_MISMATCHED
from torchtitan.inference.types import TAGS, Completion, GenerateRequest, SamplingParameters, Tag
from torchtitan.utils.json_lines import ActivityLog
from torchtitan.utils.prometheus import Figure
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)


class EngineServer(ActorServer):
    """One engine behind HTTP.

    Args:
        engine: handed over.
        token: what clients must send as `Authorization: Bearer …`.
        threads: of the engine; 0 leaves torch's choice.
        require_version: answer 503 until a first version was applied.
        relay_host: see ActorServer.
        drain_timeout_s: so long may what runs finish before weights change; 0: they change in flight.
        activity_file: gets notes of when the engine worked.
        verify_every: versions from one check of the weights in use to the next; 0 checks none.
    """

    body_limit = 64 * 1024 * 1024
    statuses = {**ActorServer.statuses, TooLong: 413, InvalidRequest: 400, Unavailable: 503, NonFiniteLogits: 500}

    def __init__(
        self,
        engine: Engine,
        token: str,
        threads: int = 0,
        require_version: bool = False,
        relay_host: str = "127.0.0.1",
        drain_timeout_s: float = 0.0,
        activity_file: Path | None = None,
        verify_every: int = 1,
    ):
        super().__init__(self, token, relay_host)
        self.engine = engine
        self.stopped = asyncio.Event()
        """Set when the process is to end"""
        # The supervisor of this process starts a fresh one.
        failed = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self.stopped.set)
        activity = ActivityLog(activity_file)
        self.loop = EngineLoop(engine, threads, require_version, failed, drain_timeout_s, activity)
        self.verifier = Verifier(verify_every, engine.weights.sets.computed_with, self._found_torn)
        self._connections = 0
        self._applying = threading.Lock()
        self._numbers = itertools.count()
        self._started = time.monotonic()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises UserError where the address cannot be bound."""
        bound = await super().start(host, port)
        self.loop.start()
        return bound

    async def close(self) -> None:
        """Abort everything and stop listening."""
        await asyncio.to_thread(self.loop.close, SHUTDOWN_SECONDS)
        await super().close()

    def routes(self) -> list[web.RouteDef]:
        """All routes. Errors are {"error": reason} with status 400, 401, 404, 413, 500 or 503 (try again later)."""
        return [*super().routes(), web.post("/v1/generate", self._generate), web.post("/v1/score", self._score)]

    # Generation

    async def _run(self, request: GenerateRequest) -> list[Completion]:
        self.loop.check_available()
        # A retry of a request may come before its lost first try was noticed: ids are our own.
        unique_request = replace(request, request_id=f"{next(self._numbers)}:{request.request_id}")
        return await self.loop.generate(unique_request)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await parse_body(request, GenerateBody)
        completions = await self._run(GenerateRequest.from_json(body.model_dump()))
        return answer({"completions": [completion.to_json() for completion in completions]})

    async def _score(self, request: web.Request) -> web.Response:
        """{"token_ids", "top"}: log-probs at temperature 1 of all but the first, ids and log-probs of the `top`
        likeliest in their places, and the version they are under."""
        body = await parse_body(request, ScoreBody)
        token_ids = body.token_ids
        wanted = GenerateRequest("score", token_ids, SamplingParameters(1))
        check_request(wanted, self.engine.args.vocab_size, self.engine.max_length + 1)

        def work() -> dict[str, Any]:
            # In the engine's thread: weights that are there when it is asked need not be when it is its turn.
            self.loop.check_available()
            with self.engine.over_whole_sequences():
                log_probs = score(self.engine.policy, token_ids)
                top = likeliest(self.engine.policy, token_ids, body.top) if body.top else None
            return {"log_probs": log_probs, "top": top, "epoch": self.engine.epoch, "version": self.engine.version}

        return answer(await asyncio.wait_for(asyncio.wrap_future(self.loop.call(work)), CALL_SECONDS))

    # Pauses and memory

    def pause(self, abort: bool) -> None:
        self.loop.do(self.engine.pause)
        if abort:
            self.loop.abort_all()

    def resume(self) -> None:
        self.loop.do(self.engine.resume)

    def sleep(self, level: int, finish_s: float) -> None:
        with self._applying:
            if level == 2:
                # It reads the weights from a thread of its own.
                self.verifier.finish()
            slept = self.loop.sleep(level, finish_s)
        if slept and level == 2 and self._weights is not None:
            self._weights.release_memory()

    def wake(self, tags: list[Tag]) -> None:
        self.loop.do(lambda: self.engine.wake(tags))

    # Weights

    def new_connection(self) -> int:
        def count() -> int:
            # What an older connection's threads still write must not meet the new one's bytes.
            self.engine.weights.sets.forget_idle()
            self._connections += 1
            return self._connections

        # Counted in the engine's thread: what an older connection orders from here on is refused there.
        return self.loop.do(count)

    @property
    def holds(self) -> tuple[str, int] | None:
        return None if self.engine.poisoned else (self.engine.epoch, self.engine.version)

    def weights_options(self) -> dict[str, Any]:
        in_host_memory = self.engine.device.type == "cpu"
        return {"where": str(self.engine.device), "sets": self.engine.weights.sets if in_host_memory else None}

    def apply(self, connection: int, staged: StagedVersion) -> dict[str, float]:
        def check() -> None:
            if connection != self._connections:
                raise WeightsRefused("another connection has taken this one's place")

        # An old connection may still apply while another takes its place.
        with self._applying:
            self.verifier.finish()
            cost = self.loop.apply(staged.epoch, staged.version, staged.tensors, check)
            self.verifier.applied(staged)
        return cost._asdict() | self.engine.weights.figures

    def _found_torn(self, epoch: str, version: int, reason: str, in_a_row: int) -> None:
        """Called by the verifier: nothing more is sampled with these weights, and everybody is told."""
        self.loop.poison(epoch, version, reason)
        weights = self._weights
        if weights is not None and weights.epoch == epoch:
            weights.poison_version(version, reason)
        if in_a_row >= MAX_MISMATCHED:
            # The supervisor of this process starts a fresh one.
            logger.error("%d versions in a row did not arrive whole: this process ends", in_a_row)
            self.loop.fail(RuntimeError(reason))

    # What it is doing

    def engine_state(self) -> tuple[ActorState, str | None]:
        engine, reason = self.engine, self.loop.why_unavailable()
        if reason is None:
            return ActorState.READY, None
        if engine.asleep:
            return ActorState.ASLEEP, reason
        if engine.poisoned:
            return ActorState.POISONED, reason
        # It holds a version and is paused, or it ends.
        is_paused = engine.paused or engine.statistics.versions_applied
        return ActorState.PAUSED if is_paused else ActorState.JOINING, reason

    def details(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "asleep": [tag for tag in TAGS if tag in engine.asleep],
            "epoch": engine.epoch or None,
            "version": engine.version if engine.statistics.versions_applied else None,
            "running": engine.running,
            "waiting": engine.waiting,
            "draining": engine.admission_paused,
            "engine_age_s": round(self.loop.turn_age, 3),
            "verifies": self.verifier.verifies,
            "verified": self.verifier.status.to_json(),
        }

    def figures(self) -> list[Figure]:
        """Return what /metrics reports: the numbers of /health, and the engine's own."""
        verified = self.verifier.status
        values: dict[str, float] = {
            "running_sequences": self.engine.running,
            "waiting_sequences": self.engine.waiting,
            "policy_version": self.engine.version,
            "verified_version": -1 if verified.version is None else verified.version,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            **{f"{name}_total": value for name, value in vars(self.engine.statistics).items()},
            **{f"versions_{name}_total": getattr(verified, name) for name in ("matched", "mismatched", "unfinished")},
            "verify_seconds_total": verified.seconds,
        }
        return [*super().figures(), *(Figure(f"engine_{name}", value) for name, value in values.items())]
