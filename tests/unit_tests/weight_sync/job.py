"""A whole job on the deterministic machine: a trainer of several ranks, the real registry, shard servers and pullers.

Only the trainer's optimizer, the engines' memory and the parent that starts processes again are played here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.deterministic import parts
from tests.deterministic.machine import Machine, Process, SimChannel, Violation
from tests.deterministic.parts import BUCKET_BYTES, ELEMENT_BYTES, REGISTRY, TOKEN, content, whole_layout
from torchtitan.weight_sync.actor.puller import Puller, Served
from torchtitan.weight_sync.memory.delta import decode_into
from torchtitan.weight_sync.memory.manifest import Manifest
from torchtitan.weight_sync.memory.published import PublishedVersions
from torchtitan.weight_sync.memory.slots import SlotState, SlotView
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE
from torchtitan.weight_sync.registry.registry import Registry
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.trainer.shard_server import ShardServer
from torchtitan.weight_sync.transports.bucket_server import IDLE_SECONDS
from torchtitan.weight_sync.wire.runtime import Message

RESTART_SECONDS = 0.3
# The parent looks once a second, and takes three looks without a beat for a frozen process.
FROZEN_SECONDS = 3.0


@dataclass(frozen=True)
class Shape(parts.Shape):
    """actor_seconds: how long each actor takes for a transfer. interval: of versions."""

    interval: float = 1.0
    actor_seconds: tuple[float, ...] = (0.2, 0.2)
    by_reference: bool = False
    apply_timeout_s: float = 10.0


@dataclass(frozen=True)
class Parts:
    """The classes that are driven: mutations replace them."""

    registry: type[Registry] = Registry
    server: type[ShardServer] = ShardServer
    puller: type[Puller] = Puller


class Rank(parts.Rank):
    """A trainer rank, whose shard server is started again when it has ended."""

    def __init__(self, job: Job, number: int):
        super().__init__(job.machine, job.shape, number)
        self.job = job
        self.start_server()

    def start_server(self) -> None:
        self.serve(self.job.parts.server, self.job.shape.by_reference)
        self._look_at_hashing(self.server)
        self.job.watch(self.process, lambda: self.slots.beat_at, self.start_server)

    def is_busy(self) -> bool:
        """Whether its shard server has anything to do with actors."""
        server = self.server
        waits = server.channels or server.acceptor._waiting or +server.live._holds
        return bool(waits) or len(server.live.filled()) > 1

    def _look_at_hashing(self, server: ShardServer) -> None:
        checksum = server._checksum

        make = server.deltas._make

        def check(data: memoryview) -> None:
            index = next(index for index, memory in enumerate(self.slots.memory) if memory is data.obj)
            if SlotView.unpack(self.slots.words[index]).state < SlotState.READY:
                raise Violation(f"a thread of rank {self.number} reads slot {index}, which is free")

        def checked(data: memoryview) -> str:
            check(data)
            return checksum(data)

        def made(new: memoryview, base: memoryview) -> memoryview | None:
            check(new)
            check(base)
            return make(new, base)

        server._checksum = checked
        server.deltas._make = made


class Actor(parts.Actor):
    """An actor, and what it has served."""

    def __init__(self, job: Job, name: str, seconds: float, epoch: str):
        super().__init__(job.machine, job.shape, job.ranks, len(job.actors), name)
        self.job, self.seconds, self.epoch = job, seconds, epoch
        self.faults = 0
        self.versions: list[tuple[float, int]] = []
        """(time, version) of everything that it has begun to serve"""
        self.begin()

    def begin(self) -> None:
        """Start its process, for the first time or anew."""
        self.start(self.job.shape.buckets * BUCKET_BYTES / self.seconds, self.job.parts.puller)
        self.process.longest_work = min(0.02, 0.1 * self.job.shape.interval)

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        version = manifest.version
        if (manifest.epoch, version, manifest.digest) not in self.job.published:
            raise Violation(f"{self.name} applies a version that was never published: {manifest.epoch} {version}")
        figures = super().apply(manifest)
        if self.versions and version < self.versions[-1][1]:
            raise Violation(f"{self.name} goes back from version {self.versions[-1][1]} to {version}")
        self.versions.append((self.job.machine.now, version))
        return figures

    @property
    def serving(self) -> Served | None:
        return self.puller.serving


@dataclass
class Job:
    """Everything, and the promises that are looked after all the time."""

    machine: Machine
    shape: Shape
    parts: Parts = field(default_factory=Parts)

    def __post_init__(self) -> None:
        self.machine.check_read = self._check_read
        if self.machine.validates and not self.machine.message_seconds:
            self.machine.message_seconds, self.machine.byte_seconds = 20e-6, 10e-9
        self.published: dict[tuple[str, int, str], float] = {}
        self.published_at: dict[int, float] = {}
        self.version_of: dict[int, int] = {}
        """By serial"""
        self.committed: list[int] = []
        self.skipped: list[int] = []
        self.journal: list[tuple[float, str, Message]] = []
        self.term = 0
        self.shared = PublishedVersions()
        """What rank 0 gives to each registry"""
        self.server_faults = 0
        """Of registry, shard servers and the trainer's network: while they last, versions may be late"""
        self.strangers: list[Actor] = []
        """Actors of an earlier launch, which do not know that it is over"""
        self.reads: Counter[Rank] = Counter()
        """Bytes that a rank's sockets were given, half of a payload at a time"""
        self.restarting = 0
        """Actors that are about to be started again"""
        self._superseded: dict[tuple[int, int], float] = {}
        self.stopped = False
        """The launch is over: nothing is started again"""
        self.registry_process: Process
        self.registry: Registry
        self.registry_beat = 0.0
        self.restart_registry = True
        self.start_registry()
        self.ranks = [Rank(self, number) for number in range(self.shape.ranks)]
        self.actors: list[Actor] = []
        for number, seconds in enumerate(self.shape.actor_seconds):
            self.actors.append(Actor(self, f"actor-{number}", seconds, self.shape.epoch))

    # Processes

    def start_registry(self) -> None:
        self.term += 1
        self.registry_process = Process(self.machine, REGISTRY)
        shape = self.shape
        settings = RegistrySettings(
            shape.ranks, shape.slots - 2, shape.lease_s, shape.relay_fanout, shape.progress_timeout_s
        )
        settings = replace(
            settings, connections=shape.connections, delta=shape.delta, apply_timeout_s=shape.apply_timeout_s
        )
        settings = replace(settings, sees_bytes=not shape.by_reference, over_channel=not shape.by_reference)
        runtime = self.registry_process.runtime
        self.registry = self.parts.registry(
            runtime, settings, shape.epoch, self.term, TOKEN, self._write, self._beat, published=self.shared
        )
        self.registry._merge = lambda _layouts: whole_layout(shape.ranks, shape.buckets)  # type: ignore[method-assign]
        self.registry.start(REGISTRY)
        self.watch(self.registry_process, lambda: self.registry_beat, self.start_registry)

    def _beat(self) -> None:
        self.registry_beat = self.machine.now

    def watch(self, process: Process, beat_at: Any, start: Any) -> None:
        """What servers.py does: kill a process that does not beat, start one anew that has ended."""
        born = self.machine.now

        def look() -> None:
            if self.stopped:
                return
            if process.alive and self.machine.now - max(born, beat_at()) > FROZEN_SECONDS:
                process.kill()
            if process.alive:
                self.machine.at(1.0, None, look)
            elif process.name != REGISTRY or self.restart_registry:
                self.machine.at(RESTART_SECONDS, None, start)
            else:
                self.machine.at(1.0, None, look)

        self.machine.at(1.0, None, look)

    def _write(self, event: str, fields: Message) -> None:
        self.journal.append((self.machine.now, event, fields))
        if event == "publish":
            version = fields["version"]
            newest = max(self.published_at, default=-1)
            if version < newest:
                raise Violation(f"version {version} is published after version {newest}")
            self.published[self.shape.epoch, version, fields["digest"]] = self.machine.now
            self.version_of[fields["serial"]] = version
            self.published_at.setdefault(version, self.machine.now)

    # The trainer

    def train(self, versions: int) -> None:
        """Commit so many versions, one per interval."""
        first = len(self.committed) + len(self.skipped)
        time = 0.0
        for version in range(first, first + versions):
            self.machine.at(time, None, partial(self._step, version))
            time += self.shape.interval * self.machine.random.uniform(0.9, 1.1)

    def _step(self, version: int) -> None:
        missing = [rank.number for rank in self.ranks if not rank.boundary.reserve()]
        last = self.committed[-1] if self.committed else None
        since = 0.0 if last is None else self.machine.now - self.published_at.get(last, self.machine.now)
        settled = last is None or since > 0.1 + 0.005 * self.machine.distance
        if missing and settled and not self.server_faults:
            words = [SlotView.unpack(word) for word in self.ranks[missing[0]].slots.words]
            raise Violation(f"ranks {missing} have no free slot for version {version}, {last} is published: {words}")
        snapshotted = [rank.boundary.commit(version, len(missing)) for rank in self.ranks]
        (self.committed if all(snapshotted) else self.skipped).append(version)

    # Promises

    def _check_read(self, channel: SimChannel, message: Message, payload: memoryview) -> None:
        """Called whenever a socket reads memory that was given to it."""
        if message["bucket"] == CHECKSUM_TABLE:
            return
        rank = self.ranks[message["rank"]]
        if rank.process is not channel.process:
            self._check_relayed(channel, message, payload)
            return
        if "base" in message:
            self._check_delta(rank, rank.server.channels[channel].sending, message, payload)
            return
        index = next(index for index, memory in enumerate(rank.slots.memory) if memory is payload.obj)
        view = SlotView.unpack(rank.slots.words[index])
        self.reads[rank] += len(payload) // 2
        for actor in self.strangers:
            if channel.peer.process is actor.process:
                raise Violation(f"bytes of epoch {self.shape.epoch} go to {actor.name} of epoch {actor.epoch}")
        reader = rank.server.channels.get(channel)
        if view.state < SlotState.READY or (reader is not None and reader.sending not in (None, view.serial)):
            raise Violation(f"a socket of rank {rank.number} reads slot {index}, which is {view.state.name}")
        if rank.server.live.newest > view.serial:
            since = self._superseded.setdefault((id(rank.server), view.serial), self.machine.now)
            frozen = rank.process.froze_at >= since
            if self.machine.now - since > self.shape.lease_s + 1.0 and not frozen:
                raise Violation(f"snapshot {view.serial} is read {self.machine.now - since:.1f} s after its end")

    def _check_delta(self, rank: Rank, serial: int | None, message: Message, payload: memoryview) -> None:
        """It makes the bucket that it is for of the one that it is against."""
        assert serial is not None
        base, new = (
            content(self.shape.epoch, self.version_of[snapshot], rank.number, self.shape.buckets)
            for snapshot in (message["base"], serial)
        )
        bucket, start = bytearray(base[:BUCKET_BYTES]), message["bucket"] * BUCKET_BYTES
        decode_into([memoryview(bucket)], payload, ELEMENT_BYTES)
        if bucket != new[start : start + BUCKET_BYTES]:
            raise Violation(f"a delta against snapshot {message['base']} does not make snapshot {serial}")

    def _check_relayed(self, channel: SimChannel, message: Message, payload: memoryview) -> None:
        """What an actor passes on is verified, and does not change under the socket."""
        actor = next(actor for actor in self.actors if actor.process is channel.process)
        assert actor.relay is not None
        reader = actor.relay.channels[channel]
        assert reader.sending is not None
        version, start = self.version_of[reader.sending], message["bucket"] * BUCKET_BYTES
        wanted = content(self.shape.epoch, version, message["rank"], self.shape.buckets)
        if bytes(payload) != wanted[start : start + BUCKET_BYTES]:
            raise Violation(f"{actor.name} passes on bytes that are not of version {version}")

    def check_progress(self, actor: Actor, since: float, until: float) -> None:
        """A healthy actor serves each version, or a newer one, within two transfers of its publication."""
        allowed = 2 * actor.seconds * 1.25 + 0.2
        for version, when in self.published_at.items():
            due = since <= when and when + allowed <= until
            if due and not any(v >= version and at <= when + allowed for at, v in actor.versions):
                raise Violation(f"{actor.name} does not serve version {version} {allowed:.1f} s after {when:.2f}")

    def check_bytes(self) -> None:
        """Nothing arrives damaged that the network has not damaged, and nobody speaks out of turn."""
        found = sum(actor.puller.corrupted for actor in self.actors)
        if found > self.machine.corrupted and not self.shape.by_reference:
            raise Violation(f"{found} buckets arrived damaged, the network has damaged {self.machine.corrupted}")
        # A child may hear of its parent before the parent hears of the layout.
        usual = ("was given up", "is not served here")
        errors = [error for error in self.machine.protocol_errors if not any(part in error for part in usual)]
        if errors:
            raise Violation(f"protocol errors: {errors}")

    def end(self) -> None:
        """The launch dies as a whole; its actors live on."""
        self.stopped = True
        for process in (self.registry_process, *(rank.process for rank in self.ranks)):
            process.kill()

    def unsettled(self) -> str:
        """What is missing until the newest version is published, and every actor that lives serves it."""
        newest = max(self.published_at, default=None)
        last = self.committed[-1] if self.committed else None
        if self.restarting:
            return "an actor is being started again"
        if newest != last:
            return f"version {last} was committed, version {newest} is the newest that is published"
        if any(not process.alive for process in (self.registry_process, *(rank.process for rank in self.ranks))):
            return "a server is dead"
        if any(rank.server.live.newest != self.registry.snapshots.newest for rank in self.ranks):
            return "a shard server does not know the newest version"
        for actor in self.actors:
            serving = actor.puller.serving
            if actor.process.alive and newest is not None and (serving is None or serving.version != newest):
                known = self.registry.actors.get(actor.name)
                if known is None or known.state != "given_up":
                    return f"{actor.name} serves {serving}, version {newest} is published"
        return ""

    def check_nothing_leaks(self) -> None:
        """Everybody leaves; then nothing is held for anybody."""
        for actor in self.actors:
            if actor.process.alive:
                actor.puller.close()
        # What was forgotten on the way is noticed by silence, or because its snapshot ends.
        deadline = self.machine.now + 3 * IDLE_SECONDS
        self.machine.run(self.machine.now + 0.1)
        self.train(1)
        self.machine.run(self.machine.now + 0.1)
        while self.machine.now < deadline and (
            self.registry.snapshots.pulls
            or self.committed[-1] not in self.published_at
            or any(rank.is_busy() for rank in self.ranks)
        ):
            self.machine.run(self.machine.now + 0.2)
        self.machine.run(self.machine.now + 0.1)
        snapshots = self.registry.snapshots
        if snapshots.retained or snapshots.pulls:
            raise Violation(f"retained {snapshots.retained} and pulls {snapshots.pulls} are left")
        for rank in self.ranks:
            live = rank.server.live
            held = +live._holds
            filled = sorted(live.filled())
            if held or rank.server.channels or filled != [serial for serial in filled if serial == live.newest]:
                raise Violation(f"rank {rank.number} holds {held}, snapshots {filled}, newest {live.newest}")
            if rank.server.acceptor._waiting:
                raise Violation(f"handshakes of rank {rank.number} are left")
        for actor in self.actors:
            if actor.process.alive and actor.process.channels:
                raise Violation(f"{actor.name} has left, and its channels {list(actor.process.channels)} are open")
