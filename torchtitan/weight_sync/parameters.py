"""The one place that reads DTensors: placements for the plan, local tensors for the copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchtitan.weight_sync.plan import PlacedParameter, Placement, PlanError, Sharded


def placed_parameter(name: str, parameter: torch.Tensor) -> PlacedParameter:
    """How this rank sees `parameter`. Raises PlanError for a placement other than sharded or replicated."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return PlacedParameter(name, shape)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    return PlacedParameter(
        name,
        shape,
        tuple(mesh.shape),
        None if coordinate is None else tuple(coordinate),
        tuple(_placement(name, placement) for placement in parameter.placements),
    )


def _placement(name: str, placement: TorchPlacement) -> Placement:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial():
        raise PlanError(f"{name}: cannot send a parameter placed as {placement}")
    return Sharded(int(dim), int(getattr(placement, "split_factor", 1)))


def unique_parameters(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the later names of tied parameters."""
    seen: set[int] = set()
    unique = {}
    for name, parameter in parameters.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            unique[name] = parameter
    return unique


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's own elements, without a copy and without a gradient."""
    if isinstance(parameter, DTensor):
        return parameter._local_tensor.detach()
    return parameter.detach()
