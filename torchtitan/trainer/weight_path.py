"""The path by which weights leave the trainer: to actors, to engines in its own processes, or nowhere in a replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.collectives import broadcast_bytes
from torchtitan.errors import Unreachable, UserError
from torchtitan.inference.engines.replicas.replica import Replica, ReplicaWeights
from torchtitan.inference.serving.joining import demands
from torchtitan.models.decoder import Decoder
from torchtitan.models.lora import synced_parameters
from torchtitan.models.shape.costs import applied_bytes
from torchtitan.utils.dtypes import DTYPES
from torchtitan.weight_sync.facade import ActorStatus, WeightSync


class WeightPath(Protocol):
    """The common interface. Only WeightSync has slots, pending versions and waiting for actors."""

    def commit(self, version: int, votes_against: int, /) -> str:
        """Offer the current weights, on every rank: "published", or "skipped" if a rank voted against it."""

    def actors(self) -> Mapping[str, ActorStatus]: ...

    def states(self) -> Mapping[str, str]:
        """Return actors' states and versions, for people."""

    def statistics(self) -> dict[str, float]: ...


class NoActors:
    """A run that samples nothing publishes nothing."""

    def __init__(self) -> None:
        self._skipped = 0

    def commit(self, version: int, votes_against: int, /) -> str:
        self._skipped += 1
        return "skipped"

    def actors(self) -> Mapping[str, ActorStatus]:
        return {}

    def states(self) -> Mapping[str, str]:
        return {}

    def statistics(self) -> dict[str, float]:
        published = {"weight_sync/versions_published": 0, "weight_sync/versions_skipped": self._skipped}
        return published | {"time/snapshot_s": 0.0, "time/sync_stall_s": 0.0}


@contextlib.contextmanager
def open_weight_path(
    config: JobConfig, policy: Decoder, epoch: str, token: str, run_dir: Path, replica: Replica | None = None
) -> Iterator[WeightPath]:
    """The weight path of this run, on every rank (collective); closed at the end.

    replica: this rank's part of the engines on the trainer's own devices, if there are any.
    """
    rank, ranks = device.rank(), device.world_size()
    if not config.has_engines:
        yield NoActors()
        return
    if replica is not None:
        replicas = ranks // config.inference.engine.tensor_parallel_size
        yield ReplicaWeights(policy, replica, replicas, epoch, DTYPES[config.inference.dtype])
        return
    # Rank 0 starts the registry, so it goes first; the others join at the address that it broadcasts, or end as it did.
    registry = None if rank == 0 else broadcast_bytes(None).decode()
    if registry is not None and registry.isdigit():
        kind = Unreachable if int(registry) == Unreachable.exit_code else UserError
        raise kind("rank 0 cannot publish weights, and says why")
    try:
        sync = WeightSync(
            config.weight_sync,
            synced_parameters(policy),
            epoch=epoch,
            token=token,
            run_dir=run_dir,
            rank=rank,
            world_size=ranks,
            local_rank=device.local_rank(),
            registry=registry,
            dtype=config.inference.dtype,
            drain_s=config.inference.drain_s,
            applied_bytes=applied_bytes(config, policy.args),
            guests=demands(config) if config.inference.discover and rank == 0 else None,
        )
    except UserError as error:
        if rank == 0:
            broadcast_bytes(str(error.exit_code).encode())
        raise
    try:
        if rank == 0:
            broadcast_bytes(sync.registry_address.encode())
        yield sync
    finally:
        sync.close()
