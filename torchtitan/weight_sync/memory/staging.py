"""An actor's staging memory: the senders' bytes as they are, and tensors over them.

A parameter may lie in several pieces. An engine's loader narrows it to its worker's part and copies that, so nothing
needs to be assembled first. Any other operation gets an ordinary tensor, assembled for it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from torchtitan.distributed.boxes import Box
from torchtitan.distributed.pieces import PiecedTensor
from torchtitan.utils.dtypes import DTYPES
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry
from torchtitan.weight_sync.memory.manifest import ChecksumTable, Layout
from torchtitan.weight_sync.memory.manifest import WeightsRefused as WeightsRefused

Area = memoryview | torch.Tensor
"""Bytes: in host memory, or a one-dimensional uint8 tensor on a device"""


@dataclass(frozen=True)
class ExpectedChecksums:
    """What is needed to verify an engine's own tensors against a version after it is applied; see
    inference/serving/weight_digest.py.

    checksum_tables: by sender rank, the checksums of its buckets. still_staged: returns whether staging memory still
    holds this version.
    """

    layout: Layout
    checksum_tables: Mapping[int, ChecksumTable]
    still_staged: Callable[[], bool]


@dataclass
class StagedVersion:
    """A whole, verified version. The tensors live in staging memory, which changes after apply returns: copy them.

    tensors: parameter name -> full tensor in the inference dtype. Tied parameters appear once, under their first name.
    apply_on_workers: if the actor's workers hold the tensors, has every worker apply its part and returns when all
    have; see group.py. proof: set if the whole version is in this process.
    """

    epoch: str
    version: int
    digest: str
    tensors: Mapping[str, torch.Tensor]
    apply_on_workers: Callable[[], None] | None = None
    proof: ExpectedChecksums | None = None


class StagedTensors(Mapping[str, torch.Tensor]):
    """Parameter name -> its tensor, in the order of the layout. A parameter in one piece is a view of staging memory;
    one in several pieces is assembled anew at each access, which to_copy() avoids.

    pieces: name -> (the parameter's entry, and for each piece the part that it is and its memory).
    """

    def __init__(self, pieces: Mapping[str, tuple[ParameterEntry, list[tuple[Box, torch.Tensor]]]]):
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.to_copy(name)
        return tensor.assembled() if isinstance(tensor, PiecedTensor) else tensor

    def to_copy(self, name: str) -> torch.Tensor:
        """Return a tensor for code that narrows it and copies the result; it is not assembled (PiecedTensor)."""
        entry, pieces = self._pieces[name]
        if not pieces:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return pieces[0][1] if len(pieces) == 1 else PiecedTensor(Box((0,) * len(entry.shape), entry.shape), pieces)

    def outlines(self) -> dict[str, torch.Tensor]:
        """Return the shapes and dtypes as meta tensors."""
        return {
            name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            for name, (entry, _) in self._pieces.items()
        }


def to_copy(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors by name, for code that narrows and copies them."""
    for name in tensors:
        yield name, tensors.to_copy(name) if isinstance(tensors, StagedTensors) else tensors[name]


class Staging:
    """Memory for one incoming version of one layout, on the device `where`. memory: existing memory to use for all of
    the layout's slots (see Layout.slot_starts)."""

    def __init__(self, layout: Layout, where: str = "cpu", memory: mmap.mmap | None = None):
        self.layout = layout
        self.memory: list[Area] = []
        """Bytes of each rank's slot: memoryviews on the host, one-dimensional uint8 tensors elsewhere"""
        starts, names = layout.slot_starts(), layout.parameters.names
        if where == "cpu" and memory is None:
            memory = _new_memory(starts[-1])
        area = torch.empty(starts[-1], dtype=torch.uint8, device=where) if memory is None else memoryview(memory)
        tensor = area if isinstance(area, torch.Tensor) else torch.frombuffer(area, dtype=torch.uint8)
        pieces = {entry.name: (entry, list[tuple[Box, torch.Tensor]]()) for entry in layout.parameters}
        for start, rank in zip(starts, layout.ranks, strict=False):
            self.memory.append(area[start : start + rank.slot_bytes])
            slot = tensor[start : start + rank.slot_bytes]
            for shard in rank:
                entry, held = pieces[names[shard.parameter]]
                data = slot[shard.byte_offset : shard.byte_end].view(DTYPES[entry.dtype])
                held.append((Box(shard.offset, shard.shape), data.view(shard.shape)))
        self.tensors = StagedTensors(pieces)

    def bucket(self, key: tuple[int, int]) -> Area:
        """Return the bytes of bucket (rank, number)."""
        start, end = self.layout.bucket_range(*key)
        return self.memory[key[0]][start:end]


def _new_memory(size: int) -> mmap.mmap:
    """Allocate host memory. Pages that are never written take none; a map must not be empty."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults for the first version, 5 to 10 % less work for the others
    return memory
