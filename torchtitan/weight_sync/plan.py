"""Who sends what: from each parameter's placement to this rank's shards; and the one place that reads DTensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchtitan.distributed.placement import StackPart, local_region
from torchtitan.weight_sync.layout_tables import Box, ParameterTable, ShardTable, numbered
from torchtitan.weight_sync.manifest import Layout


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
class Placed:
    """A shape on a mesh, as one rank sees it. A rank outside of the mesh has no coordinate.

    entry: what is sent is this entry of it along the first dimension.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    coordinate: tuple[int, ...] | None = ()
    placements: tuple[Placement, ...] = ()
    entry: int | None = None
    rows: tuple[int, int] | None = None
    """First and end of the entry's rows that are sent, where not all are: those are not sharded"""

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Of the parameter as actors know it."""
        if self.rows is not None:
            return (self.rows[1] - self.rows[0], *self.shape[2:])
        return self.shape if self.entry is None else self.shape[1:]


class PlacedParameter(NamedTuple):
    """A parameter as one rank sees it. Planning is fast where parameters that are placed alike share one `placed`."""

    name: str
    placed: Placed


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of chunk `index`, cut as torch.chunk cuts: equal lengths, the last ones shorter or empty."""
    length = -(-size // parts)
    start = min(index * length, size)
    return start, min(length, size - start)


def _order_of_cuts(placed: Placed) -> list[int]:
    """Mesh dimensions in the order in which they cut: from the left, a strided one after those it follows."""
    remaining = list(range(len(placed.placements)))
    order: list[int] = []
    while remaining:
        for mesh_dim in remaining:
            placement = placed.placements[mesh_dim]
            before = placement.split_factor if placement is not None else 1
            later = [
                other
                for other in remaining
                if other > mesh_dim and placement is not None and _cuts(placed.placements[other], placement.dim)
            ]
            if before == 1 or not later:
                break
        else:
            raise PlanError(f"placements {placed.placements} have no order")
        if placement is not None and before > 1:
            done = [o for o in order if o > mesh_dim and _cuts(placed.placements[o], placement.dim)]
            if math.prod(placed.mesh_shape[other] for other in done) != before:
                raise PlanError(f"split factor {before} does not match the mesh {placed.mesh_shape}")
        order.append(mesh_dim)
        remaining.remove(mesh_dim)
    return order


def _cuts(placement: Placement, dim: int) -> bool:
    return placement is not None and placement.dim == dim


def local_box(placed: Placed) -> Box | None:
    """The part of the parameter that this rank holds; None outside of its mesh, or where it has not that entry."""
    if placed.coordinate is None:
        return None
    offset, shape = [0] * len(placed.shape), list(placed.shape)
    for mesh_dim in _order_of_cuts(placed):
        placement = placed.placements[mesh_dim]
        if placement is None:
            continue
        start, length = _chunk(shape[placement.dim], placed.mesh_shape[mesh_dim], placed.coordinate[mesh_dim])
        offset[placement.dim] += start
        shape[placement.dim] = length
    if placed.entry is None:
        return Box(tuple(offset), tuple(shape))
    if not offset[0] <= placed.entry < offset[0] + shape[0]:
        return None
    if placed.rows is not None:
        shape[1] = placed.rows[1] - placed.rows[0]
    return Box(tuple(offset[1:]), tuple(shape[1:]))


def sent_box(placed: Placed, rank: int) -> Box | None:
    """The part that this rank sends: what it holds, unless a lower coordinate holds the same or it holds nothing.

    A parameter without a mesh is the same on every rank: rank 0 sends it.
    """
    box = local_box(placed)
    if box is None or math.prod(box.shape) == 0:
        return None
    if not placed.mesh_shape:
        return box if rank == 0 else None
    assert placed.coordinate is not None
    for placement, coordinate in zip(placed.placements, placed.coordinate, strict=True):
        if placement is None and coordinate != 0:
            return None
    return box


def plan_rank(parameters: Sequence[PlacedParameter], rank: int, dtype: str, bucket_bytes: int) -> Layout:
    """What `rank` sends, as a layout with this one rank: shards in the order of the parameters, without gaps."""
    names, all_placed = tuple(map(itemgetter(0), parameters)), list(map(itemgetter(1), parameters))
    # First by identity, which needs no hash of a whole placement, then the few that are left by value.
    identity = list(map(id, all_placed))
    by_identity = dict(zip(identity, all_placed, strict=True))
    placements, number = numbered(by_identity.values())
    number_of = dict(zip(by_identity, number.tolist(), strict=True))
    which = np.fromiter(map(number_of.__getitem__, identity), np.int64, len(identity))

    kinds, kind = numbered((dtype, placed.sent_shape) for placed in placements)
    sent: list[Box | None] = []
    for index, placed in enumerate(placements):
        try:
            sent.append(sent_box(placed, rank))
        except PlanError as error:
            raise PlanError(f"{names[int(np.argmax(which == index))]}: {error}") from error
    boxes, box_of_sent = numbered(box for box in sent if box is not None)
    box_of = np.full(len(sent), -1, np.int64)
    box_of[[index for index, box in enumerate(sent) if box is not None]] = box_of_sent

    parameter = np.flatnonzero(box_of[which] >= 0)
    box = box_of[which[parameter]]
    table = ParameterTable(names, kinds, kind[which])
    return Layout(bucket_bytes, table, (ShardTable(table, boxes, parameter, box),))


Weight = TypeVar("Weight", bound=torch.Tensor | StackPart)


def placed_parameters(parameters: Mapping[str, torch.Tensor | StackPart]) -> list[PlacedParameter]:
    """How this rank sees each parameter. Raises PlanError for a placement other than sharded or replicated."""
    # Meshes and placements are few and shared: what was read once is used for all that are placed alike.
    known: dict[tuple[object, ...], Placed] = {}
    placed = []
    for name, one in parameters.items():
        parameter, entry, rows = (one.stack, one.index, one.rows) if isinstance(one, StackPart) else (one, None, None)
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        key = (parameter.shape, id(mesh), placements, entry, rows)
        if key not in known:
            known[key] = replace(_placed(name, tuple(parameter.shape), mesh, placements), entry=entry, rows=rows)
        placed.append(PlacedParameter(name, known[key]))
    return placed


def _placed(
    name: str, shape: tuple[int, ...], mesh: DeviceMesh | None, placements: tuple[TorchPlacement, ...]
) -> Placed:
    if mesh is None:
        return Placed(shape)
    coordinate = mesh.get_coordinate()
    return Placed(
        shape,
        tuple(mesh.shape),
        None if coordinate is None else tuple(coordinate),
        tuple(_placement(name, placement) for placement in placements),
    )


def _placement(name: str, placement: TorchPlacement) -> Placement:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial():
        raise PlanError(f"{name}: cannot send a parameter placed as {placement}")
    return Sharded(int(dim), int(getattr(placement, "split_factor", 1)))


def unique_parameters(parameters: Mapping[str, Weight]) -> dict[str, Weight]:
    """Without the later names of tied parameters."""
    seen: set[int] = set()
    unique = {}
    for name, parameter in parameters.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            unique[name] = parameter
    return unique


class LocalTensors:
    """This rank's own elements of some parameters (tensors, DTensors or parts of stacks), without a copy.

    FSDP2 may replace a parameter's local tensor (first forward, loading), so they are looked up for every snapshot: one
    attribute each, which 64,000 of them do not notice.
    """

    def __init__(self, parameters: Sequence[torch.Tensor | StackPart]):
        self._distributed = all(isinstance(parameter, DTensor) for parameter in parameters)
        self._parameters = [one.stack if isinstance(one, StackPart) else one for one in parameters]
        self._entries = [
            (place, one.index - local_region(one.stack)[0].start, slice(*one.rows or (None,)))
            for place, one in enumerate(parameters)
            if isinstance(one, StackPart)
        ]
        """(which parameter, its place in what this rank has of the stack, its rows there)"""

    def now(self) -> list[torch.Tensor]:
        """In the order of the parameters. To be copied under no_grad: they may require gradients."""
        if self._distributed:
            return list(map(_local_tensor, self._parameters))
        local = [p._local_tensor if isinstance(p, DTensor) else p for p in self._parameters]
        for place, entry, rows in self._entries:
            local[place] = local[place][entry, rows]
        return local


_local_tensor = attrgetter("_local_tensor")
