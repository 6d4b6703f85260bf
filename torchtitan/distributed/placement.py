"""Where the part of a tensor that this rank holds lies in the whole tensor."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import TypeIs

from torchtitan.distributed.device import device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# What of a parameter is a tensor of its own in files: all of it, an entry along its first dimension, or rows of one.
Place = int | tuple[int, tuple[int, int]] | None


@dataclass(frozen=True, eq=False)
class StackPart:
    """One entry of a stack along its first dimension: a tensor of its own in files, engines and on the wire.

    It is never copied out of the stack for that, and the stack may be sharded in any way.
    """

    stack: torch.Tensor
    index: int
    rows: tuple[int, int] | None = None
    """First and end of the entry's rows that it is, where it is not all: then entries are whole on their rank"""

    @property
    def shape(self) -> torch.Size:
        rows = self.stack.shape[1] if self.rows is None else self.rows[1] - self.rows[0]
        return torch.Size((rows, *self.stack.shape[2:]))

    @property
    def region(self) -> tuple[slice, ...]:
        """Of this tensor, what this rank holds where it holds some of the entry."""
        rows, *others = local_region(self.stack)[1:]
        return rows if self.rows is None else slice(0, self.shape[0]), *others

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    def local(self) -> torch.Tensor | None:
        """This rank's part of the entry, a view of its part of the stack; None where it has nothing of it."""
        first = local_region(self.stack)[0]
        if not first.start <= self.index < first.stop:
            return None
        entry = local_tensor(self.stack)[self.index - first.start]
        return entry if self.rows is None else entry[slice(*self.rows)]


def part_of(tensor: torch.Tensor, place: Place) -> torch.Tensor | StackPart:
    """That part of a parameter."""
    if place is None:
        return tensor
    return StackPart(tensor, *place) if isinstance(place, tuple) else StackPart(tensor, place)


def is_distributed(tensor: object) -> TypeIs[DTensor]:
    """Whether it is a DTensor. Importing those takes half a second, which engines without them are spared."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def local_region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The region of the global tensor that this rank holds, one slice per dimension (possibly empty).

    Covers plain tensors and DTensors sharded any number of times per dimension, uneven shards included. FSDP2 shards
    what tensor parallelism has already sharded; torch marks that as a strided shard, which comes after those to its
    right. The region stays one contiguous block in every dimension.
    """
    start, size = [0] * tensor.dim(), list(tensor.shape)
    if is_distributed(tensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return tuple(slice(0, 0) for _ in size)
        plain, strided = [], []
        for index, placement in enumerate(tensor.placements):
            if hasattr(placement, "split_factor"):
                # A strided shard: its class is private and its is_shard() is False.
                strided.append((index, placement.dim))  # type: ignore[attr-defined]
            elif placement.is_shard():
                plain.append((index, placement.dim))  # type: ignore[attr-defined]
        for index, shard_dim in plain + strided[::-1]:
            dim = shard_dim % tensor.dim()
            # As torch.chunk cuts: every part but the last ones has the rounded-up size.
            part = -(-size[dim] // mesh.size(index))
            begin = min(coordinate[index] * part, size[dim])
            start[dim] += begin
            size[dim] = min(part, size[dim] - begin)
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this rank; for a DTensor a collective of its mesh, on the mesh's device."""
    if not is_distributed(tensor):
        return tensor
    local = tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:
        # An offloaded parameter: its mesh's collectives run on the device.
        local = local.to(device())
        tensor = type(tensor).from_local(
            local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor()


def held_part(one: torch.Tensor | StackPart) -> tuple[tuple[slice, ...], torch.Tensor | None]:
    """The region of it that this rank holds, and what is there; None where it has nothing of a stack's entry."""
    if isinstance(one, StackPart):
        return one.region, one.local()
    return local_region(one), local_tensor(one)


@torch.no_grad()
def copy_full_(target: torch.Tensor | StackPart, full: torch.Tensor) -> None:
    """Fill `target`, sharded or not, from the whole tensor; no communication."""
    region, local = held_part(target)
    if local is not None:
        local.copy_(full[region])
