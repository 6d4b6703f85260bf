"""The leader's side of an actor of several workers: all stage, verify and apply a version, or none does.

Each worker is a Receiver of its own (see worker.py) for which the leader stands in for the coordinator: it passes
layouts, offers and aborts on, and collects the answers. The coordinator sees one actor with several data addresses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torchtitan.weight_sync import wire
from torchtitan.weight_sync.connection import Connection, Server, listen
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.manifest import Layout, Manifest
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused
from torchtitan.weight_sync.states.receiver import BeginRelay, ReceiverMachine, Served
from torchtitan.weight_sync.transfer_figures import check_figures, together
from torchtitan.weight_sync.wire import Message, ProtocolError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
# To its workers the leader is a coordinator that never changes: an order comes over the one connection that there is.
LEADER_TERM = 0


class GroupOwner(Protocol):
    """The leader's receiver. Called on the loop's thread."""

    def worker_lost(self, reason: str) -> None:
        """The actor cannot take part any more: leave, and rejoin when all workers are there."""

    def part_declined(self, attempt: int, reason: str) -> None:
        """A worker cannot take the offered version now."""

    def part_refused(self, attempt: int, reason: str) -> None:
        """What a worker received is not what was offered."""

    def part_staged(self, attempt: int, worker: int) -> None:
        """A worker has everything, verified."""

    def relay_finished(self, attempt: int, error: str | None, shadow: bool = True) -> None:
        """All workers have sent their parts, or one cannot; without `shadow` because it does not hold its part."""

    def tell(self, message: Message) -> None:
        """Pass a worker's message on to the coordinator."""


@dataclass
class _Worker:
    """One worker's connection, and what it has said over it."""

    connection: Connection
    address: str
    served: Served | None
    poisoned: bool
    heard_at: float
    layout_id: str = ""
    part: str = ""
    accepted: bool | None = None
    """Answer to the current offer: whether the base of a delta is held; None: none yet"""
    progress_bytes: int = 0
    figures: Message = field(default_factory=dict)
    applied: str | None = None
    """How the current attempt's apply ended: "" well, otherwise why not; None: not yet"""
    refused: bool = False


class WorkerGroup:
    """`count` workers that connect to `address`: (host to bind to, host to say).

    Methods are for the loop's thread, those about applying for any.
    """

    def __init__(
        self,
        loop: EventLoop,
        token: str,
        machine: ReceiverMachine,
        owner: GroupOwner,
        address: tuple[str, str],
        *,
        actor: str,
        count: int,
        apply_timeout_s: float,
        trusted: bool,
    ):
        self._loop, self._token, self._machine, self._owner = loop, token, machine, owner
        self._actor, self._count, self._apply_timeout_s, self._trusted = actor, count, apply_timeout_s, trusted
        self._listener, self.address = listen(*address)
        self._workers: dict[int, _Worker] = {}
        self.current: tuple[Layout, str] | None = None
        self._when_ready: Callable[[], None] | None = None
        self._attempt: int | None = None
        self._relays: dict[int, set[int]] = {}
        """Relays that are going on, and the workers that have not finished"""
        self._when_accepted: Callable[[bool], None] | None = None
        self._changed = threading.Condition()
        self._generation = 0
        """Counts lost workers: an apply, or a joining, that began before fails"""

    def start(self) -> None:
        """Begin to accept workers."""
        Server(self._loop, self._listener, self._token, self._admit, self._on_worker)
        self._loop.call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        """Close all sockets. The loop has ended."""
        for worker in self._workers.values():
            worker.connection.socket.close()
        self._listener.close()
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    # What the receiver asks and orders

    def missing(self) -> str:
        """Why the actor cannot join yet, or nothing."""
        absent = [str(worker) for worker in range(self._count) if worker not in self._workers]
        return f"worker {', '.join(absent)} of {self._count} is not there" if absent else ""

    @property
    def generation(self) -> int:
        """Changes with every worker that is lost or replaced."""
        return self._generation

    def addresses(self) -> list[str]:
        """Where couriers send to, worker by worker."""
        return [self._workers[worker].address for worker in range(self._count)]

    def parts(self) -> list[str]:
        """What each worker needs: workers of two actors serve each other where these are equal."""
        return [self._workers[worker].part for worker in range(self._count)]

    def settle(self) -> None:
        """Before the actor (re)joins: it serves what all its workers hold, and nothing where they differ."""
        held = {worker.served for worker in self._workers.values()}
        mine = self._machine.served
        if len(held) > 1 or any(worker.poisoned for worker in self._workers.values()):
            self._machine.poisoned = True
        elif mine is None:
            (self._machine.served,) = held
            # Weights that are whole are not enough: their engine may stand still, because an apply has failed.
            if self._machine.served is not None and not self._trusted:
                self._machine.poisoned = True
        elif held != {mine}:
            self._machine.poisoned = True

    def layout(self, layout: Layout, layout_id: str, message: Message, ready: Callable[[], None]) -> None:
        """Have all workers prepare staging memory for it, then call `ready`."""
        self.current = (layout, layout_id)
        self._when_ready = ready
        for worker in self._workers.values():
            if worker.layout_id not in ("", layout_id):
                # Within an epoch that does not happen; a worker takes a layout once per connection.
                worker.connection.close("the layout changed")
                return
            if not worker.layout_id:
                self._send(worker, {"type": "layout", "layout": message["layout"]})
        self._look_whether_ready()

    def awaited(self) -> list[tuple[int, int]]:
        """What the receiver's machine waits for: every worker."""
        return [(worker, 0) for worker in range(self._count)]

    def begin(self, attempt: int, manifest: Manifest, message: Message, then: Callable[[bool], None]) -> None:
        """Offer it to all workers; when all have accepted, call then(all hold the base of a delta)."""
        self._attempt, self._when_accepted = attempt, then
        fields = ("attempt", "version", "layout_id", "checksums", "digest", "source")
        offer = {"type": "offer", **{name: message.get(name) for name in fields}}
        offer["base"] = message.get("base") if self._machine.delta else None
        # Nothing counts as served any more where the actor as a whole is poisoned.
        offer["poisoned"] = self._machine.poisoned
        for worker in self._workers.values():
            worker.accepted, worker.applied, worker.refused = None, None, False
            worker.progress_bytes, worker.figures = 0, {}
            self._send(worker, offer)

    def discard(self, attempt: int) -> None:
        """Nothing of this attempt is wanted any more."""
        if attempt == self._attempt:
            self._attempt = self._when_accepted = None
        for worker in self._workers.values():
            self._send(worker, {"type": "abort", "attempt": attempt, "reason": "the actor's attempt is over"})

    def begin_relay(self, order: BeginRelay, shadow: Served) -> None:
        """Have every worker send its part to the same worker of another actor."""
        if len(order.data) != self._count:
            raise ProtocolError(f"a relay to {order.actor} has {len(order.data)} addresses for {self._count} workers")
        self._relays[order.attempt] = set(self._workers)
        fields = {"attempt": order.attempt, "actor": order.actor, "data": order.data}
        for worker in self._workers.values():
            self._send(worker, {"type": "relay", **fields, "version": shadow.version, "digest": shadow.digest})

    def end_relay(self, attempt: int) -> None:
        """Nobody wants this relay any more."""
        self._relays.pop(attempt, None)
        for worker in self._workers.values():
            self._send(worker, {"type": "release", "attempt": attempt})

    def _relay_message(self, number: int, message: Message) -> None:
        """A worker's part of a relay is over ("sent" comes after every one), or cannot be sent ("broken")."""
        attempt = message["attempt"]
        if message["type"] == "sent":
            self._owner.tell(message)
        waiting = self._relays.get(attempt)
        if waiting is None:
            return
        waiting.discard(number)
        if message["type"] == "broken":
            shadow = bool(message.get("shadow", True))
            self._owner.relay_finished(attempt, f"worker {number}: {message['reason']}", shadow)
            self.end_relay(attempt)
        elif not waiting:
            del self._relays[attempt]
            self._owner.relay_finished(attempt, None)

    @property
    def progress_bytes(self) -> int:
        """Of the current attempt, all workers together."""
        return sum(worker.progress_bytes for worker in self._workers.values())

    def figures(self) -> Message:
        """Of the attempt that all have staged: from the first begin to the last end, sums of bytes."""
        return together([worker.figures for worker in self._workers.values()])

    # Applying (from the thread on which the engine applies)

    def apply(self, attempt: int) -> None:
        """Have every worker apply what it has staged; the engine stands still meanwhile.

        Returns when all have. Raises WeightsRefused when all have refused, and are as they were; RuntimeError when one
        has failed, is lost, or does not answer in time: then the actor is poisoned.
        """
        deadline = time.monotonic() + self._apply_timeout_s
        with self._changed:
            generation = self._generation
            if len(self._workers) != self._count:
                raise RuntimeError("a worker is lost")
            self._loop.call_from_thread(partial(self._order_apply, attempt))
            while not self._all_answered() and generation == self._generation:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RuntimeError(f"not all workers have applied within {self._apply_timeout_s:g} s")
                self._changed.wait(left)
            if generation != self._generation:
                raise RuntimeError("a worker was lost while it applied")
            answers = {number: worker.applied for number, worker in sorted(self._workers.items())}
            failed = [f"worker {number}: {reason}" for number, reason in answers.items() if reason]
            if failed and all(worker.refused for worker in self._workers.values()):
                raise WeightsRefused(failed[0])
            if failed:
                raise RuntimeError(failed[0])

    def staged(self, attempt: int, epoch: str, version: int, digest: str) -> StagedVersion:
        """For the engine: the workers hold the tensors."""
        return StagedVersion(epoch, version, digest, {}, partial(self.apply, attempt))

    def touched(self) -> bool:
        """Whether the current attempt has changed any worker, or may have."""
        with self._changed:
            return any(worker.applied is not None and not worker.refused for worker in self._workers.values())

    def check_applied(self) -> None:
        """Raises RuntimeError unless all workers have applied the current attempt."""
        with self._changed:
            if len(self._workers) != self._count or any(w.applied != "" for w in self._workers.values()):
                raise RuntimeError("the engine did not have all workers apply the version")

    def _all_answered(self) -> bool:
        return all(worker.applied is not None for worker in self._workers.values())

    def _order_apply(self, attempt: int) -> None:
        for worker in list(self._workers.values()):
            self._send(worker, {"type": "apply", "attempt": attempt})

    # Workers

    def _send(self, worker: _Worker, message: Message) -> None:
        worker.connection.send({**message, "epoch": self._machine.epoch, "term": LEADER_TERM})

    def _admit(self, role: str, fields: Message) -> Message:
        if role != "worker" or fields.get("epoch") != self._machine.epoch or fields.get("actor") != self._actor:
            raise ProtocolError(f"this port takes workers of {self._actor} in epoch {self._machine.epoch}")
        number, data, served = fields.get("worker"), fields.get("data"), fields.get("served")
        if type(number) is not int or not 0 <= number < self._count:
            raise ProtocolError(f"no worker {number!r} among {self._count}")
        if not isinstance(data, list) or [type(address) for address in data] != [str]:
            raise ProtocolError("a worker says one data address")
        wire.parse_data_address(data[0])
        if served is not None and not (isinstance(served, list) and list(map(type, served)) == [str, int, str]):
            raise ProtocolError("served is [epoch, version, digest]")
        return {"term": LEADER_TERM}

    def _on_worker(self, connection: Connection, _role: str, fields: Message) -> None:
        number = fields["worker"]
        old = self._workers.get(number)
        if old is not None:
            old.connection.close("replaced")
        served = None if fields.get("served") is None else Served(*fields["served"])
        poisoned = bool(fields.get("poisoned"))
        worker = _Worker(connection, fields["data"][0], served, poisoned, time.monotonic())
        with self._changed:
            self._workers[number] = worker
        connection.on_message = partial(self._on_message, number, worker)
        connection.on_close = partial(self._on_lost, number, worker)

    def _on_lost(self, number: int, worker: _Worker, _connection: Connection, reason: str) -> None:
        if self._workers.get(number) is not worker:
            return
        logger.warning("%s: worker %d lost: %s", self._actor, number, reason)
        with self._changed:
            del self._workers[number]
            self._generation += 1
            self._changed.notify_all()
        self._when_ready = None
        self._owner.worker_lost(f"worker {number}: {reason}")

    def _look(self) -> None:
        self._loop.call_later(LOOK_SECONDS, self._look)
        for worker in list(self._workers.values()):
            if time.monotonic() - worker.heard_at > wire.SILENCE_SECONDS:
                worker.connection.close(f"it said nothing for {wire.SILENCE_SECONDS:g} s")

    def _on_message(self, number: int, worker: _Worker, _connection: Connection, message: Message) -> None:
        worker.heard_at = time.monotonic()
        kind = message["type"]
        if kind == "ping":
            self._send(worker, {"type": "pong"})
        elif kind == "ready":
            parts = message.get("parts")
            if parts is None or len(parts) != 1:
                raise ProtocolError("a worker says the one part that it needs")
            worker.layout_id, (worker.part,) = message["layout_id"], parts
            self._look_whether_ready()
        elif kind in ("sent", "broken"):
            self._relay_message(number, message)
        elif message.get("attempt") != self._attempt:
            return
        elif kind == "accept":
            worker.accepted = bool(message.get("base"))
            self._look_whether_accepted()
        elif kind == "decline":
            self._owner.part_declined(message["attempt"], f"worker {number}: {message['reason']}")
        elif kind == "progress":
            worker.progress_bytes = message["bytes"]
        elif kind == "staged":
            worker.figures = check_figures(message.get("figures"))
            self._owner.part_staged(message["attempt"], number)
        elif kind in ("refused", "applied", "poisoned"):
            self._on_end(number, worker, message)
        else:
            raise ProtocolError(f"a worker does not send {kind!r}")

    def _on_end(self, number: int, worker: _Worker, message: Message) -> None:
        if message["type"] == "refused" and self._machine.wants(message["attempt"]):
            self._owner.part_refused(message["attempt"], f"worker {number}: {message['reason']}")
            return
        with self._changed:
            worker.refused = message["type"] == "refused"
            worker.applied = "" if message["type"] == "applied" else message["reason"]
            if not worker.applied:
                worker.served = Served(self._machine.epoch, message["version"], message["digest"])
                worker.poisoned = False
            elif not worker.refused:
                worker.poisoned = True
            self._changed.notify_all()

    def _look_whether_ready(self) -> None:
        ready, current = self._when_ready, self.current
        if ready is None or current is None or len(self._workers) != self._count:
            return
        if all(worker.layout_id == current[1] for worker in self._workers.values()):
            self._when_ready = None
            ready()

    def _look_whether_accepted(self) -> None:
        then = self._when_accepted
        if then is not None and all(worker.accepted is not None for worker in self._workers.values()):
            self._when_accepted = None
            then(all(worker.accepted for worker in self._workers.values()))
