"""One actor as the pool sees it: its state, its requests, and the loop that starts, probes, evicts and restarts it, and
sees to it that it sleeps or wakes."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol, TypeVar

from torchtitan.config.job_config import Inference
from torchtitan.inference.client import (
    ActorClient,
    ActorError,
    ActorHealth,
    ActorNotReady,
    Capabilities,
    ScoredTokens,
)
from torchtitan.inference.rest import Rest
from torchtitan.inference.types import TAGS, Completion, GenerateRequest, Tag
from torchtitan.utils.events import EventLog

# Between two probes of an actor that somebody waits for, and of one that is about to join.
FAST_PROBE_S = 0.02
JOINING_PROBE_S = 0.1
BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# The probe has 64 tokens; a later version's answer is worth more than one that takes longer.
LONGEST_SCORE_S = 60.0
# An actor that has served for this long has its restarts forgiven.
STABLE_S = 600.0
# An actor that does not serve for longer than this is mentioned in the events.
BRIEFLY_S = 2.0
# After so many fruitless connections to the weight coordinator in a row a process is started anew.
JOIN_ATTEMPTS = 3
# What the coordinator has deadlines for itself.
ON_THE_WAY = ("RECEIVING", "STAGED", "APPLYING")
# A process whose connections broke is given this long to be recognised as dead.
REAP_S = 0.3
# A run that ends wakes servers that it did not start.
WAKE_AT_END_S = 10.0

Result = TypeVar("Result")


class ActorState(enum.Enum):
    STARTING = "starting"
    JOINING = "joining"
    """alive, but without weights of this epoch"""
    READY = "ready"
    SUSPECT = "suspect"
    """a request failed; the next sign of life from its engine decides"""
    ASLEEP = "asleep"
    """as it was asked to be; it serves nothing, and nobody expects it to"""
    EVICTED = "evicted"
    GAVE_UP = "gave up"


# Nobody waits for these to sleep or wake.
NOT_THERE = (ActorState.STARTING, ActorState.EVICTED, ActorState.GAVE_UP)


class Process(Protocol):
    """What the actor needs of actor_process.ActorProcess."""

    @property
    def alive(self) -> bool: ...

    async def start(self) -> str: ...

    async def wait(self) -> None: ...

    def describe_end(self) -> str: ...

    async def stop(self, grace_s: float = ...) -> None: ...


class Actor:
    """Supervises one actor. `changed()` is called after everything that may let a waiting request go on."""

    def __init__(
        self,
        name: str,
        config: Inference,
        epoch: str,
        events: EventLog,
        make_client: Callable[[str], ActorClient],
        changed: Callable[[], None],
        process: Process | None = None,
        url: str = "",
        join_timeout_s: float = 60.0,
    ):
        self.name = name
        self.state = ActorState.STARTING
        self.version: int | None = None
        """Newest version that the actor is known to serve"""
        self.load = 0
        """Sequences that are being generated for us"""
        self.restarts = 0
        self.evictions = 0
        self.starved = False
        """Somebody waits for a newer version than this actor is known to serve: probe it often"""
        self.last_reason = ""
        self.coordinator: str | None = None
        self._connected = False
        self._config = config
        self._epoch = epoch
        self._events = events
        self._make_client = make_client
        self._changed = changed
        self._process = process
        self._client = make_client(url) if process is None else None
        self._started_once = False
        self.incarnation = 0
        """Counts the processes that had this name"""
        self._distrusted = -1
        """This version and older ones, as this process holds them, are not what the trainer sent"""
        self._join_timeout_s = join_timeout_s
        self._joining_since = 0.0
        self._failed_joins = 0
        self._requests = self._failed_requests = 0
        self._announced = False
        self._evicted_at = self._ready_at = self._rejects_since = self._suspect_since = 0.0
        self._rest = Rest()
        self._told_sleepless = False
        self._may_sleep = False
        """It was told to sleep, and has not been seen awake since"""
        self._look_now = asyncio.Event()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connect(self, coordinator: str) -> None:
        """Fetch weights from this coordinator from now on."""
        self.coordinator, self._connected = coordinator, False
        self.look()

    def look(self) -> None:
        """Probe now."""
        self._look_now.set()

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Have it give its memory back; returns when it has, or `timeout_s` is over: then it goes on as before, and an
        event says so. One that is not there now is put to sleep when it comes."""
        if self.load:
            self._stay_awake(f"{self.load} sequences are not finished")
            return
        self._rest.want(TAGS, level)
        self.look()
        if self.state in NOT_THERE:
            return
        if await self._rest.settled(timeout_s):
            return
        reason = f"it was not asleep within {timeout_s:g} s"
        if self._process is None:
            self._stay_awake(reason)
        else:
            # It may still fall asleep, or fail and end: then its memory stays free until it is to wake.
            self._events.write("actor_stays_awake", level=logging.WARNING, actor=self.name, reason=reason)

    async def wake(self, asleep: Collection[Tag], timeout_s: float) -> None:
        """Have it take its memory again, all but `asleep`; returns when it has, or `timeout_s` is over: then its
        supervision goes on trying, and an event says so."""
        self._rest.want(asleep)
        self.look()
        if self.state is ActorState.ASLEEP and not await self._rest.settled(timeout_s):
            reason = f"it was not awake within {timeout_s:g} s"
            self._events.write("actor_stays_asleep", level=logging.WARNING, actor=self.name, reason=reason)

    def _stay_awake(self, reason: str) -> None:
        """It does not sleep this time, and an event says why."""
        self._want_nothing()
        self.look()
        self._events.write("actor_stays_awake", level=logging.WARNING, actor=self.name, reason=reason)

    def _want_nothing(self) -> None:
        """It is to be awake, and nobody waits for that."""
        self._rest.want(())
        self._rest.settle(self._rest.wish)

    @property
    def gave_up(self) -> bool:
        return self.state is ActorState.GAVE_UP

    def lost_from_sync(self, reason: str) -> None:
        """The weight coordinator has evicted it: what it works on is redone elsewhere, and it gets no prompts before a
        probe has shown that it lives. Does nothing where it is out already."""
        # One that finishes requests before a version comes is joining, and has work.
        if self.state is not ActorState.READY and not (self.state is ActorState.JOINING and self._requests):
            return
        self.last_reason = reason
        self._set_state(ActorState.SUSPECT)
        self._interrupt(reason)
        self.look()

    async def capabilities(self) -> Capabilities:
        """Raises ActorError."""
        if self._client is None:
            raise ActorError("health", "the actor has not started")
        return await self._client.capabilities(self._config.health_timeout_s)

    async def score(self, token_ids: list[int]) -> ScoredTokens:
        """Raises ActorError, also where the actor is evicted meanwhile."""
        if self._client is None:
            raise ActorError("score", "the actor has not started")
        timeout_s = min(self._config.request_timeout_s, LONGEST_SCORE_S)
        return await self._unless_lost("score", self._client.score(token_ids, timeout_s))

    async def distrust(self, version: int, reason: str, forever: bool = False) -> None:
        """What it serves as `version` is something else: it is out until it serves a newer one, a process of ours is
        started anew; `forever` it is given up."""
        self._distrusted = max(self._distrusted, version)
        self._evict("parity", reason)
        if forever:
            self._give_up(reason)
        self.look()
        if self._process is not None:
            await self._process.stop()

    def _interrupt(self, reason: str) -> None:
        """End all requests to it with an ActorError."""
        lost, self._lost = self._lost, asyncio.get_running_loop().create_future()
        lost.set_result(reason)

    def serves(self, min_version: int) -> bool:
        return self.state is ActorState.READY and self.version is not None and self.version >= min_version

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Raises ActorError when the actor fails or is evicted meanwhile."""
        if self._client is None:
            raise ActorError("generate", "the actor has not started")
        self._requests += 1
        try:
            work = self._client.generate(request, self._config.request_timeout_s)
            completions = await self._unless_lost("generate", work)
            self._check(completions)
        except ActorNotReady:
            if self.state is ActorState.READY:
                self._set_state(ActorState.JOINING)
            self.look()
            raise
        except ActorError:
            if self.state in (ActorState.READY, ActorState.SUSPECT):
                self._failed_requests += 1
                self._set_state(ActorState.SUSPECT)
            self.look()
            raise
        finally:
            self._requests -= 1
        # The answer is newer than the last probe.
        served = max((span.version for completion in completions for span in completion.spans), default=0)
        if self.version is not None and served > self.version:
            self.version = served
            self._changed()
        return completions

    async def _unless_lost(self, doing: str, request: Coroutine[Any, Any, Result]) -> Result:
        """The request's answer; ActorError where the actor is evicted before it has come."""
        lost, work = self._lost, asyncio.ensure_future(request)
        try:
            either: set[asyncio.Future[Any]] = {work, lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ActorError(doing, f"evicted: {lost.result()}")
            return work.result()
        finally:
            work.cancel()

    async def supervise(self) -> None:
        """Run until the actor is given up or the task is cancelled."""
        try:
            while not self.gave_up:
                try:
                    if self._process is not None and not self._process.alive:
                        await self._replace(self._process)
                    if self._process is None or self._process.alive:
                        await self._probe()
                except ActorError as error:
                    await self._failed(error)
                if not self.gave_up:
                    await self._wait()
        except Exception as error:
            self._give_up(f"its supervision failed: {error!r}")
            raise

    async def close(self) -> None:
        if self._client is not None:
            if self._process is None and self._may_sleep:
                # Whoever has started it finds it awake.
                with contextlib.suppress(ActorError):
                    await self._client.wake(TAGS, WAKE_AT_END_S)
            await self._client.close()
        if self._process is not None:
            await self._process.stop()

    def _check(self, completions: list[Completion]) -> None:
        for completion in completions:
            if completion.finish_reason == "abort":
                raise ActorError("generate", "the engine aborted the request")
            for span in completion.spans:
                if span.epoch != self._epoch:
                    raise ActorError("generate", f"sampled under epoch {span.epoch!r}, this one is {self._epoch!r}")

    async def _replace(self, process: Process) -> None:
        """There is no process, or it has ended."""
        if self._started_once and self.state is not ActorState.EVICTED:
            self._evict("exit", process.describe_end())
        # Its successor would take memory that others were promised.
        if not (self._started_once and self._rest.deep):
            await self._start_process(process)

    async def _start_process(self, process: Process) -> None:
        if self._started_once:
            if self._ready_at and time.monotonic() - self._ready_at > STABLE_S:
                self.restarts = 0
            if self.restarts >= self._config.max_restarts:
                self._give_up(f"restarted {self.restarts} times (inference.max_restarts); last: {self.last_reason}")
                return
            await asyncio.sleep(min(BACKOFF_S * 2**self.restarts, LONGEST_BACKOFF_S))
            self.restarts += 1
            self._events.write("actor_restarting", actor=self.name, restart=self.restarts)
        self._started_once = True
        self.state = ActorState.STARTING
        if self._client is not None:
            await self._client.close()
        self._connected, self._announced, self.version, self._ready_at = False, False, None, 0.0
        self._joining_since = 0.0
        self.incarnation += 1
        self._distrusted = -1
        self._told_sleepless = False
        self._client = self._make_client(await process.start())
        self._set_state(ActorState.JOINING)

    async def _probe(self) -> None:
        assert self._client is not None
        begun = time.monotonic()
        health = await self._client.health(self._config.health_timeout_s)
        if health.engine_age_s > self._config.health_timeout_s:
            raise ActorError("engine", f"its engine has not moved for {health.engine_age_s:.1f} s")
        if self.state is ActorState.SUSPECT and health.answered_age_s > begun - self._suspect_since:
            # What is beside a dead engine does not know yet: more requests would be lost on it.
            return
        if self.state is ActorState.EVICTED:
            # It may have missed anything: a fresh connection and a full version.
            self._connected = False
            self._events.write("actor_rejoining", actor=self.name)
            self._set_state(ActorState.JOINING)
        wish = self._rest.wish
        health, matched = await self._match_memory(health)
        if self._connected and health.weights_failure is not None:
            self._connected = False
            self._events.write(
                "actor_weights_lost", level=logging.WARNING, actor=self.name, reason=health.weights_failure
            )
        # Asleep it could only refuse them.
        if self.coordinator is not None and not self._connected and not self._rest.deep:
            await self._client.connect_weights(self.coordinator, self.name, self._epoch, self._config.health_timeout_s)
            self._connected = True
            health = await self._client.health(self._config.health_timeout_s)
        self._failed_requests = 0
        self._may_sleep = bool(health.asleep)
        self._apply(health)
        if matched:
            self._rest.settle(wish)
        if self.state is ActorState.JOINING:
            await self._judge_joining(health)

    async def _match_memory(self, health: ActorHealth) -> tuple[ActorHealth, bool]:
        """Have it asleep or awake, as is wanted: also one that has just come, or that an earlier run left asleep.
        Returns its health after that, and whether there is nothing more to do. Raises ActorError."""
        assert self._client is not None
        wish = self._rest.wish
        sleeps = self._rest.deep and set(health.asleep) != wish.asleep
        wakes = [tag for tag in health.asleep if tag not in wish.asleep]
        if not sleeps and not wakes:
            return health, True
        if health.weights_state in ON_THE_WAY and "weights" not in health.asleep:
            # The order would only wait for that version, which has deadlines of its own.
            return health, False
        self._may_sleep = True
        if not sleeps:
            await self._client.wake(wakes, self._config.sleep_timeout_s)
        elif not (await self.capabilities()).sleep:
            self._stay_awake_for_good()
        elif not await self._client.sleep(wish.level, self._config.sleep_timeout_s):
            self._stay_awake("its engine still works on something")
        return await self._client.health(self._config.health_timeout_s), True

    def _stay_awake_for_good(self) -> None:
        told, self._told_sleepless = self._told_sleepless, True
        if told:
            self._want_nothing()
        else:
            self._stay_awake("it was not started so that it can sleep (see docs/engines.md)")

    async def _judge_joining(self, health: ActorHealth) -> None:
        """An actor that gets no weights for too long is connected anew; where that does not help, started anew."""
        now = time.monotonic()
        if not self._connected or health.status == "paused":
            self._joining_since = 0.0
            return
        self._joining_since = self._joining_since or now
        if now - self._joining_since <= self._join_timeout_s or health.weights_state in ON_THE_WAY:
            return
        self._joining_since, self._connected = 0.0, False
        self._failed_joins += 1
        why = health.reason or f"it serves version {health.version} of epoch {health.epoch}"
        reason = f"no weights within weight_sync.join_timeout_s = {self._join_timeout_s:g} s: {why}"
        self._events.write("actor_join_timeout", level=logging.WARNING, actor=self.name, reason=reason)
        if self._process is not None and self._failed_joins >= JOIN_ATTEMPTS:
            self._failed_joins = 0
            self._evict("join", reason)
            await self._process.stop()

    def _apply(self, health: ActorHealth) -> None:
        if health.asleep and self._rest.wish.asleep:
            self._rejects_since = self._joining_since = 0.0
            if self.state is not ActorState.ASLEEP:
                self._set_state(ActorState.ASLEEP)
            return
        ours = health.serves and health.version is not None and health.epoch == self._epoch
        ours = ours and health.version is not None and health.version > self._distrusted
        before = self.version
        self.version = health.version if ours else None
        now = time.monotonic()
        if not ours:
            self._rejects_since = self._rejects_since or now
            # A version on its way has deadlines of its own, and is no trouble.
            if self._announced and now - self._rejects_since > BRIEFLY_S and health.weights_state not in ON_THE_WAY:
                self._announced = False
                self._events.write("actor_not_serving", actor=self.name, status=health.status, version=health.version)
            if self.state is not ActorState.JOINING:
                self._set_state(ActorState.JOINING)
                self.look()  # engines do not serve while they apply a version: it is over at once
            return
        self._rejects_since = self._joining_since = 0.0
        self._failed_joins = 0
        if not self._announced:
            self._announced, self._ready_at = True, now
            self._events.write("actor_ready", actor=self.name, version=health.version)
        if self.state is not ActorState.READY:
            self._set_state(ActorState.READY)
        elif self.version != before:
            self._changed()

    async def _failed(self, error: ActorError) -> None:
        if self._process is not None and error.phase != "startup":
            await self._first_of([self._process.wait()], timeout=REAP_S)
            if not self._process.alive:
                self._evict("exit", self._process.describe_end())
                return
        self._evict(error.phase, str(error))
        if error.phase in ("sleep", "wake"):
            await self._end_half_asleep()
            return
        frozen_s = time.monotonic() - self._evicted_at
        if self._process is not None and self._process.alive and frozen_s > self._config.startup_timeout_s:
            self._events.write("actor_killed", actor=self.name, reason=f"no sign of life for {frozen_s:.0f} s")
            await self._process.stop(grace_s=0.0)

    async def _end_half_asleep(self) -> None:
        """Nobody knows which memory it has: a process of ours ends, and has none; another does not sleep this time."""
        if self._process is not None:
            await self._process.stop()
        elif self._rest.deep:
            self._rest.want(())

    def _evict(self, noticed_by: str, reason: str) -> None:
        """Take the actor out; its requests are redone elsewhere. Does nothing where it is out already."""
        self.last_reason = reason
        if self.state is ActorState.EVICTED:
            return
        unfinished = self._failed_requests + self._requests
        phase = "generate" if unfinished else "idle" if self._ready_at else self.state.value
        self.evictions += 1
        self._evicted_at = time.monotonic()
        self.version, self._announced, self._rejects_since = None, False, 0.0
        self._events.write(
            "actor_evicted",
            level=logging.WARNING,
            actor=self.name,
            phase=phase,
            noticed_by=noticed_by,
            reason=reason,
            unfinished_requests=unfinished,
        )
        self._failed_requests = 0
        self._interrupt(reason)
        self._set_state(ActorState.EVICTED)

    def _give_up(self, reason: str) -> None:
        self.last_reason = reason
        self._events.write("actor_gave_up", level=logging.ERROR, actor=self.name, reason=reason)
        self._set_state(ActorState.GAVE_UP)

    def _set_state(self, state: ActorState) -> None:
        if state is ActorState.SUSPECT:
            self._suspect_since = time.monotonic()
        self.state = state
        if state in NOT_THERE:
            self._rest.settle(self._rest.wish)
        self._changed()

    async def _wait(self) -> None:
        """Until the next probe is due, somebody asks for one, or the process ends."""
        interval = self._config.health_interval_s
        if self.state in (ActorState.JOINING, ActorState.SUSPECT):
            interval = min(interval, JOINING_PROBE_S)
        if self.starved:
            interval = min(interval, FAST_PROBE_S)
        waits: list[Coroutine[None, None, object]] = [self._look_now.wait()]
        if self._process is not None and self._process.alive:
            waits.append(self._process.wait())
        await self._first_of(waits, interval)
        if self._look_now.is_set():
            self._look_now.clear()
            await asyncio.sleep(FAST_PROBE_S)  # whoever wakes us often must not make us busy

    @staticmethod
    async def _first_of(waits: list[Coroutine[None, None, object]], timeout: float) -> None:
        """Wait until one of them is done, at most `timeout` seconds, and cancel the others."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
