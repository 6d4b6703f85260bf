"""Ranks and actors on the deterministic machine: the real shard server and puller, with memory of their own.

A version's bytes are derived from its number, so that an actor can check what it is about to serve.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tests.deterministic.machine import Machine, Process, Violation
from torchtitan.distributed.boxes import Box
from torchtitan.weight_sync.actor.actor import StagingEngine
from torchtitan.weight_sync.actor.puller import Puller
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout, Manifest, merge_layouts
from torchtitan.weight_sync.memory.slots import Boundary, SlotWriter
from torchtitan.weight_sync.memory.staging import SetsOfTensors, StagedTensors, StagedVersion
from torchtitan.weight_sync.trainer.shard_server import ShardServer
from torchtitan.weight_sync.transports.bucket_server import Relay
from torchtitan.weight_sync.wire.handshake import ACTOR, Identity, role_key
from torchtitan.weight_sync.wire.runtime import Message

TOKEN = "token"
REGISTRY = "registry"
BUCKET_BYTES = 128
ELEMENT_BYTES = 4
FIRST_WIDTH = 20


@functools.cache
def rank_layout(ranks: int, buckets: int, rank: int) -> Layout:
    """Return the layout that one rank reports: its row of two matrices."""
    # The first bucket holds parts of both.
    widths = (FIRST_WIDTH, buckets * BUCKET_BYTES // ELEMENT_BYTES - FIRST_WIDTH)
    entries = [ParameterEntry(f"w{number}", "float32", (ranks, width)) for number, width in enumerate(widths)]
    shards = [(number, Box((rank, 0), (1, width))) for number, width in enumerate(widths)]
    parameters = ParameterTable.of(entries)
    return _read_once(Layout(BUCKET_BYTES, parameters, (ShardTable.of(parameters, shards),)))


@functools.cache
def whole_layout(ranks: int, buckets: int) -> Layout:
    """Return the merged layout of all ranks."""
    return _read_once(merge_layouts([rank_layout(ranks, buckets, rank).to_json() for rank in range(ranks)]))


def _read_once(layout: Layout) -> Layout:
    """Cache the layout's JSON: encoding it repeatedly would dominate a short run, and is not what is tested."""
    written = layout.to_json()
    vars(layout)["to_json"] = lambda: written
    return layout


@functools.cache
def content(epoch: str, version: int, rank: int, buckets: int) -> bytes:
    """Return a rank's bytes of a version. Most versions differ from the one before only in a bucket's outer
    elements."""
    usual = hashlib.blake2b(f"{epoch} {rank}".encode()).digest() * (BUCKET_BYTES // 64)
    digest = hashlib.blake2b(f"{epoch} {version} {rank}".encode()).digest() * (BUCKET_BYTES // 64)
    bucket = digest if version % 4 == 3 else digest[:4] + usual[4:-4] + digest[-4:]
    return bucket * buckets


@dataclass(frozen=True)
class Shape:
    """The dimensions of a job."""

    ranks: int = 2
    buckets: int = 2
    slots: int = 3
    lease_s: float = 60.0
    progress_timeout_s: float = 5.0
    epoch: str = "e1"
    relay_fanout: int = 0
    connections: int = 1
    delta: bool = False


class Slots:
    """A rank's slots, in memory that outlives the shard server."""

    def __init__(self, machine: Machine, count: int, size: int):
        self.count = count
        self.words = [0] * count
        self.memory = [bytearray(size) for _ in range(count)]
        self.failed: list[tuple[int, int]] = []
        self.beat_at = 0.0
        self._machine = machine

    @property
    def state_words(self) -> list[int]:
        return self.words

    def slot(self, index: int) -> memoryview:
        return memoryview(self.memory[index])

    def beat(self) -> None:
        self.beat_at = self._machine.now


class Rank:
    """A trainer rank: its slots, its side of the vote, and its shard server's process."""

    process: Process
    server: ShardServer

    def __init__(self, machine: Machine, shape: Shape, number: int):
        self.machine, self.shape, self.number = machine, shape, number
        self.address = f"10.0.0.1:{6000 + number}"
        self.slots = Slots(machine, shape.slots + shape.delta, shape.buckets * BUCKET_BYTES)
        self.writer = SlotWriter(self.slots.words)
        self.reserve, self.release = self.writer.reserve, self.writer.release
        self.boundary = Boundary(self)

    def serve(self, kind: type[ShardServer] = ShardServer, refer: bool = False) -> None:
        """Start the shard server. refer: actors copy the bytes themselves."""
        shape = self.shape
        self.process = Process(self.machine, f"server-{self.number}")
        self.slots.beat_at = self.machine.now
        self.server = kind(
            self.process.runtime,
            self.slots,  # type: ignore[arg-type]
            rank_layout(shape.ranks, shape.buckets, self.number),
            rank=self.number,
            epoch=shape.epoch,
            token=TOKEN,
            registry=REGISTRY,
            address=self.address,
            lease_s=shape.lease_s,
            relay=shape.relay_fanout > 0,
            connections=shape.connections,
            refer=self._refer if refer else None,
        )
        self.server.start(self.address)

    def _refer(self, slot: int, start: int, end: int) -> Message:
        return {"rank": self.number, "slot": slot, "start": start, "end": end}

    # SlotPort, as the publisher implements it

    def snapshot(self, version: int, serial: int) -> None:
        index = self.writer.begin(version, serial)
        memory = self.slots.memory[index]
        data = content(self.shape.epoch, version, self.number, self.shape.buckets)
        half = len(data) // 2
        memory[:half] = data[:half]

        def finish() -> None:
            memory[half:] = data[half:]
            self.writer.finish(index)
            self.ring()

        self.machine.at(self.machine.copy_seconds(), None, finish)

    def fail(self, version: int, serial: int) -> None:
        self.slots.failed.append((serial, version))
        self.ring()

    def ring(self) -> None:
        self.machine.at(0.0, self.process, self.server.read_slots)


class Sets:
    """An engine's two sets of tensors, see EngineSets."""

    def __init__(self, layout: Layout):
        self.idle, self.live = ({entry.name: torch.zeros(entry.shape) for entry in layout.parameters} for _ in range(2))
        self.outlines = self.live

    def sets(self) -> SetsOfTensors:
        return SetsOfTensors(self.idle, self.live)

    def exchange(self) -> None:
        self.idle, self.live = self.live, self.idle


class Actor(StagingEngine):
    """An actor's process: the real puller and the real staging memory, which is a set of its engine's tensors unless it
    relays or copies by reference."""

    min_piece_bytes = 1
    process: Process
    puller: Puller
    relay: Relay | None

    def __init__(self, machine: Machine, shape: Shape, ranks: list[Rank], number: int, name: str):
        self.machine, self.shape, self._ranks, self.number, self.name = machine, shape, ranks, number, name
        self.lives = self.patched = 0
        """How many processes had its name; how many buckets came as deltas"""

    def start(self, rate: float, kind: type[Puller] = Puller) -> None:
        """Start its process, which receives `rate` bytes per second from each rank."""
        shape = self.shape
        self.lives += 1
        self.process = Process(self.machine, self.name, rate)
        runtime, relay, address = self.process.runtime, None, ""
        self.sets = Sets(whole_layout(shape.ranks, shape.buckets))
        super().__init__(self._take, "cpu", lambda _function: None, engine=None if shape.relay_fanout else self.sets)
        if shape.relay_fanout:
            relay = Relay(runtime, shape.epoch, self.memory, role_key(TOKEN, ACTOR, self.name))
            address = f"10.0.{1 + self.number // 250}.{self.number % 250}:{7000 + self.lives}"
        self.relay = relay
        self.puller = kind(
            runtime,
            REGISTRY,
            Identity.of(TOKEN, ACTOR, self.name),
            shape.epoch,
            self,
            relay=relay,
            relay_address=address,
        )
        self.puller._read_layout = self._read_layout  # type: ignore[method-assign]
        self.puller.start(address)

    def _read_layout(self, data: Message) -> Layout:
        return whole_layout(self.shape.ranks, self.shape.buckets)

    # Engine

    def copy(self, reference: Message, target: memoryview | torch.Tensor) -> None:
        memory = self._ranks[reference["rank"]].slots.memory[reference["slot"]]
        assert isinstance(target, memoryview)
        target[:] = memory[reference["start"] : reference["end"]]

    def patch(self, key: tuple[int, int], delta: memoryview, in_place: bool) -> str:
        self.patched += 1
        return super().patch(key, delta, in_place)

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        if manifest.epoch != self.shape.epoch:
            raise Violation(f"{self.name} of epoch {self.shape.epoch} applies a version of {manifest.epoch}")
        return super().apply(manifest)

    def _take(self, staged: StagedVersion) -> dict[str, float]:
        """Compute with a version from now on, if every byte is its."""
        shape, tensors = self.shape, staged.tensors
        assert isinstance(tensors, StagedTensors)
        for rank in range(shape.ranks):
            found = b"".join(tensor[rank].numpy().tobytes() for tensor in tensors.values())
            if found != content(shape.epoch, staged.version, rank, shape.buckets):
                raise Violation(f"{self.name} applies torn bytes as version {staged.version}")
        if tensors.received_in is not None:
            tensors.exchange(self.sets.exchange)
        return {"pause_s": 0.0}
