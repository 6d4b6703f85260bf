"""The way by which weights leave the trainer: to actors, or nowhere when a record is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.collectives import broadcast_bytes
from torchtitan.inference.colocated.replica import Replica
from torchtitan.inference.colocated.weights import ColocatedWeights
from torchtitan.models.decoder import Decoder
from torchtitan.models.lora import synced_parameters
from torchtitan.weight_sync.facade import ActorStatus, SyncOutcome, WeightSync
from torchtitan.weight_sync.publisher import Snapshot
from torchtitan.weight_sync.staging import TORCH_DTYPES


class WeightPath(Protocol):
    """What the loop asks for; weight_sync.facade.WeightSync describes its methods."""

    @property
    def coordinator_address(self) -> str: ...

    @property
    def owed(self) -> int | None: ...

    def reserve(self) -> bool: ...

    def fence(self) -> None: ...

    def make_room(self) -> None:
        """The trainer's state is needed next, so what generation holds of this device goes. Every rank."""

    def commit(self, version: int, noes: int) -> str: ...

    def snapshot_owed(self, version: int) -> bool: ...

    def wait_until_applied(
        self, version: int, timeout: float, at_least: int = 0, counts_as_stall: bool = True
    ) -> SyncOutcome: ...

    def pin(self, version: int) -> frozenset[str]: ...

    def unpin(self) -> None: ...

    def actors(self) -> Mapping[str, ActorStatus]: ...

    def statistics(self) -> dict[str, float]: ...

    def take_snapshots(self) -> list[Snapshot]: ...


class NoWeightSync:
    """A run that replays a record has no actors: every version is skipped and none is owed."""

    coordinator_address = ""
    owed: int | None = None

    def __init__(self) -> None:
        self._skipped = 0

    def reserve(self) -> bool:
        return True

    def fence(self) -> None:
        """No snapshot is under way."""

    def make_room(self) -> None:
        """Nothing is generated."""

    def commit(self, version: int, noes: int) -> str:
        self._skipped += 1
        return "skipped"

    def snapshot_owed(self, version: int) -> bool:
        raise RuntimeError("nothing is owed where nothing is published")

    def wait_until_applied(
        self, version: int, timeout: float, at_least: int = 0, counts_as_stall: bool = True
    ) -> SyncOutcome:
        return SyncOutcome(frozenset(), {})

    def pin(self, version: int) -> frozenset[str]:
        return frozenset()

    def unpin(self) -> None:
        """Nothing is pinned."""

    def actors(self) -> Mapping[str, ActorStatus]:
        return {}

    def statistics(self) -> dict[str, float]:
        return {
            "weight_sync/versions_published": 0,
            "weight_sync/versions_skipped": self._skipped,
            "time/snapshot_s": 0.0,
            "time/sync_stall_s": 0.0,
        }

    def take_snapshots(self) -> list[Snapshot]:
        return []


@contextlib.contextmanager
def open_weight_path(
    config: JobConfig, policy: Decoder, epoch: str, token: str, run_dir: Path, replica: Replica | None = None
) -> Iterator[WeightPath]:
    """The weight path of this run, on every rank (collective); closed at the end.

    replica: this rank's part of the engines on the trainer's own devices, where they are.
    """
    if config.rollout.replay:
        yield NoWeightSync()
        return
    if replica is not None:
        replicas = device.world_size() // config.inference.tensor_parallel_size
        yield ColocatedWeights(policy, replica, replicas, epoch, TORCH_DTYPES[config.inference.dtype])
        return
    # Rank 0 starts the coordinator, so it goes first; the others join at the address that it broadcasts.
    first = device.rank() == 0
    address = None if first else broadcast_bytes(None).decode()
    sync = WeightSync(
        config.weight_sync,
        synced_parameters(policy),
        epoch=epoch,
        token=token,
        run_dir=run_dir,
        rank=device.rank(),
        world_size=device.world_size(),
        coordinator_address=address,
        dtype=config.inference.dtype,
        host=config.weight_sync.host,
    )
    try:
        if first:
            broadcast_bytes(sync.coordinator_address.encode())
        yield sync
    finally:
        sync.close()
