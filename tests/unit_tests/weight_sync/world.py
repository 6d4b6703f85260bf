"""A whole weight synchronisation in one thread: the real state machines, queues for sockets, numbers for bytes.

Every connection is a FIFO that can be cut, every step of every part an event that may happen in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.unit_tests.weight_sync.parts import (
    RUBBISH,
    ActorProcess,
    Key,
    Message,
    Rank,
    Sending,
    Shape,
    Violation,
    digest_of,
    require,
)
from torchtitan.weight_sync.states.commands import Command, Disconnect, HangUp, Record, Settings, ToActor, ToCourier
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine
from torchtitan.weight_sync.states.receiver import ReceiverMachine, ReceiverState
from torchtitan.weight_sync.states.slot import SlotState, SlotView

Event = tuple[int, int, int]
"""(what, who, which): an index into World.handlers and its arguments"""
FAULTS = 13


class World:
    """Everything, and the events that may happen to it."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.settings = Settings(
            world_size=shape.ranks,
            evict_after_versions=4,
            delta=shape.delta,
            full_every=shape.full_every,
            relay=shape.relay,
            relay_fanout=shape.fanout,
        )
        self.all_keys: list[Key] = [(rank, bucket) for rank in range(shape.ranks) for bucket in range(shape.buckets)]
        self.keys = [
            [key for key in self.all_keys if sum(key) % shape.workers == worker] for worker in range(shape.workers)
        ]
        self.handlers: tuple[Callable[[int, int], None], ...] = (
            self.connect_courier,
            self.courier_reads,
            self.coordinator_reads_courier,
            self.courier_hashes,
            self.courier_sends,
            self.courier_lets_go,
            self.connect_actor,
            self.actor_reads,
            self.coordinator_reads_actor,
            self.actor_receives,
            self.engine_applies,
            self.actor_relays,
            self.actor_reads_late,
        )
        self.now = 0.0
        self.epoch = 0
        self.lives = self.sessions = self.term = 0
        self.index = {f"actor-{number}": number for number in range(shape.actors)}
        self.published: dict[str, tuple[int, int]] = {}
        """digest -> (epoch, version) of everything that was ever published"""
        self.counts: dict[str, int] = {}
        """Journal events"""
        self.from_trainer: dict[tuple[int, int], int] = {}
        """(epoch, version) -> how many offers of it the couriers had to serve"""
        self.applied_versions: set[tuple[int, int]] = set()
        self.acknowledged: set[int] = set()
        """Sessions in which a version was applied"""
        self.corrupt_next = False
        self.corruptions = self.faults = 0
        self.actors: list[ActorProcess] = []
        self.start_trainer(-1)
        for number in range(shape.actors):
            self.lives += 1
            self.actors.append(ActorProcess(self, number, self.lives))

    def start_trainer(self, version: int) -> None:
        """A launch: a new epoch, in which `version` is what the checkpoint holds (-1: there is none)."""
        self.epoch += 1
        self.term = 0
        self.version = version
        self.ranks = [Rank(self, number) for number in range(self.shape.ranks)]
        self.start_coordinator()

    # Events of the trainer

    @property
    def owed(self) -> int | None:
        status = self.coordinator.status()
        return self.ranks[0].boundary.owed(status["newest"], status["dropped"])

    def train(self) -> None:
        """A batch: reserve, vote, step, and snapshot or skip on all ranks."""
        self.version += 1
        noes = sum(not rank.boundary.reserve() for rank in self.ranks)
        for rank in self.ranks:
            rank.boundary.commit(self.version, noes)
        self.check_ranks()

    def snapshot_owed(self) -> None:
        """Ordered while there is no data; a rank without a slot fails alone, and the version is dropped for all."""
        owed = self.owed
        if owed is not None:
            for rank in self.ranks:
                rank.boundary.snapshot_owed(owed)

    def check_ranks(self) -> None:
        taken = {(rank.boundary.serial, rank.boundary.serial in rank.taken) for rank in self.ranks}
        require(len(taken) == 1, f"ranks disagree on whether version {self.version} is skipped")

    def resume(self, back: int) -> None:
        """The job dies and is resumed from a checkpoint that is `back` versions old; actors live on.

        What the old coordinator has sent is still on its way.
        """
        for actor in self.actors:
            actor.end_connection()
            actor.links.clear()
            actor.relaying.clear()
            # An apply of the old receiver is refused by the engine.
            actor.applying = None
        self.start_trainer(max(-1, self.version - back))
        for actor in self.actors:
            actor.machine = ReceiverMachine(f"e{self.epoch}", actor.machine.serving, actor.process)
        if self.version >= 0:
            # What the checkpoint holds is published before the first batch.
            self.version -= 1
            self.train()

    # Events of the coordinator

    def start_coordinator(self) -> None:
        """The first one, or the next term after a death. Its connections are cut."""
        self.term += 1
        self.coordinator = CoordinatorMachine(self.settings, self.term)
        self.run(self.coordinator.layout_known({}, "layout", digest_of, self.now))
        for rank in self.ranks:
            self.cut_courier(rank.number)
        for actor in self.actors:
            if actor.session is not None:
                actor.end_connection()
                self.post(actor, {"type": "end"})

    def post(self, actor: ActorProcess, message: Message) -> None:
        actor.inbox.append((f"e{self.epoch}", self.term, message))

    def run(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, ToCourier):
                for rank in self.ranks if command.rank is None else (self.ranks[command.rank],):
                    if rank.connected:
                        rank.inbox.append(command.message)
                if command.message["type"] == "send":
                    self.check_send(command.message)
            elif isinstance(command, ToActor):
                actor = self.actors[self.index[command.actor]]
                if actor.session == command.session:
                    self.post(actor, command.message)
            elif isinstance(command, Disconnect):
                actor = self.actors[self.index[command.actor]]
                if actor.session == command.session:
                    # What was sent before is still read, then the end is seen.
                    actor.session = None
                    self.post(actor, {"type": "end"})
            elif isinstance(command, HangUp):
                require(self.ranks[command.rank].frozen, "the coordinator hangs up on a courier that shows life")
                self.cut_courier(command.rank, told=True)
            else:
                self.note(command)

    def note(self, record: Record) -> None:
        event, fields = record.event, record.fields
        self.counts[event] = self.counts.get(event, 0) + 1
        if event == "publish":
            self.published[fields["digest"]] = (self.epoch, fields["version"])
        elif event == "applied":
            self.applied_versions.add((self.epoch, fields["version"]))
            self.acknowledged.add(self.coordinator.actors[fields["actor"]].session)
        elif event == "poisoned":
            require(not self.coordinator.actors[fields["actor"]].serves, "prompts are sent to a poisoned actor")
        elif event == "offer" and fields["source"] is None:
            key = (self.epoch, fields["version"])
            self.from_trainer[key] = self.from_trainer.get(key, 0) + 1
            # While nothing has gone wrong or stood still for long enough to look so.
            if self.shape.relay and not self.faults and not self.counts.get("abort") and self.now < 0.5:
                require(self.from_trainer[key] <= self.shape.fanout, "the trainer sent a version too often")
        elif event == "abort" and "checksum" in fields["reason"]:
            self.corruptions -= 1
            require(self.corruptions >= 0, "bytes changed although nothing was corrupted")

    def check_send(self, message: Message) -> None:
        if message["base_serial"] is not None:
            session = self.coordinator.actors[message["actor"]].session
            require(session in self.acknowledged, "the first version after a rejoin is not full")

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for actor in self.actors:
            if not actor.frozen and actor.session is not None and not actor.outbox:
                self.run(self.coordinator.actor_message(actor.name, actor.session, {"type": "ping"}, self.now))
        for rank in self.ranks:
            if rank.connected and not rank.frozen:
                self.coordinator.courier_heard(rank.number, self.now)
        self.run(self.coordinator.tick(self.now))

    # Events of couriers

    def connect_courier(self, rank_number: int, _: int = 0) -> None:
        rank = self.ranks[rank_number]
        rank.connected = True
        self.run(self.coordinator.courier_joined(rank_number, self.now))
        for serial in sorted(rank.checksums, reverse=True):
            rank.report(serial)
        for serial, version in rank.failed:
            rank.tell({"type": "failed", "serial": serial, "version": version})

    def cut_courier(self, rank_number: int, told: bool = False) -> None:
        """The control connection breaks: attempts end, leases end. told: the coordinator knows."""
        rank = self.ranks[rank_number]
        was_connected, rank.connected = rank.connected, False
        rank.inbox.clear()
        rank.outbox.clear()
        rank.stop(lambda sending: True)
        rank.keeper.end_all_leases()
        if was_connected and not told:
            self.run(self.coordinator.courier_lost(rank_number, self.now))

    def kill_courier(self, rank_number: int, _: int = 0) -> None:
        self.cut_courier(rank_number)
        self.ranks[rank_number].start_courier()

    def courier_reads(self, rank: int, _: int) -> None:
        self.ranks[rank].read()

    def courier_hashes(self, rank: int, _: int) -> None:
        self.ranks[rank].hash()

    def courier_sends(self, rank: int, link: int) -> None:
        self.ranks[rank].send(self.ranks[rank].sending[link])

    def courier_lets_go(self, rank: int, _: int) -> None:
        self.ranks[rank].let_go(self.ranks[rank].stopping.pop(0))

    def coordinator_reads_courier(self, rank: int, _: int) -> None:
        message = self.ranks[rank].outbox.popleft()
        self.run(self.coordinator.courier_message(rank, message, self.now))

    def deliver(self, sender: int | str, sending: Sending, key: Key, payload: int | tuple[int, int]) -> None:
        if self.corrupt_next:
            self.corrupt_next, payload = False, RUBBISH
            self.corruptions += 1
        links = self.actors[sending.actor].links
        links.setdefault((sender, sending.worker), deque()).append((sending.attempt, key, payload))

    # Events of actors

    def connect_actor(self, number: int, _: int = 0) -> None:
        actor = self.actors[number]
        self.sessions += 1
        actor.session = self.sessions
        actor.outbox.clear()
        fields = {**actor.machine.hello_fields(), "data": actor.address}
        actor.machine.connected(self.term)
        self.run(self.coordinator.actor_joined(actor.name, self.sessions, fields, self.now))

    def cut_actor(self, number: int, _: int = 0) -> None:
        """The control connection breaks and both ends notice."""
        actor = self.actors[number]
        session, actor.session = actor.session, None
        if session is not None:
            self.run(self.coordinator.actor_lost(actor.name, session, "connection reset", self.now))
        actor.outbox.clear()
        actor.inbox.clear()
        actor.obey(actor.machine.disconnected())

    def kill_actor(self, number: int, _: int = 0) -> None:
        """SIGKILL and a fresh process without weights."""
        actor = self.actors[number]
        session, actor.session = actor.session, None
        if session is not None:
            self.run(self.coordinator.actor_lost(actor.name, session, "connection reset", self.now))
        self.lives += 1
        self.actors[number] = ActorProcess(self, number, self.lives)
        for rank in self.ranks:
            for sending in rank.stop(lambda sending: sending.actor == number):
                rank.broken(sending.attempt, "connection reset")
        for source in self.actors:
            for sending in [sending for sending in source.relaying if sending.actor == number]:
                source.relaying.remove(sending)
                source.obey(source.machine.relay_finished(sending.attempt, "connection reset"))

    def reset_data(self, number: int, _: int = 0) -> None:
        """All data connections of an actor break."""
        actor = self.actors[number]
        for link in list(actor.links):
            actor.lose_connection(link)
        for rank in self.ranks:
            for sending in rank.stop(lambda sending: sending.actor == number):
                rank.broken(sending.attempt, "connection reset")

    def actor_reads(self, number: int, _: int) -> None:
        actor = self.actors[number]
        actor.read(actor.inbox.popleft())

    def actor_reads_late(self, number: int, _: int) -> None:
        actor = self.actors[number]
        machine = actor.machine
        before = (machine.state, machine.attempt, machine.highest_attempt, machine.served, set(machine.relays))
        actor.read(actor.late.popleft())
        after = (machine.state, machine.attempt, machine.highest_attempt, machine.served, machine.relays)
        require(before == after, "a message of an old epoch or term was obeyed")

    def actor_receives(self, number: int, which: int) -> None:
        actor = self.actors[number]
        link = [link for link, queue in actor.links.items() if queue][which]
        actor.receive(link)

    def actor_relays(self, number: int, which: int) -> None:
        actor = self.actors[number]
        actor.relay(actor.relaying[which])

    def engine_applies(self, number: int, _: int) -> None:
        self.actors[number].apply()

    def coordinator_reads_actor(self, number: int, _: int) -> None:
        actor = self.actors[number]
        assert actor.session is not None
        message = actor.outbox.popleft()
        self.run(self.coordinator.actor_message(actor.name, actor.session, message, self.now))

    # What may happen next

    def enabled(self) -> list[Event]:
        """Every event that can happen now, apart from training, time and faults."""
        events: list[Event] = []
        for number, rank in enumerate(self.ranks):
            if rank.connected and rank.outbox:
                events.append((2, number, 0))
            if rank.frozen:
                continue
            if not rank.connected:
                events.append((0, number, 0))
            elif rank.inbox:
                events.append((1, number, 0))
            if rank.hashing:
                events.append((3, number, 0))
            if rank.sending:
                events += [(4, number, which) for which in range(len(rank.sending))]
            if rank.stopping:
                events.append((5, number, 0))
        for number, actor in enumerate(self.actors):
            if actor.session is not None and actor.outbox:
                events.append((8, number, 0))
            if actor.frozen:
                continue
            if actor.inbox:
                events.append((7, number, 0))
            # Not before it knows of the next term.
            if actor.late and actor.late[0][:2] != (actor.machine.epoch, actor.machine.term):
                events.append((12, number, 0))
            if actor.session is None and actor.machine.state is ReceiverState.DISCONNECTED:
                events.append((6, number, 0))
            if actor.applying is not None:
                events.append((10, number, 0))
            which = 0
            for queue in actor.links.values():
                if queue:
                    events.append((9, number, which))
                    which += 1
            if actor.relaying:
                events += [(11, number, which) for which in range(len(actor.relaying))]
        return events

    def happen(self, event: Event) -> None:
        self.handlers[event[0]](event[1], event[2])

    def fault(self, kind: int, number: int) -> None:
        """One of FAULTS faults, to actor or rank `number`."""
        self.faults += 1
        actor_number, rank_number = number % self.shape.actors, number % self.shape.ranks
        actor = self.actors[actor_number]
        if kind == 0:
            actor.next_outcome = "engine failed"
        elif kind == 1:
            actor.next_outcome = "refused"
        elif kind == 2:
            actor.frozen = not actor.frozen
        elif kind == 3:
            if not actor.frozen:
                self.cut_actor(actor_number)
        elif kind == 4:
            self.kill_actor(actor_number)
        elif kind == 5:
            self.kill_courier(rank_number)
        elif kind == 6:
            self.cut_courier(rank_number)
        elif kind == 7:
            self.start_coordinator()
        elif kind == 8:
            self.corrupt_next = True
        elif kind == 9:
            self.reset_data(actor_number)
        elif kind == 10:
            for _ in range(14):
                self.tick(0.4)
        elif kind == 11:
            self.resume(number % 2)
        elif kind == 12:
            self.ranks[rank_number].frozen = not self.ranks[rank_number].frozen

    # The end

    def settle(self) -> None:
        """Heal everything and let every part do its work: then nothing may be stuck or leaked."""
        for actor in self.actors:
            actor.frozen = False
        for rank in self.ranks:
            rank.frozen = False
        problems: list[str] = []
        for _ in range(500):
            for step in range(2000):
                events = self.enabled()
                if not events:
                    break
                self.happen(events[step % len(events)])
            else:
                raise Violation("there is no end to it")
            problems = self.unsettled()
            if not problems:
                return
            if self.owed is not None and all(rank.writer.has_free() for rank in self.ranks):
                self.snapshot_owed()
            self.tick(0.4)
        raise Violation("; ".join(problems))

    def unsettled(self) -> list[str]:
        """What keeps this world from rest: nothing, once it has settled."""
        problems = []
        newest = self.coordinator.versions.newest
        if newest is None or newest.version != self.version:
            problems.append(f"version {self.version} was never published")
            return problems
        for actor in self.actors:
            served = actor.machine.serving
            if served is None or (served.epoch, served.version) != (f"e{self.epoch}", self.version):
                problems.append(f"{actor.name} starves: {served}")
            if actor.machine.relays or actor.relaying:
                problems.append(f"{actor.name} relays for ever")
        kept = {serial for serial in (newest.serial, self.coordinator.retained) if serial is not None}
        for rank in self.ranks:
            views = [SlotView.unpack(word) for word in rank.words]
            filled = {view.serial for view in views if view.state is not SlotState.FREE}
            if filled != kept or any(view.state is SlotState.LEASED for view in views):
                problems.append(f"slots of rank {rank.number} leaked: {views}")
        return problems
