"""A whole job in virtual time: the real registry, shard server and pullers, between modelled ranks, links and engines.

Trainer ranks all do the same at the same time, so one represents them all, with the bandwidth of all.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from tests.deterministic.machine import Event, Machine, Process, SimChannel, Violation
from tests.deterministic.network import Network
from tests.deterministic.parts import REGISTRY, TOKEN, Actor, Rank, Shape
from tests.journals import is_applied
from tests.simulator.rollouts import Engine, Rollouts
from tests.simulator.scenario import Scenario, slowest_of
from torchtitan.config.job_config import JobConfig
from torchtitan.weight_sync.memory.manifest import Manifest
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE
from torchtitan.weight_sync.registry.registry import Registry
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.registry.trainer_view import STATUS_SECONDS
from torchtitan.weight_sync.wire.runtime import Message, Timer

# As in trainer.controller: while there is no data, when a pending version is first tried, and how often again.
FIRST_PENDING_TRY_S = 0.01
PENDING_RETRY_S = 0.25


@dataclass
class StepTimes:
    """How the seconds of a step were spent."""

    step_s: float = 0.0
    data_wait_s: float = 0.0
    train_s: float = 0.0
    snapshot_s: float = 0.0
    sync_stall_s: float = 0.0


class Trainer:
    """The trainer; call start() once. `steps` are the finished ones."""

    def __init__(self, world: World):
        self.version = -1
        self.steps: list[StepTimes] = []
        self.boundary = world.ranks.boundary
        self._world, self._scenario, self._rollouts = world, world.scenario, world.rollouts
        self._random = Random(f"{world.scenario.seed}/trainer")
        self._times = StepTimes()
        self._began_at: float | None = None
        """When the step began; None before the first batch was handed out"""
        self._since = 0.0
        self._has_slot = self._waiting_for_data = False
        self._waited_for: int | None = None
        self._deadline: Event | None = None

    def start(self) -> None:
        """Publish version 0."""
        self._reserve()
        self._train_done()

    def data_came(self) -> None:
        """Handle a group that has become ready."""
        if self._waiting_for_data and self._rollouts.take_batch():
            self._waiting_for_data = False
            if self._began_at is None:
                self._began_at = self._since = self._world.now
            self._times.data_wait_s = self._world.now - self._since
            self._train()

    def _train(self) -> None:
        # The ranks synchronise in collectives all the time, so the slowest one determines the time.
        sigmas = slowest_of(self._scenario.ranks, self._random.random())
        seconds = self._times.train_s = self._scenario.train_s * math.exp(self._scenario.step_jitter * sigmas)
        self._world.at(seconds * self._scenario.reserve_share, None, self._reserve)
        self._world.at(seconds, None, self._train_done)

    def _reserve(self) -> None:
        self._has_slot = self.boundary.reserve()

    def _train_done(self) -> None:
        self.version += 1
        taken = self.boundary.commit(self.version, votes_against=not self._has_slot)
        if taken:
            self._world.committed(self.version)
            self._times.snapshot_s = self._scenario.snapshot_s
        wait = taken and not self._world.asynchronous
        self._world.at(self._times.snapshot_s, None, self._wait_for_actors if wait else self._step_done)

    def _wait_for_actors(self) -> None:
        self._since, self._waited_for = self._world.now, self.version
        self._deadline = self._world.at(JobConfig().blocking_timeout_s, None, self._waited)
        self.check_wait()

    def check_wait(self) -> None:
        """Check after news from the registry whether the trainer's wait has ended."""
        if self._waited_for is not None and self._world.everyone_has(self._waited_for):
            self._waited_for = None
            self._world.at(STATUS_SECONDS, None, self._waited)

    def _waited(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline, self._waited_for = None, None
            self._times.sync_stall_s = self._world.now - self._since
            self._step_done()

    def _step_done(self) -> None:
        now = self._world.now
        if self._began_at is not None:
            self._times.step_s = now - self._began_at
            self.steps.append(self._times)
            self._began_at = now
        self._times, self._since, self._waiting_for_data = StepTimes(), now, True
        self._rollouts.set_version(self.version)
        self.data_came()
        step = len(self.steps)
        self._world.at(FIRST_PENDING_TRY_S, None, lambda: self._snapshot_pending(step))

    def _snapshot_pending(self, step: int) -> None:
        """Publish a version that was skipped or dropped, while there is no data."""
        if self._waiting_for_data and step == len(self.steps):
            self._world.at(PENDING_RETRY_S, None, lambda: self._snapshot_pending(step))
            pending = self._world.pending_version()
            if pending is not None and self.boundary.snapshot_pending(pending):
                self._world.committed(pending)


class SimulatedActor(Actor):
    """An actor that pulls, applies and generates; it may freeze, or die and come back."""

    def __init__(self, world: World, shape: Shape, number: int):
        super().__init__(world, shape, [world.ranks], number, f"actor-{number}")
        scenario, network = world.scenario, world.network
        slowness = scenario.slow_actor_factor if number < scenario.slow_actors else 1.0
        self.engine = Engine(world, scenario, slowness, world.rollouts.finished)
        world.rollouts.engines.append(self.engine)
        self.crashes = self.freezes = 0
        self._network, self._scenario, self._rollouts = network, scenario, world.rollouts
        self._random = Random(f"{scenario.seed}/{self.name} faults")
        self._bytes_per_s = min(scenario.actor_gigabytes_per_s * 1e9 / slowness, scenario.process_bytes_per_s)
        self.ingress, self.egress = network.add_link(self._bytes_per_s), network.add_link(self._bytes_per_s)

    def come_up(self) -> None:
        """Start the process, and draw its faults from here on."""
        self.start(self._bytes_per_s)
        self.engine.halt("dead", False)
        self.engine.up = True
        self._plan(self._scenario.crashes_per_hour, self._crash)
        self._plan(self._scenario.freezes_per_hour, self._freeze)

    def _plan(self, per_hour: float, fault: Callable[[], None]) -> None:
        if per_hour:
            self._if_alive(self._random.expovariate(per_hour / 3600), fault)

    def _if_alive(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run `callback` in `seconds`, even if this process is frozen then, but not if it has ended."""
        process = self.process
        self.machine.at(seconds, None, lambda: callback() if process.alive else None)

    def _crash(self) -> None:
        self.crashes += 1
        self._set_frozen(False)
        self.process.kill()
        self.engine.halt("dead")
        self.engine.halt("apply", False)
        self.engine.version = None
        self._lose_engine()
        self.machine.at(self._scenario.restart_s, None, self.come_up)

    def _lose_engine(self) -> None:
        """Have the engine's requests redone elsewhere."""
        self.engine.up = False
        self._rollouts.redo(self.engine.abandon())

    def _freeze(self) -> None:
        self.freezes += 1
        self._set_frozen(True)
        self.process.freeze()
        self._if_alive(self._scenario.health_timeout_s, lambda: self._lose_engine() if self.process.frozen else None)
        self._if_alive(self._random.expovariate(1 / self._scenario.freeze_s), self._thaw)

    def _set_frozen(self, frozen: bool) -> None:
        self.engine.halt("frozen", frozen)
        for link in (self.ingress, self.egress):
            self._network.set_capacity(link, 0.0 if frozen else self._bytes_per_s)

    def _thaw(self) -> None:
        self._set_frozen(False)
        self.process.thaw()
        self.engine.up = True
        self._rollouts.dispatch()
        self._plan(self._scenario.freezes_per_hour, self._freeze)

    def begin_apply(self, finish: Callable[[], None]) -> None:
        """After staging, prepare, then pause the engine, then call `finish`, which applies."""

        def pause() -> None:
            self.engine.halt("apply")
            self.machine.at(self._scenario.pause_s, self.process, finish)

        self.machine.at(self._scenario.prepare_s, self.process, pause)

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See transfer.TransferTarget."""
        self.engine.account()
        self.engine.version = manifest.version
        self.engine.halt("apply", False)
        self._rollouts.dispatch()
        return super().apply(manifest)


# With relays or corruption, which work on buckets, each connection carries this many of a version, otherwise one.
BUCKETS = 8


class World(Machine):
    """The whole job; call simulate() once."""

    def __init__(self, scenario: Scenario, asynchronous: bool = True):
        super().__init__(scenario.seed)
        sync = scenario.weight_sync
        self.scenario, self.asynchronous, self.corruption = scenario, asynchronous, scenario.corruption_probability
        self.network, self.rollouts = Network(self), Rollouts(self, scenario, lambda: self.trainer.data_came())
        self.published: list[int] = []
        """Versions, ascending"""
        self.records: Counter[str] = Counter()
        """Counts of the journal's lines by event, and of its deliveries by outcome"""
        self.lost: Counter[str] = Counter()
        """Counts of actors' lost connections by state"""
        self.superseded = 0
        self.sent_bytes = 0.0
        """Bytes sent by the trainer"""
        self.delays: list[float] = []
        """Seconds from a version's snapshot to its apply, per actor"""
        self.transfers: list[float] = []
        self._committed: dict[int, float] = {}
        self._served: dict[str, int] = {}
        buckets = sync.table.connections * (BUCKETS if sync.table.relay or scenario.corruption_probability else 1)
        self._bucket_bytes = scenario.gigabytes * 1e9 / buckets
        settings = RegistrySettings.of(sync, 1, round(scenario.gigabytes * 1e9))
        # The savings of deltas are modelled here, so none are made. A bucket arrives in only two pieces, so a pull that
        # seems to stall may still be moving.
        settings = replace(settings, delta=False, progress_timeout_s=settings.lease_s)
        shape = Shape(
            ranks=1,
            buckets=buckets,
            slots=sync.slots_per_rank,
            lease_s=settings.lease_s,
            progress_timeout_s=settings.lease_s,
            relay_fanout=settings.relay_fanout,
            connections=settings.connections,
        )
        runtime = Process(self, REGISTRY).runtime
        self.registry = Registry(runtime, settings, shape.epoch, 1, TOKEN, self._note, lambda: None)
        self.registry.start(REGISTRY)
        # One rank represents all.
        self.ranks = Rank(self, shape, 0)
        self.ranks.serve()
        rank_bytes_per_s = min(scenario.rank_gigabytes_per_s * 1e9, scenario.process_bytes_per_s)
        self._trainers_link = self.network.add_link(rank_bytes_per_s * scenario.ranks)
        self.actors: dict[str, SimulatedActor] = {}
        for number in range(scenario.actors):
            actor = SimulatedActor(self, shape, number)
            self.actors[actor.name] = actor
        self.trainer = Trainer(self)

    def simulate(self) -> None:
        """Simulate the whole time. Raises Violation if a promise is broken."""
        for actor in self.actors.values():
            actor.come_up()
        self.trainer.start()
        self.run(self.scenario.seconds)
        for engine in self.rollouts.engines:
            engine.account()

    # See deterministic.machine.Machine

    def latency(self) -> float:
        jitter = -self.scenario.latency_jitter_s * math.log(max(1 - self.random.random(), 1e-12))
        return self.scenario.latency_s + jitter

    def copy_seconds(self) -> float:
        return self.scenario.shard_bytes / (self.scenario.snapshot_gigabytes_per_s * 1e9)

    def begin_work(self, process: Process, thread: str, finish: Callable[[], None]) -> None:
        if thread == "apply":
            self.actors[process.name].begin_apply(finish)
        else:
            self.at(self.scenario.shard_bytes / (self.scenario.checksum_gigabytes_per_s * 1e9), process, finish)

    def carry(self, channel: SimChannel, message: Message, done: Callable[[], None]) -> Timer:
        if message["bucket"] == CHECKSUM_TABLE:
            return super().carry(channel, message, done)
        source, target = self.actors.get(channel.process.name), self.actors[channel.peer.process.name]
        link = self._trainers_link if source is None else source.egress
        has_base = len(self.published) > 1 and self._served.get(target.name) == self.published[-2]
        share = self.scenario.delta_share if self.scenario.weight_sync.table.delta and has_base else 1.0
        self.sent_bytes += self._bucket_bytes * share * (source is None)
        # A connection here stands for one to each rank, of which each has its own thread if there are several.
        limit = self.scenario.thread_bytes_per_s * self.scenario.ranks
        return self.network.start(link, target.ingress, self._bucket_bytes * share, done, limit)

    # Registry

    def _note(self, event: str, fields: Message) -> None:
        self.records[fields["outcome"] if event == "delivery" else event] += 1
        if event == "publish":
            self.published.append(fields["version"])
        elif event == "evicted":
            self.lost[fields["state"]] += 1
        elif is_applied(event, fields):
            self.transfers.append(fields["figures"]["transfer_s"])
            self._applied(fields["actor"], fields["version"])
        self.trainer.check_wait()

    def _applied(self, name: str, version: int) -> None:
        before = self._served.get(name, version)
        if version not in self.published or before > version:
            raise Violation(f"{name} serves version {version} after {before}, published are {self.published[-3:]}")
        first, last = bisect.bisect_right(self.published, before), bisect.bisect_left(self.published, version)
        self.superseded += max(0, last - first)
        self._served[name] = version
        self.delays.append(self.now - self._committed[version])

    # For the trainer

    def everyone_has(self, version: int) -> bool:
        """Return whether all live actors serve `version` or a newer one."""
        newest, actors = self.registry.newest, self.registry.actors.values()
        live = [actor for actor in actors if actor.channel is not None]
        return newest is not None and newest.version >= version and all(actor.version >= version for actor in live)

    def pending_version(self) -> int | None:
        """Return a version that was skipped or dropped, if any."""
        newest, dropped = self.registry.newest, self.registry.status()["dropped"]
        return self.ranks.boundary.pending_version(None if newest is None else newest.version, dropped)

    def committed(self, version: int) -> None:
        """Record that all ranks have snapshotted `version`."""
        self._committed[version] = self.now
