"""Where the part of a tensor that this rank holds lies in the whole tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The region of the global tensor that this rank holds, one slice per dimension (possibly empty).

    Covers plain tensors and DTensors sharded any number of times per dimension, uneven shards included. FSDP2 shards
    what tensor parallelism has already sharded; torch marks that as a strided shard, which comes after those to its
    right. The region stays one contiguous block in every dimension.
    """
    start, size = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return tuple(slice(0, 0) for _ in size)
        shards = [(index, placement) for index, placement in enumerate(tensor.placements) if placement.is_shard()]
        strided = [entry for entry in shards if hasattr(entry[1], "split_factor")]
        plain = [entry for entry in shards if not hasattr(entry[1], "split_factor")]
        for index, placement in plain + strided[::-1]:
            dim = placement.dim % tensor.dim()
            # As torch.chunk cuts: every part but the last ones has the rounded-up size.
            part = -(-size[dim] // mesh.size(index))
            begin = min(coordinate[index] * part, size[dim])
            start[dim] += begin
            size[dim] = min(part, size[dim] - begin)
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this rank; for a DTensor a collective of its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
