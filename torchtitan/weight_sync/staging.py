"""An actor's staging memory: the senders' bytes as they are, and tensors over them (the actor side's only torch)."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from torchtitan.weight_sync.layout_tables import Box, ParameterEntry
from torchtitan.weight_sync.manifest import SHARD_ALIGNMENT, Layout
from torchtitan.weight_sync.manifest import WeightsRefused as WeightsRefused
from torchtitan.weight_sync.needs import intersection
from torchtitan.weight_sync.transports.base import Area

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


def copy_to_device(area: torch.Tensor, data: memoryview) -> None:
    """Bytes from host memory into staging memory on a device."""
    area.copy_(torch.frombuffer(data, dtype=torch.uint8))


class Staging:
    """Memory for one incoming version of one layout.

    boxes: parameter name -> the part that is wanted; None: all of everything. where: the device of the memory.
    """

    def __init__(self, layout: Layout, boxes: Mapping[str, Box] | None = None, where: str = "cpu"):
        self.layout = layout
        self.memory: list[Area] = []
        """Per rank the bytes of its slot: memoryviews on the host, one-dimensional uint8 tensors elsewhere"""
        bases = [self._new_slot(rank.slot_bytes, where) for rank in layout.ranks]
        if boxes is None:
            boxes = {entry.name: Box((0,) * len(entry.shape), entry.shape) for entry in layout.parameters}
        # Where a part lies in one piece it is used where it was received; the others are put together here.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        pieces: dict[int, list[tuple[Box, torch.Tensor]]] = {}
        for base, rank in zip(bases, layout.ranks, strict=True):
            for shard in rank.shards:
                entry = layout.parameters[shard.parameter]
                wanted = boxes.get(entry.name)
                whole = Box(shard.offset, shard.shape)
                part = None if wanted is None else intersection(wanted, whole)
                if part is not None:
                    dtype = TORCH_DTYPES[entry.dtype]
                    size = shard.elements * dtype.itemsize
                    flat = base[shard.byte_offset : shard.byte_offset + size].view(dtype)
                    piece = _within(flat.view(shard.shape), whole, part)
                    pieces.setdefault(shard.parameter, []).append((part, piece))
        split = []
        for index, entry in enumerate(layout.parameters):
            if entry.name in boxes and len(pieces.get(index, ())) == 1:
                self._tensors[entry.name] = pieces[index][0][1]
            elif entry.name in boxes:
                split.append((entry, boxes[entry.name], pieces.get(index, [])))
        self._assemble_into_one_area(split, where)
        self._tensors = {entry.name: self._tensors[entry.name] for entry in layout.parameters if entry.name in boxes}

    def _new_slot(self, size: int, where: str) -> torch.Tensor:
        base, area = _new_area(size, where)
        self.memory.append(area)
        return base

    def _assemble_into_one_area(
        self, split: list[tuple[ParameterEntry, Box, list[tuple[Box, torch.Tensor]]]], where: str
    ) -> None:
        """One behind the other, as they would lie in the slot of a rank that has all: an engine that stacks some of
        them finds them stacked."""
        sizes = [math.prod(box.shape) * TORCH_DTYPES[entry.dtype].itemsize for entry, box, _ in split]
        starts = [0, *itertools.accumulate(-(-size // SHARD_ALIGNMENT) * SHARD_ALIGNMENT for size in sizes)]
        base, _ = _new_area(starts[-1], where)
        for (entry, box, pieces), start, size in zip(split, starts[:-1], sizes, strict=True):
            whole = base[start : start + size].view(TORCH_DTYPES[entry.dtype]).view(box.shape)
            self._copies += [(_within(whole, box, part), piece) for part, piece in pieces]
            self._tensors[entry.name] = whole

    def bucket(self, key: tuple[int, int]) -> Area:
        """The bytes of bucket (rank, number)."""
        rank, bucket = key
        start, end = self.layout.bucket_range(rank, bucket)
        return self.memory[rank][start:end]

    def assemble(self) -> dict[str, torch.Tensor]:
        """Everything received, by name."""
        if self._copies:
            torch._foreach_copy_(
                [target for target, _ in self._copies], [source for _, source in self._copies], non_blocking=False
            )
        return dict(self._tensors)


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


def _within(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of `part` in a tensor that is `box`."""
    bounds = zip(box.offset, part.offset, part.shape, strict=True)
    return tensor[tuple(slice(start - origin, start - origin + size) for origin, start, size in bounds)]
