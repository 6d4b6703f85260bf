"""A running agent: the engine's process, its control, its weight loader, and an HTTP server with an actor's routes
except generation, which the engine's own server does."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.errors import UserError
from torchtitan.inference.actor_client import UNUSABLE, Offers, base_url
from torchtitan.inference.engines.sidecar.applier import Applier, FileLoader
from torchtitan.inference.engines.sidecar.foreign_engine import (
    WILDCARDS,
    EngineControl,
    EngineError,
    EngineFacts,
    EngineNotListening,
    EngineOptions,
    EngineRefused,
    EngineUnfit,
    ForeignEngine,
    WeightLoader,
)
from torchtitan.inference.serving.actor_server import SHUTDOWN_SECONDS, ActorServer
from torchtitan.inference.serving.joining import Guest, offers, shape_facts
from torchtitan.inference.serving.weight_verification import BaseWeights
from torchtitan.inference.types import TAGS
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.json_lines import ActivityLog
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.actor_state import ActorState

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
PROBE_S = 5.0
# A server that is shutting down closes its port first and soon ends. One whose engine has died may wait for ever for
# requests that will never finish (vLLM 0.32: "Waiting for background tasks to complete").
ENDING_S = 10.0
LOOK_S = 1.0
POLL_S = 0.1
# What may be gone when an engine is started again: a process that ends just now has the memory, or the port.
TRANSIENT = re.compile(r"out of memory|free memory|already in use|timed out|connection (refused|reset)", re.I)
# Facts of an actor that are its engine's, and not the agent's. They are on the agent's command line, too.
OF_THE_ENGINE = ("version", "dtype", "log-probs", "max-length", "max-sequences")
Result = TypeVar("Result")


class UnusableEngine(UserError):
    """The engine cannot be an actor with these options, and would fail the same way again. The exit code says so to
    whoever has started the agent."""

    exit_code = UNUSABLE


class EngineWatch:
    """Checks every second whether the engine lives, answers, and still holds the weights that it was given.

    lost(reason) is called from the thread if the engine holds other weights: its owner has restarted it, or changed
    them.
    """

    def __init__(self, control: EngineControl, applier: Applier, lost: Callable[[str], None]):
        self._control, self._applier, self._lost = control, applier, lost
        self._ended = threading.Event()
        self._silent_since: float | None = None
        """When the first probe began that had no answer, since the last one that had"""
        self._closed_since: float | None = None
        """Likewise for probes that found the engine's port closed"""
        self._answered_at = time.monotonic()
        self.trouble: str | None = None
        """Why the last probe failed"""
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Start the checks."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop the checks; a probe that hangs is abandoned after `timeout_s`."""
        self._ended.set()
        if self._thread.is_alive():  # it may never have started
            self._thread.join(timeout_s)

    @property
    def age_s(self) -> float:
        """Seconds for which the engine has answered no probe; 0 while it answers, or applies a version (which has
        deadlines of its own)."""
        since = self._silent_since
        return 0.0 if since is None or self._is_excused() else time.monotonic() - since

    @property
    def closed_s(self) -> float:
        """Seconds for which the engine's port has been closed; 0 while it is open."""
        since = self._closed_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def answered_age_s(self) -> float:
        """Seconds since the last answered probe began."""
        return time.monotonic() - self._answered_at

    def _is_excused(self) -> bool:
        """Whether an apply explains the engine's silence. It does not if the engine has not even obeyed the order to
        pause: otherwise every attempt to give a frozen engine a version would excuse it."""
        return self._applier.busy and self._applier.lost_pause is None

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            asked_at = time.monotonic()
            try:
                self._control.check_health(PROBE_S)
                self._silent_since = self._closed_since = self.trouble = None
                self._answered_at = asked_at
                self._applier.undo_lost_pause()
                if (reason := self._applier.find_lost_weights()) is not None:
                    logger.error("%s", reason)
                    self._lost(reason)
            except EngineError as error:
                closed = isinstance(error, EngineNotListening)
                self._closed_since = (self._closed_since or asked_at) if closed else None
                if self._is_excused():
                    self._silent_since = None
                    continue
                if self._silent_since is None:
                    logger.warning("the engine does not answer: %s", error)
                    self._silent_since = asked_at
                self.trouble = str(error)


class AgentServer(ActorServer):
    """The HTTP server of one engine's agent.

    place: what clients are told about the engine: url, capabilities, and token_env, the variable that has its token
    (None if the token is the agent's own).
    timeout_s: for all workers of the engine to apply what they staged.
    """

    statuses = {**ActorServer.statuses, EngineError: 502}

    def __init__(
        self,
        place: dict[str, Any],
        control: EngineControl,
        loader: WeightLoader,
        applier: Applier,
        token: str,
        relay_host: str,
        timeout_s: float,
    ):
        super().__init__(applier, token, relay_host)
        self._place, self._loader, self._applier, self._timeout_s = place, loader, applier, timeout_s
        self.watch = EngineWatch(control, applier, self._weights_lost)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises UserError if the address cannot be bound."""
        bound = await super().start(host, port)
        self.watch.start()
        return bound

    async def close(self) -> None:
        await asyncio.to_thread(self.watch.close, SHUTDOWN_SECONDS)
        await super().close()

    # Called by the routes

    def weights_options(self) -> dict[str, Any]:
        return {"workers": self._loader.workers, "workers_timeout_s": self._timeout_s}

    def connected(self, weights: SyncActor) -> None:
        try:
            self._loader.connected(weights)
        except EngineError as error:
            self._lost = f"the engine could not be connected to the weight sync: {error}"
            raise

    def _weights_lost(self, reason: str) -> None:
        # The run that connected the engine reads this and connects again; the engine then gets a full version.
        self._lost = reason

    def engine_state(self) -> tuple[ActorState, str | None]:
        applier = self._applier
        if applier.asleep:
            return ActorState.ASLEEP, "the engine is asleep"
        if applier.poisoned is not None:
            return ActorState.POISONED, applier.poisoned
        weights = None if self._weights is None else self._weights.status()["state"]
        if self._loader.workers and weights is ActorState.POISONED:
            return ActorState.POISONED, "its workers do not all hold the same version"
        if applier.holds is None:
            return ActorState.JOINING, self._lost or "no weights version has been applied yet"
        if applier.paused:
            return ActorState.PAUSED, "the engine is paused"
        if applier.lost_pause is not None:
            return ActorState.PAUSED, f"the engine may still be paused: {applier.lost_pause}"
        if applier.draining:
            # vLLM up to 0.32 lets new requests wait, and later versions answer 503. Other actors serve them sooner
            # either way.
            return ActorState.PAUSED, "running requests finish before new weights come"
        return ActorState.READY, None

    def details(self) -> dict[str, Any]:
        epoch, version = self._applier.holds or (None, None)
        return {
            "asleep": [tag for tag in TAGS if tag in self._applier.asleep],
            "epoch": epoch,
            "version": version,
            "engine_age_s": round(self.watch.age_s, 3),
            "answered_age_s": round(self.watch.answered_age_s, 3),
            "engine_trouble": self.watch.trouble,
            "engine": self._place,
            "verified": None if self._weights is None else self._weights.verified(),
        }


class RunningAgent:
    """The engine and its agent; belongs to one asyncio loop. `token` is the agent's, and that of an engine that it
    starts."""

    def __init__(self, arguments: argparse.Namespace, engine: ForeignEngine, options: EngineOptions, token: str):
        self._arguments, self._engine, self._options, self._token = arguments, engine, options, token
        self.engine_url = arguments.url or ""
        self._process: ChildProcess | None = None
        self._loader: WeightLoader | None = None
        self._server: AgentServer | None = None
        self._facts: EngineFacts | None = None

    async def start(self, deadline: float) -> int:
        """Return the agent's port once engine and agent serve. Raises UserError. `deadline` is on time.monotonic()."""
        arguments, options = self._arguments, self._options
        token, token_env = self._token, None
        if arguments.url:
            # An engine without a token gets none, because ours must not reach it.
            token_env = arguments.engine_token_env or ""
            token = os.environ[token_env] if token_env else ""
        else:
            command, extra = self._engine.command(options)
            print(f"engine: {shlex.join(command)}", flush=True)
            variables = {**extra, options.token_env: self._token}
            environment = child_environment(options.threads, secrets=True, **variables)
            self._process = ChildProcess("the engine", arguments.log_file)
            await self._process.launch(command, environment)
            port = await self._unless_it_ends(self._process.read_port(options.port_file, deadline))
            self.engine_url = base_url(WILDCARDS.get(options.host, options.host), port)
        control = self._engine.control(self.engine_url, token, options)
        # On a busy machine an engine that has just started answers its first questions late.
        control.timeout_s = max(options.update_timeout_s, deadline - time.monotonic())
        facts = await self._unless_it_ends(until_described(control, deadline))
        control.timeout_s = options.update_timeout_s
        # A running engine knows its number of workers. In a weight group for fewer, the others would end SGLang's
        # server.
        options = replace(options, tensor_parallel_size=facts.world_size)
        if arguments.drain_timeout_s and not facts.can_wait:
            raise UserError(
                f"{self._engine.name} cannot let running requests finish while new ones wait: use "
                'inference.update_mode = "in_flight"'
            )
        if options.route == "agent":
            loader: WeightLoader = FileLoader(options, control.read_files)
        else:
            loader = self._engine.special_loader(control, options)
        self._loader = loader
        # Workers inside the engine merge adapters themselves.
        base = None if loader.workers else BaseWeights(options.model)
        activity = ActivityLog(arguments.activity_file)
        applier = Applier(control, loader, options.update_timeout_s, arguments.drain_timeout_s, activity, base)
        capabilities = replace(facts.capabilities, route=options.route).to_json()
        place = {"url": self.engine_url, "capabilities": capabilities, "token_env": token_env}
        self._facts = facts
        self._server = AgentServer(place, control, loader, applier, self._token, options.host, options.update_timeout_s)
        self._server.describe = self._offers
        return await self._server.start(options.host, arguments.port)

    def _offers(self, with_weights: bool) -> Offers:
        """What the command line says, and where the engine says otherwise, what the engine says."""
        assert self._facts is not None
        claimed = offers(self._arguments, self._engine.name, with_weights)
        reported, model = self._facts.reported, self._facts.model
        if self._process is not None:
            # We have told it what the command line says.
            return Offers({**claimed, **reported})
        silent = [name for name in OF_THE_ENGINE if name not in reported]
        if model is not None and (Path(model) / "config.json").is_file():
            reported = shape_facts(model) | reported
        else:
            silent.append("model")
        return Offers({**claimed, **reported}, tuple(silent))

    async def stay_in_run(self, stopped: asyncio.Event, port: int) -> None:
        """Join a run at this port; see Guest.stay."""
        assert self._server is not None
        await Guest(self._arguments, self._offers(True).offers, port, self._token).stay(stopped, self._server)

    async def engine_ended(self) -> str:
        """Return how the engine that we started has ended, or that it fails to end. Never returns for an engine that
        ran already."""
        if self._process is None:
            await asyncio.Event().wait()
            raise AssertionError
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                await asyncio.wait({ended}, timeout=LOOK_S)
                if ended.done():
                    if self._server is None:
                        return self._process.describe_failure()
                    # An engine that has served has written errors that it outlived.
                    return f"{self._process.describe_end()}; {self._process.log_tail()}"
                if self._server is not None and self._server.watch.closed_s > ENDING_S:
                    closed = f"the engine has closed its port but did not end within {ENDING_S:g} s: killing it"
                    return f"{closed}; {self._process.log_tail()}"
        finally:
            ended.cancel()

    async def close(self, grace_s: float) -> None:
        """Stop everything; an engine that we started gets `grace_s` before it is killed."""
        if self._server is not None:
            await self._server.close()
        if self._loader is not None:
            await asyncio.to_thread(self._loader.close)
        if self._process is not None:
            await self._process.stop(grace_s)

    async def _unless_it_ends(self, waiting: Coroutine[Any, Any, Result]) -> Result:
        """Return what `waiting` returns. Raises UserError if the engine ends first."""
        work = asyncio.ensure_future(waiting)
        ended = asyncio.ensure_future(self.engine_ended())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or (self._process is not None and not self._process.alive):
                raise self._failure(await ended)
            return await work
        finally:
            work.cancel()
            ended.cancel()

    def _failure(self, reason: str) -> UserError:
        """The error for an engine that has ended before it served. Another start is worth trying where a signal ended
        it, where it has not said why, or where it says what may be gone by then."""
        assert self._process is not None
        cause = self._process.find_cause()
        is_final = cause and not TRANSIENT.search(cause) and (self._process.end_code() or 0) > 0
        return UnusableEngine(reason) if is_final else UserError(reason)


async def until_described(control: EngineControl, deadline: float) -> EngineFacts:
    """Return what the engine says of itself, once it answers.

    Raises UserError if it has not answered by `deadline` (time.monotonic()), and at once if it answers and cannot be an
    actor: no time mends a version or an option.
    """
    while True:
        try:
            facts = await asyncio.to_thread(control.describe)
            await asyncio.to_thread(control.check_health, PROBE_S)
            return facts
        except (EngineUnfit, EngineRefused) as error:
            raise UnusableEngine(f"the engine at {control.client.url}: {error}") from error
        except EngineError as error:
            if time.monotonic() > deadline:
                raise UserError(f"the engine does not answer: {error}") from error
        await asyncio.sleep(POLL_S)
