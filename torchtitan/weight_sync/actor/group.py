"""Actors with several workers, as in tensor parallelism: each worker pulls its part; all apply, or none counts.

To the registry the leader is one actor; to its workers it is the registry: it tells them the version to pull, and when
to apply. Workers pull straight from the shard servers. When a worker is lost, the actor leaves, and joins again once
all workers are there; what they hold counts only if it is the same everywhere.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.weight_sync.actor.puller import GIVE_UP_SECONDS, Puller, Served
from torchtitan.weight_sync.actor.shard_connection import ShardServerConnection
from torchtitan.weight_sync.memory.manifest import BucketKey, Layout, Manifest, WeightsRefused
from torchtitan.weight_sync.memory.slots import anonymous_file, file_reference
from torchtitan.weight_sync.memory.staging import StagedVersion
from torchtitan.weight_sync.memory.transfer import ADDED_UP, BYTES
from torchtitan.weight_sync.wire.handshake import WORKER, Acceptor, Identity
from torchtitan.weight_sync.wire.runtime import SILENCE_SECONDS, Channel, Message, ProtocolError
from torchtitan.weight_sync.wire.sockets import SocketRuntime

logger = logging.getLogger("torchtitan.weight_sync.actor.group")

NOTHING = -1
"""The version of a worker that holds none"""

# Of so many versions it is known which workers have found them whole; each looks at them in order.
REMEMBERED_VERSIONS = 64
# While workers apply, how often to check that the actor's loop still runs.
POLL_SECONDS = 0.2
ApplyFunction = Callable[[StagedVersion], "float | Mapping[str, float] | None"]


class WorkerPuller(Puller):
    """A worker's part: pulls the version that its leader names, and applies it when the leader says so."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # A worker that applies reads memory that all workers write to, and cannot say yet what it holds.
        self.registry.ready = lambda: not self._applying

        self._verified: Message = {}
        """What its engine has found of the versions in use, once it has looked"""

    def tell_verified(self, found: Message) -> None:
        """Tell the leader, also one that comes later."""
        self._verified = {"type": "verified", **found}
        self._tell(self._verified)

    def _joined(self) -> None:
        super()._joined()
        if self._verified:
            self._tell(self._verified)
        if not self.poisoned and (self.serving is None or self.serving.epoch != self.epoch):
            self._tell({"type": "serving", "version": NOTHING, "digest": "", "figures": {}})

    def _on_message(self, message: Message) -> None:
        if message["type"] != "apply":
            super()._on_message(message)
        elif self._staged is not None and self._staged[0].version == message["version"]:
            super()._apply_staged()
        else:
            self._tell_ended(message["version"], "refused", "it is not staged")

    def _on_newest(self, message: Message) -> None:
        before = self._newest
        super()._on_newest(message)
        if self.serving == Served(message["epoch"], message["version"], message["digest"]):
            # The leader announces what this worker serves: another worker lacks it, so all pull it again.
            self.serving = None
        if before is None or before[0] != message["newest"]:
            self._staged = None
        elif self._staged is not None:
            self._tell_ended(message["version"], "staged")

    def _apply_staged(self) -> None:
        """Do nothing: a worker applies only when its leader says so."""


@dataclass
class _Worker:
    """A worker's connection, and what it has said over it."""

    channel: Channel
    heard_at: float
    held: Served | None = None
    known: bool = False
    """Whether it has said what it holds"""
    staged: int = NOTHING
    """The version that it has staged"""
    bytes: int = 0
    verified: Message = field(default_factory=dict)
    """What it has found of the versions in use"""
    answer: Message | Exception | None = field(default_factory=dict)
    """The answer to the last order to apply: figures if it applied, an exception if not, None while it is pending"""


class Leader(Puller):
    """Leads `count` workers and stages nothing itself. apply_timeout_s: deadline for all workers to apply; secret:
    their keys are derived from it; others: see Puller."""

    def __init__(self, *args: Any, count: int, secret: str, apply_timeout_s: float, **options: Any):
        super().__init__(*args, **options)
        self._count, self._apply_timeout_s = count, apply_timeout_s
        self.registry.ready = self._complete
        self._acceptor = Acceptor(self._runtime, frozenset((WORKER,)), secret, self._admit, self._enter)
        self._workers: dict[int, _Worker] = {}
        self._model: Message | None = None
        self._memory: int | None = None
        """Descriptor of the memory for one version, which the workers share"""
        self._order: Future[Mapping[str, float]] | None = None
        """Receives the outcome of the last order to apply; None once it is known"""
        self._ordered: Served | None = None
        """What all workers serve once they have done what was ordered last"""
        self._found_whole: dict[int, set[int]] = {}
        """Version -> the workers that have found it whole, of the last versions"""
        self._matched = 0
        """How many versions all workers have found whole"""
        self._last_whole = NOTHING
        self._lacking_since: float | None = None
        """Since when a worker is away that was there"""

    def start(self, listener: Any = None) -> None:
        """Begin to look for the registry, and to accept workers at this listener."""
        self._acceptor.listen(listener)
        super().start()

    def close(self) -> None:
        super().close()
        self._acceptor.close()
        self._fail_order("another connection has taken this one's place")
        for worker in list(self._workers.values()):
            worker.channel.close("the actor ends")
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _complete(self) -> bool:
        return len(self._workers) == self._count and all(worker.known for worker in self._workers.values())

    def _send(self, message: Message) -> None:
        for worker in self._workers.values():
            worker.channel.send(message)

    # Registry

    def _joined(self) -> None:
        held = {worker.held for worker in self._workers.values()}
        if self.serving is not None and self.serving.epoch == self.epoch and held != {self.serving}:
            self.poisoned, self.serving = True, None
        super()._joined()

    def _tick(self) -> Message:
        for number, worker in list(self._workers.items()):
            if self._runtime.now() - worker.heard_at > SILENCE_SECONDS:
                worker.channel.close(f"worker {number} said nothing for {SILENCE_SECONDS:g} s")
        self._check_lacking()
        return super()._tick()

    def _check_lacking(self) -> None:
        """Give up if a worker that was there stays away: its puller may have failed for good, and says so only in the
        log of its process. Whoever connects this actor anew makes new workers. One that applies comes back later."""
        if self._complete():
            self._lacking_since = None
        since, allowed_s = self._lacking_since, self._apply_timeout_s + GIVE_UP_SECONDS
        if since is not None and self._runtime.now() - since > allowed_s and not self.registry.failure:
            there = {number for number, worker in self._workers.items() if worker.known}
            lacking = ", ".join(map(str, sorted({*range(self._count)} - there)))
            self.registry.failure = f"worker {lacking} has not come back for {allowed_s:g} s"
            logger.error("%s gives up: %s", self.name, self.registry.failure)

    def _on_model(self, message: Message) -> None:
        super()._on_model(message)
        if self._memory is None:
            assert self._layout is not None
            self._memory = anonymous_file("weights-staging", self._layout.slot_starts()[-1])
        self._model = {**message, "staging": {**file_reference(self._memory), "workers": self._count}}
        self._send(self._model)

    def _new_sources(self, ranks: int, count: int) -> list[ShardServerConnection]:
        # Only workers pull.
        return []

    # Pulling

    def _may_begin(self, manifest: Manifest) -> bool:
        # A worker that still applies reads memory that the others would write to.
        idle = all(worker.answer is not None for worker in self._workers.values())
        return idle and self._complete() and super()._may_begin(manifest)

    def _begin(self, serial: int, manifest: Manifest, peer: Message | None) -> None:
        super()._begin(serial, manifest, peer)
        if self.transfer is not None:
            for worker in self._workers.values():
                worker.staged, worker.bytes = NOTHING, 0
            live = {"newest": serial, "retained": [], "room": True, "base": self._base, "dropped": []}
            self._send({"type": "newest", **live, **manifest.to_json()})

    def _ended(self, number: int, worker: _Worker, message: Message) -> None:
        version, outcome, reason = message["version"], message["outcome"], f"worker {number}: {message['reason']}"
        if worker.answer is None:
            if outcome == "refused":
                self._answered(worker, WeightsRefused(reason))
        elif self.transfer is not None and version == self.transfer.manifest.version:
            if outcome == "staged":
                worker.staged = version
                if all(other.staged == version for other in self._workers.values()) and self._complete():
                    self._finish_transfer(self.transfer)
            elif outcome in ("gone", "refused"):
                self._end_pull(outcome, reason)
                self._pause()

    # Applying

    def order(self, manifest: Manifest, order: Future[Mapping[str, float]]) -> None:
        """Have all workers apply what they have staged while the engine is paused. Runs on the loop's thread.

        order: receives the figures of all workers, WeightsRefused if all are unchanged, or else RuntimeError.
        """
        if not self._complete() or any(worker.staged != manifest.version for worker in self._workers.values()):
            order.set_exception(WeightsRefused("a worker was lost meanwhile"))
            return
        for worker in self._workers.values():
            worker.answer = None
        self._order, self._ordered = order, Served(manifest.epoch, manifest.version, manifest.digest)
        self._send({"type": "apply", "version": manifest.version})

        def late() -> None:
            if self._order is order:
                for worker in [worker for worker in self._workers.values() if worker.answer is None]:
                    worker.channel.close(f"it did not apply within {self._apply_timeout_s:g} s")

        self._runtime.call_later(self._apply_timeout_s, late)

    def _answered(self, worker: _Worker, answer: Message | Exception) -> None:
        worker.answer, worker.staged = answer, NOTHING
        answers = [worker.answer for worker in self._workers.values()]
        if self._order is None:
            self._react()
        elif None not in answers:
            failures = [answer for answer in answers if isinstance(answer, Exception)]
            if failures:
                refused = all(isinstance(answer, WeightsRefused) for answer in answers)
                self._fail_order(str(failures[0]), WeightsRefused if refused else RuntimeError)
            else:
                order, self._order = self._order, None
                order.set_result(_merge_figures([answer for answer in answers if isinstance(answer, dict)]))

    def _fail_order(self, reason: str, kind: type[Exception] = RuntimeError) -> None:
        order, self._order = self._order, None
        if order is not None:
            order.set_exception(kind(reason))

    # Workers

    def _admit(self, identity: Identity, fields: Message) -> Message:
        if fields.get("epoch") != self.epoch:
            raise ProtocolError(f"this actor's epoch is {self.epoch}, not {fields.get('epoch')}")
        if identity.name not in map(str, range(self._count)):
            raise ProtocolError(f"no worker {identity.name!r} among {self._count}")
        # The term is always 1: a leader that is replaced closes its port, so no worker hears two leaders.
        return {"term": 1}

    def _enter(self, channel: Channel, identity: Identity, _fields: Message) -> None:
        number = int(identity.name)
        if number in self._workers:
            self._workers[number].channel.close("replaced")
        worker = self._workers[number] = _Worker(channel, self._runtime.now())
        channel.on_message = lambda channel, message: self._on_worker_message(number, worker, message)
        channel.on_close = lambda _channel, reason: self._lost(number, reason)
        if self._model is not None:
            channel.send(self._model)

    def _lost(self, number: int, reason: str) -> None:
        del self._workers[number]
        reason = f"worker {number} is lost: {reason}"
        logger.warning("%s: %s", self.name, reason)
        if self._lacking_since is None:
            self._lacking_since = self._runtime.now()
        self._staged = None
        self._fail_order(reason)
        self._end_pull("lost", reason)
        self.registry.hang_up(reason)

    def verified(self) -> Message | None:
        """What all workers have found of the versions in use; None where not all have told. Any thread may ask."""
        findings = [worker.verified for worker in list(self._workers.values())]
        if len(findings) != self._count or not all(findings):
            return None
        return {
            "version": None if self._last_whole == NOTHING else self._last_whole,
            "matched": self._matched,
            "mismatched": max(finding["mismatched"] for finding in findings),
            "unfinished": max(finding["unfinished"] for finding in findings),
        }

    def _note_whole(self, number: int, version: int) -> None:
        """Count a version once every worker has found it whole: one may not have come to what another looked at."""
        if version == NOTHING:
            return
        workers = self._found_whole.setdefault(version, set())
        if number not in workers:
            workers.add(number)
            if len(workers) == self._count:
                self._matched, self._last_whole = self._matched + 1, max(self._last_whole, version)
        while len(self._found_whole) > REMEMBERED_VERSIONS:
            del self._found_whole[min(self._found_whole)]

    def _on_worker_message(self, number: int, worker: _Worker, message: Message) -> None:
        worker.heard_at = self._runtime.now()
        kind = message["type"]
        if kind == "ping":
            worker.channel.send({"type": "pong"})
            count = message.get("bytes") or 0
            if self.transfer is not None and count > worker.bytes:
                worker.bytes, self.transfer.moved_at = count, worker.heard_at
                self.transfer.received["bytes_full"] = sum(other.bytes for other in self._workers.values())
        elif kind == "ended":
            self._ended(number, worker, message)
        elif kind == "serving":
            version, digest = message["version"], message["digest"]
            worker.known = True
            worker.held = None if version == NOTHING else Served(self.epoch, version, digest)
            if worker.answer is None:
                other = RuntimeError(f"worker {number} was to apply {self._ordered}, and serves {worker.held}")
                self._answered(worker, message["figures"] if worker.held == self._ordered else other)
        elif kind == "poisoned":
            worker.known, worker.held = True, None
            reason = f"worker {number}: {message['reason']}"
            if worker.answer is None and message["version"] == worker.staged:
                self._answered(worker, RuntimeError(reason))
            else:
                self.poison_version(message["version"], reason)
        elif kind == "verified":
            worker.verified = message
            self._note_whole(number, message["version"])
        elif kind != "pulling":
            raise ProtocolError(f"a worker does not send {kind!r}")


def _merge_figures(figures: list[Message]) -> dict[str, float]:
    """Return what all workers received together, and the bytes of the one with the most."""
    merged: dict[str, float] = {"worker_bytes": 0, **dict.fromkeys(ADDED_UP, 0)}
    for of_worker in figures:
        received = sum(of_worker.get(name, 0) for name in BYTES)
        merged["worker_bytes"] = max(merged["worker_bytes"], received)
        for name in ADDED_UP:
            merged[name] += of_worker.get(name, 0)
    return merged


class LeadingEngine:
    """An engine whose workers stage everything, and get their orders from the actor's loop."""

    leader: Leader

    def __init__(self, apply: ApplyFunction, runtime: SocketRuntime):
        self._apply, self._runtime = apply, runtime

        self.held: dict[BucketKey, int] = {}
        self.held_live: Mapping[BucketKey, int] = {}

    def prepare(self, layout: Layout, _message: Message) -> Collection[BucketKey]:
        """See transfer.TransferTarget."""
        return layout.bucket_keys()

    def choose_memory(self) -> bool:
        """See transfer.TransferTarget."""
        return True

    def release(self) -> None:
        """See transfer.TransferTarget."""

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See transfer.TransferTarget."""
        started, order = time.monotonic(), Future[Mapping[str, float]]()

        def apply_on_workers() -> None:
            order.set_running_or_notify_cancel()
            self._runtime.post(partial(self.leader.order, manifest, order))
            # The leader answers within its deadline as long as its loop runs.
            while not wait([order], POLL_SECONDS).done:
                if not self._runtime.runs:
                    raise RuntimeError("the connection to the trainer was closed meanwhile")
            order.result()

        staged = StagedVersion(manifest.epoch, manifest.version, manifest.digest, {}, apply_on_workers)
        try:
            cost = as_figures(self._apply(staged), started)
        except WeightsRefused as error:
            if order.running() or (order.done() and not isinstance(order.exception(), WeightsRefused)):
                raise RuntimeError(f"the workers have applied what the engine refuses: {error}") from error
            raise
        if not order.done() or order.exception() is not None:
            raise RuntimeError("the engine did not have all workers apply the version")
        return {**order.result(), **cost}


def as_figures(cost: float | Mapping[str, float] | None, started: float) -> dict[str, float]:
    """Return an engine's figures by name, without those that are not finite, and none below 0, as where two clocks
    differ: no peer accepts them."""
    figures = {"pause_s": time.monotonic() - started}
    if cost is None:
        return figures
    for name, value in (cost if isinstance(cost, Mapping) else {"pause_s": cost}).items():
        if math.isfinite(value):
            figures[str(name)] = max(0.0, float(value))
    return figures
