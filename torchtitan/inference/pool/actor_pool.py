"""All inference actors of a run: starts or finds them, routes whole groups to the least loaded, redoes what is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import DISK_ERRORS, UserError
from torchtitan.inference.actor_client import (
    TOKEN_VARIABLE,
    ActorClient,
    ActorError,
    ActorNotReady,
    Facts,
    RequestRefused,
    failed_too_often,
)
from torchtitan.inference.answer_checks import MixtureShape
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.pool.actor import Actor
from torchtitan.inference.pool.actor_process import ActorProcess
from torchtitan.inference.pool.weight_probe import MAX_FAILURES, ParityGuard, ProbeAnswers
from torchtitan.inference.serving.joining import demands
from torchtitan.inference.types import TAGS, Completion, GenerateRequest, Tag
from torchtitan.models.shape.checkpoint_shape import read_shape, vocabulary_of
from torchtitan.utils.json_lines import EventLog
from torchtitan.weight_sync.wire.handshake import ACTOR, HTTP, role_key

logger = logging.getLogger(__name__)

# New versions reach actors a little apart. Without this grace the first to have one would be given all that waits.
GRACE_S = 0.1
# Conversations of which it is remembered who had their last turn.
MAX_NAMES = 65536


@dataclass
class _Waiter:
    sequences: int
    min_version: int
    shares: str
    failed: Collection[str]
    """Names of actors on which it has failed: it goes to another one that serves, if need be later"""
    actor: asyncio.Future[Actor]
    grace_until: float | None = None


class InferencePool:
    """Actors that we started (inference.num_actors), that run already (inference.servers), or that have joined by
    themselves (inference.discover).

    All methods belong to one asyncio loop. `statistics` counts requests that were redone, evictions and restarts.
    """

    def __init__(
        self,
        config: JobConfig,
        epoch: str,
        token: str,
        run_dir: Path,
        events: EventLog,
        make_client: Callable[[str, str], ActorClient] | None = None,
    ):
        """`token` is the job's, and stays here: keys derived from it authorise each actor for the weights, and us at
        each actor. Servers that run already let us in with the token in the environment variable
        TORCHTITAN_ACTOR_TOKEN instead. make_client: of another engine than inference.backend names."""
        self._config, self._epoch, self._token = config, epoch, token
        self._run_dir, self._events = run_dir, events
        args = read_shape(config) if config.grpo.routing_replay else None
        self._mixture: MixtureShape | None = None
        """Of the run's model, where engines name the experts of their tokens"""
        experts = 0
        if args is not None and args.experts is not None:
            self._mixture = MixtureShape(args.num_hidden_layers, args.experts.per_token, args.experts.count)
            experts = self._mixture.layers * self._mixture.per_token
        self._make_client = make_client or partial(
            engine_of(config).make_client, experts=experts, vocabulary=vocabulary_of(config)
        )
        self._actors: list[Actor] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The supervision of each actor, by its name, and the parity guard, by an empty one"""
        self._guests: dict[str, Actor] = {}
        """Those of the actors that have joined by themselves"""
        self._demands: Facts = {}
        """What every actor has to be"""
        self._registry: str | None = None
        self._published: Container[int] | None = None
        self._wrong_samples: Counter[str] = Counter()
        """By actor: batches in a row whose log-probs were not the trainer's"""
        self._past: Counter[str] = Counter()
        """Evictions of actors that have left"""
        self._waiting: list[_Waiter] = []
        self._last_of: dict[str, Actor] = {}
        """Name that requests shared -> the actor that had the last one, the latest last"""
        self._redone = 0
        self._asleep = False
        """Actors sleep, or are about to: requests wait for all of their memory to be there again"""
        self._idle = asyncio.Event()
        """No request is with an actor; set while they sleep"""
        self._guard: asyncio.Task[None] | None = None
        self.answers = ProbeAnswers()
        """What the actors have to say of the probe; any thread may add to it"""
        self._parity = ParityGuard(config, epoch, events, self.answers)

    def _demands_of(self, url: str) -> Facts:
        """What an actor has to be that was started elsewhere, at this URL, or by this run (no URL)."""
        # An engine may compute fewer sequences at a time than it is sent: the others wait inside of it.
        needless = {"max-sequences"} if url else {"max-sequences", "weights"}
        return {name: fact for name, fact in self._demands.items() if name not in needless}

    @property
    def statistics(self) -> Counter[str]:
        return Counter(
            requests_redone=self._redone,
            evictions=self._past["evictions"] + sum(actor.evictions for actor in self._actors),
            restarts=sum(actor.restarts for actor in self._actors),
            probes=self._parity.probes,
            probed_version=self._parity.newest,
        )

    @property
    def actors(self) -> dict[str, str]:
        """Actor -> state, for people."""
        return {actor.name: str(actor.state) for actor in self._actors}

    def describe_actors(self) -> str:
        """Return what keeps each actor from serving, for people."""
        descriptions = []
        for actor in self._actors:
            why = f" ({actor.last_reason})" if actor.last_reason and not actor.serves(0) else ""
            descriptions.append(f"{actor.name} {actor.state}{why}")
        return "; ".join(descriptions) or "none"

    def serving_version(self) -> int | None:
        """The newest version that some ready actor is known to serve."""
        return max(
            (actor.version for actor in self._actors if actor.serves(0) and actor.version is not None), default=None
        )

    async def start(self) -> None:
        """Begin to start all actors; returns at once. Actors that do not come up are reported where they are needed.

        Raises:
            UserError: a server refuses our token, or is not what the run needs (each is asked once, within
                inference.health_timeout_s; with adapters it also reads its checkpoint, within
                inference.startup_timeout_s).
        """
        servers = self._config.inference.servers
        if self._config.model.hf_assets_path:
            self._demands = await asyncio.to_thread(demands, self._config)
        for i in range(len(servers) or self._config.started_actors):
            self._add(f"actor-{i}", i, servers[i] if servers else "")
        if servers:
            await asyncio.gather(*(actor.probe_once() for actor in self._actors))
        self._guard = asyncio.create_task(self._parity.run(self._actors))
        self._watch("", self._guard)
        for actor in self._actors:
            self._watch(actor.name, asyncio.create_task(actor.supervise()))

    def _add(self, name: str, number: int, url: str) -> Actor:
        """Add an actor at `url`, or (empty) one that is started as number `number`."""
        key = role_key(self._token, HTTP, name)
        if url:
            key = os.environ.get(TOKEN_VARIABLE, key)
        actor = Actor(
            name,
            self._config,
            self._epoch,
            role_key(self._token, ACTOR, name),
            self._events,
            make_client=lambda url: self._make_client(url, key),
            changed=self._dispatch,
            process=None if url else ActorProcess(name, self._config, key, self._run_dir, number),
            url=url,
            demands=self._demands_of(url),
            mixture=self._mixture,
        )
        self._actors.append(actor)
        return actor

    def _watch(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks[name] = task
        task.add_done_callback(self._ended)

    async def admit(self, guests: Mapping[str, str]) -> None:
        """Have these actors that have joined by themselves, name -> URL, and no others. One that is missing stays while
        it answers, because its registry may just have been restarted, and while it still has requests if it leaves."""
        for name, actor in list(self._guests.items()):
            url = guests.get(name)
            has_gone = actor.absent or (actor.leaves and not actor.load)
            stays = not has_gone if url is None else url == actor.url
            if stays:
                continue
            del self._guests[name]
            self._actors.remove(actor)
            self._past["evictions"] += actor.evictions
            self._tasks.pop(name).cancel()
            try:
                self._events.write("actor_left", actor=name, url=actor.url)
            finally:
                await actor.part()
        for name in guests.keys() - self._guests.keys():
            actor = self._guests[name] = self._add(name, 0, guests[name])
            if self._registry is not None:
                actor.connect(self._registry, self._published)
            self._watch(name, asyncio.create_task(actor.supervise()))
            self._events.write("actor_joined", actor=name, url=actor.url)

    async def connect_weights(self, registry: str, published: Container[int] | None = None) -> None:
        """Have all actors, also those that (re)join later, pull their weights from the trainer with this registry
        (host:port). published: the versions that they may say they serve; None: any."""
        self._registry, self._published = registry, published
        for actor in self._actors:
            actor.connect(registry, published)

    async def redo_elsewhere(self, actor: str, reason: str) -> None:
        """Weight synchronisation has given an actor up: its requests go to others, and a probe decides about itself."""
        for member in self._actors:
            if member.name == actor:
                member.lost_from_sync(reason)

    async def judge_samples(self, actor: str, version: int, wrong: str) -> None:
        """What an actor sampled with `version` is right, or (not empty) wrong for this reason: it is evicted until it
        serves a newer version, restarted if the run has started it, and the third time in a row given up."""
        found = next((member for member in self._actors if member.name == actor), None)
        if not wrong:
            self._wrong_samples.pop(actor, None)
        elif found is not None and not found.given_up:
            self._wrong_samples[actor] += 1
            await found.distrust(version, wrong, forever=self._wrong_samples[actor] >= MAX_FAILURES)

    async def sleep(self) -> None:
        """Have the actors give their memory back, as its sleep_level says. Nothing is sent to them before
        wake("kv_cache"); what runs gets inference.drain_timeout_s to finish. Events say who stays awake."""
        inference = self._config.inference
        if not inference.sleep_level:
            return
        self._asleep = True
        self._idle.clear()
        self._dispatch()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), inference.drain_timeout_s)
        timeout_s = inference.sleep_timeout_s
        await asyncio.gather(*(actor.sleep(inference.sleep_level, timeout_s) for actor in self._actors))

    async def wake(self, tag: Tag) -> None:
        """Have the actors take this part of their memory again, and those that wake before it; with the last one
        requests go out again. Does nothing where they do not sleep."""
        if not self._asleep:
            return
        asleep = TAGS[TAGS.index(tag) + 1 :]
        timeout_s = self._config.inference.sleep_timeout_s
        await asyncio.gather(*(actor.wake(asleep, timeout_s) for actor in self._actors))
        self._asleep = bool(asleep)
        self._dispatch()

    async def generate(self, request: GenerateRequest, min_version: int = 0, *, shares: str = "") -> list[Completion]:
        """Sample a request on an actor that serves at least `min_version`; redone elsewhere where an actor fails.

        Waits for such an actor for as long as it takes, so the caller sets the deadline.

        Args:
            shares: names what it begins with, such as the conversation of which it is a turn: where it can be, it goes
                to the actor that had the last one of that name, which has computed the beginning.

        Raises:
            UserError: all actors have been given up, one refused the request that has not joined by itself, or it
                failed 1 + Inference.max_retries times, on different actors where there are so many.
            OSError: the disk is full, so an actor's supervision or the comparison of weights has ended.
        """
        failures: list[str] = []
        failed: set[str] = set()
        while True:
            self._check_tasks()
            actor = await self._acquire(request.sampling.n, min_version, shares, failed)
            try:
                return await actor.generate(request)
            except ActorNotReady as error:
                logger.debug("%s is not ready: %s", actor.name, error)
            except ActorError as error:
                if isinstance(error, RequestRefused) and actor.name not in self._guests:
                    raise UserError(f"{actor.name} refused request {request.request_id}: {error}") from error
                failures.append(f"{actor.name}: {error}")
                failed.add(actor.name)
                if len(failures) > self._config.inference.max_retries:
                    raise failed_too_often(request.request_id, failures, self._config.inference.max_retries) from error
                self._redone += 1
            finally:
                actor.load -= request.sampling.n
                self._dispatch()

    async def close(self) -> None:
        """Stop everything; actors that we started are terminated."""
        for task in self._tasks.values():
            task.cancel()
        results = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                logger.error("an actor's supervision had failed: %r", result)
        try:
            if self._parity.asks_actors:
                await asyncio.gather(*(actor.ask_verified() for actor in self._actors))
            self._parity.summarize(self._actors)
        finally:
            await asyncio.gather(*(actor.close() for actor in self._actors))

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Tell those that wait: there may be no actor left that could take them."""
        try:
            self._check_tasks()
        except (OSError, UserError) as error:
            for waiter in self._waiting:
                if not waiter.actor.done():
                    waiter.actor.set_exception(error)

    def _check_tasks(self) -> None:
        """Raises OSError where a full disk has ended a supervision or the guard, whichever was first, and UserError
        where the guard against stale and torn weights has failed otherwise."""
        ended = [task for task in self._tasks.values() if task.done() and not task.cancelled()]
        for error in [task.exception() for task in ended]:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise error
        if self._guard in ended and (error := self._guard.exception()) is not None:
            raise UserError(
                f"the actors' weights are no longer compared with the trainer's ({error!r}) and could be stale or "
                "torn. Resume from the last checkpoint; weight_sync.verify = off trains without this check"
            )

    async def _acquire(self, sequences: int, min_version: int, shares: str, failed: Collection[str]) -> Actor:
        waiter = _Waiter(sequences, min_version, shares, failed, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._dispatch()
        try:
            return await waiter.actor
        except asyncio.CancelledError:
            # Where the waiter had its actor already, the caller never learned of it.
            if not waiter.actor.cancelled() and waiter.actor.done() and waiter.actor.exception() is None:
                waiter.actor.result().load -= sequences
                self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Give waiting requests, oldest first, to the least loaded actors that may take them."""
        lost = bool(self._actors) and all(actor.given_up for actor in self._actors)
        if self._waiting and lost and not self._config.inference.discover:
            reasons = "; ".join(f"{actor.name}: {actor.last_reason}" for actor in self._actors)
            for waiter in self._waiting:
                if not waiter.actor.done():
                    waiter.actor.set_exception(UserError(f"no inference actor is left ({reasons})"))
            return
        if self._asleep:
            if not any(actor.load for actor in self._actors):
                self._idle.set()
            return
        served = self.serving_version()
        self._waiting = waiting = [waiter for waiter in self._waiting if not waiter.actor.done()]
        left: list[_Waiter] = []
        for number, waiter in enumerate(waiting):
            if served is None or waiter.min_version > served:
                left.append(waiter)
                continue
            actors = [actor for actor in self._actors if actor.serves(waiter.min_version)]
            limit = self._limit(waiter, actors)
            others = [actor for actor in actors if actor.name not in waiter.failed] or actors
            open_to = [actor for actor in others if actor.load == 0 or actor.load + waiter.sequences <= limit]
            if not open_to and waiter.failed:
                left.append(waiter)
                continue
            if not open_to:
                left += waiting[number:]  # all are busy; who came later waits longer
                break
            chosen = self._last_of.pop(waiter.shares, None)
            if chosen not in open_to:
                chosen = min(open_to, key=lambda actor: actor.load)
            if waiter.shares:
                self._last_of[waiter.shares] = chosen
                if len(self._last_of) > MAX_NAMES:
                    del self._last_of[next(iter(self._last_of))]
            chosen.load += waiter.sequences
            waiter.actor.set_result(chosen)
        self._waiting = left
        newest = max((waiter.min_version for waiter in waiting), default=0)
        for actor in self._actors:
            # Requests wait for a newer version than it is known to serve: look often.
            starved = actor.serves(0) and not actor.serves(newest)
            if starved and not actor.starved:
                actor.probe_now()
            actor.starved = starved

    def _limit(self, waiter: _Waiter, actors: list[Actor]) -> int:
        """Sequences that an actor may have with this request: one request more than fits keeps it busy while an answer
        travels. While others are about to have the version too, only its share of all the work."""
        limit = self._config.inference.max_sequences + waiter.sequences
        late = [actor for actor in self._actors if actor.serves(0) and actor not in actors]
        if not late:
            return limit
        loop = asyncio.get_running_loop()
        if waiter.grace_until is None:
            waiter.grace_until = loop.time() + GRACE_S
            loop.call_later(GRACE_S, self._dispatch)
        if loop.time() >= waiter.grace_until:
            return limit
        work = sum(actor.load for actor in self._actors)
        work += sum(other.sequences for other in self._waiting if not other.actor.done())
        return min(limit, math.ceil(work / (len(actors) + len(late))))
