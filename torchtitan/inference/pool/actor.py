"""One actor as the pool sees it: its state, its requests, and the loop that starts, probes, evicts and restarts it, and
puts it to sleep or wakes it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Container, Coroutine

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import DISK_ERRORS, UserError
from torchtitan.inference.actor_client import (
    ActorClient,
    ActorError,
    ActorHealth,
    ActorNotReady,
    AnswerRefused,
    Facts,
    TokenRefused,
    VerifiedVersions,
)
from torchtitan.inference.answer_checks import MixtureShape
from torchtitan.inference.pool.actor_memory import ActorMemory
from torchtitan.inference.pool.actor_process import ActorProcess, StartRefused
from torchtitan.inference.pool.actor_requests import ActorRequests
from torchtitan.inference.pool.admission import Admission, Unfit
from torchtitan.inference.pool.weight_connection import WeightConnection
from torchtitan.inference.types import TAGS, Capabilities, Completion, GenerateRequest, ScoredTokens, Tag
from torchtitan.utils.json_lines import EventLog
from torchtitan.utils.machine import NO_DESCRIPTOR, describe_lack_of_descriptors
from torchtitan.weight_sync.actor_state import OUT, SERVING, UPDATING, ActorState

# The intervals between probes of an actor that requests wait for, of one that is about to join or to change what it
# holds of its memory, and of others: they are probed at least ten times before inference.health_timeout_s has passed.
FAST_PROBE_S = 0.02
JOINING_PROBE_S = 0.1
PROBE_S = 1.0
# The probe has 64 tokens; a later version's answer is worth more than one that takes longer.
MAX_SCORE_S = 60.0
# The events mention an actor that does not serve for longer than this.
BRIEFLY_S = 2.0
# A process whose connections broke is recognised as dead if it ends within this time.
REAP_S = 0.3
# At its end, a run asks what its actors have verified, and wakes the servers that it did not start.
LAST_LOOK_S = 2.0
WAKE_AT_END_S = 10.0

# Nothing waits for actors in these states to sleep or wake.
ABSENT = (ActorState.STARTING, *OUT)


class Actor:
    """Supervises one actor: a process that the run starts, or a server that already runs at `url`.

    key: the actor's own key at the weight registry. `changed()` is called after every change that may let a waiting
    request proceed.
    """

    def __init__(
        self,
        name: str,
        config: JobConfig,
        epoch: str,
        key: str,
        events: EventLog,
        make_client: Callable[[str], ActorClient],
        changed: Callable[[], None],
        process: ActorProcess | None = None,
        url: str = "",
        demands: Facts | None = None,
        mixture: MixtureShape | None = None,
    ):
        """demands: what the actor has to be (joining.demands); None: anything. mixture: whose experts it names where a
        request asks for them."""
        self.name = name
        self.state = ActorState.STARTING
        self.version: int | None = None
        """Newest version that the actor is known to serve"""
        self.verified: VerifiedVersions | None = None
        """What it was last known to have found of its own weights"""
        self.load = 0
        """Sequences that the actor is generating for this run"""
        self.evictions = 0
        self.starved = False
        """Requests wait for a newer version than this actor is known to serve, so it is probed often"""
        self.incarnation = 0
        """Number of processes that have had this name"""
        self.last_reason = ""
        self._config, self._epoch = config.inference, epoch
        self._write = functools.partial(events.write, actor=name)
        self._make_client, self._changed, self._process = make_client, changed, process
        self._client_or_none = make_client(url) if process is None else None
        self._distrusted = -1
        """In this process, neither this version nor any older one is what the trainer sent"""
        self._announced = False
        """An event has said that the actor serves"""
        self._has_served = False
        """Some process of this name has been ready"""
        self.url = url
        self.leaves = False
        """It takes no new requests, and ends when it has answered those that it has"""
        # Times are on time.monotonic(); 0.0 means that it does not apply.
        self._evicted_at = self._ready_at = self._not_serving_since = self._suspect_since = 0.0
        self._requests = ActorRequests(epoch, mixture, self._write)
        self._admission = Admission(config.inference, demands or {}, process is not None, self._write)
        self._memory = ActorMemory(config.inference, self._write)
        self._weights = WeightConnection(name, config, epoch, key, self._write)
        self._probe_now = asyncio.Event()

    # Called by the pool

    @property
    def given_up(self) -> bool:
        return self.state is ActorState.GIVEN_UP

    @property
    def restarts(self) -> int:
        return 0 if self._process is None else self._process.restarts

    @property
    def absent(self) -> bool:
        return self.state in ABSENT

    def serves(self, min_version: int) -> bool:
        """Whether a request that needs this version or a newer one may be sent to it."""
        return self._serves and not self.leaves and self.version is not None and self.version >= min_version

    @property
    def _serves(self) -> bool:
        return self.version is not None and self.state in SERVING

    def connect(self, registry: str, published: Container[int] | None = None) -> None:
        """From now on, pull weights from the trainer with this registry (host:port). published: the versions that the
        actor may say it serves; None: any."""
        self._requests.published = published
        self._weights.use(registry)
        self.probe_now()

    def probe_now(self) -> None:
        """Probe at once instead of waiting for the next interval."""
        self._probe_now.set()

    async def probe_once(self) -> None:
        """Probe a server that already runs, once. Raises UserError if it refuses our token, or is not what the run
        needs."""
        try:
            await self._client.health(self._config.health_timeout_s)
            await self._admission.check(self._client)
        except (TokenRefused, Unfit) as error:
            raise UserError(f"inference.servers: {error}") from error
        except ActorError as error:
            self.last_reason = str(error)  # supervise() tries again

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Raises ActorError if the actor fails or is evicted meanwhile."""
        self._requests.in_progress += 1
        known = self.version
        try:
            asked = self._client.generate(request, self._config.request_timeout_s)
            completions = await self._requests.unless_lost("generate", asked)
            self._requests.check(request, completions)
        except ActorNotReady:
            if self._serves:
                self._set_state(ActorState.PAUSED)
            self.probe_now()
            raise
        except ActorError as error:
            if isinstance(error, AnswerRefused):
                self._note_refused(str(error))
            if self._serves or self.state is ActorState.SUSPECT:
                self._requests.failed += 1
                self._set_state(ActorState.SUSPECT)
            self.probe_now()
            raise
        finally:
            self._requests.in_progress -= 1
        self._requests.refused_answers = 0
        for completion in completions:
            completion.actor, completion.asked_at = self.name, known
        # The answer is newer than the last probe.
        served = max((span.version for completion in completions for span in completion.spans), default=0)
        if self.version is not None and served > self.version:
            self.version = served
            self._changed()
        return completions

    async def capabilities(self) -> Capabilities:
        """Raises ActorError."""
        return await self._client.capabilities(self._config.health_timeout_s)

    async def score(self, token_ids: list[int]) -> ScoredTokens:
        """Raises ActorError, also where the actor is evicted meanwhile."""
        timeout_s = min(self._config.request_timeout_s, MAX_SCORE_S)
        scored = await self._requests.unless_lost("score", self._client.score(token_ids, timeout_s))
        if scored.epoch == self._epoch and not self._requests.is_published(scored.version):
            raise ActorError("score", f"scored under version {scored.version}, which was not published")
        return scored

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Have the actor give back its memory. Returns when it has, or after `timeout_s`; an event reports an actor
        that stays awake. An absent actor is put to sleep when it comes back."""
        if self.load:
            self._memory.stay_awake(f"{self.load} sequences are not finished")
            self.probe_now()
            return
        self._memory.aim(TAGS, level)
        self.probe_now()
        if self.state in ABSENT or await self._memory.wait(timeout_s):
            return
        reason = f"it was not asleep within {timeout_s:g} s"
        if self._process is None:
            self._memory.stay_awake(reason)
            self.probe_now()
        else:
            # The process may still fall asleep, or fail and end. Either way its memory stays free until it has to wake.
            self._write("actor_stays_awake", level=logging.WARNING, reason=reason)

    async def wake(self, asleep: Collection[Tag], timeout_s: float) -> None:
        """Have the actor take back its memory, except for `asleep`. Returns when it has, or after `timeout_s`; then an
        event reports it, and the supervision keeps trying."""
        self._memory.aim(asleep)
        self.probe_now()
        if self.state is ActorState.ASLEEP and not await self._memory.wait(timeout_s):
            reason = f"it was not awake within {timeout_s:g} s"
            self._write("actor_stays_asleep", level=logging.WARNING, reason=reason)

    def lost_from_sync(self, reason: str) -> None:
        """The weight sync has lost this actor: its requests are redone elsewhere, and it gets no prompts until a probe
        has shown that it lives. Does nothing if the actor is already out."""
        # An actor that finishes its requests before an update serves nothing, but has work.
        is_out = self.state in (*ABSENT, ActorState.ASLEEP, ActorState.SUSPECT)
        if is_out or not (self._serves or self._requests.in_progress):
            return
        self.last_reason = reason
        self._set_state(ActorState.SUSPECT)
        self._requests.interrupt(reason)
        self.probe_now()

    async def distrust(self, version: int, reason: str, forever: bool = False) -> None:
        """What the actor serves as `version` is something else, so it is out until it serves a newer version. A process
        that the run started is stopped and restarted. With `forever`, the actor is given up."""
        self._distrusted = max(self._distrusted, version)
        self._evict("parity", reason)
        if forever:
            self._give_up(reason)
        self.probe_now()
        if self._process is not None:
            await self._process.stop()

    async def ask_verified(self) -> None:
        """Bring `verified` up to date, at the end of a run."""
        if self._serves:
            with contextlib.suppress(ActorError):
                self.verified = (await self._client.health(LAST_LOOK_S)).verified

    async def close(self) -> None:
        if self._client_or_none is not None:
            if self._process is None and self._memory.may_be_asleep:
                # The next run has to find it awake.
                with contextlib.suppress(ActorError):
                    await self._client.wake(TAGS, WAKE_AT_END_S)
            await self._client_or_none.close()
        if self._process is not None:
            await self._process.stop()

    async def part(self) -> None:
        """The actor has gone for good: what it has not answered is redone elsewhere."""
        self._requests.interrupt("it has left")
        await self._client.close()

    # Supervision

    async def supervise(self) -> None:
        """Run until the actor is given up or the task is cancelled."""
        try:
            while not self.given_up:
                try:
                    await self._keep_alive()
                except OSError as error:
                    if error.errno not in NO_DESCRIPTOR:
                        raise
                    # To start or stop a process takes descriptors, too. Requests that end give some back.
                    self._evict("supervision", describe_lack_of_descriptors(error))
                if not self.given_up:
                    await self._wait()
        except Exception as error:
            # A full disk is no fault of the actor's, and ends the run by itself (InferencePool._check_tasks).
            if not (isinstance(error, OSError) and error.errno in DISK_ERRORS):
                self._give_up(f"its supervision failed: {error!r}")
            raise

    async def _keep_alive(self) -> None:
        """Start the process if there is none, look at the actor once, and act on what is found."""
        try:
            if self._process is not None and not self._process.alive:
                await self._replace(self._process)
            if self._process is None or self._process.alive:
                await self._probe()
        except ActorError as error:
            await self._failed(error)

    async def _replace(self, process: ActorProcess) -> None:
        """Start a process, because there is none yet or it has ended."""
        if self.incarnation:
            if self.state is not ActorState.EVICTED:
                self._evict("exit", process.describe_end())
            if self._memory.without_weights:
                return  # a new process would take memory that the trainer uses now
            if not await process.may_restart(time.monotonic() - self._ready_at if self._ready_at else 0.0):
                self._give_up(f"restarted {self.restarts} times ; last: {self.last_reason}")
                return
        self.state = ActorState.STARTING
        if self.restarts:
            self._write("actor_restarting", restart=self.restarts)
        if self._client_or_none is not None:
            await self._client_or_none.close()
        self._announced, self.version, self._ready_at, self._distrusted = False, None, 0.0, -1
        self._admission.ask_again()
        self.incarnation += 1
        self._weights.reset()
        self._memory.said_unable = False
        self._client_or_none = self._make_client(await process.start())
        self._set_state(ActorState.JOINING)

    @property
    def _silence_limit_s(self) -> float:
        """How long its engine may be silent: one that we have started, and that has not served yet, still starts."""
        starting = self._process is not None and not self._ready_at
        return max(self._config.health_timeout_s, self._config.startup_timeout_s if starting else 0.0)

    async def _probe(self) -> None:
        asked_at = time.monotonic()
        health = await self._client.health(self._config.health_timeout_s)
        if self.state is ActorState.EVICTED and self._process is None:
            # It may have been started anew, with other options.
            self._admission.ask_again()
        await self._admission.check(self._client)
        if health.engine_age_s > self._silence_limit_s:
            limit = self._silence_limit_s
            key = "health_timeout_s" if limit == self._config.health_timeout_s else "startup_timeout_s"
            text = f"its engine has not moved for {health.engine_age_s:.1f} s (inference.{key} = {limit:g})"
            raise ActorError("engine", text)
        self.leaves, self.verified = health.leaves, health.verified
        if self.leaves and not self.load:
            await self._client.release(self._config.health_timeout_s)
        if self.state is ActorState.SUSPECT and health.answered_age_s > asked_at - self._suspect_since:
            # The agent may not know yet that its engine is dead, and more requests would be lost on it.
            return
        if self.state is ActorState.EVICTED:
            # It may have missed anything, so it gets a fresh connection and a full version.
            self._weights.connected = False
            self._set_state(ActorState.JOINING)
            self._write("actor_rejoining")
        if self._weights.is_forgotten(health):
            raise ActorError("restart", "it knows nothing of this run's weights any more: its server was started anew")
        reached = self._memory.reached
        health, matched = await self._memory.match(self._client, health)
        # An actor that is asleep could only refuse weights.
        may_connect = not self._memory.without_weights and not self.leaves
        health = await self._weights.keep(self._client, health, may_connect)
        self._requests.failed = 0
        self._memory.may_be_asleep = bool(health.asleep)
        self._apply(health)
        if matched:
            reached.set()
        is_awaited = self.version is None and self.state not in (ActorState.ASLEEP, ActorState.GIVEN_UP)
        overdue = self._weights.overdue(health) if is_awaited else ""
        if overdue and self._process is not None and self._weights.hopeless:
            self._evict("join", overdue)
            await self._process.stop()

    def _apply(self, health: ActorHealth) -> None:
        """Set the state of a healthy actor."""
        if health.asleep and self._memory.asleep:
            self._not_serving_since = 0.0
            self._weights.stop_waiting(success=False)
            if self.state is not ActorState.ASLEEP:
                self._set_state(ActorState.ASLEEP)
            return
        served: int | None = None
        unpublished = False
        if health.serves and health.epoch == self._epoch and health.version is not None:
            unpublished = not self._requests.is_published(health.version)
            if not unpublished and health.version > self._distrusted:
                served = health.version
        before, self.version = self.version, served
        now = time.monotonic()
        if self.version is None:
            self._not_serving_since = self._not_serving_since or now
            # An update in progress has deadlines of its own and is no trouble.
            brief = now - self._not_serving_since <= BRIEFLY_S or health.weights_state in UPDATING
            # What it serves may be no version of this run.
            self._set_state(ActorState.JOINING if health.serves else health.state)
            if before is not None:
                self.probe_now()  # engines do not serve while they apply a version, but that ends soon
            if self._announced and not brief:
                self._announced = False
                reason = "this version was not published" if unpublished else ""
                self._write("actor_not_serving", state=health.state, version=health.version, reason=reason)
            return
        self._not_serving_since = 0.0
        self._weights.stop_waiting(success=True)
        is_news, self._announced = not self._announced, True
        self._has_served = True
        if is_news:
            self._ready_at = now
        self._set_state(health.state)
        if self.version != before:
            self._changed()
        if is_news:
            self._write("actor_ready", version=health.version)

    async def _failed(self, error: ActorError) -> None:
        """Handle a failed probe, or a failed call that the probe led to."""
        process = self._process
        if isinstance(error, Unfit) and process is not None:
            self._evict(error.phase, str(error))
            self._give_up(str(error))
            await process.stop()
            return
        if isinstance(error, StartRefused) and not self._has_served:
            self._evict(error.phase, str(error))
            self._give_up(str(error))
            return
        if process is not None and error.phase != "startup":
            await _first_of([process.wait()], timeout=REAP_S)
            if not process.alive:
                self._evict("exit", process.describe_end())
                self.probe_now()  # the next look restarts it
                return
        self._evict(error.phase, str(error))
        if error.phase in ("sleep", "wake"):
            # It is unknown which memory the actor holds. A process of the run is stopped, so it holds none; a server
            # stays awake this time.
            if process is not None:
                await process.stop()
            elif self._memory.without_weights:
                self._memory.aim(())
            return
        frozen_s = time.monotonic() - self._evicted_at
        if process is not None and process.alive and frozen_s > self._config.startup_timeout_s:
            self._write("actor_killed", reason=f"no sign of life for {frozen_s:.0f} s")
            await process.stop(grace_s=0.0)

    def _evict(self, noticed_by: str, reason: str) -> None:
        """Take the actor out; its requests are redone elsewhere. Does nothing if it is already out."""
        self.last_reason = reason
        if self.state in OUT:
            return
        unfinished = self._requests.unfinished
        if self.leaves and not unfinished:
            self._set_state(ActorState.EVICTED)
            return
        before = self.state
        self.evictions += 1
        self._evicted_at = time.monotonic()
        self.version, self._announced, self._not_serving_since = None, False, 0.0
        self._requests.failed = 0
        self._requests.interrupt(reason)
        self._set_state(ActorState.EVICTED)
        # Last: its requests go to others also where the event cannot be written.
        self._write(
            "actor_evicted", level=logging.WARNING, state=before, noticed_by=noticed_by, reason=reason,
            unfinished_requests=unfinished,
        )  # fmt: skip

    def _give_up(self, reason: str) -> None:
        self.last_reason = reason
        self._set_state(ActorState.GIVEN_UP)
        self._write("actor_given_up", level=logging.ERROR, reason=reason)

    def _set_state(self, state: ActorState) -> None:
        if self.given_up:
            return  # a probe that was in progress may have found something else
        if state is ActorState.SUSPECT:
            self._suspect_since = time.monotonic()
        if state is self.state:
            return
        self.state = state
        if state in ABSENT:
            self._memory.reached.set()
        self._changed()

    async def _wait(self) -> None:
        """Wait until the next probe is due or requested, or the process ends."""
        interval = min(PROBE_S, self._config.health_timeout_s / 10)
        is_settled = self._memory.reached.is_set() and (self._serves or self.state is ActorState.ASLEEP)
        if self.state not in ABSENT and not is_settled:
            interval = min(interval, JOINING_PROBE_S)
        if self.starved:
            interval = min(interval, FAST_PROBE_S)
        waits: list[Coroutine[None, None, object]] = [self._probe_now.wait()]
        if self._process is not None and self._process.alive:
            waits.append(self._process.wait())
        await _first_of(waits, interval)
        if self._probe_now.is_set():
            self._probe_now.clear()
            await asyncio.sleep(FAST_PROBE_S)  # frequent calls of probe_now() must not cause a busy loop

    # Requests

    @property
    def _client(self) -> ActorClient:
        if self._client_or_none is None:
            raise ActorError("startup", "the actor has not started")
        return self._client_or_none

    def _note_refused(self, reason: str) -> None:
        """An answer cannot be right."""
        if self.state in OUT:
            return  # what else it had answered meanwhile
        if text := self._requests.refuse(reason):
            self._evict("answers", text)
            if self._requests.hopeless:
                self._give_up(text)


async def _first_of(waits: list[Coroutine[None, None, object]], timeout: float) -> None:
    """Wait until one of them is done, at most `timeout` seconds, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
