"""One version in transit to an actor: what is missing, what has arrived, and the engine that receives it."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from torchtitan.weight_sync.memory.manifest import BucketKey, Layout, Manifest
from torchtitan.weight_sync.wire.runtime import Channel, Message

# How a version's bytes arrived: whole buckets, deltas, or relayed by another actor.
BYTES = ("bytes_full", "bytes_delta", "bytes_relayed")


@dataclass
class Transfer:
    """One pull of a version. number: unique per actor; serial: the snapshot's. Times are the runtime's."""

    number: int
    serial: int
    manifest: Manifest
    missing: set[BucketKey]
    begun: float
    moved_at: float
    """When the last byte arrived"""
    source: str = ""
    """Name of the actor that relays it; empty: the trainer sends it"""
    digests: Sequence[Sequence[str]] = ()
    """SHA-256 of each bucket of each rank, if it is relayed: a checksum does not keep an actor from passing on other
    bytes"""
    arriving: dict[BucketKey, Any] = field(default_factory=dict)
    """Arriving bucket -> its hasher, or a delta's bytes; None if a thread writes the bucket"""
    corruptions: Counter[BucketKey] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    """Bytes by figure (see BYTES)"""

    def hasher(self) -> Any:
        """Return a hasher for a bucket; see expected()."""
        return hashlib.sha256() if self.source else xxhash.xxh3_128()

    def expected(self, key: BucketKey) -> str:
        """Return what a bucket has to hash to: its digest if an actor relays it, else its checksum."""
        return (self.digests if self.source else self.manifest.checksums)[key[0]][key[1]]

    def count(self, count: int, is_delta: bool, now: float) -> None:
        """Record that `count` bytes have arrived."""
        self.received["bytes_relayed" if self.source else "bytes_delta" if is_delta else "bytes_full"] += count
        self.moved_at = now

    def figures(self, now: float) -> Message:
        """Return what the registry is told when everything has arrived."""
        received = {name: self.received[name] for name in BYTES}
        return {"transfer_s": now - self.begun, **received, "source": self.source or "trainer"}

    def requests(self, rank: int, held: Mapping[BucketKey, int], base: int | None) -> list[Message]:
        """Return the requests to this rank's shard server for buckets that are missing and not arriving already.

        held: bucket -> serial of the snapshot in staging memory; where that is `base`, a delta is requested.
        """
        again: list[int] = []
        deltas: list[int] = []
        whole: list[int] = []
        for key in sorted(key for key in self.missing if key[0] == rank and key not in self.arriving):
            is_delta = base is not None and held.get(key) == base
            (again if self.corruptions[key] else deltas if is_delta else whole).append(key[1])
        asked: list[tuple[list[int], Message]] = [(again, {"again": True}), (deltas, {"base": base}), (whole, {})]
        return [self.request(buckets, **how) for buckets, how in asked if buckets]

    def request(self, buckets: list[int], **how: Any) -> Message:
        """Return a request for these buckets of a rank, in ascending order."""
        return {"type": "open", "pull": self.number, "serial": self.serial, "buckets": _ranges(buckets), **how}


def _ranges(numbers: list[int]) -> list[list[int]]:
    """Return [first, end) of each run of consecutive numbers in an ascending list."""
    place = itertools.count()
    # Within one run, the difference between a number and its position is constant.
    runs = [list(run) for _, run in itertools.groupby(numbers, lambda number: number - next(place))]
    return [[run[0], run[-1] + 1] for run in runs]


class Engine(Protocol):
    """Where versions end up. `apply`, `fetch` and `patch` run on threads, at most one call of each at a time."""

    def prepare(self, layout: Layout, message: Message) -> Collection[BucketKey]:
        """Allocate staging memory for the layout in `message`. Returns the needed buckets. Raises LayoutError."""

    def bucket(self, key: BucketKey) -> memoryview:
        """Return the staging memory of a bucket, for writing."""

    def linked(self, channel: Channel, message: Message) -> None:
        """Handle an entry of a link, on the loop's thread. Raises ProtocolError for an invalid one."""

    def fetch(self, key: BucketKey, reference: Message) -> str:
        """Copy the bytes that a reference points to into the bucket's staging memory. Returns the copy's checksum.

        Raises ConnectionError if only the link was broken; its channel is then closed.
        """

    def patch(self, key: BucketKey, delta: memoryview) -> str:
        """Apply a delta to a bucket in staging memory. Returns the checksum of the result."""

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """Switch to the staged version between two decode steps. Returns figures.

        Raises WeightsRefused if the engine is unchanged. After any other exception it may hold half a version.
        """
