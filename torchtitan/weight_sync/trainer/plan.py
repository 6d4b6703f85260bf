"""Plans which shards this rank sends, from each parameter's placement. The only place here that reads DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchtitan.distributed.boxes import Box
from torchtitan.distributed.placement import StackPart, region_at
from torchtitan.errors import UserError
from torchtitan.utils.columns import numbered
from torchtitan.weight_sync.memory.layout_tables import ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout

MAX_BUCKETS = 4096
# Elements never straddle buckets.
BUCKET_ALIGNMENT = 1024


@dataclass(frozen=True, eq=False)
class Placed:
    """A parameter's shape and placement on a mesh, as one rank sees them. A rank outside the mesh has no coordinate.

    entry: if set, only this entry along the first dimension is sent.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    coordinate: tuple[int, ...] | None = ()
    placements: tuple[Placement, ...] = ()
    entry: int | None = None
    rows: tuple[int, int] | None = None
    """First and end of the entry's rows that are sent, if not all are; such rows are not sharded"""

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of the parameter as actors know it."""
        if self.rows is not None:
            return (self.rows[1] - self.rows[0], *self.shape[2:])
        return self.shape if self.entry is None else self.shape[1:]


class PlacedParameter(NamedTuple):
    """A parameter as one rank sees it. Planning is fast if parameters with the same placement share one `placed`."""

    name: str
    placed: Placed


def local_box(placed: Placed) -> Box | None:
    """Return the part that this rank holds; None if the rank is outside the mesh or lacks the entry."""
    if placed.coordinate is None:
        return None
    region = list(region_at(placed.shape, placed.mesh_shape, placed.coordinate, placed.placements))
    if placed.entry is not None:
        entries = region.pop(0)
        if not entries.start <= placed.entry < entries.stop:
            return None
    if placed.rows is not None:
        region[0] = slice(0, placed.rows[1] - placed.rows[0])
    starts = tuple(part.start for part in region)
    return Box(starts, tuple(part.stop - part.start for part in region))


def sent_box(placed: Placed, rank: int) -> Box | None:
    """Return the part that this rank sends: what it holds, unless that is nothing or a lower coordinate holds the same.

    Rank 0 sends a parameter without a mesh, because it is the same on every rank.
    """
    box = local_box(placed)
    if box is None or box.elements == 0:
        return None
    assert placed.coordinate is not None
    if not placed.mesh_shape:
        return box if rank == 0 else None
    for placement, coordinate in zip(placed.placements, placed.coordinate, strict=True):
        if placement.is_replicate() and coordinate > 0:
            return None
    return box


def bucket_bytes_of(version_bytes: int, ranks: int) -> int:
    """Return the least size of buckets of which a rank has about MAX_BUCKETS, if all send as much: checksums, requests
    and messages then stay few however large the version is."""
    return -(-version_bytes // (ranks * MAX_BUCKETS * BUCKET_ALIGNMENT)) * BUCKET_ALIGNMENT


def plan_rank(parameters: Sequence[PlacedParameter], rank: int, dtype: str, bucket_bytes: int) -> Layout:
    """Return what `rank` sends, as a layout with this one rank: shards in the order of the parameters, without gaps."""
    placements, which = numbered(parameter.placed for parameter in parameters)
    kinds, kind = numbered((dtype, placed.sent_shape) for placed in placements)
    sent = [sent_box(placed, rank) for placed in placements]
    boxes, box_of_sent = numbered(box for box in sent if box is not None)
    box_of = np.full(len(sent), -1, np.int64)
    box_of[np.array([box is not None for box in sent], bool)] = box_of_sent

    parameter = np.flatnonzero(box_of[which] >= 0)
    box = box_of[which[parameter]]
    table = ParameterTable(tuple(parameter.name for parameter in parameters), kinds, kind[which])
    return Layout(bucket_bytes, table, (ShardTable(table, boxes, parameter, box),))


def placed_parameters(parameters: Mapping[str, torch.Tensor | StackPart]) -> list[PlacedParameter]:
    """Return how this rank sees each parameter. Raises UserError for placements other than sharded or replicated."""
    # Meshes and placements are few and shared, so each combination is read once.
    known: dict[tuple[object, ...], Placed] = {}
    placed = []
    for name, sent in parameters.items():
        parameter, entry, rows = sent, None, None
        if isinstance(sent, StackPart):
            parameter, entry, rows = sent.stack, sent.index, sent.rows
        mesh = None
        placements: tuple[Placement, ...] = ()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
        key = (parameter.shape, id(mesh), placements, entry, rows)
        if key not in known:
            for placement in placements:
                if not hasattr(placement, "dim") and not placement.is_replicate():
                    raise UserError(f"weight sync cannot send {name} shard by shard: it is placed as {placement}")
            coordinate = () if mesh is None else mesh.get_coordinate()
            at = None if coordinate is None else tuple(coordinate)
            shape, mesh_shape = tuple(parameter.shape), () if mesh is None else tuple(mesh.shape)
            known[key] = Placed(shape, mesh_shape, at, placements, entry, rows)
        placed.append(PlacedParameter(name, known[key]))
    return placed
