"""Who sends what: from each parameter's placement to this rank's shards. Pure; parameters.py reads DTensors into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.weight_sync.manifest import (
    DTYPE_BYTES,
    SHARD_ALIGNMENT,
    Layout,
    ParameterEntry,
    RankLayout,
    ShardEntry,
)


class PlanError(Exception):
    """A placement that cannot be sent shard by shard."""


@dataclass(frozen=True)
class Sharded:
    """This mesh dimension cuts tensor dimension `dim` into chunks.

    split_factor > 1: later mesh dimensions have cut it into so many parts before (FSDP2 over tensor parallelism).
    """

    dim: int
    split_factor: int = 1


# None stands for a mesh dimension whose ranks all hold the same.
Placement = Sharded | None


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter as one rank sees it. A rank outside of the parameter's mesh has no coordinate."""

    name: str
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    coordinate: tuple[int, ...] | None = ()
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of chunk `index`, cut as torch.chunk cuts: equal lengths, the last ones shorter or empty."""
    length = -(-size // parts)
    start = min(index * length, size)
    return start, min(length, size - start)


def _order_of_cuts(parameter: PlacedParameter) -> list[int]:
    """Mesh dimensions in the order in which they cut: from the left, a strided one after those it follows."""
    remaining = list(range(len(parameter.placements)))
    order: list[int] = []
    while remaining:
        for mesh_dim in remaining:
            placement = parameter.placements[mesh_dim]
            before = placement.split_factor if placement is not None else 1
            later = [
                other
                for other in remaining
                if other > mesh_dim and placement is not None and _cuts(parameter.placements[other], placement.dim)
            ]
            if before == 1 or not later:
                break
        else:
            raise PlanError(f"{parameter.name}: placements {parameter.placements} have no order")
        if placement is not None and before > 1:
            done = [o for o in order if o > mesh_dim and _cuts(parameter.placements[o], placement.dim)]
            if math.prod(parameter.mesh_shape[other] for other in done) != before:
                raise PlanError(
                    f"{parameter.name}: split factor {before} does not match the mesh {parameter.mesh_shape}"
                )
        order.append(mesh_dim)
        remaining.remove(mesh_dim)
    return order


def _cuts(placement: Placement, dim: int) -> bool:
    return placement is not None and placement.dim == dim


def local_box(parameter: PlacedParameter) -> Box | None:
    """The part of the parameter that this rank holds; None outside of its mesh."""
    if parameter.coordinate is None:
        return None
    offset, shape = [0] * len(parameter.shape), list(parameter.shape)
    for mesh_dim in _order_of_cuts(parameter):
        placement = parameter.placements[mesh_dim]
        if placement is None:
            continue
        start, length = _chunk(shape[placement.dim], parameter.mesh_shape[mesh_dim], parameter.coordinate[mesh_dim])
        offset[placement.dim] += start
        shape[placement.dim] = length
    return Box(tuple(offset), tuple(shape))


def sent_box(parameter: PlacedParameter, rank: int) -> Box | None:
    """The part that this rank sends: what it holds, unless a lower coordinate holds the same or it holds nothing.

    A parameter without a mesh is the same on every rank: rank 0 sends it.
    """
    box = local_box(parameter)
    if box is None or math.prod(box.shape) == 0:
        return None
    if not parameter.mesh_shape:
        return box if rank == 0 else None
    assert parameter.coordinate is not None
    for placement, coordinate in zip(parameter.placements, parameter.coordinate, strict=True):
        if placement is None and coordinate != 0:
            return None
    return box


def plan_rank(parameters: Sequence[PlacedParameter], rank: int, dtype: str, bucket_bytes: int) -> Layout:
    """What `rank` sends, as a layout with this one rank: shards in the order of the parameters, each aligned."""
    entries = tuple(ParameterEntry(parameter.name, dtype, parameter.shape) for parameter in parameters)
    shards, end = [], 0
    for index, parameter in enumerate(parameters):
        box = sent_box(parameter, rank)
        if box is None:
            continue
        start = -(-end // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
        shards.append(ShardEntry(index, box.offset, box.shape, start))
        end = start + math.prod(box.shape) * DTYPE_BYTES[dtype]
    return Layout(bucket_bytes, entries, (RankLayout(end, tuple(shards)),))
