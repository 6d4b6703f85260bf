"""What a version consists of: the layout (once per job) and the checksums (per version), both plain JSON.

A rank's slot is a row of shards, each aligned, cut into buckets of a fixed number of bytes regardless of where shards
end. The receiver keeps one area per sender rank with the very same bytes, so a bucket is checked and stored as it is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import xxhash

SHARD_ALIGNMENT = 64
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class LayoutError(Exception):
    """The ranks' shards do not make up the parameters exactly once."""


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter: its Hugging Face checkpoint name, dtype on the wire and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardEntry:
    """A box of one parameter (by index); its elements start at byte_offset of the rank's slot."""

    parameter: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class RankLayout:
    """What one rank sends: its shards and the bytes of its slot (0: this rank sends nothing)."""

    slot_bytes: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True)
class Layout:
    """Names, dtypes, shapes and shards of every version of a job."""

    bucket_bytes: int
    parameters: tuple[ParameterEntry, ...]
    ranks: tuple[RankLayout, ...]

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

    def layout_id(self) -> str:
        """Names this layout: equal exactly when everything in it is equal."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), separators=(",", ":")).encode())

    def to_json(self) -> dict[str, Any]:
        return {
            "bucket_bytes": self.bucket_bytes,
            "parameters": [[entry.name, entry.dtype, list(entry.shape)] for entry in self.parameters],
            "ranks": [
                [rank.slot_bytes, [[s.parameter, list(s.offset), list(s.shape), s.byte_offset] for s in rank.shards]]
                for rank in self.ranks
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Read and check a layout. Raises LayoutError for one that is malformed or not whole."""
        try:
            parameters = tuple(ParameterEntry(name, dtype, tuple(shape)) for name, dtype, shape in data["parameters"])
            ranks = tuple(
                RankLayout(slot_bytes, tuple(ShardEntry(p, tuple(o), tuple(s), b) for p, o, s, b in shards))
                for slot_bytes, shards in data["ranks"]
            )
            layout = cls(data["bucket_bytes"], parameters, ranks)
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"malformed layout: {error!r}") from error
        return layout


def content_digest(layout_id: str, checksums: list[list[str]]) -> str:
    """One digest over a version's bytes: layout id and every bucket's checksum, rank by rank."""
    return xxhash.xxh3_128_hexdigest(json.dumps([layout_id, checksums], separators=(",", ":")).encode())


def bucket_checksum(data: bytes | memoryview) -> str:
    """Checksum of one bucket's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class Manifest:
    """One version: who it is, and a checksum per bucket of every rank."""

    epoch: str
    version: int
    layout_id: str
    checksums: tuple[tuple[str, ...], ...]
    digest: str

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "version": self.version,
            "layout_id": self.layout_id,
            "checksums": [list(rank) for rank in self.checksums],
            "digest": self.digest,
        }

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


def check_coverage(layout: Layout) -> None:
    """Raises LayoutError unless the ranks' shards cover every parameter exactly once, inside their slots."""
    boxes: list[list[ShardEntry]] = [[] for _ in layout.parameters]
    for number, rank in enumerate(layout.ranks):
        end = 0
        for shard in sorted(rank.shards, key=lambda entry: entry.byte_offset):
            if not 0 <= shard.parameter < len(layout.parameters):
                raise LayoutError(f"rank {number} sends an unknown parameter")
            parameter = layout.parameters[shard.parameter]
            if parameter.dtype not in DTYPE_BYTES:
                raise LayoutError(f"{parameter.name}: unknown dtype {parameter.dtype}")
            if shard.byte_offset < end:
                raise LayoutError(f"rank {number}: shards overlap in the slot at {parameter.name}")
            end = shard.byte_offset + shard.elements * DTYPE_BYTES[parameter.dtype]
            if len(shard.shape) != len(parameter.shape) or any(
                low < 0 or low + size > full
                for low, size, full in zip(shard.offset, shard.shape, parameter.shape, strict=True)
            ):
                raise LayoutError(f"rank {number}: a shard of {parameter.name} lies outside of it")
            boxes[shard.parameter].append(shard)
        if end > rank.slot_bytes:
            raise LayoutError(f"rank {number}: shards end at byte {end} of a slot of {rank.slot_bytes}")
    for parameter, pieces in zip(layout.parameters, boxes, strict=True):
        covered = sum(piece.elements for piece in pieces)
        if covered != parameter.elements or _overlap(pieces):
            raise LayoutError(
                f"{parameter.name}: the ranks send {covered} elements of {parameter.elements}, or some of them twice"
            )


def _overlap(pieces: list[ShardEntry]) -> bool:
    """Whether any two boxes share an element."""
    if len(pieces) < 2:
        return False
    if not pieces[0].shape:
        return True  # two copies of a scalar
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    for index, first in enumerate(ordered):
        for second in ordered[index + 1 :]:
            if second.offset[0] >= first.offset[0] + first.shape[0]:
                break
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
            ):
                return True
    return False


def merge_layouts(parts: list[dict[str, Any]]) -> Layout:
    """One layout from what each rank reported (its own shards, everyone's parameters). Raises LayoutError."""
    layouts = [Layout.from_json(part) for part in parts]
    first = layouts[0]
    for rank, layout in enumerate(layouts):
        if layout.parameters != first.parameters or layout.bucket_bytes != first.bucket_bytes:
            raise LayoutError(f"rank {rank} and rank 0 do not have the same parameters, dtypes and bucket size")
        if len(layout.ranks) != 1:
            raise LayoutError(f"rank {rank} reported the shards of {len(layout.ranks)} ranks")
    whole = Layout(first.bucket_bytes, first.parameters, tuple(layout.ranks[0] for layout in layouts))
    check_coverage(whole)
    return whole
