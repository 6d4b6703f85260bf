"""The one place that reads DTensors: placements for the plan, local tensors for the copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchtitan.distributed.placement import StackPart, local_region
from torchtitan.weight_sync.plan import Placed, PlacedParameter, Placement, PlanError, Sharded

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
