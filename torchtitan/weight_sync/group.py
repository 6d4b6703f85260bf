"""Actors of several workers, such as a tensor-parallel engine: each worker pulls its part, all apply or none counts.

The leader is one actor to the registry, and the registry to its workers: it names them the version that is due, and
says when they apply. They pull straight from the shard servers. A worker that is lost makes the actor leave, and join
again when all are there; what they hold counts only where it is the same everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torchtitan.weight_sync.clients import Source
from torchtitan.weight_sync.handshake import WORKER, Gate, Identity, role_key
from torchtitan.weight_sync.manifest import BucketKey, Layout, Manifest, WeightsRefused
from torchtitan.weight_sync.puller import Puller, Served
from torchtitan.weight_sync.slots import anonymous_file, named
from torchtitan.weight_sync.sockets import SocketRuntime
from torchtitan.weight_sync.staging import StagedVersion
from torchtitan.weight_sync.wire import SILENCE_SECONDS, Channel, Message, ProtocolError

logger = logging.getLogger("torchtitan.weight_sync.group")

# A leader that is replaced closes its port: no worker hears two of them.
LEADER_TERM = 1
NOTHING = -1
"""The version of a worker that holds none"""

# While workers apply, it is asked so often whether the actor's loop still runs.
LOOK_SECONDS = 0.2
ApplyFunction = Callable[[StagedVersion], "float | Mapping[str, float] | None"]


class LedPuller(Puller):
    """A worker's part: pulls what its leader names, and applies when the leader says so."""

    _ordered = NOTHING

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # While it applies it reads what all workers write to, and cannot say what it holds.
        self.registry.ready = lambda: not self._applying

    def _joined(self) -> None:
        super()._joined()
        if not self.poisoned and (self.serving is None or self.serving.epoch != self.epoch):
            self._tell({"type": "serving", "version": NOTHING, "digest": "", "figures": {}})

    def _on_message(self, message: Message) -> None:
        if message["type"] != "apply":
            super()._on_message(message)
            return
        version = message["version"]
        if self._staged is None or self._staged[0].version != version:
            self._tell_ended(version, "refused", "it is not staged")
        else:
            self._ordered = version
        self._consider()

    def _on_model(self, message: Message) -> None:
        self._engine.shared = message["staging"]  # type: ignore[attr-defined]
        super()._on_model(message)

    def _on_newest(self, message: Message) -> None:
        before = self._newest
        super()._on_newest(message)
        assert self._newest is not None
        serial, manifest = self._newest
        if self.serving == Served(manifest.epoch, manifest.version, manifest.digest):
            # The leader knows what is served here: not all workers have it.
            self.serving = None
        if before is None or before[0] != serial:
            self._staged = None
        elif self._staged is not None:
            self._tell_ended(manifest.version, "staged")

    def _apply_staged(self) -> None:
        if self._staged is not None and self._staged[0].version == self._ordered:
            self._ordered = NOTHING
            super()._apply_staged()


class Outcome(NamedTuple):
    """What became of an order to apply. error: empty where all workers have; refused: all are as they were."""

    error: str
    refused: bool
    figures: Mapping[str, float]


@dataclass
class _Worker:
    """A worker's connection, and what it has said over it."""

    channel: Channel
    heard_at: float
    held: Served | None = None
    known: bool = False
    """It has said what it holds"""
    staged: int = NOTHING
    """Version"""
    bytes: int = 0
    answer: str | None = ""
    """To the last order to apply: empty once it has applied, else why not; None while there is none"""
    refused: bool = False
    figures: Message = field(default_factory=dict)


class Leader(Puller):
    """count: of workers; apply_timeout_s: for all of them to apply; secret: from which their keys are derived; others:
    see Puller. The engine stages nothing."""

    def __init__(self, *args: Any, count: int, secret: str, apply_timeout_s: float, **options: Any):
        super().__init__(*args, **options)
        self._count, self._apply_timeout_s = count, apply_timeout_s
        self.registry.ready = self._complete
        roles, key_of = frozenset((WORKER,)), partial(role_key, secret)
        self._gate = Gate(self._runtime, roles, key_of, self._admit, self._enter)
        self._workers: dict[int, _Worker] = {}
        self._model: Message | None = None
        self._memory: int | None = None
        """A descriptor: memory for one version, which the workers share"""
        self._newest_message: Message = {}
        self._order: Callable[[Outcome], None] | None = None
        """Whom to tell what became of the last order to apply"""
        self.listen = self._gate.listen

    def close(self) -> None:
        super().close()
        self._gate.close()
        self._settle(Outcome("another connection has taken this one's place", False, {}))
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

    def _look(self) -> Message:
        for number, worker in list(self._workers.items()):
            if self._runtime.now() - worker.heard_at > SILENCE_SECONDS:
                worker.channel.close(f"worker {number} said nothing for {SILENCE_SECONDS:g} s")
        return super()._look()

    def _on_model(self, message: Message) -> None:
        super()._on_model(message)
        if self._memory is None:
            assert self._layout is not None
            self._memory = anonymous_file("weights-staging", self._layout.slot_starts()[-1])
        self._model = {**message, "staging": {**named(self._memory), "workers": self._count}}
        self._send(self._model)

    def _new_sources(self, ranks: int) -> list[Source]:
        # Only workers pull.
        return []

    def _on_newest(self, message: Message) -> None:
        super()._on_newest(message)
        self._newest_message = {name: value for name, value in message.items() if name not in ("source", "pinned")}

    # Pulling

    def _may_begin(self, manifest: Manifest) -> bool:
        # Who still applies reads what the others would write to.
        idle = all(worker.answer is not None for worker in self._workers.values())
        return idle and self._complete() and super()._may_begin(manifest)

    def _begin(self, serial: int, manifest: Manifest) -> None:
        super()._begin(serial, manifest)
        if self.transfer is not None:
            for worker in self._workers.values():
                worker.staged, worker.bytes = NOTHING, 0
            self._send({**self._newest_message, "lanes": [], "room": True})

    def _ended(self, number: int, worker: _Worker, message: Message) -> None:
        version, outcome, reason = message["version"], message["outcome"], f"worker {number}: {message['reason']}"
        if worker.answer is None:
            if outcome == "refused":
                worker.refused = True
                self._answered(worker, reason)
        elif self.transfer is not None and version == self.transfer.manifest.version:
            if outcome == "staged":
                worker.staged = version
                if all(one.staged == version for one in self._workers.values()) and self._complete():
                    self._staged_whole(self.transfer)
            elif outcome in ("gone", "refused"):
                self.refused += outcome == "refused"
                self._end_pull(outcome, reason)
                self._pause()

    # Applying

    def order(self, manifest: Manifest, done: Callable[[Outcome], None]) -> None:
        """Have all workers apply what they have staged; the engine stands still meanwhile. On the loop's thread."""
        if not self._complete() or any(worker.staged != manifest.version for worker in self._workers.values()):
            done(Outcome("a worker was lost meanwhile", True, {}))
            return
        for worker in self._workers.values():
            worker.answer, worker.refused = None, False
        self._order = done
        self._send({"type": "apply", "version": manifest.version})

        def late() -> None:
            if self._order is done:
                for worker in [worker for worker in self._workers.values() if worker.answer is None]:
                    worker.channel.close(f"it did not apply within {self._apply_timeout_s:g} s")

        self._runtime.call_later(self._apply_timeout_s, late)

    def _answered(self, worker: _Worker, error: str) -> None:
        worker.answer, worker.staged = error, NOTHING
        if self._order is None:
            self._consider()
            return
        answers = [one.answer for one in self._workers.values()]
        if None in answers:
            return
        workers = self._workers.values()
        failures = [answer for answer in answers if answer]
        figures = _together([one.figures for one in workers])
        self._settle(Outcome(failures[0] if failures else "", all(one.refused for one in workers), figures))

    def _settle(self, outcome: Outcome) -> None:
        order, self._order = self._order, None
        if order is not None:
            order(outcome)

    # Workers

    def _admit(self, identity: Identity, fields: Message) -> Message:
        if fields.get("epoch") != self.epoch:
            raise ProtocolError(f"this actor's epoch is {self.epoch}, not {fields.get('epoch')}")
        if identity.name not in map(str, range(self._count)):
            raise ProtocolError(f"no worker {identity.name!r} among {self._count}")
        return {"term": LEADER_TERM}

    def _enter(self, channel: Channel, identity: Identity, _fields: Message) -> None:
        number = int(identity.name)
        old = self._workers.get(number)
        if old is not None:
            old.channel.close("replaced")
        worker = self._workers[number] = _Worker(channel, self._runtime.now())
        channel.on_message = lambda channel, message: self._on_worker_message(number, worker, message)
        channel.on_close = lambda _channel, reason: self._lost(number, worker, reason)
        if self._model is not None:
            channel.send(self._model)

    def _lost(self, number: int, worker: _Worker, reason: str) -> None:
        if self._workers.get(number) is not worker:
            return
        del self._workers[number]
        reason = f"worker {number} is lost: {reason}"
        logger.warning("%s: %s", self.name, reason)
        self._staged = None
        self._settle(Outcome(reason, False, {}))
        self._end_pull("lost", reason)
        self.registry.hang_up(reason)

    def _on_worker_message(self, number: int, worker: _Worker, message: Message) -> None:
        worker.heard_at = self._runtime.now()
        kind = message["type"]
        if kind == "ping":
            worker.channel.send({"type": "pong"})
            count = message.get("bytes") or 0
            if self.transfer is not None and count > worker.bytes:
                worker.bytes, self.transfer.moved_at = count, worker.heard_at
                self.transfer.bytes = sum(one.bytes for one in self._workers.values())
        elif kind == "ended":
            self._ended(number, worker, message)
        elif kind == "serving":
            version, digest = message["version"], message["digest"]
            worker.known = True
            worker.held = None if version == NOTHING else Served(self.epoch, version, digest)
            if worker.answer is None:
                worker.figures = message["figures"]
                self._answered(worker, "")
        elif kind == "poisoned":
            worker.known, worker.held = True, None
            reason = f"worker {number}: {message['reason']}"
            if worker.answer is None and message["version"] == worker.staged:
                self._answered(worker, reason)
            else:
                self.found_torn(message["version"], reason)
        elif kind != "pulling":
            raise ProtocolError(f"a worker does not send {kind!r}")


def _together(figures: list[Message]) -> dict[str, float]:
    """What all workers have received, and the one with the most."""
    names = ("bytes_full", "bytes_delta", "bytes_relayed")
    received = [[one.get(name, 0) for name in names] for one in figures]
    return {
        **dict(zip(names, map(sum, zip(*received, strict=True)), strict=True)),
        "worker_bytes": max(map(sum, received)),
    }


class LeadingEngine:
    """An engine whose workers stage their parts: nothing arrives here.

    lives(): whether the actor's loop still runs, which orders what workers do.
    """

    def __init__(self, apply: ApplyFunction, runtime: SocketRuntime, lives: Callable[[], bool]):
        self._apply, self._runtime, self._lives = apply, runtime, lives
        self.leader: Leader | None = None

    def prepare(self, layout: Layout) -> Collection[BucketKey]:
        """See puller.Engine."""
        return layout.bucket_keys()

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See puller.Engine."""
        begun, outcomes = time.monotonic(), list[Outcome]()

        def apply_on_workers() -> None:
            outcomes.append(self._on_workers(manifest))
            if outcomes[-1].error:
                raise (WeightsRefused if outcomes[-1].refused else RuntimeError)(outcomes[-1].error)

        staged = StagedVersion(manifest.epoch, manifest.version, manifest.digest, {}, apply_on_workers)
        try:
            cost = in_figures(self._apply(staged), begun)
        except WeightsRefused as error:
            if outcomes and not outcomes[-1].refused:
                raise RuntimeError(f"the workers have applied what the engine refuses: {error}") from error
            raise
        if not outcomes or outcomes[-1].error:
            raise RuntimeError("the engine did not have all workers apply the version")
        return {**outcomes[-1].figures, **cost}

    def _on_workers(self, manifest: Manifest) -> Outcome:
        assert self.leader is not None
        answered: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._runtime.post(partial(self.leader.order, manifest, answered.put))
        while True:  # the leader answers within its deadline, as long as its loop runs
            with contextlib.suppress(queue.Empty):
                return answered.get(timeout=LOOK_SECONDS)
            if not self._lives():
                return Outcome("the connection to the trainer was closed meanwhile", False, {})


def in_figures(cost: float | Mapping[str, float] | None, begun: float) -> dict[str, float]:
    """What an engine returned, by name."""
    named = cost if isinstance(cost, Mapping) else {} if cost is None else {"pause_s": cost}
    return {"pause_s": time.monotonic() - begun, **{str(name): float(value) for name, value in named.items()}}
