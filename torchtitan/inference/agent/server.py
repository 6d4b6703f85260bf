"""The agent's HTTP server: the routes of an actor, without generation, which the engine's own server does."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.inference.actor_server import SHUTDOWN_SECONDS, ActorServer
from torchtitan.inference.agent.applier import Applier, WeightLoader
from torchtitan.inference.agent.control import EngineControl, EngineError, EngineNotListening
from torchtitan.inference.client import Capabilities
from torchtitan.inference.types import TAGS, Tag
from torchtitan.weight_sync.actor import Actor
from torchtitan.weight_sync.staging import StagedVersion

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
PROBE_S = 5.0


class Watch:
    """Whether the engine lives, answers, and still holds what was put into it: asked every second.

    lost(reason) is called, from the thread, when the engine holds other weights than it was given: its owner has
    started it anew, or changed them.
    """

    def __init__(
        self,
        control: EngineControl,
        applier: Applier,
        lost: Callable[[str], None],
        interval_s: float = INTERVAL_S,
        probe_s: float = PROBE_S,
    ):
        self._control, self._applier, self._lost = control, applier, lost
        self._interval_s, self._probe_s = interval_s, probe_s
        self._ended = threading.Event()
        self._silent_since: float | None = None
        """When the first of the probes began that had no answer since the last one that had"""
        self._closed_since: float | None = None
        """Likewise of those that found its port closed"""
        self._answered_at = time.monotonic()
        self.trouble: str | None = None
        """Why the last probe failed"""
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop asking; a probe that hangs is left behind after `timeout_s`."""
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
        """Seconds since the last probe that had an answer began."""
        return time.monotonic() - self._answered_at

    def _is_excused(self) -> bool:
        """Applying takes the engine's time. Not where it has not even obeyed the order to stand still: else one that is
        frozen would be excused by each attempt to give it a version."""
        return self._applier.busy and self._applier.lost_pause is None

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            begun = time.monotonic()
            try:
                self._control.check_health(self._probe_s)
                self._silent_since = self._closed_since = self.trouble = None
                self._answered_at = begun
                self._applier.undo_lost_pause()
                if (reason := self._applier.find_lost_weights()) is not None:
                    logger.error("%s", reason)
                    self._lost(reason)
            except EngineError as error:
                closed = isinstance(error, EngineNotListening)
                self._closed_since = (self._closed_since or begun) if closed else None
                if self._is_excused():
                    self._silent_since = None
                    continue
                if self._silent_since is None:
                    logger.warning("the engine does not answer: %s", error)
                    self._silent_since = begun
                self.trouble = str(error)


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


class AgentServer(ActorServer):
    """One engine's agent behind HTTP. timeout_s: for all workers of the engine to apply what they staged."""

    statuses = {**ActorServer.statuses, EngineError: 502}

    def __init__(
        self,
        place: EnginePlace,
        control: EngineControl,
        loader: WeightLoader,
        applier: Applier,
        token: str,
        relay_host: str,
        timeout_s: float,
    ):
        super().__init__(token, relay_host)
        self._place, self._loader, self._applier, self._timeout_s = place, loader, applier, timeout_s
        self._watch = Watch(control, applier, self._weights_lost)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises UserError where the address cannot be bound."""
        bound = await super().start(host, port)
        self._watch.start()
        return bound

    @property
    def engine_closed_s(self) -> float:
        """Seconds for which the engine's port has been closed; 0 while it is open."""
        return self._watch.closed_s

    async def close(self) -> None:
        await asyncio.to_thread(self._watch.close, SHUTDOWN_SECONDS)
        await super().close()

    # What the routes do

    def pause(self, abort: bool) -> None:
        self._applier.pause(abort)

    def resume(self) -> None:
        self._applier.resume()

    def sleep(self, level: int, finish_s: float) -> None:
        self._applier.sleep(level, finish_s)

    def wake(self, tags: list[Tag]) -> None:
        self._applier.wake(tags)

    def new_connection(self) -> int:
        return self._applier.new_connection()

    @property
    def holds(self) -> tuple[str, int] | None:
        return self._applier.holds

    def apply(self, connection: int, staged: StagedVersion) -> dict[str, float]:
        return self._applier.apply(connection, staged)

    def weights_options(self) -> dict[str, Any]:
        return {"workers": self._loader.workers, "workers_timeout_s": self._timeout_s}

    def connected(self, weights: Actor) -> None:
        try:
            self._loader.connected(weights)
        except EngineError as error:
            self._lost = f"the engine could not be connected: {error}"
            raise

    def _weights_lost(self, reason: str) -> None:
        # The run that has connected it reads this and connects anew: then the engine gets a version in full.
        self._lost = reason

    def status(self) -> tuple[str, str | None]:
        applier = self._applier
        if applier.asleep:
            return "asleep", "the engine is asleep"
        if applier.poisoned is not None:
            return "poisoned", applier.poisoned
        if self._loader.workers and self._weights is not None and self._weights.status().poisoned:
            return "poisoned", "its workers do not hold one version"
        if applier.holds is None:
            return "not_ready", self._lost or "no weights version has been applied yet"
        if applier.paused:
            return "paused", "the engine is paused"
        if applier.lost_pause is not None:
            return "paused", f"the engine may stand still: {applier.lost_pause}"
        if applier.draining:
            # vLLM has new requests wait up to 0.32 and answers 503 since: either way others have them sooner.
            return "paused", "running requests finish before new weights come"
        return "ok", None

    def details(self) -> dict[str, Any]:
        epoch, version = self._applier.holds or (None, None)
        return {
            "asleep": [tag for tag in TAGS if tag in self._applier.asleep],
            "epoch": epoch,
            "version": version,
            "engine_age_s": round(self._watch.age_s, 3),
            "answered_age_s": round(self._watch.answered_age_s, 3),
            "engine_trouble": self._watch.trouble,
            "engine": self._place.to_json(),
        }
