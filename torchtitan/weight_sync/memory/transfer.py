"""One version in transit to an actor: what is missing, what has arrived, and the engine that receives it."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from torchtitan.weight_sync.memory.delta import shortest
from torchtitan.weight_sync.memory.manifest import BucketKey, ChecksumTable, Layout, Manifest, new_digest, table_sizes
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError, field_of

# How a version's bytes arrived: whole buckets, deltas, or relayed by another actor.
BYTES = ("bytes_full", "bytes_delta", "bytes_relayed")
# Figures that add up. corrupt_buckets: those that did not come as their checksums say, and were asked for again.
ADDED_UP = (*BYTES, "corrupt_buckets")


# After so long, an actor that relays has to have sent this share of what the trainer would have, divided by how many
# actors it sends to.
RELAY_SECONDS, RELAY_SHARE = 2.0, 0.25
# So many threads at most read buckets that references name.
READERS = 8
# The number by which a rank's table of checksums is asked for, before its buckets.
CHECKSUM_TABLE = -1


@dataclass
class Transfer:
    """One pull of a version. number: unique per actor; serial: the snapshot's. Times are the runtime's."""

    number: int
    serial: int
    manifest: Manifest
    layout: Layout
    missing: dict[int, set[int]]
    """Rank -> buckets, its checksum table among them; without ranks of which nothing is missing"""
    started: float
    moved_at: float
    """When the last byte arrived"""
    source: str = ""
    """Name of the actor that relays it; empty: the trainer sends it"""
    fanout: int = 1
    """To how many other hosts, and how many actors of its own, that actor relays at most"""
    arriving: dict[BucketKey, Any] = field(default_factory=dict)
    """Arriving bucket -> its hasher, or a delta's bytes; None if a thread writes the bucket"""
    corruptions: Counter[BucketKey] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(BYTES, 0)))
    """Bytes by figure (see BYTES)"""
    _checksum_tables: dict[int, memoryview] = field(default_factory=dict)
    """Rank -> the memory that its checksum table arrives in"""
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def lacks(self, rank: int, bucket: int) -> bool:
        """Return whether this bucket, or checksum table, is missing."""
        return bucket in self.missing.get(rank, ())

    def done(self, rank: int, bucket: int) -> None:
        """Record that it is there and verified."""
        self.missing[rank].remove(bucket)
        if not self.missing[rank]:
            del self.missing[rank]

    def checked_key(self, rank: int, message: Message) -> BucketKey:
        """Return which bucket this message of the source for `rank` is about. Raises ProtocolError unless it is due."""
        key = found, bucket = message["rank"], message["bucket"]
        if found != rank:
            raise ProtocolError(f"a bucket of rank {found} came from rank {rank}")
        if bucket == CHECKSUM_TABLE and "bytes" not in message:
            raise ProtocolError("checksums come over the channel, in bytes")
        if bucket != CHECKSUM_TABLE and self.lacks(rank, CHECKSUM_TABLE):
            raise ProtocolError(f"bucket {bucket} of rank {rank} came before its checksum")
        if not self.lacks(*key) or key in self.arriving:
            # Verified bytes are never overwritten: what is applied is what was verified.
            raise ProtocolError(f"bucket {bucket} of rank {rank} was sent twice, or not asked for")
        return key

    def bucket_bytes(self, key: BucketKey) -> int:
        """Return the size of a bucket."""
        start, end = self.layout.bucket_range(*key)
        return end - start

    def table_memory(self, rank: int, count: int) -> memoryview:
        """Return memory for a rank's checksum table. Raises ProtocolError if it cannot have so many bytes."""
        if count not in table_sizes(self.layout.bucket_count(rank)):
            raise ProtocolError(f"{count} bytes are not the checksums of rank {rank}")
        self._checksum_tables[rank] = memoryview(bytearray(count))
        return self._checksum_tables[rank]

    def take_table(self, rank: int) -> None:
        """Use a rank's checksum table, which has arrived and been verified."""
        self.manifest.checksum_tables[rank] = ChecksumTable(
            bytes(self._checksum_tables.pop(rank)), self.layout.bucket_count(rank)
        )

    def hasher(self, bucket: int) -> Any:
        """Return a hasher for a bucket; see expected()."""
        if bucket == CHECKSUM_TABLE:
            return new_digest()
        return hashlib.sha256() if self.source else xxhash.xxh3_128()

    def expected(self, key: BucketKey) -> str:
        """Return what a bucket has to hash to: its SHA-256 if an actor relays it, because a checksum does not keep an
        actor from passing on other bytes, else its checksum."""
        rank, bucket = key
        if bucket == CHECKSUM_TABLE:
            return self.manifest.table_digests[rank]
        table = self.manifest.checksum_tables[rank]
        return table.sha256(bucket) if self.source else table[bucket]

    def count(self, count: int, is_delta: bool, now: float) -> None:
        """Record that `count` bytes have arrived. Any thread may call it."""
        figure = "bytes_delta" if is_delta else "bytes_full"
        if self.source:
            figure = "bytes_relayed"
        with self._counting:
            self.received[figure] += count
        self.moved_at = now

    @property
    def bytes_per_s(self) -> float:
        """The mean rate until the last byte came; 0 unless the trainer has sent all."""
        seconds = self.moved_at - self.started
        return 0.0 if self.received["bytes_relayed"] or seconds <= 0 else self.received.total() / seconds

    def lags(self, bytes_per_s: float, now: float) -> bool:
        """Return whether the actor that relays it is much slower than the trainer was, at this rate, though it divides
        what it sends among `fanout` actors."""
        due = (now - self.started - RELAY_SECONDS) * bytes_per_s * RELAY_SHARE / self.fanout
        return bool(self.source) and self.received["bytes_relayed"] < due

    def plan(self, key: BucketKey, reference: Any, held: int | None) -> tuple[Any, int, bool, str]:
        """Return a bucket's reference with only those parts that have to be read, how many bytes they are, whether all
        are deltas, and the thread to read them on. held: serial of the snapshot that the bucket is there of."""
        size = self.bucket_bytes(key)
        if not isinstance(reference, dict) or "parts" not in reference:
            return reference, size, False, "fetch"
        parts = shortest(reference["parts"], size, held)
        lengths = [part[3] for part in parts]
        only_deltas = all(length < size for length in lengths)
        thread = field_of(reference, "thread", int) % READERS
        return {**reference, "parts": parts}, sum(lengths), only_deltas, f"fetch-{thread}"

    def figures(self, now: float) -> Message:
        """Return what the registry is told when everything has arrived."""
        counts = {**self.received, "corrupt_buckets": self.corruptions.total()}
        return {"transfer_s": now - self.started, **counts, "source": self.source or "trainer"}

    def requests(
        self,
        rank: int,
        carries: Callable[[BucketKey], bool],
        has: Callable[[BucketKey, int], bool],
        base: int | None,
    ) -> list[Message]:
        """Return the requests for what one connection to this rank's shard server carries, if it is missing and not
        arriving already: the table of checksums first, because no bucket can be verified without it. Connections that
        do not carry the table ask for nothing before it is there.

        has(bucket, serial): see TransferTarget; of buckets that are there as of snapshot `base`, deltas are requested.
        """
        table: list[int] = []
        again: list[int] = []
        deltas: list[int] = []
        full: list[int] = []
        waits = self.lacks(rank, CHECKSUM_TABLE) and not carries((rank, CHECKSUM_TABLE))
        for bucket in () if waits else sorted(self.missing.get(rank, ())):
            key = rank, bucket
            if key in self.arriving or not carries(key):
                continue
            if bucket == CHECKSUM_TABLE:
                table.append(bucket)
            elif key in self.corruptions:
                again.append(bucket)
            elif base is not None and has(key, base):
                deltas.append(bucket)
            else:
                full.append(bucket)
        requests: list[tuple[list[int], Message]] = [
            (table, {}),
            (again, {"again": True}),
            (deltas, {"base": base}),
            (full, {}),
        ]
        return [self.request(buckets, **how) for buckets, how in requests if buckets]

    def request(self, buckets: list[int], **how: Any) -> Message:
        """Return a request for these buckets of a rank, in ascending order."""
        return {"type": "open", "pull": self.number, "serial": self.serial, "buckets": _ranges(buckets), **how}


def _ranges(numbers: list[int]) -> list[list[int]]:
    """Return [first, end) of each run of consecutive numbers in an ascending list."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    return runs


class TransferTarget(Protocol):
    """Where versions end up. `apply`, `fetch` and `patch` run on threads, at most one call of each at a
    time, but for references that name different threads."""

    @property
    def held(self) -> dict[BucketKey, int]:
        """Bucket -> serial of the snapshot of which staging memory holds it, verified. The puller keeps it."""

    @property
    def held_live(self) -> Mapping[BucketKey, int]:
        """The same of the memory that the engine computes with, if it can be staging memory later; see patch()."""

    def prepare(self, layout: Layout, message: Message) -> Collection[BucketKey]:
        """Prepare for versions of the layout in `message`. Returns the needed buckets. Raises LayoutError."""

    def choose_memory(self) -> bool:
        """Choose the staging memory of the next transfer. Returns whether there is any."""

    def pieces(self, key: BucketKey) -> Sequence[memoryview]:
        """Return the staging memory of a bucket, for writing."""

    def linked(self, channel: Channel, message: Message) -> None:
        """Handle an entry of a link, on the loop's thread. Raises ProtocolError for an invalid one."""

    def fetch(self, key: BucketKey, reference: Message) -> str:
        """Copy the bytes that a reference points to into the bucket's staging memory. Returns the copy's checksum.

        Raises ConnectionError if only the link was broken; its channel is then closed.
        """

    def patch(self, key: BucketKey, delta: memoryview, in_place: bool) -> str:
        """Apply a delta to a bucket in staging memory. Returns the checksum of the result.

        in_place: its base is there. Otherwise it is copied first from the memory that the engine computes with.
        """

    def release(self) -> None:
        """Let go of staging memory that is the engine's."""

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """Switch to the staged version between two decode steps. Returns figures.

        Raises WeightsRefused if the engine is unchanged. After any other exception it may hold half a version.
        """
