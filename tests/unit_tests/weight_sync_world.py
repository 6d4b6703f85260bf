"""A whole weight synchronisation in one thread: the real state machines, queues for sockets, strings for bytes.

Two ranks, two actors, every connection a FIFO that can be cut. A slot's memory is one string; a courier reads it at the
moment of sending, as a socket would, so that a slot that is reused too early shows up as a corrupt bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torchtitan.weight_sync.states.commands import (
    Disconnect,
    Record,
    Settings,
    ToActor,
    ToCourier,
)
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine
from torchtitan.weight_sync.states.receiver import BeginApply, Discard, ReceiverMachine, ReceiverState, Send, Served
from torchtitan.weight_sync.states.slot import SlotKeeper, SlotState, SlotView, SlotWriter

EPOCH = "1-test"
BUCKETS = 2
Message = dict[str, Any]


def content(version: int, rank: int, bucket: int) -> str:
    return f"v{version} r{rank} b{bucket}"


def digest_of(checksums: list[list[str]]) -> str:
    return "|".join(",".join(rank) for rank in checksums)


@dataclass
class Rank:
    """A trainer rank and its courier."""

    number: int
    slots: int

    def __post_init__(self) -> None:
        self.words = [0] * self.slots
        self.memory: list[int] = [-1] * self.slots
        self.writer = SlotWriter(self.words)
        self.reserved: int | None = None
        self.start_courier()

    def start_courier(self) -> None:
        self.keeper = SlotKeeper(self.words)
        self.to_coordinator: deque[Message] = deque()
        self.from_coordinator: deque[Message] = deque()
        self.connected = False
        self.sending: dict[str, tuple[int, int, int]] = {}
        """actor -> (attempt, serial, next bucket)"""


@dataclass
class ActorProcess:
    name: str
    machine: ReceiverMachine = field(default_factory=lambda: ReceiverMachine(EPOCH))
    session: int | None = None
    frozen: bool = False
    to_coordinator: deque[Message] = field(default_factory=deque)
    from_coordinator: deque[Message] = field(default_factory=deque)
    data: dict[int, deque[tuple[int, int, str]]] = field(default_factory=dict)
    """rank -> buckets on their way: (attempt, bucket, bytes)"""
    offered: Message | None = None
    staging: dict[tuple[int, int], str] = field(default_factory=dict)
    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    applying: BeginApply | None = None


class World:
    """Everything, and the events that may happen to it."""

    def __init__(self, ranks: int = 2, actors: int = 2, slots: int = 3):
        self.settings = Settings(world_size=ranks, evict_after_versions=4)
        self.ranks = [Rank(number, slots) for number in range(ranks)]
        self.actors = {f"actor-{n}": ActorProcess(f"actor-{n}") for n in range(actors)}
        self.now = 0.0
        self.term = 0
        self.sessions = 0
        self.version = -1
        self.serial = 0
        self.owed: int | None = None
        self.published: dict[str, int] = {}
        """digest -> version of everything that was ever published"""
        self.records: list[Record] = []
        self.corrupt_next = False
        self.corruptions = 0
        self.start_coordinator()

    # Coordinator

    def start_coordinator(self) -> None:
        """Kill the coordinator, if there is one, and start the next term. Its connections are cut."""
        self.term += 1
        self.coordinator = CoordinatorMachine(self.settings, self.term)
        self.run(self.coordinator.layout_known({}, "layout", digest_of, self.now))
        for rank in self.ranks:
            self.cut_courier(rank)
        for actor in self.actors.values():
            self.cut_actor(actor)

    def run(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, ToCourier):
                for rank in self.ranks if command.rank is None else [self.ranks[command.rank]]:
                    if rank.connected:
                        rank.from_coordinator.append(command.message)
            elif isinstance(command, ToActor):
                actor = self.actors[command.actor]
                if actor.session == command.session:
                    actor.from_coordinator.append(command.message)
            elif isinstance(command, Disconnect):
                actor = self.actors[command.actor]
                if actor.session == command.session:
                    actor.session = None  # what was sent before is still read, then the end is seen
            elif isinstance(command, Record):
                self.records.append(command)
                if command.event == "publish":
                    self.published[command.fields["digest"]] = command.fields["version"]

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.coordinator.tick(self.now))

    # Trainer

    def train(self) -> None:
        """A batch: reserve, vote, step, and snapshot or skip on all ranks."""
        self.version += 1
        self.serial += 1
        noes = 0
        for rank in self.ranks:
            rank.reserved = rank.writer.reserve()
            if rank.reserved is None:
                noes += 1
                rank.to_coordinator.append({"type": "need_slot"})
        if noes:
            self.owed = self.version
            for rank in self.ranks:
                if rank.reserved is not None:
                    rank.writer.release(rank.reserved)
        else:
            self.owed = None
            for rank in self.ranks:
                self.fill(rank)

    def snapshot_owed(self) -> None:
        """Ordered while there is no data; a rank without a slot fails alone, and the version is dropped for all."""
        if self.owed is None:
            return
        self.serial += 1
        failed = False
        for rank in self.ranks:
            rank.reserved = rank.writer.reserve()
            if rank.reserved is None:
                failed = True
                rank.to_coordinator.append({"type": "failed", "serial": self.serial, "version": self.version})
            else:
                self.fill(rank)
        self.owed = self.owed if failed else None

    def fill(self, rank: Rank) -> None:
        assert rank.reserved is not None
        index, rank.reserved = rank.reserved, None
        rank.writer.begin(index, self.version, self.serial)
        rank.memory[index] = self.version
        rank.writer.finish(index)
        if rank.connected:
            rank.to_coordinator.append(self.snapped(rank, self.serial, self.version))

    def snapped(self, rank: Rank, serial: int, version: int) -> Message:
        sums = [content(version, rank.number, bucket) for bucket in range(BUCKETS)]
        return {"type": "snapped", "serial": serial, "version": version, "checksums": sums}

    # Couriers

    def cut_courier(self, rank: Rank) -> None:
        """The control connection breaks: attempts end, leases end."""
        was_connected, rank.connected = rank.connected, False
        rank.to_coordinator.clear()
        rank.from_coordinator.clear()
        for actor in list(rank.sending):
            self.stop_sending(rank, actor)
        rank.keeper.end_all_leases()
        if was_connected:
            self.run(self.coordinator.courier_lost(rank.number, self.now))

    def kill_courier(self, rank: Rank) -> None:
        self.cut_courier(rank)
        rank.start_courier()

    def connect_courier(self, rank: Rank) -> None:
        if rank.connected:
            return
        rank.connected = True
        self.run(self.coordinator.courier_joined(rank.number, self.now))
        for serial, (_, version) in sorted(rank.keeper.filled().items()):
            rank.to_coordinator.append(self.snapped(rank, serial, version))

    def stop_sending(self, rank: Rank, actor: str) -> None:
        sending = rank.sending.pop(actor, None)
        if sending is not None:
            rank.keeper.let_go(sending[1], f"attempt {sending[0]}")
            self.actors[actor].data.pop(rank.number, None)  # the data connection is closed

    def courier_reads(self, rank: Rank) -> None:
        if not rank.connected or not rank.from_coordinator:
            return
        message = rank.from_coordinator.popleft()
        kind = message["type"]
        if kind == "publish":
            rank.keeper.publish(message["serial"])
        elif kind == "drop":
            rank.keeper.drop(message["serial"])
        elif kind == "lease":
            for attempt, _actor in message["attempts"]:
                if not rank.keeper.lease(message["serial"], attempt):
                    self.broken(rank, attempt, "no such snapshot")
        elif kind == "send":
            serial, attempt = message["serial"], message["attempt"]
            if attempt not in rank.keeper.leases(serial):
                self.broken(rank, attempt, "not leased")
                return
            self.stop_sending(rank, message["actor"])
            rank.keeper.hold(serial, f"attempt {attempt}")
            rank.sending[message["actor"]] = (attempt, serial, 0)
        elif kind == "release":
            rank.keeper.end_lease(message["attempt"])
        elif kind == "abort":
            for actor, sending in list(rank.sending.items()):
                if sending[0] == message["attempt"]:
                    self.stop_sending(rank, actor)
            rank.keeper.end_lease(message["attempt"])

    def broken(self, rank: Rank, attempt: int, reason: str) -> None:
        rank.to_coordinator.append({"type": "broken", "attempt": attempt, "reason": reason})

    def courier_sends(self, rank: Rank, actor: str) -> None:
        """One bucket leaves the slot's memory, as it is now."""
        if actor not in rank.sending:
            return
        attempt, serial, bucket = rank.sending[actor]
        index = next(i for i, word in enumerate(rank.words) if SlotView.unpack(word).serial == serial)
        data = content(rank.memory[index], rank.number, bucket)
        if self.corrupt_next:
            self.corrupt_next, data = False, "corrupt"
            self.corruptions += 1
        self.actors[actor].data.setdefault(rank.number, deque()).append((attempt, bucket, data))
        if bucket + 1 < BUCKETS:
            rank.sending[actor] = (attempt, serial, bucket + 1)
        else:
            del rank.sending[actor]
            rank.keeper.let_go(serial, f"attempt {attempt}")

    def coordinator_reads_courier(self, rank: Rank) -> None:
        if rank.connected and rank.to_coordinator:
            message = rank.to_coordinator.popleft()
            self.run(self.coordinator.courier_message(rank.number, message, self.now))

    # Actors

    def cut_actor(self, actor: ActorProcess) -> None:
        """The control connection breaks and both ends notice."""
        session, actor.session = actor.session, None
        if session is not None:
            self.run(self.coordinator.actor_lost(actor.name, session, "connection reset", self.now))
        actor.to_coordinator.clear()
        actor.from_coordinator.clear()
        self.obey(actor, actor.machine.disconnected())

    def kill_actor(self, actor: ActorProcess) -> None:
        """SIGKILL and a fresh process without weights."""
        self.cut_actor(actor)
        for rank in self.ranks:
            if actor.name in rank.sending:
                attempt = rank.sending[actor.name][0]
                self.stop_sending(rank, actor.name)
                self.broken(rank, attempt, "connection reset")
        self.actors[actor.name] = ActorProcess(actor.name)

    def connect_actor(self, actor: ActorProcess) -> None:
        if actor.frozen or actor.session is not None or actor.from_coordinator:
            return
        if actor.machine.state is ReceiverState.APPLYING:
            return
        if actor.machine.state is not ReceiverState.DISCONNECTED:
            self.obey(actor, actor.machine.disconnected())
        self.sessions += 1
        actor.session = self.sessions
        actor.to_coordinator.clear()
        fields = {**actor.machine.hello_fields(), "data": "127.0.0.1:1"}
        actor.machine.connected(self.term)
        self.run(self.coordinator.actor_joined(actor.name, self.sessions, fields, self.now))

    def actor_reads(self, actor: ActorProcess) -> None:
        if actor.frozen:
            return
        if not actor.from_coordinator:
            if actor.session is None and actor.machine.state is not ReceiverState.DISCONNECTED:
                self.obey(actor, actor.machine.disconnected())
            return
        message = actor.from_coordinator.popleft()
        machine, kind = actor.machine, message["type"]
        if kind == "layout":
            self.obey(actor, machine.layout("layout"))
        elif kind == "offer":
            buckets = [(rank, bucket) for rank in range(len(self.ranks)) for bucket in range(BUCKETS)]
            commands = machine.offer(message["attempt"], message["version"], message["digest"], buckets)
            if machine.wants(message["attempt"]):
                actor.offered, actor.staging = message, {}
            self.obey(actor, commands)
        elif kind == "abort":
            self.obey(actor, machine.abort(message["attempt"]))
        elif kind == "apply":
            self.obey(actor, machine.apply(message["attempt"]))

    def actor_receives(self, actor: ActorProcess, rank: int) -> None:
        queue = actor.data.get(rank)
        if actor.frozen or not queue:
            return
        attempt, bucket, data = queue.popleft()
        if not actor.machine.wants(attempt):
            return
        assert actor.offered is not None
        actor.staging[rank, bucket] = data
        intact = data == actor.offered["checksums"][rank][bucket]
        commands = actor.machine.bucket(attempt, (rank, bucket), intact)
        if intact:
            commands.append(Send({"type": "progress", "attempt": attempt, "bytes": len(actor.staging)}))
        self.obey(actor, commands)
        if actor.machine.wants(attempt) and not actor.machine.missing:
            self.obey(actor, actor.machine.staged(attempt))

    def obey(self, actor: ActorProcess, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Send) and actor.session is not None:
                actor.to_coordinator.append(command.message)
            elif isinstance(command, BeginApply):
                actor.applying = command
            elif isinstance(command, Discard):
                actor.staging = {}

    def engine_applies(self, actor: ActorProcess, fails: bool = False) -> None:
        if actor.frozen or actor.applying is None:
            return
        command, actor.applying = actor.applying, None
        # A failing engine has overwritten one bucket and not the others.
        actor.weights.update(dict(list(actor.staging.items())[:1]) if fails else actor.staging)
        self.obey(actor, actor.machine.apply_finished(command.attempt, "engine failed" if fails else None, {}))

    def ping(self, actor: ActorProcess) -> None:
        if not actor.frozen and actor.session is not None:
            actor.to_coordinator.append({"type": "ping"})

    def coordinator_reads_actor(self, actor: ActorProcess) -> None:
        if actor.session is not None and actor.to_coordinator:
            message = actor.to_coordinator.popleft()
            self.run(self.coordinator.actor_message(actor.name, actor.session, message, self.now))

    def everything_moves(self) -> None:
        """Each part does one thing."""
        for rank in self.ranks:
            self.connect_courier(rank)
            self.courier_reads(rank)
            self.coordinator_reads_courier(rank)
            for name in self.actors:
                self.courier_sends(rank, name)
        for actor in self.actors.values():
            self.actor_reads(actor)
            self.connect_actor(actor)
            for rank in self.ranks:
                self.actor_receives(actor, rank.number)
            self.engine_applies(actor)
            self.coordinator_reads_actor(actor)

    def random_event(self, random: Random) -> None:
        """One event of any kind: mostly work, now and then a fault."""
        rank = random.choice(self.ranks)
        actor = random.choice(list(self.actors.values()))
        work: list[Callable[[], None]] = [
            lambda: self.courier_reads(rank),
            lambda: self.courier_sends(rank, actor.name),
            lambda: self.coordinator_reads_courier(rank),
            lambda: self.actor_reads(actor),
            lambda: self.actor_receives(actor, rank.number),
            lambda: self.engine_applies(actor),
            lambda: self.coordinator_reads_actor(actor),
            lambda: self.connect_actor(actor),
            lambda: self.connect_courier(rank),
            lambda: self.ping(actor),
        ]
        faults: list[Callable[[], None]] = [
            lambda: self.engine_applies(actor, fails=True),
            lambda: setattr(actor, "frozen", not actor.frozen),
            lambda: None if actor.frozen else self.cut_actor(actor),
            lambda: self.kill_actor(actor),
            lambda: self.kill_courier(rank),
            self.start_coordinator,
            lambda: setattr(self, "corrupt_next", True),
            lambda: [self.tick(0.4) for _ in range(random.randrange(40))] and None,
        ]
        dice = random.random()
        if dice < 0.02:
            self.train()
        elif dice < 0.03:
            self.snapshot_owed()
        elif dice < 0.034:
            random.choice(faults)()
        elif dice < 0.06:
            self.tick(0.01)
        elif dice < 0.12:
            self.everything_moves()
        else:
            random.choice(work)()

    # What must always hold

    def check(self) -> None:
        for actor in self.actors.values():
            served = actor.machine.served
            if served is not None and not actor.machine.poisoned:
                self.check_served(actor, served)
        assert self.refusals() <= self.corruptions, "bytes changed although nothing was corrupted"
        for rank in self.ranks:
            pinned = rank.keeper.pinned
            if pinned is not None:
                assert pinned in rank.keeper.filled(), "the newest published version's slot was freed"

    def refusals(self) -> int:
        return sum(record.event == "abort" and "checksum" in record.fields["reason"] for record in self.records)

    def check_served(self, actor: ActorProcess, served: Served) -> None:
        versions = {self.version_of(text) for text in actor.weights.values()}
        assert versions == {served.version}, f"torn: {actor.weights}"
        assert self.published.get(served.digest) == served.version, "serves what was never published"

    @staticmethod
    def version_of(text: str) -> int:
        return int(text.split()[0][1:])

    def settle(self) -> None:
        """Heal everything and let every part do its work for a while: then nothing may be stuck or leaked."""
        for actor in self.actors.values():
            actor.frozen = False
        for round_number in range(600):
            if round_number % 20 == 19 and not self.unsettled():
                return
            for rank in self.ranks:
                self.connect_courier(rank)
                self.courier_reads(rank)
                for name in self.actors:
                    self.courier_sends(rank, name)
                self.coordinator_reads_courier(rank)
            for actor in list(self.actors.values()):
                self.actor_reads(actor)
                self.connect_actor(actor)
                for number in range(len(self.ranks)):
                    self.actor_receives(actor, number)
                self.engine_applies(actor)
                self.ping(actor)
                self.coordinator_reads_actor(actor)
                self.coordinator_reads_actor(actor)
            self.tick(0.2)
            self.check()
            if all(rank.writer.has_free() for rank in self.ranks):
                self.snapshot_owed()

    def unsettled(self) -> list[str]:
        """What keeps this world from rest: nothing, once it has settled."""
        if self.version < 0:
            return []
        problems = []
        newest = self.coordinator.versions.newest
        if newest is None or newest.version != self.version:
            problems.append(f"version {self.version} was never published")
        for actor in self.actors.values():
            served = actor.machine.served
            if served is None or served.version != self.version or actor.machine.poisoned:
                problems.append(f"{actor.name} starves: {served}")
        for rank in self.ranks:
            states = [SlotView.unpack(word).state for word in rank.words]
            if states.count(SlotState.FREE) != len(states) - 1:
                problems.append(f"slots of rank {rank.number} leaked: {states}")
        return problems
