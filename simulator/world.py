"""A whole job in virtual time: the real state machines of weight_sync.states between modelled trainers and actors."""

from __future__ import annotations

import bisect
from collections import Counter

from simulator.actors import SimulatedActor
from simulator.broken import ProtocolBroken
from simulator.clock import Clock
from simulator.control import Channel, Latency, random_for
from simulator.courier import Courier
from simulator.engine import Engine
from simulator.network import Network
from simulator.rollouts import Rollouts
from simulator.scenario import Scenario
from simulator.trainer import Trainer
from torchtitan.weight_sync.states.actor import ActorState
from torchtitan.weight_sync.states.commands import (
    Command,
    Disconnect,
    HangUp,
    Message,
    Record,
    Settings,
    ToActor,
    ToCourier,
)
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine
from torchtitan.weight_sync.states.receiver import BucketKey

TERM = 1
# As often as the real coordinator judges deadlines.
TICK_S = 0.1
NEWS = ("applied", "publish", "evict", "poisoned", "refused")


class World:
    """Call run() once."""

    def __init__(self, scenario: Scenario, asynchronous: bool = True):
        self.scenario, self.asynchronous = scenario, asynchronous
        self.clock = Clock()
        self.network = Network(self.clock)
        self.rollouts = Rollouts(self.clock, scenario, self._data_came)
        self.published: list[int] = []
        """Versions, ascending"""
        self.records: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        """By phase; those of actors that merely joined anew are left out"""
        self.applied = self.superseded = self.engine_restarts = 0
        self.delays: list[float] = []
        """Seconds from a version's snapshot to its apply, per actor"""
        self.transfers: list[float] = []
        self._digests: dict[str, int] = {}
        self._committed: dict[int, float] = {}
        self._sessions = 0
        self._connections: dict[str, tuple[int, Channel, Channel]] = {}
        """actor -> session, to it, from it"""
        self._served: dict[str, int] = {}
        self._latency = self._new_latency("control")
        self.targets: dict[str, SimulatedActor] = {}
        classes = self._make_couriers()
        self.machine = CoordinatorMachine(self._settings(), TERM)
        self._make_actors()
        trainer_random = random_for(scenario.seed, "trainer")
        self.trainer = Trainer(self.clock, scenario, asynchronous, trainer_random, classes, self.rollouts, self)

    def run(self) -> None:
        """Simulate the whole time. Raises ProtocolBroken where an invariant does not hold."""
        self.execute(self.machine.layout_known({}, "layout", _digest, 0.0))
        for courier in self.couriers:
            self._connect_courier(courier)
            self._plan_courier_crash(courier)
        for actor in self.targets.values():
            actor.start()
        self.trainer.start()
        self.clock.call_later(TICK_S, self._tick)
        self.clock.run(self.scenario.seconds)
        for engine in self.rollouts.engines:
            engine.account()
        self._check_slots()

    # Making

    def _new_latency(self, use: str) -> Latency:
        scenario = self.scenario
        return Latency(scenario.latency_s, scenario.latency_jitter_s, random_for(scenario.seed, use))

    def _make_couriers(self) -> list[tuple[int, float, list[Courier]]]:
        scenario = self.scenario
        self.couriers: list[Courier] = []
        self._to_couriers: list[Channel] = []
        self._courier_random = random_for(scenario.seed, "courier faults")
        classes = []
        sizes = ((scenario.ranks - scenario.slow_ranks, 1.0), (scenario.slow_ranks, scenario.slow_rank_factor))
        for count, factor in sizes:
            weights = ([count] if scenario.aggregate else [1] * count) if count else []
            couriers = []
            for weight in weights:
                rank = len(self.couriers)
                latency = self._new_latency(f"courier {rank}")
                courier = Courier(
                    self.clock, self.network, scenario, latency, rank, weight, self.targets, self._from_courier
                )  # fmt: skip
                couriers.append(courier)
                self.couriers.append(courier)
                self._to_couriers.append(Channel(self.clock, latency, courier.message, weight))
            if count:
                classes.append((count, factor, couriers))
        return classes

    def _settings(self) -> Settings:
        sync = self.scenario.weight_sync
        return Settings(
            world_size=len(self.couriers),
            join_timeout_s=sync.join_timeout_s,
            offer_timeout_s=sync.offer_timeout_s,
            progress_timeout_s=sync.progress_timeout_s,
            apply_timeout_s=sync.apply_timeout_s,
            snapshot_timeout_s=sync.snapshot_timeout_s,
            evict_after_versions=sync.evict_after_versions,
            delta=sync.delta,
            full_every=sync.full_every,
            relay=sync.relay,
            relay_fanout=sync.relay_fanout,
        )

    def _make_actors(self) -> None:
        scenario = self.scenario
        keys: list[BucketKey] = [(courier.rank, 0) for courier in self.couriers]
        for number in range(scenario.actors):
            name = f"actor-{number}"
            slowness = scenario.slow_actor_factor if number < scenario.slow_actors else 1.0
            engine = Engine(
                self.clock,
                name,
                scenario.tokens_per_s / slowness,
                scenario.sequence_tokens_per_s / slowness,
                scenario.max_sequences,
                scenario.completion_tokens,
                self.rollouts.finished,
                lambda name=name: self.targets[name].engine_idle(),  # type: ignore[misc]
            )
            self.rollouts.engines.append(engine)
            self.targets[name] = SimulatedActor(
                self.clock,
                self.network,
                scenario,
                self._new_latency(f"{name} latency"),
                random_for(scenario.seed, f"{name} faults"),
                name,
                slowness,
                engine,
                self,
                self.targets,
                keys,
            )

    # Coordinator

    def execute(self, commands: list[Command]) -> None:
        """Obey the coordinator's machine."""
        news = False
        for command in commands:
            if isinstance(command, ToCourier):
                for rank in range(len(self.couriers)) if command.rank is None else [command.rank]:
                    if self.couriers[rank].connected:
                        self._to_couriers[rank].send(command.message)
            elif isinstance(command, ToActor):
                found = self._connections.get(command.actor)
                # An answer to a heartbeat says that the coordinator lives; here it always does.
                if found is not None and found[0] == command.session and command.message["type"] != "pong":
                    found[1].send(command.message)
            elif isinstance(command, Disconnect):
                self._evicted(command)
            elif isinstance(command, HangUp):
                raise ProtocolBroken(f"rank {command.rank}: a courier that shows life was taken for frozen")
            elif isinstance(command, HangUp):
                raise ProtocolBroken(f"the courier of rank {command.rank} shows life and is hung up on")
            elif isinstance(command, Record):
                news = news or command.event in NEWS
                self._note(command)
        if news:
            self.trainer.look()

    def _note(self, record: Record) -> None:
        self.records[record.event] += 1
        if record.event == "publish":
            version = record.fields["version"]
            self._digests[record.fields["digest"]] = version
            self.published.append(version)
            # Couriers pin it when the message has arrived; looked at when it surely has.
            self.clock.call_later(self.scenario.train_s / 4, self._check_slots)
        elif record.event == "evict" and record.fields["reason"] != "joined anew":
            self.evictions[record.fields["phase"]] += 1
        elif record.event == "applied":
            self.transfers.append(record.fields["figures"]["transfer_s"])

    def _tick(self) -> None:
        self.clock.call_later(TICK_S, self._tick)
        for courier in self.couriers:
            if courier.connected:
                # Their heartbeats, which nothing delays here.
                self.machine.courier_heard(courier.rank, self.clock.now)
        # Their heartbeats, without the way that they take: nothing freezes a courier here.
        for courier in self.couriers:
            if courier.connected:
                self.machine.courier_heard(courier.rank, self.clock.now)
        self.execute(self.machine.tick(self.clock.now))

    # Couriers

    def _from_courier(self, rank: int, message: Message) -> None:
        self.execute(self.machine.courier_message(rank, message, self.clock.now))

    def _connect_courier(self, courier: Courier) -> None:
        courier.connected = True
        self.execute(self.machine.courier_joined(courier.rank, self.clock.now))
        courier.connect()

    def _plan_courier_crash(self, courier: Courier) -> None:
        rate = self.scenario.courier_crashes_per_hour * courier.weight / 3600
        if rate:
            self.clock.call_later(self._courier_random.expovariate(rate), self._crash_courier, courier)

    def _crash_courier(self, courier: Courier) -> None:
        courier.die()
        rank, latency = courier.rank, self._new_latency(f"courier {courier.rank} at {self.clock.now}")
        self._to_couriers[rank].cut()
        self._to_couriers[rank] = Channel(self.clock, latency, courier.message, courier.weight)
        self.clock.call_later(self.scenario.latency_s, self._courier_lost, rank)
        self.clock.call_later(self.scenario.courier_restart_s, self._connect_courier, courier)
        self._plan_courier_crash(courier)

    def _courier_lost(self, rank: int) -> None:
        self.execute(self.machine.courier_lost(rank, self.clock.now))

    # Actors (see actors.Surroundings)

    def join(self, actor: SimulatedActor) -> None:
        self._sessions += 1
        session, name = self._sessions, actor.name
        latency = self._new_latency(f"{name} session {session}")
        outward = Channel(self.clock, latency, actor.message)
        inward = Channel(self.clock, latency, lambda message: self._from_actor(name, session, message))
        self._connections[name] = (session, outward, inward)
        actor.joined_session, actor.term = session, TERM
        self.execute(self.machine.actor_joined(name, session, actor.hello(), self.clock.now))

    def _from_actor(self, name: str, session: int, message: Message) -> None:
        self.execute(self.machine.actor_message(name, session, message, self.clock.now))

    def say(self, actor: SimulatedActor, message: Message) -> None:
        found = self._connections.get(actor.name)
        if found is not None and actor.joined_session == found[0]:
            found[2].send(message)

    def hang_up(self, actor: SimulatedActor) -> None:
        actor.joined_session = None
        found = self._connections.pop(actor.name, None)
        if found is not None:
            session, outward, inward = found
            outward.cut()
            inward.cut()
            self.clock.call_later(self.scenario.latency_s, self._actor_lost, actor.name, session)

    def _actor_lost(self, name: str, session: int) -> None:
        self.execute(self.machine.actor_lost(name, session, "connection reset", self.clock.now))

    def _evicted(self, command: Disconnect) -> None:
        found = self._connections.get(command.actor)
        if found is None or found[0] != command.session:
            return
        del self._connections[command.actor]
        actor = self.targets[command.actor]
        found[2].cut()

        def over() -> None:
            if actor.joined_session == command.session:
                actor.joined_session = None
                actor.connection_over()

        found[1].end(over)

    def reset_data(self, actor: SimulatedActor, attempt: int) -> None:
        self.clock.call_later(self.scenario.latency_s, self._reset_data, actor.name, attempt)

    def _reset_data(self, name: str, attempt: int) -> None:
        for courier in self.couriers:
            courier.reset(name, attempt)
        for other in self.targets.values():
            other.relays.reset(name, attempt)

    def served(self, actor: SimulatedActor, version: int, digest: str) -> None:
        if self._digests.get(digest) != version:
            raise ProtocolBroken(f"{actor.name} serves {digest} as version {version}, which was never published")
        if actor.staged_version != version:
            raise ProtocolBroken(f"{actor.name} applied version {version} out of bytes of {actor.staged_version}")
        before = self._served.get(actor.name)
        if before is not None:
            if before > version:
                raise ProtocolBroken(f"{actor.name} went from version {before} back to {version}")
            first, last = bisect.bisect_right(self.published, before), bisect.bisect_left(self.published, version)
            self.superseded += max(0, last - first)
        self._served[actor.name] = version
        self.applied += 1
        self.delays.append(self.clock.now - self._committed[version])

    def lost_engine(self, actor: SimulatedActor) -> None:
        self.rollouts.redo(actor.engine.abandon())

    def routes_changed(self) -> None:
        self.rollouts.dispatch()

    # Trainer (see trainer.Versions)

    def _data_came(self) -> None:
        self.trainer.data_came()

    def committed(self, version: int) -> None:
        self._committed[version] = self.clock.now

    def everyone_has(self, version: int) -> bool:
        newest = self.machine.versions.newest
        if newest is None or newest.version < version:
            return False
        return all(
            (actor.version >= version and not actor.poisoned) or actor.pinned
            for actor in self.machine.actors.values()
            if actor.state is not ActorState.EVICTED and not actor.on_probation
        )

    def newest_and_dropped(self) -> tuple[int | None, list[tuple[int, int]]]:
        newest = self.machine.versions.newest
        return None if newest is None else newest.version, self.machine.dropped

    # Invariants

    def _check_slots(self) -> None:
        for courier in self.couriers:
            filled = courier.keeper.filled()
            if courier.newest_told and courier.newest_told not in filled:
                raise ProtocolBroken(f"rank {courier.rank}: the newest published version's slot was freed")
            for serial, (index, version) in filled.items():
                if courier.memory[index] != version:
                    raise ProtocolBroken(f"rank {courier.rank}: slot of snapshot {serial} was overwritten")


def _digest(checksums: list[list[str]]) -> str:
    versions = {text for rank in checksums for text in rank}
    if len(versions) != 1:
        raise ProtocolBroken(f"a version was put together out of {sorted(versions)}")
    return f"v{versions.pop()}"
