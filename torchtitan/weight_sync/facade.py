"""What the training loop sees of the weight synchronisation, on every rank.

    sync = WeightSync(config.weight_sync, dict(policy.named_parameters()), epoch=epoch, token=token, run_dir=run_dir)
    no_vote = not sync.reserve()            # before the backward of a batch's last optimizer step
    sync.fence()                            # right before every optimizer step
    outcome = sync.commit(version, noes)    # after that step, with the noes of all ranks

Apart from `wait_until_applied` and `pin`, nothing here waits for another process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.errors import UserError
from torchtitan.weight_sync.courier_thread import CourierThread
from torchtitan.weight_sync.launch import CoordinatorProcess, SupervisedProcess
from torchtitan.weight_sync.observer import Observer
from torchtitan.weight_sync.plan import PlanError
from torchtitan.weight_sync.publisher import Publisher, Snapshot
from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.states.boundary import Boundary
from torchtitan.weight_sync.transports import IN_TRAINER
from torchtitan.weight_sync.transports.disk_owner import FolderOwner
from torchtitan.weight_sync.wire import Message

# What metrics.jsonl says of each actor's last version; report/sync_metrics.py has everything of every version.
ACTOR_FIGURES = ("transfer_s", "apply_s", "pause_s", "adapter_norm", "adapter_applied_norm")


class ActorStatus(NamedTuple):
    """One actor, as the coordinator last knew it. version is -1 where it serves none of this epoch."""

    state: str
    epoch: str
    version: int
    digest: str
    serves: bool
    """Whether prompts may be sent to it"""
    pinned: bool
    reason: str
    """Why it is where it is, after a failure: what happened and in which phase"""
    evictions: int


@dataclass(frozen=True)
class SyncOutcome:
    """Who has applied a version, and who has not and why."""

    applied: frozenset[str]
    missing: dict[str, str]


class WeightSync:
    """Publishes this rank's shards; on rank 0 also starts the coordinator and watches the actors.

    Args:
        config: the [weight_sync] table.
        parameters: checkpoint name -> parameter (tensor or DTensor), in the same order on every rank.
        epoch: this launch's, minted by rank 0 (run_dir.mint_epoch), the same on every rank.
        token: the job's secret, the same on every rank and actor.
        run_dir: the run folder; logs and the journal go to its weight_sync folder.
        coordinator_address: what rank 0's `coordinator_address` says; None on rank 0, which starts the coordinator.
        dtype: type in which the actors hold weights ([inference] dtype).
        host: address that rank 0's coordinator binds to.

    Raises UserError where a parameter's placement cannot be sent shard by shard.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        parameters: Mapping[str, torch.Tensor],
        *,
        epoch: str,
        token: str,
        run_dir: Path,
        rank: int = 0,
        world_size: int = 1,
        coordinator_address: str | None = None,
        dtype: str = "float32",
        host: str = "127.0.0.1",
    ):
        if (rank == 0) != (coordinator_address is None):
            raise ValueError("rank 0 starts the coordinator, every other rank is given its address")
        self.epoch, self.token, self.rank = epoch, token, rank
        folder = Path(run_dir) / "weight_sync"
        folder.mkdir(parents=True, exist_ok=True)
        disk_path = Path(config.disk_path) if config.disk_path else folder.parent / "weights"
        self._folder_owner: FolderOwner | None = None
        if rank == 0 and config.transport == "disk":
            self._folder_owner = FolderOwner(disk_path, epoch)
        try:
            self._publisher = Publisher(
                parameters,
                rank=rank,
                dtype=dtype,
                num_slots=config.slots_per_rank,
                bucket_bytes=config.bucket_bytes,
                folder=folder,
                on_device=config.transport in IN_TRAINER,
            )
        except PlanError as error:
            raise UserError(f"weight sync cannot send this model's shards: {error}") from error
        self._coordinator: CoordinatorProcess | None = None
        self._observer: Observer | None = None
        if coordinator_address is None:
            settings = {
                "world_size": world_size,
                "join_timeout_s": config.join_timeout_s,
                "offer_timeout_s": config.offer_timeout_s,
                "progress_timeout_s": config.progress_timeout_s,
                "apply_timeout_s": config.apply_timeout_s,
                "snapshot_timeout_s": config.snapshot_timeout_s,
                "evict_after_versions": config.evict_after_versions,
                "delta": config.delta,
                "full_every": config.full_every,
                "relay": config.relay,
                "relay_fanout": config.relay_fanout,
            }
            self._coordinator = CoordinatorProcess(epoch, token, settings, folder, host, config.max_restarts)
            coordinator_address = self._coordinator.address
            self._observer = Observer(coordinator_address, token, epoch)
        self.coordinator_address: str = coordinator_address
        self._courier = self._start_courier(config, folder, disk_path, world_size)
        self._boundary = Boundary(self._publisher)
        self._snapshot_s = self._stall_s = 0.0
        self._closed = False

    def _start_courier(
        self, config: WeightSyncConfig, folder: Path, disk_path: Path, world_size: int
    ) -> SupervisedProcess | CourierThread:
        slots = self._publisher.slots
        layout_file = folder / f"layout-rank{self.rank}.json"
        layout_file.write_text(json.dumps(self._publisher.layout.to_json()))
        arguments: dict[str, Any] = {
            "rank": self.rank,
            "world_size": world_size,
            "epoch": self.epoch,
            "coordinator": self.coordinator_address,
            "progress_timeout_s": config.progress_timeout_s,
            "transport": config.transport,
            "streams": config.streams,
            "options": {
                "disk_path": str(disk_path),
                "chunk_bytes": config.chunk_bytes,
                "chunk_timeout_s": config.chunk_timeout_s,
            },
            "layout_file": str(layout_file),
        }
        name = f"weight courier of rank {self.rank}"
        if config.transport in IN_TRAINER:

            def with_slots() -> dict[str, Any]:
                return {**arguments, "slots": slots, "bell": self._publisher.courier_bell.dup()}

            return CourierThread(name, with_slots, self.token, config.max_restarts, lambda: slots.pulse)
        assert isinstance(slots, SharedSlots)
        arguments |= {
            "num_slots": slots.count,
            "words_fd": slots.words_fd,
            "data_fd": slots.data_fd,
            "bell_fd": self._publisher.courier_bell.fileno(),
        }
        return SupervisedProcess(
            name,
            "torchtitan.weight_sync.courier",
            lambda _number: arguments,
            [slots.words_fd, slots.data_fd, arguments["bell_fd"]],
            self.token,
            folder / f"courier-rank{self.rank}.log",
            config.max_restarts,
            lambda: slots.pulse,
        )

    # Step boundary (every rank)

    def reserve(self) -> bool:
        """Reserve a slot for the version that the coming optimizer step makes. False is this rank's no. Never waits."""
        begun = time.perf_counter()
        reserved = self._boundary.reserve()
        self._stall_s += time.perf_counter() - begun
        return reserved

    def fence(self) -> None:
        """Right before parameters change: what the device is given from now on waits for the last snapshot's copy.

        This thread does only on the CPU. Without the fence a snapshot that is under way would be torn.
        """
        begun = time.perf_counter()
        self._publisher.fence()
        self._stall_s += time.perf_counter() - begun

    def make_room(self) -> None:
        """Actors are processes of their own: nothing of theirs is on this device."""

    def commit(self, version: int, noes: int) -> Literal["published", "skipped"]:
        """At the boundary, on every rank with the same arguments: snapshot `version`, or skip it if any rank voted no.

        A skipped version is owed. Raises UserError when a process of the synchronisation has died too often.
        """
        self._check_alive()
        begun = time.perf_counter()
        snapshotted = self._boundary.commit(version, noes)
        if snapshotted:
            self._snapshot_s += self._publisher.snapshot_seconds
        self._stall_s += time.perf_counter() - begun
        return "published" if snapshotted else "skipped"

    def snapshot_owed(self, version: int) -> bool:
        """On every rank, ordered by whoever hands out batches: snapshot the owed version while there is no data.

        Where a rank has no free slot the version is dropped on all ranks, and stays owed. Returns whether this rank
        had one.
        """
        self._check_alive()
        begun = time.perf_counter()
        snapshotted = self._boundary.snapshot_owed(version)
        if snapshotted:
            self._snapshot_s += self._publisher.snapshot_seconds
        self._stall_s += time.perf_counter() - begun
        return snapshotted

    @property
    def owed(self) -> int | None:
        """The version that was skipped, or dropped because a rank could not snapshot it (that only rank 0 knows)."""
        if self._observer is None:
            return self._boundary.owed(None, ())
        status = self._observer.status()
        return self._boundary.owed(status["newest"], status["dropped"])

    @property
    def has_free_slot(self) -> bool:
        """Whether an order to snapshot the owed version would find a slot on this rank."""
        return self._publisher.has_free_slot()

    # Actors (rank 0)

    def actors(self) -> dict[str, ActorStatus]:
        """Every actor that has ever joined. Empty on other ranks. Never waits."""
        if self._observer is None:
            return {}
        return {name: self._actor_status(fields) for name, fields in self._observer.status()["actors"].items()}

    def _actor_status(self, fields: Message) -> ActorStatus:
        return ActorStatus(
            fields["state"],
            self.epoch,
            fields["version"],
            fields["digest"],
            fields["serves"],
            fields["pinned"],
            fields["reason"],
            fields["evictions"],
        )

    @property
    def published_version(self) -> int | None:
        """The newest version that every rank holds, as rank 0 last heard."""
        return None if self._observer is None else self._observer.status()["newest"]

    def wait_until_applied(
        self, version: int, timeout: float, at_least: int = 0, counts_as_stall: bool = True
    ) -> SyncOutcome:
        """Wait until all live actors, and at least `at_least`, serve `version` or newer; at most `timeout` seconds.

        The wait is the trainer's (`time/sync_stall_s`) unless another thread, say an evaluation's, does the waiting.
        Evicted actors are not waited for, nor are pinned ones, nor those that have failed again and again and not yet
        recovered. `missing` leaves out whoever was and is gone so: that is no news. Rank 0 only; other ranks return at
        once with nothing.
        """
        if self._observer is None:
            return SyncOutcome(frozenset(), {})
        begun = time.perf_counter()
        gone = {name for name, actor in self._observer.status()["actors"].items() if not _is_live(actor)}

        def everyone(status: Message) -> bool:
            actors = status["actors"].values()
            done = sum(_has(actor, version) for actor in actors)
            waited_for = [actor for actor in actors if _is_live(actor) and not actor["pinned"]]
            dead = bool(self._failure())
            return dead or (
                status["newest"] is not None
                and status["newest"] >= version
                and done >= at_least
                and all(_has(actor, version) for actor in waited_for)
            )

        self._observer.wait_for(everyone, timeout)
        self._check_alive()
        if counts_as_stall:
            self._stall_s += time.perf_counter() - begun
        actors = self._observer.status()["actors"]
        applied = frozenset(name for name, actor in actors.items() if _has(actor, version))
        missing = {
            name: f"{actor['state']} at version {actor['version']}"
            + (f": {actor['reason']}" if actor["reason"] else "")
            for name, actor in actors.items()
            if name not in applied and not (name in gone and not _is_live(actor))
        }
        return SyncOutcome(applied, missing)

    def pin(self, version: int, timeout: float = 5.0) -> frozenset[str]:
        """Actors that serve `version` keep it until unpin(), for an evaluation. Returns them. Rank 0 only."""
        if self._observer is None:
            return frozenset()
        self._observer.pin(version)
        self._observer.wait_for(lambda status: status.get("pinned") == version, timeout)
        return frozenset(name for name, actor in self._observer.status()["actors"].items() if actor["pinned"])

    def unpin(self) -> None:
        """The evaluation is over. Does not wait."""
        if self._observer is not None:
            self._observer.pin(None)

    # Figures and end

    def statistics(self) -> dict[str, float]:
        """Keys for metrics.jsonl. The two times are sums over the trainer thread since the last call, in seconds; what
        it spent on synchronisation altogether is their sum."""
        figures: dict[str, float] = {
            "weight_sync/versions_published": self._boundary.published,
            "weight_sync/versions_skipped": self._boundary.skipped,
            "time/snapshot_s": self._snapshot_s,
            "time/sync_stall_s": self._stall_s - self._snapshot_s,
        }
        self._snapshot_s = self._stall_s = 0.0
        if self._observer is not None:
            status = self._observer.status()
            actors = status["actors"]
            evictions = sum(actor["evictions"] for actor in actors.values())
            figures["weight_sync/evictions"] = evictions + status.get("forgotten_evictions", 0)
            for name, actor in actors.items():
                figures[f"weight_sync/{name}/version"] = actor["version"]
                given = actor["figures"]
                figures |= {f"weight_sync/{name}/{key}": given[key] for key in ACTOR_FIGURES if key in given}
        return figures

    def take_snapshots(self) -> list[Snapshot]:
        """This rank's snapshots whose fence was reached since the last call, at most the newest few."""
        snapshots = self._publisher.snapshots
        return [snapshots.popleft() for _ in range(len(snapshots))]

    def _failure(self) -> str:
        failures = [self._courier.failure, self._publisher.failure]
        if self._coordinator is not None:
            failures.append(self._coordinator.supervised.failure)
        if self._observer is not None:
            failures += [self._observer.failure, self._observer.status()["failure"]]
        return "; ".join(filter(None, failures))

    def _check_alive(self) -> None:
        failure = self._failure()
        if failure:
            raise UserError(f"weight synchronisation has failed: {failure}")

    def close(self, timeout: float = 5.0) -> None:
        """End courier and coordinator within about `timeout` seconds. May be called twice."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        if self._observer is not None:
            self._observer.close(timeout)
        self._courier.close(deadline)
        if self._coordinator is not None:
            self._coordinator.close(deadline)
        self._publisher.close()
        if self._folder_owner is not None:
            self._folder_owner.close()


def _is_live(actor: Message) -> bool:
    return actor["state"] != "EVICTED" and not actor["on_probation"]


def _has(actor: Message, version: int) -> bool:
    return actor["version"] >= version and not actor["poisoned"] and actor["state"] != "EVICTED"
