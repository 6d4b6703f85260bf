"""The couriers of equal trainer ranks, as one: their slots' words, one real SlotWriter and SlotKeeper, their sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from simulator.broken import ProtocolBroken
from simulator.clock import Clock
from simulator.control import Channel, Latency
from simulator.network import Network
from simulator.scenario import Scenario
from torchtitan.weight_sync.states.boundary import Boundary
from torchtitan.weight_sync.states.commands import Message
from torchtitan.weight_sync.states.receiver import BucketKey
from torchtitan.weight_sync.states.slot import SlotKeeper, SlotWriter

# A connection is there after its own and the protocol's handshake.
HANDSHAKE_WAYS = 4


class Target(Protocol):
    """What a sender needs of an actor."""

    name: str
    ingress: int

    def sending(self, attempt: int, sender: str, flow: int) -> None:
        """Bytes begin to arrive."""

    def delivered(self, attempt: int, sender: str, size: float, keys: list[BucketKey], version: int) -> None:
        """Everything of a sender has arrived: `size` bytes, which were `version` when the last of them left."""

    def connection_lost(self, attempt: int, sender: str) -> None:
        """A data connection broke."""

    def breaks_after(self, attempt: int, sender: str) -> float | None:
        """The share of its bytes after which this sender's connection breaks; None: it does not."""


class Courier:
    """Representative of `weight` ranks that do everything at the same time.

    Their keepers would go through the same states in lockstep: one stands for all. What differs is only how long the
    slowest of their messages takes, and that their connections load the actor's link `weight` times.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        scenario: Scenario,
        latency: Latency,
        rank: int,
        weight: int,
        targets: Mapping[str, Target],
        to_coordinator: Callable[[int, Message], None],
    ):
        self.rank, self.weight, self.name = rank, weight, f"rank {rank}"
        self.sent_bytes = 0.0
        self.connected = False
        self._clock, self._network, self._scenario, self._latency = clock, network, scenario, latency
        self._targets, self._receive = targets, to_coordinator
        # A base of deltas is kept besides what deliveries need.
        slots = scenario.weight_sync.num_slots + scenario.weight_sync.delta
        self.words = [0] * slots
        self.memory = [-1] * slots
        """Version whose bytes lie in the slot, whatever its word says"""
        self.writer = SlotWriter(self.words)
        self.boundary = Boundary(self)
        self.fenced_at = 0.0
        self.newest_told = 0
        """Serial of the newest version that it was told is published"""
        self._reserved: int | None = None
        self.egress = network.add_link(scenario.rank_gigabytes_per_s * 1e9)
        self.keeper = SlotKeeper(self.words)
        self._generation = 0
        self._start()

    def _start(self) -> None:
        self._checksums: set[int] = set()
        self._hashing: set[int] = set()
        self._hashed_until = 0.0
        self._sending: dict[str, tuple[int, int, int | None]] = {}
        """actor -> (attempt, serial, flow, None while the connection is being made)"""
        self._connections: set[str] = set()
        self._out = Channel(self._clock, self._latency, lambda message: self._receive(self.rank, message), self.weight)

    # The trainer's side (see states.boundary.SlotPort)

    def reserve(self) -> bool:
        if self._reserved is None:
            self._reserved = self.writer.reserve()
        if self._reserved is None:
            self._tell({"type": "need_slot"})
        return self._reserved is not None

    def release(self) -> None:
        if self._reserved is not None:
            self.writer.release(self._reserved)
            self._reserved = None

    def snapshot(self, version: int, serial: int) -> None:
        """The copy is made beside what the rank does next; `fenced_at` says until when."""
        assert self._reserved is not None
        index, self._reserved = self._reserved, None
        self.writer.begin(index, version, serial)
        self.memory[index] = version
        seconds = self._scenario.shard_bytes / (self._scenario.snapshot_gigabytes_per_s * 1e9)
        self.fenced_at = max(self.fenced_at, self._clock.now) + seconds
        self._clock.call_at(self.fenced_at, self._snapshotted, index)

    def _snapshotted(self, index: int) -> None:
        self.writer.finish(index)
        self.look()

    def fail(self, version: int, serial: int) -> None:
        self._tell({"type": "failed", "serial": serial, "version": version})

    # The courier's

    def connect(self) -> None:
        """The coordinator has taken the hello."""
        self.connected = True
        for serial in sorted(self._checksums):
            self._tell_snapped(serial)
        self.look()

    def die(self) -> None:
        """SIGKILL. Slots stay, what it knew is gone; connect() after a while."""
        self.connected = False
        self._out.cut()
        for actor in list(self._sending):
            attempt = self._sending[actor][0]
            self._stop(actor)
            self._targets[actor].connection_lost(attempt, self.name)
        self._generation += 1
        self.keeper = SlotKeeper(self.words)
        self._start()

    def look(self) -> None:
        """Read from the words what the trainer has done."""
        filled = self.keeper.filled()
        self._checksums.intersection_update(filled)
        for serial in sorted(filled):
            if serial not in self._checksums and serial not in self._hashing:
                self._hashing.add(serial)
                self.keeper.hold(serial, "checksum")
                seconds = self._scenario.shard_bytes / (self._scenario.checksum_gigabytes_per_s * 1e9)
                self._hashed_until = max(self._hashed_until, self._clock.now) + seconds
                self._clock.call_at(self._hashed_until, self._hashed, serial, self._generation)

    def _hashed(self, serial: int, generation: int) -> None:
        if generation == self._generation:
            self._hashing.discard(serial)
            self._checksums.add(serial)
            self._tell_snapped(serial)
            self.keeper.let_go(serial, "checksum")

    def _tell_snapped(self, serial: int) -> None:
        found = self.keeper.filled().get(serial)
        if found is not None:
            sums = [str(self.memory[found[0]])]
            self._tell({"type": "snapped", "serial": serial, "version": found[1], "checksums": sums})

    def _tell(self, message: Message) -> None:
        if self.connected:
            self._out.send(message)

    def message(self, message: Message) -> None:
        """From the coordinator."""
        kind = message["type"]
        if kind == "publish":
            self.newest_told = max(self.newest_told, message["serial"])
            self.keeper.publish(message["serial"])
        elif kind == "drop":
            self.keeper.drop(message["serial"])
        elif kind == "retain":
            self.keeper.retain(message["serial"])
        elif kind == "lease":
            for attempt, _actor in message["attempts"]:
                if not self.keeper.lease(message["serial"], attempt):
                    self._tell({"type": "broken", "attempt": attempt, "reason": "no such snapshot here"})
        elif kind == "send":
            self._send(message)
        elif kind == "release":
            self.keeper.end_lease(message["attempt"])
        elif kind == "abort":
            for actor, sending in list(self._sending.items()):
                if sending[0] == message["attempt"]:
                    self._stop(actor)
            self.keeper.end_lease(message["attempt"])
        elif kind == "forget":
            self._connections.discard(message["actor"])
        else:
            raise ValueError(f"no courier knows {kind!r}")

    def _send(self, message: Message) -> None:
        attempt, serial, base_serial = message["attempt"], message["serial"], message["base_serial"]
        found = self.keeper.filled()
        for needed in (serial,) if base_serial is None else (serial, base_serial):
            if needed not in found or attempt not in self.keeper.leases(needed):
                self._tell({"type": "broken", "attempt": attempt, "reason": "the slot is not leased"})
                return
        actor = message["actor"]
        self._stop(actor)
        self.keeper.hold(serial, f"attempt {attempt}")
        self._sending[actor] = (attempt, serial, None)
        delta = base_serial is not None
        if actor in self._connections:
            self._begin(actor, attempt, delta)
        else:
            self._connections.add(actor)
            seconds = sum(self._latency.draw(self.weight) for _ in range(HANDSHAKE_WAYS))
            self._clock.call_later(seconds, self._begin, actor, attempt, delta)

    def _begin(self, actor: str, attempt: int, delta: bool) -> None:
        if actor not in self._sending or self._sending[actor][0] != attempt:
            return
        serial = self._sending[actor][1]
        target = self._targets[actor]
        size = self._scenario.shard_bytes * (self._scenario.delta_share if delta else 1.0)
        breaks_after = target.breaks_after(attempt, self.name)

        def done() -> None:
            self.sent_bytes += moving * self.weight
            found = self.keeper.filled().get(serial)
            if found is None:
                raise ProtocolBroken(f"{self.name}: the slot of snapshot {serial} was freed while it was sent")
            del self._sending[actor]
            self.keeper.let_go(serial, f"attempt {attempt}")
            if breaks_after is None:
                target.delivered(attempt, self.name, size * self.weight, [(self.rank, 0)], self.memory[found[0]])
            else:
                self._connections.discard(actor)
                self._tell({"type": "broken", "attempt": attempt, "reason": "connection reset"})
                target.connection_lost(attempt, self.name)

        moving = size if breaks_after is None else size * breaks_after
        flow = self._network.start(self.egress, target.ingress, moving, self.weight, done)
        self._sending[actor] = (attempt, serial, flow)
        target.sending(attempt, self.name, flow)

    def reset(self, actor: str, attempt: int) -> None:
        """The actor has closed its data connection, or is dead."""
        if actor in self._sending and self._sending[actor][0] == attempt:
            self._stop(actor)
            self._tell({"type": "broken", "attempt": attempt, "reason": "the peer closed the connection"})

    def _stop(self, actor: str) -> None:
        """Nothing touches the slot for this actor any more; the connection, within a frame, is lost."""
        sending = self._sending.pop(actor, None)
        if sending is None:
            return
        attempt, serial, flow = sending
        self._connections.discard(actor)
        if flow is not None:
            self.sent_bytes += self._network.moved(flow)
            self._network.cancel(flow)
        self.keeper.let_go(serial, f"attempt {attempt}")
