"""How the ranks are laid out: replicas × shards × context × tensor parallelism, and experts across the latter three. No
torch until the mesh is made."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.config.job_config import Parallelism
from torchtitan.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class ParallelDims:
    """Degrees of parallelism; their product is the world size.

    Ranks are numbered with tensor parallelism fastest, then context parallelism, shards and replicas, so that the ranks
    that talk most are neighbours. Parameters are sharded over shards × context, whose ranks all add to the gradients.
    """

    dp_replicate: int
    dp_shard: int
    tp: int
    world_size: int
    rank: int = 0
    ep: int = 1
    """Ranks, neighbours among the shards and their tensor-parallel ranks, that have different experts"""
    cp: int = 1
    """Ranks that share each pack"""

    def __post_init__(self) -> None:
        degrees = {
            "data_parallel_replicate_degree": self.dp_replicate,
            "data_parallel_shard_degree": self.dp_shard,
            "context_parallel_degree": self.cp,
            "tensor_parallel_degree": self.tp,
            "expert_parallel_degree": self.ep,
        }
        problems = [f"parallelism.{key} = {value}: must be at least 1" for key, value in degrees.items() if value < 1]
        if not problems and self.dp_shard * self.cp * self.tp % self.ep:
            text = f"does not divide data_parallel_shard_degree {self.dp_shard} × tensor_parallel_degree {self.tp}"
            problems.append(f"parallelism.expert_parallel_degree = {self.ep} {text}")
        del degrees["expert_parallel_degree"]
        if not problems and self.dp_size * self.cp * self.tp != self.world_size:
            if self.cp == 1:
                del degrees["context_parallel_degree"]
            product = " × ".join(f"{key} {value}" for key, value in degrees.items())
            problems.append(f"parallelism: {product} does not make the {self.world_size} ranks that were started")
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_config(cls, parallelism: Parallelism, world_size: int, rank: int | None = None) -> ParallelDims:
        """Fill in the shard degree where it is -1; without a rank, take the one that torchrun set.

        Raises ConfigError where the degrees do not fit the world size.
        """
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        replicate, tensor = parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree
        shard, context = parallelism.data_parallel_shard_degree, parallelism.context_parallel_degree
        if shard == -1 and min(replicate, tensor, context) > 0:
            others = replicate * context * tensor
            shard = world_size // others
            if shard * others != world_size:
                among = f"context_parallel_degree {context} × " if context > 1 else ""
                raise ConfigError(
                    [
                        f"parallelism: data_parallel_replicate_degree {replicate} × {among}tensor_parallel_degree "
                        f"{tensor} does not divide the {world_size} ranks that were started"
                    ]
                )
        return cls(replicate, shard, tensor, world_size, rank, parallelism.expert_parallel_degree, context)

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
        """With several ranks FSDP2 always holds the parameters, if only to reduce gradients in one place."""
        return self.world_size > 1

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh with dimensions dp_replicate, dp_shard (context-parallel ranks among them) and tp.

        Making it is a collective of all ranks.
        """
        from torch.distributed.device_mesh import init_device_mesh

        from torchtitan.distributed.device import device, ensure_process_group

        ensure_process_group()
        shape = (self.dp_replicate, self.dp_shard * self.cp, self.tp)
        return init_device_mesh(device().type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))

    @functools.cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks for the experts: dp_replicate, efsdp (ranks with the same experts) and ep."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.dp_replicate, self.dp_shard * self.cp * self.tp // self.ep, self.ep)
        return init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=("dp_replicate", "efsdp", "ep"))

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What `fully_shard` gets: shards, or replicas × shards (HSDP)."""
        return self.mesh["dp_replicate", "dp_shard"] if self.dp_replicate > 1 else self.mesh["dp_shard"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self.mesh["tp"]

    @functools.cached_property
    def cp_group(self) -> ProcessGroup:
        """The ranks that share a pack with this one. Making it is a collective of all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        kind = self.mesh.device_type
        return init_device_mesh(kind, (self.dp_size, self.cp, self.tp), mesh_dim_names=("dp", "cp", "tp")).get_group(
            "cp"
        )

    @property
    def groups(self) -> list[ProcessGroup]:
        """Process groups of the mesh, for `device.set_timeouts`; none where no mesh was made."""
        meshes = [self.__dict__[name] for name in ("mesh", "expert_mesh") if name in self.__dict__]
        shared = [self.cp_group] if "cp_group" in self.__dict__ else []
        return [mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names] + shared
