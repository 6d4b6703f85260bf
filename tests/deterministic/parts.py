"""Ranks and actors on the deterministic machine: the real shard server and puller, with memory of their own.

A version's bytes are derived from its number, so that an actor can check what it is about to serve.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from tests.deterministic.machine import Machine, Process, Violation
from torchtitan.distributed.boxes import Box
from torchtitan.weight_sync.actor.puller import Puller
from torchtitan.weight_sync.memory.delta import decode_into
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout, Manifest, merge_layouts
from torchtitan.weight_sync.memory.slots import Boundary, SlotWriter
from torchtitan.weight_sync.trainer.shard_server import ShardServer
from torchtitan.weight_sync.transports.bucket_server import Relay
from torchtitan.weight_sync.wire.handshake import ACTOR, Identity, role_key
from torchtitan.weight_sync.wire.runtime import Channel, Message

TOKEN = "token"
REGISTRY = "registry"
BUCKET_BYTES = 128
ELEMENT_BYTES = 4


@functools.cache
def rank_layout(ranks: int, buckets: int, rank: int) -> Layout:
    """Return the layout that one rank reports: its row of one matrix."""
    rows, width = ranks, buckets * BUCKET_BYTES // ELEMENT_BYTES
    parameters = ParameterTable.of([ParameterEntry("w", "float32", (rows, width))])
    return _read_once(Layout(BUCKET_BYTES, parameters, (ShardTable.of(parameters, [(0, Box((rank, 0), (1, width)))]),)))


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
    own = hashlib.blake2b(f"{epoch} {version} {rank}".encode()).digest() * (BUCKET_BYTES // 64)
    bucket = own if version % 4 == 3 else own[:4] + usual[4:-4] + own[-4:]
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


class Actor:
    """An actor's process: the real puller, with memory of its own."""

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
        self.staging = [bytearray(shape.buckets * BUCKET_BYTES) for _ in range(shape.ranks)]
        runtime, relay, address = self.process.runtime, None, ""
        if shape.relay_fanout:
            relay = Relay(runtime, shape.epoch, self.bucket, role_key(TOKEN, ACTOR, self.name))
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

    def prepare(self, layout: Layout, _message: Message) -> list[tuple[int, int]]:
        return layout.bucket_keys()

    def bucket(self, key: tuple[int, int]) -> memoryview:
        rank, bucket = key
        return memoryview(self.staging[rank])[bucket * BUCKET_BYTES : (bucket + 1) * BUCKET_BYTES]

    def linked(self, channel: Channel, message: Message) -> None:
        raise NotImplementedError("buckets come over the channel, or are fetched")

    def fetch(self, key: tuple[int, int], reference: Message) -> str:
        memory = self._ranks[reference["rank"]].slots.memory[reference["slot"]]
        data = bytes(memory[reference["start"] : reference["end"]])
        self.bucket(key)[:] = data
        return xxhash.xxh3_128_hexdigest(data)

    def patch(self, key: tuple[int, int], delta: memoryview) -> str:
        decode_into(self.bucket(key), delta, ELEMENT_BYTES)
        self.patched += 1
        return xxhash.xxh3_128_hexdigest(self.bucket(key))

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        shape = self.shape
        if manifest.epoch != shape.epoch:
            raise Violation(f"{self.name} of epoch {shape.epoch} applies a version of {manifest.epoch}")
        for rank, staged in enumerate(self.staging):
            if bytes(staged) != content(shape.epoch, manifest.version, rank, shape.buckets):
                raise Violation(f"{self.name} applies torn bytes as version {manifest.version}")
        return {}
