"""What describes a version: the layout (once per job, as JSON) and the checksums (per version, as bytes). No torch.

A rank's slot consists of shards without gaps, cut into buckets of a fixed size regardless of where shards end. The
actor's staging memory holds the same bytes per sender rank, so a bucket is verified and stored as it is. Whether the
ranks' shards make up every parameter exactly once is checked once per distinct cut: most parameters are cut alike, so
the check of four million shards takes less than a second.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from torchtitan.distributed.boxes import Box
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.wire.runtime import ProtocolError

# Alignment of the ranks' slots where one memory holds them all.
SLOT_ALIGNMENT = 64

BucketKey = tuple[int, int]
"""(rank, bucket)"""


class LayoutError(ProtocolError):
    """The ranks' shards do not make up the parameters exactly once, or a version does not fit them."""


class WeightsRefused(ValueError):
    """The engine refuses this version, and continues to serve what it served before."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Names, dtypes, shapes and shards of every version of a job."""

    bucket_bytes: int
    parameters: ParameterTable
    ranks: tuple[ShardTable, ...]
    checksum: str = "xxh3"
    """Kind of the bucket checksums, see checksum_function"""

    def slot_starts(self) -> list[int]:
        """Return where each rank's slot begins if one memory holds them all, followed by that memory's size."""
        sizes = (-(-rank.slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for rank in self.ranks)
        return [0, *itertools.accumulate(sizes)]

    @property
    def reads_devices(self) -> bool:
        """Whether slots and staging memory may be on a device: their checksums can be computed there."""
        return self.checksum == "sum"

    @property
    def total_bytes(self) -> int:
        return sum(rank.slot_bytes for rank in self.ranks)

    def bucket_count(self, rank: int) -> int:
        """Return the number of buckets in this rank's slot."""
        return -(-self.ranks[rank].slot_bytes // self.bucket_bytes)

    def bucket_range(self, rank: int, bucket: int) -> tuple[int, int]:
        """Return the first byte and the end of a bucket in its rank's slot."""
        start = bucket * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.ranks[rank].slot_bytes)

    def bucket_keys(self) -> list[tuple[int, int]]:
        """Return (rank, bucket) of all buckets, in order."""
        return [(rank, bucket) for rank in range(len(self.ranks)) for bucket in range(self.bucket_count(rank))]

    def layout_id(self) -> str:
        """Return an identifier that two layouts share exactly if they are equal."""
        # Not hashed over the JSON, because compressed columns may differ from machine to machine.
        table, columns = self.parameters, [self.parameters.kind]
        about = [self.bucket_bytes, self.checksum, table.names, table.kinds, [rank.boxes for rank in self.ranks]]
        for rank in self.ranks:
            columns += rank.parameter, rank.box
        hasher = xxhash.xxh3_128(json.dumps([*about, list(map(len, columns))]).encode())
        for column in columns:
            hasher.update(column.astype("<i8").tobytes())
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
        """Read and check a layout. Raises LayoutError for one that is malformed or incomplete."""
        try:
            parameters = ParameterTable.from_json(data["parameters"])
            ranks = tuple(ShardTable.from_json(shards, parameters) for shards in data["ranks"])
            bucket_bytes = data["bucket_bytes"]
            if type(bucket_bytes) is not int or bucket_bytes < 1:
                raise ValueError(f"buckets of {bucket_bytes!r} bytes")
            return cls(bucket_bytes, parameters, ranks, data["checksum"])
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"malformed layout: {error!r}") from error


CHECKSUM_BYTES, SHA256_BYTES = 16, 32
DIGEST_BYTES = 16


def new_digest(data: bytes = b"") -> Any:
    """Return a hasher for checksum tables: BLAKE2b, because whoever relays a table might want another one to be taken
    for it."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)


class ChecksumTable:
    """What the buckets of one rank in one version hash to. data: `count` checksums of 16 bytes each, and behind them,
    if actors relay, as many SHA-256 digests. It travels like a bucket, to whoever lacks it."""

    def __init__(self, data: bytes, count: int):
        self.data, self._count = data, count

    @classmethod
    def of(cls, checksums: Sequence[str], digests: Sequence[str] = ()) -> ChecksumTable:
        """Make a checksum table of hexadecimal checksums, and of the buckets' SHA-256 if actors relay."""
        return cls(bytes.fromhex("".join((*checksums, *digests))), len(checksums))

    def digest(self) -> str:
        """Return what the registry announces of this checksum table."""
        return str(new_digest(self.data).hexdigest())

    def __getitem__(self, bucket: int) -> str:
        """Return a bucket's checksum."""
        return self.data[CHECKSUM_BYTES * bucket : CHECKSUM_BYTES * (bucket + 1)].hex()

    def sha256(self, bucket: int) -> str:
        """Return a bucket's SHA-256; empty, which nothing hashes to, if this checksum table has none."""
        start = CHECKSUM_BYTES * self._count + SHA256_BYTES * bucket
        return self.data[start : start + SHA256_BYTES].hex()


def table_sizes(count: int) -> tuple[int, int]:
    """Return how many bytes a checksum table of so many buckets has, without and with SHA-256."""
    return CHECKSUM_BYTES * count, (CHECKSUM_BYTES + SHA256_BYTES) * count


def content_digest(layout_id: str, table_digests: Sequence[str]) -> str:
    """Return one digest of a version's bytes, over the layout id and every rank's table of checksums."""
    return str(new_digest(json.dumps([layout_id, *table_digests]).encode()).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """A version: its identity, and what each rank's table of checksums hashes to.

    checksum_tables: by rank, those that this process has and has verified.
    """

    epoch: str
    version: int
    layout_id: str
    table_digests: tuple[str, ...]
    digest: str
    checksum_tables: dict[int, ChecksumTable] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, epoch: str, version: int, layout_id: str, table_digests: Sequence[str]) -> Manifest:
        """Make the manifest of a version with these checksum tables."""
        return cls(epoch, version, layout_id, tuple(table_digests), content_digest(layout_id, table_digests))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Read a manifest. Raises LayoutError if fields are missing or the digest does not match its tables'."""
        try:
            digests = [str(value) for value in data["table_digests"]]
            manifest = cls.of(str(data["epoch"]), int(data["version"]), str(data["layout_id"]), digests)
            if manifest.digest != data["digest"]:
                raise LayoutError("the manifest's digest does not match those of its checksum tables")
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"malformed manifest: {error!r}") from error
        return manifest

    def to_json(self) -> dict[str, Any]:
        about = {"epoch": self.epoch, "version": self.version, "layout_id": self.layout_id, "digest": self.digest}
        return {**about, "table_digests": list(self.table_digests)}

    def check_fits(self, layout: Layout, layout_id: str) -> None:
        """Raise LayoutError unless there is exactly one checksum table per rank of `layout`."""
        if self.layout_id != layout_id:
            raise LayoutError(f"version {self.version} has layout {self.layout_id}, not {layout_id}")
        if len(self.table_digests) != len(layout.ranks):
            raise LayoutError(f"version {self.version} does not have one checksum table per rank")


def merge_layouts(parts: list[dict[str, Any]]) -> Layout:
    """Merge what each rank reported (its own shards, everyone's parameters) into one layout. Raises LayoutError."""
    first, ranks = {**parts[0], "ranks": []}, []
    for rank, part in enumerate(parts):
        # Machines may compress equal columns to different bytes.
        model = {**part, "ranks": []}
        if model != first and Layout.from_json(model).layout_id() != Layout.from_json(first).layout_id():
            raise LayoutError(f"rank {rank} and rank 0 do not have the same parameters, dtypes, buckets and checksums")
        if not isinstance(part.get("ranks"), list) or len(part["ranks"]) != 1:
            raise LayoutError(f"rank {rank} did not report the shards of one rank")
        ranks += part["ranks"]
    layout = Layout.from_json({**first, "ranks": ranks})
    check_coverage(layout)
    return layout


def check_coverage(layout: Layout) -> None:
    """Raise LayoutError unless the ranks' shards cover every parameter exactly once, at most one shard per rank."""
    parameters = layout.parameters
    if len(set(parameters.names)) != len(parameters):
        raise LayoutError("two parameters have the same name")
    # int64 [parameters]: equal for parameters of one kind that the ranks processed so far cut into the same boxes.
    cutting, numbers = parameters.kind.copy(), len(parameters.kinds)
    for rank, shards in enumerate(layout.ranks):
        if np.bincount(shards.parameter, minlength=1).max() > 1:
            raise LayoutError(f"rank {rank} sends two shards of one parameter")
        steps = cutting[shards.parameter] * len(shards.boxes) + shards.box
        distinct, which = np.unique(steps, return_inverse=True)
        cutting[shards.parameter] = numbers + which
        numbers += len(distinct)
    # One parameter represents all that are cut like it.
    _, first = np.unique(cutting, return_index=True)
    represents = np.isin(np.arange(len(parameters)), first)
    pieces: dict[int, list[tuple[int, Box]]] = {index: [] for index in sorted(first.tolist())}
    for rank, shards in enumerate(layout.ranks):
        for row in np.flatnonzero(represents[shards.parameter]).tolist():
            pieces[int(shards.parameter[row])].append((rank, shards.boxes[shards.box[row]]))
    for index, held in pieces.items():
        _check_parameter(parameters[index], held)


def _check_parameter(parameter: ParameterEntry, pieces: list[tuple[int, Box]]) -> None:
    """Check one parameter. pieces: (rank, box) of all its shards."""
    edges = [{0, full} for full in parameter.shape]
    for rank, box in pieces:
        if not _lies_within(box, parameter.shape):
            raise LayoutError(f"rank {rank}: a shard of {parameter.name} lies outside of it")
        for ends, low, size in zip(edges, *box, strict=True):
            ends.update((low, low + size))
    # All edges together make a grid: count how often each of its cells is sent.
    places = [_numbered(ends) for ends in edges]
    sent = np.zeros([len(ends) - 1 for ends in edges], np.int64)
    for _, box in pieces:
        cells: list[slice] = []
        for place, low, size in zip(places, *box, strict=True):
            cells.append(slice(place[low], place[low + size]))
        sent[tuple(cells)] += 1
    if (sent != 1).any():
        covered = sum(box.elements for _, box in pieces)
        raise LayoutError(
            f"{parameter.name}: the ranks send {covered} elements of {math.prod(parameter.shape)}, "
            "or some of them twice"
        )


def _numbered(edges: set[int]) -> dict[int, int]:
    """Edge -> its place among all of them."""
    return {edge: place for place, edge in enumerate(sorted(edges))}


def _lies_within(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.shape) == len(box.offset) == len(shape):
        return False
    bounds = zip(box.offset, box.shape, shape, strict=True)
    return all(low >= 0 and low + size <= full for low, size, full in bounds)


def checksum_function(kind: str) -> Callable[[Any], str]:
    """Return the checksum function of this kind: xxh3 (128 bits) reads host memory, sum reads tensors on any device.

    Both release the interpreter lock while they work. Raises ValueError for an unknown kind.
    """
    if kind == "xxh3":
        return xxhash.xxh3_128_hexdigest
    if kind != "sum":
        raise ValueError(f"unknown checksum {kind!r}")
    from torchtitan.distributed.checksum import sum_checksum  # imports torch

    return sum_checksum
