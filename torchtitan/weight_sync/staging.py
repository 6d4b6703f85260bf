"""An actor's staging memory: the senders' bytes as they are, and tensors over them (the actor side's only torch)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from torchtitan.weight_sync.layout_tables import Box, ParameterEntry
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.needs import intersection
from torchtitan.weight_sync.transports.base import Area

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightsRefused(ValueError):
    """The engine takes no such version; it serves what it served before."""


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
        bases = [self._new_area(rank.slot_bytes, where) for rank in layout.ranks]
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
        for index, entry in enumerate(layout.parameters):
            if entry.name in boxes:
                self._tensors[entry.name] = self._assembled(entry, boxes[entry.name], pieces.get(index, []), where)

    def _new_area(self, size: int, where: str) -> torch.Tensor:
        if where != "cpu":
            tensor = torch.empty(size, dtype=torch.uint8, device=where)
            self.memory.append(tensor)
            return tensor
        # Pages that are never written take no memory. A map may not be empty: a rank that sends nothing gets one page.
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)  # fewer faults for the first version, 5 to 10 % less work for the others
        self.memory.append(memoryview(area)[:size])
        return torch.frombuffer(area, dtype=torch.uint8)

    def _assembled(
        self, entry: ParameterEntry, box: Box, pieces: list[tuple[Box, torch.Tensor]], where: str
    ) -> torch.Tensor:
        if len(pieces) == 1:
            return pieces[0][1]
        whole = torch.empty(box.shape, dtype=TORCH_DTYPES[entry.dtype], device=where)
        self._copies += [(_within(whole, box, part), piece) for part, piece in pieces]
        return whole

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


def _within(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of `part` in a tensor that is `box`."""
    bounds = zip(box.offset, part.offset, part.shape, strict=True)
    return tensor[tuple(slice(start - origin, start - origin + size) for origin, start, size in bounds)]
