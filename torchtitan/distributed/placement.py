"""The layout of the ranks (replicas × shards × context × tensor parallelism, and experts across the last three), and
the position of a rank's part of a tensor in the whole tensor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import torch
from typing_extensions import TypeIs

from torchtitan.config.job_config import Parallelism
from torchtitan.distributed.device import device, ensure_process_group
from torchtitan.utils.ranks import from_torchrun

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass
class ParallelDims:
    """Degrees of parallelism; their product is the world size.

    Tensor parallelism varies fastest in rank numbers, then context parallelism, shards and replicas, so that the ranks
    that communicate most are neighbours. Parameters are sharded over shards × context, and all these ranks contribute
    gradients.
    """

    dp_replicate: int
    dp_shard: int
    tp: int
    world_size: int
    rank: int = 0
    ep: int = 1
    """Ranks with different experts: neighbouring shards and their tensor-parallel ranks"""
    cp: int = 1
    """Ranks that share each pack"""

    @classmethod
    def from_config(cls, parallelism: Parallelism, world_size: int, rank: int | None = None) -> ParallelDims:
        """Fill in the shard degree where it is -1; without a rank, take the one that torchrun set. That the degrees fit
        the world size preflight/training.py has seen to."""
        rank = from_torchrun("RANK", "0") if rank is None else rank
        replicate, tensor = parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree
        experts, context = parallelism.expert_parallel_degree, parallelism.context_parallel_degree
        return cls(replicate, parallelism.shard_degree(world_size), tensor, world_size, rank, experts, context)

    @property
    def dp_size(self) -> int:
        """Ranks (or groups of context- and tensor-parallel ranks) that work on different packs."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Which share of the packs this rank works on."""
        return self.rank // (self.tp * self.cp)

    @property
    def fsdp_enabled(self) -> bool:
        """With several ranks, FSDP2 always holds the parameters, if only to reduce gradients in one place."""
        return self.world_size > 1

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh with dimensions dp_replicate, dp_shard (which includes context-parallel ranks) and tp.

        Creating it is a collective of all ranks.
        """
        from torch.distributed.device_mesh import init_device_mesh

        ensure_process_group()
        shape = (self.dp_replicate, self.dp_shard * self.cp, self.tp)
        return init_device_mesh(device().type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))

    @functools.cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks arranged for the experts: dp_replicate, efsdp (ranks with the same experts) and ep."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.dp_replicate, self.dp_shard * self.cp * self.tp // self.ep, self.ep)
        return init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=("dp_replicate", "efsdp", "ep"))

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: shards, or replicas × shards (HSDP)."""
        return self.mesh["dp_replicate", "dp_shard"] if self.dp_replicate > 1 else self.mesh["dp_shard"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self.mesh["tp"]

    @functools.cached_property
    def cp_group(self) -> ProcessGroup:
        """The ranks that share a pack with this one. Creating the group is a collective of all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        kind = self.mesh.device_type
        return init_device_mesh(kind, (self.dp_size, self.cp, self.tp), mesh_dim_names=("dp", "cp", "tp")).get_group(
            "cp"
        )

    @property
    def groups(self) -> list[ProcessGroup]:
        """Process groups of the mesh, for `device.set_timeouts`; none if no mesh exists."""
        meshes = [self.__dict__[name] for name in ("mesh", "expert_mesh") if name in self.__dict__]
        shared = [self.cp_group] if "cp_group" in self.__dict__ else []
        return [mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names] + shared


# The part of a parameter that files store as a tensor: all of it, an entry of its first dimension, or rows of one.
Place = int | tuple[int, tuple[int, int]] | None


@dataclass(frozen=True, eq=False)
class StackPart:
    """One entry of a stack along its first dimension: a separate tensor in files, engines and transfers.

    It is not copied out of the stack, and the stack may be sharded in any way.
    """

    stack: torch.Tensor
    index: int
    rows: tuple[int, int] | None = None
    """Start and end of its rows in the entry if it is not the whole entry; entries are then whole on their rank"""

    @property
    def shape(self) -> torch.Size:
        rows = self.stack.shape[1] if self.rows is None else self.rows[1] - self.rows[0]
        return torch.Size((rows, *self.stack.shape[2:]))

    @property
    def region(self) -> tuple[slice, ...]:
        """The region of this tensor that this rank holds, if it holds some of the entry."""
        rows, *others = local_region(self.stack)[1:]
        return rows if self.rows is None else slice(0, self.shape[0]), *others

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    def local(self) -> torch.Tensor | None:
        """This rank's part of the entry, as a view of its part of the stack; None if it holds nothing of it."""
        first = local_region(self.stack)[0]
        if not first.start <= self.index < first.stop:
            return None
        entry = local_tensor(self.stack)[self.index - first.start]
        return entry if self.rows is None else entry[slice(*self.rows)]


def part_of(tensor: torch.Tensor, place: Place) -> torch.Tensor | StackPart:
    """Return the part of a parameter at `place`."""
    if place is None:
        return tensor
    return StackPart(tensor, *place) if isinstance(place, tuple) else StackPart(tensor, place)


def is_distributed(tensor: object) -> TypeIs[DTensor]:
    """Whether it is a DTensor. This avoids the half second of importing DTensor in engines that do not use it."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def local_copy(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter that all ranks hold and each uses for something else, so that their gradients add up."""
    if not is_distributed(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    return parameter.to_local(grad_placements=[Partial()])


def local_region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The region of the global tensor that this rank holds, one slice per dimension (possibly empty)."""
    if not is_distributed(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    mesh = tensor.device_mesh
    return region_at(tensor.shape, mesh.shape, mesh.get_coordinate(), tensor.placements)


def region_at(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int] | None, placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """The region of a tensor that the rank at this coordinate of a mesh holds; empty for a rank outside the mesh.

    Supports tensors sharded any number of times per dimension, including uneven shards. FSDP2 shards what tensor
    parallelism has already sharded; torch marks that as a strided shard, which is applied after those to its right. The
    region stays one contiguous block in every dimension.
    """
    if coordinate is None:
        return tuple(slice(0, 0) for _ in shape)
    start, length = [0] * len(shape), list(shape)
    plain, strided = [], []
    for index, placement in enumerate(placements):
        if hasattr(placement, "split_factor"):
            # A strided shard: its class is private and its is_shard() is False.
            strided.append((index, placement.dim))  # type: ignore[attr-defined]
        elif placement.is_shard():
            plain.append((index, placement.dim))  # type: ignore[attr-defined]
    for index, shard_dim in plain + strided[::-1]:
        dim = shard_dim % len(shape)
        # As in torch.chunk, every part but the last ones has the rounded-up size.
        part = -(-length[dim] // mesh_shape[index])
        begin = min(coordinate[index] * part, length[dim])
        start[dim] += begin
        length[dim] = min(part, length[dim] - begin)
    return tuple(slice(first, first + size) for first, size in zip(start, length, strict=True))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this rank; for a DTensor a collective of its mesh, on the mesh's device."""
    if not is_distributed(tensor):
        return tensor
    local = tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:
        # The parameter is offloaded, but its mesh's collectives run on the device.
        local = local.to(device())
        tensor = type(tensor).from_local(
            local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor()


def held_part(parameter: torch.Tensor | StackPart) -> tuple[tuple[slice, ...], torch.Tensor | None]:
    """The region that this rank holds, and its values; None if it holds nothing of a stack's entry."""
    if isinstance(parameter, StackPart):
        return parameter.region, parameter.local()
    return local_region(parameter), local_tensor(parameter)


@torch.no_grad()
def copy_full_(target: torch.Tensor | StackPart, full: torch.Tensor) -> None:
    """Fill `target`, sharded or not, from the whole tensor, without communication."""
    region, local = held_part(target)
    if local is not None:
        local.copy_(full[region])


class LocalTensors:
    """This rank's own elements of some parameters (tensors, DTensors or parts of stacks), without a copy.

    FSDP2 may replace a parameter's local tensor (first forward, loading), so each snapshot looks it up: one attribute
    access per parameter, which is cheap even for 64,000.
    """

    def __init__(self, parameters: Sequence[torch.Tensor | StackPart]):
        self._parameters: list[torch.Tensor] = []
        self._entries: list[tuple[int, int, slice]] = []
        """(index of the parameter, index of the entry in this rank's part of the stack, its rows)"""
        for place, parameter in enumerate(parameters):
            if isinstance(parameter, StackPart):
                self._parameters.append(parameter.stack)
                entry = parameter.index - local_region(parameter.stack)[0].start
                self._entries.append((place, entry, slice(*parameter.rows or (None,))))
            else:
                self._parameters.append(parameter)
        self._are_distributed = list(map(is_distributed, self._parameters))
        self._all_distributed = all(map(is_distributed, parameters))

    def now(self) -> list[torch.Tensor]:
        """Return the tensors in the order of the parameters. Copy them under no_grad: they may require gradients."""
        if self._all_distributed:
            return list(map(_local_tensor, self._parameters))
        local = [
            _local_tensor(parameter) if distributed else parameter
            for parameter, distributed in zip(self._parameters, self._are_distributed, strict=True)
        ]
        for place, entry, rows in self._entries:
            local[place] = local[place][entry, rows]
        return local


_local_tensor = attrgetter("_local_tensor")


Weight = TypeVar("Weight", bound=torch.Tensor | StackPart)


def unique_parameters(parameters: Mapping[str, Weight]) -> dict[str, Weight]:
    """Leave out the later names of tied parameters."""
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        first.setdefault(id(parameter), name)
    return {name: parameters[name] for name in first.values()}
