"""What the training loop sees of the weight synchronisation, on every rank.

    sync = WeightSync(config, dict(policy.named_parameters()), epoch=epoch, token=token, run_dir=run_dir)
    no_vote = not sync.reserve()            # before the backward of a batch's last optimizer step
    sync.fence()                            # right before every optimizer step
    outcome = sync.commit(version, noes)    # after that step, with the noes of all ranks

Apart from `wait_until_applied` and `pin`, nothing here waits for another process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.distributed.placement import StackPart
from torchtitan.errors import UserError
from torchtitan.weight_sync.manifest import DTYPE_BYTES
from torchtitan.weight_sync.parameters import unique_parameters
from torchtitan.weight_sync.plan import PlanError
from torchtitan.weight_sync.publication import Publication
from torchtitan.weight_sync.publisher import Snapshot
from torchtitan.weight_sync.registry_state import Settings
from torchtitan.weight_sync.wire import Message

# What metrics.jsonl says of each actor's last version; report/sync_metrics.py has everything of every version.
ACTOR_FIGURES = ("transfer_s", "apply_s", "pause_s", "adapter_norm", "adapter_applied_norm")
# An actor that has failed so often in a row is not waited for before it has applied a version again.
MOST_FAILURES = 3
GONE = ("LOST", "GIVEN_UP")


class ActorStatus(NamedTuple):
    """One actor, as the registry last knew it. version is -1 where it serves none of this epoch."""

    state: str
    """JOINING, PULLING, APPLYING, READY, POISONED (a version may be there by half), LOST or GIVEN_UP"""
    epoch: str
    version: int
    digest: str
    serves: bool
    """Whether prompts may be sent to it"""
    pinned: bool
    reason: str
    """Why it is where it is, after a failure"""
    evictions: int
    """How often its connection was lost, or it was given up"""


@dataclass(frozen=True)
class SyncOutcome:
    """Who has applied a version, and who has not and why."""

    applied: frozenset[str]
    missing: dict[str, str]


class WeightSync:
    """Publishes this rank's shards; on rank 0 also starts the registry and watches the actors.

    Args:
        config: the [weight_sync] table.
        parameters: checkpoint name -> parameter (tensor or DTensor), in the same order on every rank.
        epoch: this launch's, minted by rank 0 (run_dir.mint_epoch), the same on every rank.
        token: the job's secret, the same on every rank.
        run_dir: the run folder; logs and the journal go to its weight_sync folder.
        registry: what rank 0's `registry_address` says; None on rank 0, which starts the registry.
        dtype: type in which the actors hold weights ([inference] dtype).
        drain_s: how long an apply may wait for requests to end.

    Raises UserError where a parameter's placement cannot be sent shard by shard, or an address cannot be used.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        parameters: Mapping[str, torch.Tensor | StackPart],
        *,
        epoch: str,
        token: str,
        run_dir: Path,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        registry: str | None = None,
        dtype: str = "float32",
        drain_s: float = 0.0,
    ):
        if (rank == 0) != (registry is None):
            raise ValueError("rank 0 starts the registry, every other rank is given its address")
        self.epoch = epoch
        size = DTYPE_BYTES[dtype] * sum(
            math.prod(parameter.shape) for parameter in unique_parameters(parameters).values()
        )
        try:
            self._publication = Publication(
                parameters,
                Settings.of(config, world_size, size, drain_s),
                config,
                epoch=epoch,
                token=token,
                folder=Path(run_dir) / "weight_sync",
                rank=rank,
                local_rank=local_rank,
                registry=registry,
                dtype=dtype,
            )
        except PlanError as error:
            raise UserError(f"weight sync cannot send this model's shards: {error}") from error
        self.registry_address = self._publication.registry_address
        self._watcher = self._publication.watcher
        self._boundary, self._publisher = self._publication.boundary, self._publication.publisher
        self._snapshot_s = self._stall_s = 0.0
        self._closed = False

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

    def commit(self, version: int, noes: int) -> Literal["published", "skipped"]:
        """At the boundary, on every rank with the same arguments: snapshot `version`, or skip it if any rank voted no.

        A skipped version is owed. Raises UserError when a process of the synchronisation has died too often.
        """
        return "published" if self._snapshot(lambda: self._boundary.commit(version, noes)) else "skipped"

    def snapshot_owed(self, version: int) -> bool:
        """On every rank, at the controller's command: snapshot the owed version while there is no data.

        Where a rank has no free slot the version is dropped on all ranks, and stays owed. Returns whether this rank
        had one.
        """
        return self._snapshot(lambda: self._boundary.snapshot_owed(version))

    def _snapshot(self, take: Callable[[], bool]) -> bool:
        self._check_alive()
        begun = time.perf_counter()
        snapshotted = take()
        if snapshotted:
            self._snapshot_s += self._publisher.snapshot_seconds
        self._stall_s += time.perf_counter() - begun
        return snapshotted

    @property
    def owed(self) -> int | None:
        """The version that was skipped, or dropped because a rank could not snapshot it (that only rank 0 knows)."""
        if self._watcher is None:
            return self._boundary.owed(None, ())
        status = self._watcher.status()
        return self._boundary.owed(status["newest"], status["dropped"])

    @property
    def has_free_slot(self) -> bool:
        """Whether a command to snapshot the owed version would find a slot on this rank."""
        return self._publisher.has_free_slot()

    # Actors (rank 0)

    def actors(self) -> dict[str, ActorStatus]:
        """Every actor that has joined and was not away for long. Empty on other ranks. Never waits."""
        return {
            name: ActorStatus(**{key: {**actor, "epoch": self.epoch}[key] for key in ActorStatus._fields})
            for name, actor in self._actors().items()
        }

    def _actors(self) -> dict[str, Message]:
        return {} if self._watcher is None else self._watcher.status()["actors"]

    @property
    def published_version(self) -> int | None:
        """The newest version that every rank holds, as rank 0 last heard."""
        return None if self._watcher is None else self._watcher.status()["newest"]

    def wait_until_applied(
        self, version: int, timeout: float, at_least: int = 0, counts_as_stall: bool = True
    ) -> SyncOutcome:
        """Wait until all live actors, and at least `at_least`, serve `version` or newer; at most `timeout` seconds.

        The wait is the trainer's (`time/sync_stall_s`) unless another thread, say an evaluation's, does the waiting.
        Lost actors are not waited for, nor are pinned ones, nor those that have failed again and again and not yet
        recovered. `missing` leaves out those that were gone before, and are: that is no news. Rank 0 only; other ranks
        return at once with nothing.
        """
        if self._watcher is None:
            return SyncOutcome(frozenset(), {})
        begun = time.perf_counter()
        gone = {name for name, actor in self._actors().items() if not _is_live(actor)}

        def all_have_it(status: Message) -> bool:
            actors = status["actors"].values()
            waited_for = [actor for actor in actors if _is_live(actor) and not actor["pinned"]]
            return bool(self._publication.failure) or (
                status["newest"] is not None
                and status["newest"] >= version
                and sum(_has(actor, version) for actor in actors) >= at_least
                and all(_has(actor, version) for actor in waited_for)
            )

        self._watcher.wait_for(all_have_it, timeout)
        self._check_alive()
        if counts_as_stall:
            self._stall_s += time.perf_counter() - begun
        actors = self._actors()
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
        if self._watcher is None:
            return frozenset()
        self._watcher.pin(version)
        self._watcher.wait_for(lambda status: status.get("pinned") == version, timeout)
        return frozenset(name for name, actor in self._actors().items() if actor["pinned"])

    def unpin(self) -> None:
        """The evaluation is over. Does not wait."""
        if self._watcher is not None:
            self._watcher.pin(None)

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
        if self._watcher is not None:
            figures["weight_sync/evictions"] = self._watcher.status()["evictions"]
            for name, actor in self._actors().items():
                figures[f"weight_sync/{name}/version"] = actor["version"]
                given = actor["figures"]
                figures |= {f"weight_sync/{name}/{key}": given[key] for key in ACTOR_FIGURES if key in given}
        return figures

    def take_snapshots(self) -> list[Snapshot]:
        """This rank's snapshots whose fence was reached since the last call, at most the newest few."""
        snapshots = self._publisher.snapshots
        return [snapshots.popleft() for _ in range(len(snapshots))]

    def _check_alive(self) -> None:
        failure = self._publication.failure
        if failure:
            raise UserError(f"weight synchronisation has failed: {failure}")

    def close(self, timeout: float = 5.0) -> None:
        """End shard server and registry within about `timeout` seconds. May be called twice."""
        if not self._closed:
            self._closed = True
            self._publication.close(timeout)


def _is_live(actor: Message) -> bool:
    return actor["state"] not in GONE and actor["failures"] < MOST_FAILURES


def _has(actor: Message, version: int) -> bool:
    return actor["serves"] and actor["version"] >= version
