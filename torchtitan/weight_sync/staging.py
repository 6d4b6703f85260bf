"""An actor's staging memory: the senders' bytes as they are, and tensors over them (the actor side's only torch)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from torchtitan.weight_sync.layout_tables import ParameterEntry, ShardEntry
from torchtitan.weight_sync.manifest import Layout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightsRefused(ValueError):
    """The engine takes no such version; it serves what it served before."""


@dataclass
class StagedVersion:
    """A whole, verified version. The tensors live in staging memory: copy them, they change after apply returns.

    tensors: parameter name -> full tensor in the inference dtype. Tied parameters appear once, under their first name.
    """

    epoch: str
    version: int
    digest: str
    tensors: dict[str, torch.Tensor]


class Staging:
    """Memory for one incoming version of one layout."""

    def __init__(self, layout: Layout):
        self.layout = layout
        # An anonymous map may not be empty; a rank that sends nothing gets one page.
        self._areas = [mmap.mmap(-1, max(rank.slot_bytes, 1)) for rank in layout.ranks]
        self.memory = [memoryview(area) for area in self._areas]
        self._pieces: list[list[tuple[ShardEntry, torch.Tensor]]] = [[] for _ in layout.parameters]
        for area, rank in zip(self._areas, layout.ranks, strict=True):
            for shard in rank.shards:
                entry = layout.parameters[shard.parameter]
                self._pieces[shard.parameter].append((shard, self._view(area, shard, entry)))
        # A parameter that arrives in one piece is used where it was received; the others are put together here.
        self._tensors: dict[str, torch.Tensor] = {}
        for entry, pieces in zip(layout.parameters, self._pieces, strict=True):
            if len(pieces) == 1:
                self._tensors[entry.name] = pieces[0][1]
            else:
                self._tensors[entry.name] = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])

    @staticmethod
    def _view(area: mmap.mmap, shard: ShardEntry, entry: ParameterEntry) -> torch.Tensor:
        dtype = TORCH_DTYPES[entry.dtype]
        if shard.elements == 0:
            return torch.empty(shard.shape, dtype=dtype)
        flat = torch.frombuffer(area, dtype=dtype, count=shard.elements, offset=shard.byte_offset)
        return flat.view(shard.shape)

    def assemble(self) -> dict[str, torch.Tensor]:
        """Full tensors of everything received, by name."""
        for entry, pieces in zip(self.layout.parameters, self._pieces, strict=True):
            if len(pieces) == 1:
                continue
            whole = self._tensors[entry.name]
            for shard, tensor in pieces:
                box = tuple(slice(low, low + size) for low, size in zip(shard.offset, shard.shape, strict=True))
                whole[box].copy_(tensor)
        return dict(self._tensors)
