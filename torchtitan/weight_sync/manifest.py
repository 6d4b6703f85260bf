"""What a version consists of: the layout (once per job) and the checksums (per version), both plain JSON.

A rank's slot is a row of shards, each aligned, cut into buckets of a fixed number of bytes regardless of where shards
end. The actor keeps one area per sender rank with the very same bytes, so a bucket is checked and stored as it is.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import xxhash

from torchtitan.weight_sync.layout_tables import ParameterTable, ShardTable

SHARD_ALIGNMENT = 64
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

BucketKey = tuple[int, int]
"""(rank, bucket)"""


class LayoutError(Exception):
    """The ranks' shards do not make up the parameters exactly once."""


class WeightsRefused(ValueError):
    """The engine takes no such version; it serves what it served before."""


@dataclass(frozen=True, eq=False)
class RankLayout:
    """What one rank sends: its shards and the bytes of its slot (0: this rank sends nothing)."""

    slot_bytes: int
    shards: ShardTable


@dataclass(frozen=True, eq=False)
class Layout:
    """Names, dtypes, shapes and shards of every version of a job."""

    bucket_bytes: int
    parameters: ParameterTable
    ranks: tuple[RankLayout, ...]
    checksum: str = "xxh3"
    """Kind of the bucket checksums, see checksums.py"""

    def slot_starts(self) -> list[int]:
        """Where each rank's slot begins in memory for all of them, and where that ends."""
        sizes = (-(-rank.slot_bytes // SHARD_ALIGNMENT) * SHARD_ALIGNMENT for rank in self.ranks)
        return [0, *itertools.accumulate(sizes)]

    @property
    def total_bytes(self) -> int:
        return sum(rank.slot_bytes for rank in self.ranks)

    def bucket_count(self, rank: int) -> int:
        """Buckets of this rank's slot."""
        return -(-self.ranks[rank].slot_bytes // self.bucket_bytes)

    def bucket_range(self, rank: int, bucket: int) -> tuple[int, int]:
        """First byte and end of a bucket in its rank's slot."""
        start = bucket * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.ranks[rank].slot_bytes)

    def bucket_keys(self) -> list[tuple[int, int]]:
        """(rank, bucket) of all buckets, in order."""
        return [(rank, bucket) for rank in range(len(self.ranks)) for bucket in range(self.bucket_count(rank))]

    def layout_id(self) -> str:
        """Names this layout: equal exactly when everything in it is equal."""
        # Not over the JSON: compressed columns need not look the same wherever they are made.
        hasher = xxhash.xxh3_128(json.dumps([self.bucket_bytes, self.checksum]).encode())
        self.parameters.feed(hasher.update)
        for rank in self.ranks:
            hasher.update(json.dumps([rank.slot_bytes, len(rank.shards)]).encode())
            rank.shards.feed(hasher.update)
        return hasher.hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "bucket_bytes": self.bucket_bytes,
            "checksum": self.checksum,
            "parameters": self.parameters.to_json(),
            "ranks": [[rank.slot_bytes, rank.shards.to_json()] for rank in self.ranks],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Read and check a layout. Raises LayoutError for one that is malformed or not whole."""
        try:
            parameters = ParameterTable.from_json(data["parameters"])
            ranks = tuple(RankLayout(slot_bytes, ShardTable.from_json(shards)) for slot_bytes, shards in data["ranks"])
            bucket_bytes, slots = data["bucket_bytes"], [rank.slot_bytes for rank in ranks]
            if (
                {type(number) for number in (bucket_bytes, *slots)} != {int}
                or bucket_bytes < 1
                or min(slots, default=0) < 0
            ):
                raise ValueError("sizes that are none")
            layout = cls(bucket_bytes, parameters, ranks, data["checksum"])
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"malformed layout: {error!r}") from error
        return layout


def content_digest(layout_id: str, checksums: list[list[str]]) -> str:
    """One digest over a version's bytes: layout id and every bucket's checksum, rank by rank."""
    return xxhash.xxh3_128_hexdigest(json.dumps([layout_id, checksums], separators=(",", ":")).encode())


@dataclass(frozen=True)
class Manifest:
    """One version: who it is, and a checksum per bucket of every rank."""

    epoch: str
    version: int
    layout_id: str
    checksums: tuple[tuple[str, ...], ...]
    digest: str

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Raises LayoutError when fields are missing or the digest is not that of the checksums."""
        try:
            checksums = [[str(value) for value in rank] for rank in data["checksums"]]
            manifest = cls(
                str(data["epoch"]),
                int(data["version"]),
                str(data["layout_id"]),
                tuple(tuple(rank) for rank in checksums),
                str(data["digest"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"malformed manifest: {error!r}") from error
        if content_digest(manifest.layout_id, checksums) != manifest.digest:
            raise LayoutError("the manifest's digest does not match its checksums")
        return manifest

    def check_fits(self, layout: Layout, layout_id: str) -> None:
        """Raises LayoutError unless there is exactly one checksum per bucket of `layout`."""
        if self.layout_id != layout_id:
            raise LayoutError(f"version {self.version} has layout {self.layout_id}, not {layout_id}")
        expected = [layout.bucket_count(rank) for rank in range(len(layout.ranks))]
        if [len(rank) for rank in self.checksums] != expected:
            raise LayoutError(f"version {self.version} does not have one checksum per bucket")
