"""An actor's staging memory: the senders' bytes as they are, and tensors over them (the actor side's only torch)."""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchtitan.weight_sync.layout_tables import Box, ShardEntry
from torchtitan.weight_sync.manifest import SHARD_ALIGNMENT, Layout, RankLayout
from torchtitan.weight_sync.manifest import WeightsRefused as WeightsRefused
from torchtitan.weight_sync.needs import intersection
from torchtitan.weight_sync.pieced import PiecedTensor

Area = memoryview | torch.Tensor
"""Bytes: on the host, or a one-dimensional uint8 tensor on a device"""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Proof:
    """By what an engine's own tensors can be held to a version once it is applied; see digest.py.

    checksums: of every bucket of every sender rank, from the version's manifest. still_staged: whether staging memory
    has not been given to a later version yet.
    """

    layout: Layout
    checksums: tuple[tuple[str, ...], ...]
    still_staged: Callable[[], bool]


@dataclass
class StagedVersion:
    """A whole, verified version. The tensors live in staging memory: copy them, they change after apply returns.

    tensors: parameter name -> full tensor in the inference dtype (or the part of it that was asked for). Tied
    parameters appear once, under their first name. apply_on_workers: for an actor of several workers, which hold the
    tensors: has every worker apply its part, and returns when all have; see worker.py. proof: where all of
    the version is here.
    """

    epoch: str
    version: int
    digest: str
    tensors: Mapping[str, torch.Tensor]
    apply_on_workers: Callable[[], None] | None = None
    proof: Proof | None = None


class StagedTensors(Mapping[str, torch.Tensor]):
    """Parameter name -> what was asked for of it, in the order of the layout. One that lies in one piece is a view of
    staging memory; another is put together anew whenever it is asked for, and without need where it is only copied."""

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[Box, torch.dtype, list[tuple[Box, torch.Tensor]]]] = {}

    def add(self, name: str, box: Box, dtype: torch.dtype, pieces: list[tuple[Box, torch.Tensor]]) -> None:
        """box: what was asked for; pieces: (part of it, where it lies)."""
        self._pieces[name] = box, dtype, pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.to_copy(name)
        return tensor.assembled() if isinstance(tensor, PiecedTensor) else tensor

    def to_copy(self, name: str) -> torch.Tensor:
        """For who narrows it, and copies that: nothing is put together (see pieced.py)."""
        box, dtype, pieces = self._pieces[name]
        if not pieces:
            return torch.empty(box.shape, dtype=dtype)
        return pieces[0][1] if len(pieces) == 1 else PiecedTensor(box, pieces)

    def outlines(self) -> dict[str, torch.Tensor]:
        """Their shapes and types, as tensors without memory."""
        return {
            name: torch.empty(box.shape, dtype=dtype, device="meta") for name, (box, dtype, _) in self._pieces.items()
        }


def to_copy(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """All of them by name, for who narrows and copies them."""
    for name in tensors:
        yield name, tensors.to_copy(name) if isinstance(tensors, StagedTensors) else tensors[name]


class Staging:
    """Memory for one incoming version of one layout.

    boxes: parameter name -> the part that is wanted; None: all of everything. where: the device of the memory; on one,
    only the buckets that are needed have memory (pages of the host that are never written take none anyway). memory:
    instead of new memory, for all of the layout's slots (see Layout.slot_starts).
    """

    def __init__(
        self,
        layout: Layout,
        boxes: Mapping[str, Box] | None = None,
        where: str = "cpu",
        memory: mmap.mmap | None = None,
    ):
        self.layout = layout
        self.memory: list[Area] = []
        """Per rank the bytes of its slot, or of its runs of buckets: memoryviews on the host, one-dimensional uint8
        tensors elsewhere"""
        self._runs: list[list[_Run]] = []
        pieces: dict[int, list[tuple[Box, torch.Tensor]]] = {}
        for number, (start, rank) in enumerate(zip(layout.slot_starts(), layout.ranks, strict=False)):
            wanted = [] if boxes is None else list(_wanted(layout, number, boxes))
            if boxes is None:
                wanted = [(shard, Box(shard.offset, shard.shape)) for shard in rank.shards]
            whole = boxes is None or where == "cpu"
            hulls = [(0, rank.slot_bytes)] if whole else [_hull(layout, shard, part) for shard, part in wanted]
            runs = _runs(hulls, layout.bucket_bytes, rank.slot_bytes)
            size = runs[-1].at + runs[-1].end - runs[-1].start if runs else 0
            base, area = _new_area(size, where) if memory is None else _slot_within(memory, start, rank)
            self.memory.append(area)
            self._runs.append(runs)
            for shard, part in wanted:
                dtype = TORCH_DTYPES[layout.parameters[shard.parameter].dtype]
                low, high = _hull(layout, shard, part)
                at = _run_of(runs, low).place(low)
                strides = torch.empty(shard.shape, device="meta").stride()
                piece = base[at : at + high - low].view(dtype).as_strided(part.shape, strides)
                pieces.setdefault(shard.parameter, []).append((part, piece))
        self.tensors = StagedTensors()
        for index, entry in enumerate(layout.parameters):
            if boxes is None or entry.name in boxes:
                box = Box((0,) * len(entry.shape), entry.shape) if boxes is None else boxes[entry.name]
                self.tensors.add(entry.name, box, TORCH_DTYPES[entry.dtype], pieces.get(index, []))

    def bucket(self, key: tuple[int, int]) -> Area:
        """The bytes of bucket (rank, number)."""
        rank, bucket = key
        start, end = self.layout.bucket_range(rank, bucket)
        at = _run_of(self._runs[rank], start).place(start)
        return self.memory[rank][at : at + end - start]


class _Run(NamedTuple):
    """Bytes [start, end) of a slot, whole buckets, and where they lie in staging memory."""

    start: int
    end: int
    at: int

    def place(self, byte: int) -> int:
        return self.at + byte - self.start


def _runs(hulls: list[tuple[int, int]], bucket_bytes: int, slot_bytes: int) -> list[_Run]:
    """The buckets that these ranges of bytes touch; what lies aligned in the slot does so here."""
    runs: list[_Run] = []
    for low, high in sorted(hulls):
        start, end = low // bucket_bytes * bucket_bytes, min(-(-high // bucket_bytes) * bucket_bytes, slot_bytes)
        if runs and start <= runs[-1].end:
            runs[-1] = runs[-1]._replace(end=max(end, runs[-1].end))
        else:
            behind = runs[-1].place(runs[-1].end) if runs else 0
            runs.append(_Run(start, end, behind + (start - behind) % SHARD_ALIGNMENT))
    return runs


def _run_of(runs: list[_Run], byte: int) -> _Run:
    return runs[bisect.bisect_right(runs, byte, key=lambda run: run.start) - 1]


def _wanted(layout: Layout, rank: int, boxes: Mapping[str, Box]) -> Iterator[tuple[ShardEntry, Box]]:
    """The shards of a rank with a part of the boxes, and that part."""
    for shard in layout.ranks[rank].shards:
        box = boxes.get(layout.parameters[shard.parameter].name)
        part = None if box is None else intersection(box, Box(shard.offset, shard.shape))
        if part is not None:
            yield shard, part


def _hull(layout: Layout, shard: ShardEntry, part: Box) -> tuple[int, int]:
    """From the first to behind the last byte of a part of a shard, in the rank's slot."""
    width = TORCH_DTYPES[layout.parameters[shard.parameter].dtype].itemsize
    first = last = 0
    for low, origin, size, full in zip(part.offset, shard.offset, part.shape, shard.shape, strict=True):
        first, last = first * full + low - origin, last * full + low - origin + size - 1
    return shard.byte_offset + first * width, shard.byte_offset + (last + 1) * width


def _slot_within(memory: mmap.mmap, start: int, rank: RankLayout) -> tuple[torch.Tensor, Area]:
    """A rank's slot in memory for all of them."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[start : start + rank.slot_bytes], memoryview(memory)[start : start + rank.slot_bytes]


def _new_area(size: int, where: str) -> tuple[torch.Tensor, Area]:
    """Memory, as a tensor of bytes and as an area."""
    if where != "cpu":
        tensor = torch.empty(size, dtype=torch.uint8, device=where)
        return tensor, tensor
    # Pages that are never written take no memory. A map may not be empty: a rank that sends nothing gets one page.
    area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)  # fewer faults for the first version, 5 to 10 % less work for the others
    return torch.frombuffer(area, dtype=torch.uint8), memoryview(area)[:size]
