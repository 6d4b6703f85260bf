"""One version on its way to an actor: which buckets are missing, which are arriving, which came damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.weight_sync.manifest import Manifest
from torchtitan.weight_sync.wire import Message

BucketKey = tuple[int, int]
"""(rank, bucket)"""


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
    bytes: int = 0
    relayed_bytes: int = 0
    """Of these, from another actor"""
    delta_bytes: int = 0
    """Of these, as deltas"""
    told_bytes: int = 0

    def count(self, count: int, is_delta: bool, now: float) -> None:
        """So many bytes have come."""
        self.bytes += count
        self.relayed_bytes += count if self.source else 0
        self.delta_bytes += count if is_delta else 0
        self.moved_at = now

    def figures(self, now: float) -> Message:
        """What the registry is told when all is there."""
        return {
            "transfer_s": now - self.begun,
            "bytes_full": self.bytes - self.relayed_bytes - self.delta_bytes,
            "bytes_delta": self.delta_bytes,
            "bytes_relayed": self.relayed_bytes,
            "source": self.source or "trainer",
        }

    def requests(self, rank: int, held: Mapping[BucketKey, int], base: int | None) -> list[Message]:
        """What to ask this rank's shard server for: what is missing and does not arrive already.

        held: serial of the snapshot that a bucket's staging memory holds. Deltas are asked for where that is `base`.
        """
        whole: list[int] = []
        deltas: list[int] = []
        again: list[int] = []
        for key in sorted(key for key in self.missing if key[0] == rank and key not in self.placing):
            if self.corruptions[key]:
                again.append(key[1])
            else:
                (deltas if base is not None and held.get(key) == base else whole).append(key[1])
        asked: list[tuple[list[int], Message]] = [(again, {"again": True}), (deltas, {"base": base}), (whole, {})]
        return [self.open(buckets, **how) for buckets, how in asked if buckets]

    def open(self, buckets: list[int], **how: Any) -> Message:
        """Asks for these buckets of a rank, in ascending order."""
        return {"type": "open", "pull": self.number, "serial": self.serial, "buckets": _ranges(buckets), **how}

    def lost(self, rank: int) -> None:
        """What was arriving from this rank does not arrive any more. What a thread writes is its own affair."""
        for key in [key for key, placed in self.placing.items() if key[0] == rank and placed is not None]:
            del self.placing[key]


def _ranges(numbers: list[int]) -> list[list[int]]:
    """[first, end) of each run in ascending numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return ranges
