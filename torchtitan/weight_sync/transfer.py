"""One version on its way to an actor: what is missing, what has come, and the engine that it is for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtitan.weight_sync.manifest import BucketKey, Layout, Manifest
from torchtitan.weight_sync.wire import Channel, Message

# Of the bytes of a version: as they are, as deltas, and from another actor.
BYTES = ("bytes_full", "bytes_delta", "bytes_relayed")


@dataclass
class Transfer:
    """number: tells an actor's transfers apart; serial: of the snapshot. Times are the runtime's."""

    number: int
    serial: int
    manifest: Manifest
    missing: set[BucketKey]
    begun: float
    moved_at: float
    """When the last byte came"""
    source: str = ""
    """The other actor that sends it; empty: the trainer"""
    placing: dict[BucketKey, Any] = field(default_factory=dict)
    """Buckets that are arriving -> what hashes them, or a delta's bytes; None for those that a thread writes"""
    corruptions: Counter[BucketKey] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    """Bytes, by the figure that they count for"""

    def count(self, count: int, is_delta: bool, now: float) -> None:
        """So many bytes have come."""
        self.received["bytes_relayed" if self.source else "bytes_delta" if is_delta else "bytes_full"] += count
        self.moved_at = now

    def figures(self, now: float) -> Message:
        """What the registry is told when all is there."""
        received = {name: self.received[name] for name in BYTES}
        return {"transfer_s": now - self.begun, **received, "source": self.source or "trainer"}

    def requests(self, rank: int, held: Mapping[BucketKey, int], base: int | None) -> list[Message]:
        """What to ask this rank's shard server for: what is missing and does not arrive already.

        held: serial of the snapshot that a bucket's staging memory holds. Deltas are asked for where that is `base`.
        """
        again: list[int] = []
        deltas: list[int] = []
        whole: list[int] = []
        for key in sorted(key for key in self.missing if key[0] == rank and key not in self.placing):
            is_delta = base is not None and held.get(key) == base
            (again if self.corruptions[key] else deltas if is_delta else whole).append(key[1])
        asked: list[tuple[list[int], Message]] = [(again, {"again": True}), (deltas, {"base": base}), (whole, {})]
        return [self.open(buckets, **how) for buckets, how in asked if buckets]

    def open(self, buckets: list[int], **how: Any) -> Message:
        """Asks for these buckets of a rank, in ascending order."""
        return {"type": "open", "pull": self.number, "serial": self.serial, "buckets": _ranges(buckets), **how}


def _ranges(numbers: list[int]) -> list[list[int]]:
    """[first, end) of each run in ascending numbers."""
    place = itertools.count()
    # Numbers of one run are all as far from their places.
    runs = [list(run) for _, run in itertools.groupby(numbers, lambda number: number - next(place))]
    return [[run[0], run[-1] + 1] for run in runs]


class Engine(Protocol):
    """Where versions end up. `apply`, `fetch` and `patch` are called on threads, one call of each at a time."""

    def prepare(self, layout: Layout, message: Message) -> Collection[BucketKey]:
        """Make staging memory for this layout, which has come in this message. Returns the buckets that are needed.
        Raises LayoutError."""

    def bucket(self, key: BucketKey) -> memoryview:
        """The staging memory of a bucket."""

    def linked(self, channel: Channel, message: Message) -> None:
        """An entry of a link has come. Called on the loop's thread. Raises ProtocolError where it makes no sense."""

    def fetch(self, key: BucketKey, reference: Message) -> str:
        """Copy what a reference points to into the bucket's staging memory; the checksum of the copy.

        Raises ConnectionError where only the way was broken, and its channel is closed.
        """

    def patch(self, key: BucketKey, delta: memoryview) -> str:
        """Make the bucket that staging memory holds the newer one; the checksum of the result."""

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """Serve what is staged, from between two steps on. Returns figures.

        Raises WeightsRefused where the engine is as it was; after anything else it may hold half a version.
        """
