"""A rank's whole side of the weight synchronisation: its publisher, its shard server, and on rank 0 the registry."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan.config.derived import ON_DEVICE
from torchtitan.config.job_config import WeightSync
from torchtitan.distributed.placement import StackPart
from torchtitan.errors import UserError
from torchtitan.weight_sync.boundary import Boundary
from torchtitan.weight_sync.device_slots import DeviceSlots
from torchtitan.weight_sync.disk_owner import FolderOwner
from torchtitan.weight_sync.publisher import Publisher
from torchtitan.weight_sync.registry_state import Settings
from torchtitan.weight_sync.server_thread import ShardServerThread
from torchtitan.weight_sync.servers import RegistryServer, ShardServerProcess, numeric, towards
from torchtitan.weight_sync.watcher import Watcher
from torchtitan.weight_sync.weight_files import PackedRank


class Publication:
    """parameters: checkpoint name -> parameter, in the same order on every rank. config: where and how it is sent;
    other ranks listen where they reach rank 0's machine. folder: of the run folder, for logs and the journal. registry:
    what rank 0's `registry_address` says; None on rank 0, which starts it. Raises UserError for an address that cannot
    be used, a folder that another job writes to, and shards that files cannot hold."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor | StackPart],
        settings: Settings,
        config: WeightSync,
        *,
        epoch: str,
        token: str,
        folder: Path,
        rank: int = 0,
        local_rank: int = 0,
        registry: str | None = None,
        dtype: str = "float32",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        host = numeric(config.host) if registry is None else towards(registry)
        self._owner: FolderOwner | None = None
        files = ""
        if config.transport == "disk":
            disk_folder = Path(config.disk_path or folder.parent / "weights")
            files = str(disk_folder.resolve())
            self._owner = FolderOwner(disk_folder, epoch) if registry is None else None
        # One slot is written, one holds the newest version, one the base of deltas, the others are lanes.
        slots = 2 + settings.lanes + settings.delta
        self.publisher = Publisher(
            parameters,
            rank=rank,
            dtype=dtype,
            num_slots=slots,
            bucket_bytes=config.bucket_bytes,
            on_device=config.transport in ON_DEVICE,
        )
        if files:
            try:
                PackedRank(self.publisher.layout, 0)
            except ValueError as error:
                raise UserError(f'weight_sync.transport = "disk": {error}; take "tcp"') from error
        self.boundary = Boundary(self.publisher)
        self.registry: RegistryServer | None = None
        self.watcher: Watcher | None = None
        if registry is None:
            where = host, config.port, config.max_restarts
            self.registry = RegistryServer(epoch, token, settings, folder, where, files)
            registry = self.registry.address
            self.watcher = Watcher(registry, token, epoch)
        self.registry_address = registry
        self.shard_server: ShardServerProcess | ShardServerThread
        where = host, config.port + 1 + local_rank if config.port else 0, config.max_restarts
        facts = {"epoch": epoch, "registry": registry, "lease_s": settings.lease_s}
        if isinstance(self.publisher.slots, DeviceSlots) or config.transport == "nccl":
            chunks = (config.chunk_bytes, config.chunk_timeout_s) if config.transport == "nccl" else None
            self.shard_server = ShardServerThread(self.publisher, token, chunks, where, **facts)
        else:
            facts |= {"transport": config.transport, "world_size": settings.world_size, "disk_folder": files}
            self.shard_server = ShardServerProcess(self.publisher, token, folder, where, **facts)

    @property
    def failure(self) -> str:
        """Why no further version will be published, or nothing."""
        failures = [self.publisher.failure, self.shard_server.failure]
        if self.registry is not None and self.watcher is not None:
            failures += [self.registry.failure, self.watcher.failure, self.watcher.status()["failure"]]
        return "; ".join(filter(None, failures))

    def close(self, timeout: float = 5.0) -> None:
        """End everything within about `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if self.watcher is not None:
            self.watcher.close(timeout)
        self.shard_server.close(deadline)
        if self.registry is not None:
            self.registry.close(deadline)
        self.publisher.close()
        if self._owner is not None:
            self._owner.close()
