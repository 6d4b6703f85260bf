"""One version on its way to an actor: which buckets are missing, which are arriving, which came damaged."""

from __future__ import annotations

from collections import Counter
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
    placing: dict[BucketKey, Any] = field(default_factory=dict)
    """Buckets that are arriving -> what hashes them; None for those that a thread fetches"""
    corruptions: Counter[BucketKey] = field(default_factory=Counter)
    bytes: int = 0
    relayed_bytes: int = 0
    """Of these, from another actor"""
    told_bytes: int = 0

    def request(self, rank: int) -> Message | None:
        """What to ask this rank's shard server for: what is missing and does not arrive already. None: nothing."""
        numbers = sorted(bucket for one, bucket in self.missing if one == rank and (one, bucket) not in self.placing)
        ranges: list[list[int]] = []
        for number in numbers:
            if ranges and ranges[-1][1] == number:
                ranges[-1][1] = number + 1
            else:
                ranges.append([number, number + 1])
        return {"type": "open", "pull": self.number, "serial": self.serial, "buckets": ranges} if ranges else None

    def lost(self, rank: int) -> None:
        """What was arriving from this rank does not arrive any more. What a thread fetches is its own affair."""
        for key in [key for key, hasher in self.placing.items() if key[0] == rank and hasher is not None]:
            del self.placing[key]
