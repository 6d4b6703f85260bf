"""What a version consists of: the layout (once per job) and the checksums (per version), both plain JSON. No torch.

A rank's slot is a row of shards without gaps, cut into buckets of a fixed number of bytes regardless of where shards
end. The actor keeps one area per sender rank with the very same bytes, so a bucket is checked and stored as it is.
Whether the ranks' shards make up every parameter exactly once is looked at once per way of cutting: most parameters are
cut alike, so that four million shards take under a second.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from torchtitan.weight_sync.layout_tables import Box, ParameterTable, ShardTable

# Of the ranks' slots, where they lie one behind the other.
SLOT_ALIGNMENT = 64

BucketKey = tuple[int, int]
"""(rank, bucket)"""


class LayoutError(Exception):
    """The ranks' shards do not make up the parameters exactly once."""


class WeightsRefused(ValueError):
    """The engine takes no such version; it serves what it served before."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Names, dtypes, shapes and shards of every version of a job."""

    bucket_bytes: int
    parameters: ParameterTable
    ranks: tuple[ShardTable, ...]
    checksum: str = "xxh3"
    """Kind of the bucket checksums, see checksum_function"""

    def slot_starts(self) -> list[int]:
        """Where each rank's slot begins in memory for all of them, and where that ends."""
        sizes = (-(-rank.slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for rank in self.ranks)
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
            rank.feed(hasher.update)
        return hasher.hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "bucket_bytes": self.bucket_bytes,
            "checksum": self.checksum,
            "parameters": self.parameters.to_json(),
            "ranks": [rank.to_json() for rank in self.ranks],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Read and check a layout. Raises LayoutError for one that is malformed or not whole."""
        try:
            parameters = ParameterTable.from_json(data["parameters"])
            ranks = tuple(ShardTable.from_json(shards, parameters) for shards in data["ranks"])
            bucket_bytes = data["bucket_bytes"]
            if type(bucket_bytes) is not int or bucket_bytes < 1:
                raise ValueError(f"buckets of {bucket_bytes!r} bytes")
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
    def of(cls, epoch: str, version: int, layout_id: str, checksums: list[list[str]]) -> Manifest:
        """The version of these checksums."""
        return cls(epoch, version, layout_id, tuple(map(tuple, checksums)), content_digest(layout_id, checksums))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Raises LayoutError when fields are missing or the digest is not that of the checksums."""
        try:
            checksums = [[str(value) for value in rank] for rank in data["checksums"]]
            manifest = cls.of(str(data["epoch"]), int(data["version"]), str(data["layout_id"]), checksums)
            if manifest.digest != data["digest"]:
                raise LayoutError("the manifest's digest does not match its checksums")
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"malformed manifest: {error!r}") from error
        return manifest

    def check_fits(self, layout: Layout, layout_id: str) -> None:
        """Raises LayoutError unless there is exactly one checksum per bucket of `layout`."""
        if self.layout_id != layout_id:
            raise LayoutError(f"version {self.version} has layout {self.layout_id}, not {layout_id}")
        expected = [layout.bucket_count(rank) for rank in range(len(layout.ranks))]
        if [len(rank) for rank in self.checksums] != expected:
            raise LayoutError(f"version {self.version} does not have one checksum per bucket")


def merge_layouts(parts: list[dict[str, Any]]) -> Layout:
    """One layout from what each rank reported (its own shards, everyone's parameters). Raises LayoutError."""
    common = {key: value for key, value in parts[0].items() if key != "ranks"}
    ranks = []
    for rank, part in enumerate(parts):
        if not _same_model({key: value for key, value in part.items() if key != "ranks"}, common):
            raise LayoutError(f"rank {rank} and rank 0 do not have the same parameters, dtypes, buckets and checksums")
        if not isinstance(part.get("ranks"), list) or len(part["ranks"]) != 1:
            raise LayoutError(f"rank {rank} did not report the shards of one rank")
        ranks += part["ranks"]
    whole = Layout.from_json({**common, "ranks": ranks})
    check_coverage(whole)
    return whole


def _same_model(part: dict[str, Any], other: dict[str, Any]) -> bool:
    if part == other:
        return True
    # Other machines may compress the same columns to other bytes.
    return Layout.from_json({**part, "ranks": []}).layout_id() == Layout.from_json({**other, "ranks": []}).layout_id()


def check_coverage(layout: Layout) -> None:
    """Raises LayoutError unless the ranks' shards cover every parameter exactly once."""
    parameters = layout.parameters
    if len(set(parameters.names)) != len(parameters):
        raise LayoutError("two parameters have the same name")
    cuttings = _Cuttings(len(parameters))
    for number, shards in enumerate(layout.ranks):
        cuttings.add(number, shards)
    # One parameter stands for all of its shape that are cut like it.
    alike = np.stack((cuttings.cutting, parameters.kind))
    _, first = np.unique(alike, axis=1, return_index=True)
    for index in sorted(first.tolist()):
        _check_parameter(parameters, index, cuttings.pieces(int(cuttings.cutting[index])))


@dataclass
class _Cuttings:
    """cutting: int64 [parameters], the same number exactly for parameters that the ranks cut into the same boxes.

    A number is a node of a tree: (the node before, the rank and box that were added to it). 0 is the root.
    """

    count: int
    cutting: np.ndarray = field(init=False)
    _nodes: list[tuple[int, int, Box] | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.cutting = np.zeros(self.count, np.int64)

    def add(self, rank: int, shards: ShardTable) -> None:
        for rows in _rounds(shards.parameter):
            chosen, box = shards.parameter[rows], shards.box[rows]
            steps = self.cutting[chosen] * len(shards.boxes) + box
            distinct, which = np.unique(steps, return_inverse=True)
            self.cutting[chosen] = len(self._nodes) + which.reshape(-1)
            for step in distinct.tolist():
                node, number = divmod(step, len(shards.boxes))
                self._nodes.append((node, rank, shards.boxes[number]))

    def pieces(self, cutting: int) -> list[tuple[int, Box]]:
        """(rank, box) of a cutting."""
        found = []
        node = self._nodes[cutting]
        while node is not None:
            found.append((node[1], node[2]))
            node = self._nodes[node[0]]
        return found[::-1]


def _rounds(column: np.ndarray) -> Iterator[np.ndarray]:
    """Row numbers in parts in which no value of `column` appears twice."""
    rows = np.arange(len(column))
    if len(column) and (np.diff(column) > 0).all():
        yield rows
        return
    while len(rows):
        _, first = np.unique(column[rows], return_index=True)
        yield rows[first]
        rows = np.delete(rows, first)


def _check_parameter(parameters: ParameterTable, index: int, pieces: list[tuple[int, Box]]) -> None:
    parameter = parameters[index]
    for rank, box in pieces:
        if not len(box.shape) == len(box.offset) == len(parameter.shape) or any(
            low < 0 or low + size > full for low, size, full in zip(box.offset, box.shape, parameter.shape, strict=True)
        ):
            raise LayoutError(f"rank {rank}: a shard of {parameter.name} lies outside of it")
    boxes = [box for _, box in pieces if box.elements]
    covered = sum(box.elements for box in boxes)
    if covered != parameter.elements or _overlap(boxes):
        raise LayoutError(
            f"{parameter.name}: the ranks send {covered} elements of {parameter.elements}, or some of them twice"
        )


def _overlap(boxes: list[Box]) -> bool:
    """Whether any two boxes (of the same number of dimensions, none of them empty) share an element."""
    if len(boxes) < 2:
        return False
    if not boxes[0].shape:
        return True  # two copies of a scalar
    ordered = sorted(boxes, key=lambda box: box.offset)
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


def reads_devices(kind: str) -> bool:
    """Whether slots and staging memory of a layout with this kind may be on a device."""
    return kind == "sum"


def bucket_checksum(data: bytes | memoryview) -> str:
    """xxh3-128 of one bucket's bytes in host memory. Gives up the interpreter's lock while it works."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_function(kind: str) -> Callable[[Any], str]:
    """The function of a layout's checksum kind: xxh3 reads host memory, sum tensors wherever they are.

    Raises ValueError for a kind that does not exist.
    """
    if kind == "xxh3":
        return bucket_checksum
    if kind != "sum":
        raise ValueError(f"unknown checksum {kind!r}")
    from torchtitan.weight_sync.device_slots import sum_checksum  # torch

    return sum_checksum
