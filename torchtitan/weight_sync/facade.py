"""The training loop's interface to the weight synchronisation on every rank: the publisher and the shard server, and on
rank 0 the registry and its view of the actors.

    sync = WeightSync(config, dict(policy.named_parameters()), epoch=epoch, token=token, run_dir=run_dir)
    no_vote = not sync.reserve()            # before the backward of a batch's last optimizer step
    sync.fence()                            # right before every optimizer step
    outcome = sync.commit(version, votes_against)  # after that step, with all ranks' number of no votes

Apart from `wait_until_applied` and `pin`, nothing here waits for another process.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.config.transports import TRANSPORTS
from torchtitan.distributed.placement import StackPart, unique_parameters
from torchtitan.errors import UserError
from torchtitan.utils.addresses import resolve_host
from torchtitan.weight_sync import servers
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.memory.device_slots import DeviceSlots
from torchtitan.weight_sync.memory.layout_tables import DTYPE_BYTES
from torchtitan.weight_sync.memory.published import PublishedVersions
from torchtitan.weight_sync.memory.slots import Boundary
from torchtitan.weight_sync.registry.state import MAX_FAILURES, MAX_NAMED, NOT_AWAITED, RegistrySettings, tally
from torchtitan.weight_sync.trainer.plan import bucket_bytes_of
from torchtitan.weight_sync.trainer.publisher import Publisher, Snapshot
from torchtitan.weight_sync.transports.transport import load_transport
from torchtitan.weight_sync.wire.clients import RegistryClient
from torchtitan.weight_sync.wire.handshake import TRAINER, Identity
from torchtitan.weight_sync.wire.runtime import Message
from torchtitan.weight_sync.wire.sockets import SocketRuntime

logger = logging.getLogger(__name__)

# A condition may depend on more than the status, such as whether the registry has failed for good.
POLL_SECONDS = 1.0


class Watcher:
    """Holds the newest status message, and forwards pins."""

    def __init__(self, registry: str, token: str, epoch: str):
        self._runtime = SocketRuntime()
        identity, fields = Identity.of(token, TRAINER, "0"), {"epoch": epoch}
        # It dials as long as the job lives: the registry's restarts are bounded where it is started.
        self._registry = RegistryClient(self._runtime, registry, identity, fields, self._send_pin, self._on_message)
        self._changed = threading.Condition()
        self._status: Message = {"newest": None, "actors": {}, "dropped": [], "evictions": 0, "failure": ""}
        self._status["guests"] = {}
        self._status |= tally(())
        self._refreshed = 0
        """How many status messages had the details of all actors"""
        self._pin: int | None = None
        self._runtime.start("watcher of the actors", self._registry.start)

    def status(self) -> Message:
        """Return the latest status; treat it as read-only. Its counts are exact; of many actors, what it says of each
        may be some seconds old (see refresh)."""
        return self._status

    def refresh(self, timeout: float) -> Message:
        """Return a status with the latest of every actor, or after `timeout` seconds the one that there is."""
        before = self._refreshed
        self._runtime.post(partial(self._registry.tell, {"type": "look"}))
        self.wait_for(lambda _status: self._refreshed > before, timeout)
        return self._status

    def wait_for(self, condition: Callable[[Message], bool], timeout: float) -> None:
        """Wait until `condition(status)` holds, at most `timeout` seconds and not beyond close().

        The condition is evaluated for each status, and once per POLL_SECONDS without one.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition(self._status) and (left := deadline - time.monotonic()) > 0 and self._runtime.runs:
                self._changed.wait(min(left, POLL_SECONDS))

    def pin(self, version: int | None) -> None:
        """Have actors that serve `version` keep it (None: no longer)."""
        self._pin = version
        self._runtime.post(self._send_pin)

    def close(self, timeout: float) -> None:
        """Stop the thread and all waits."""
        self._runtime.end(timeout)
        with self._changed:
            self._changed.notify_all()

    @property
    def failure(self) -> str:
        """Why no status comes any more; empty unless the thread has failed."""
        return self._runtime.failure

    def _send_pin(self) -> None:
        self._registry.tell({"type": "pin", "version": self._pin})

    def _on_message(self, message: Message) -> None:
        if message["type"] == "status":
            known = {} if message["complete"] else self._status["actors"]
            known = {name: actor for name, actor in known.items() if name not in message["forgotten"]}
            guests = {**({} if message["complete"] else self._status["guests"]), **message["guests"]}
            guests = {name: url for name, url in guests.items() if url}
            with self._changed:
                self._status = {**message, "actors": {**known, **message["actors"]}, "guests": guests}
                self._refreshed += message["complete"]
                self._changed.notify_all()


# What metrics.jsonl reports of each actor's last version; report/sync_metrics.py has everything about every version.
ACTOR_FIGURES = ("transfer_s", "apply_s", "pause_s", "adapter_norm", "adapter_applied_norm")
REFRESH_TIMEOUT_SECONDS = 2.0


class ActorStatus(NamedTuple):
    """One actor, as last reported by the registry. version is -1 if it serves none of this epoch."""

    state: ActorState
    version: int
    serves: bool
    """Whether prompts may be sent to it"""
    reason: str
    """Why it is in this state, after a failure"""
    evictions: int
    """How often it was evicted, or given up"""
    eviction: str = ""
    """Why that happened last, also when it is back"""


class SyncOutcome(NamedTuple):
    """Which actors have applied a version, and which have not and why."""

    applied: frozenset[str]
    missing: dict[str, str]


class WeightSync:
    """Publishes this rank's shards; on rank 0 also starts the registry and watches the actors.

    Args:
        config: the [weight_sync] table.
        parameters: checkpoint name -> parameter (tensor or DTensor), in the same order on every rank.
        epoch: this launch's, minted by rank 0 (run_dir.new_epoch), the same on every rank.
        token: the job's secret, the same on every rank.
        run_dir: the run folder; logs and the journal go to its weight_sync folder.
        registry: rank 0's `registry_address`; None on rank 0, which starts the registry.
        dtype: the type in which actors hold weights ([inference] dtype).
        drain_s: how long an apply may wait for requests to end.
        applied_bytes: what an actor writes when it applies a version, if that is more than the version, as it is where
            adapters are merged into all weights.
        guests: what a server has to offer that joins by itself (see Settings); empty: none may.

    Other ranks listen on the address that reaches rank 0's machine. Raises UserError if a parameter's placement cannot
    be sent shard by shard, an address cannot be used, or another job writes to the folder.
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
        applied_bytes: int = 0,
        guests: Message | None = None,
    ):
        if (rank == 0) != (registry is None):
            raise ValueError("rank 0 starts the registry, every other rank is given its address")
        folder = run_dir / "weight_sync"
        folder.mkdir(parents=True, exist_ok=True)
        self._closed = False
        self._transport = transport = load_transport(config.transport).configured(config, run_dir)
        if registry is None:
            host = resolve_host(config.host, "weight_sync.host")
            transport.claim(epoch)
        else:
            host = servers.local_address_towards(registry)
        elements = sum(math.prod(parameter.shape) for parameter in unique_parameters(parameters).values())
        version_bytes = DTYPE_BYTES[dtype] * elements
        self.publisher = Publisher(
            parameters,
            rank=rank,
            dtype=dtype,
            num_slots=config.slots_per_rank,
            bucket_bytes=max(config.bucket_bytes, bucket_bytes_of(version_bytes, world_size)),
            on_device=TRANSPORTS[config.transport].on_device,
        )
        self.boundary = Boundary(self.publisher)
        self.registry: servers.RegistryServer | None = None
        self.watcher: Watcher | None = None
        settings = RegistrySettings.of(config, world_size, version_bytes, drain_s, guests, applied_bytes)
        if registry is None:
            where = host, config.port, servers.MAX_RESTARTS
            self.registry = servers.RegistryServer(epoch, token, settings, folder, where, transport)
            registry = self.registry.address
            self.watcher = Watcher(registry, token, epoch)
        self.registry_address = registry
        self.shard_server: servers.ShardServerProcess | servers.ShardServerThread
        where = host, config.port + 1 + local_rank if config.port else 0, servers.MAX_RESTARTS
        facts = {"epoch": epoch, "ranks": world_size, "registry": registry}
        facts |= {"lease_s": settings.lease_s, "relay": config.table.relay, "connections": config.table.connections}
        if isinstance(self.publisher.slots, DeviceSlots) or transport.threaded:
            self.shard_server = servers.ShardServerThread(self.publisher, transport, token, where, facts)
        else:
            self.shard_server = servers.ShardServerProcess(self.publisher, transport, token, folder, where, facts)
        self._snapshot_s = self._stall_s = 0.0
        self._taken: dict[int, int] = {}
        """Version -> serial of its snapshot, on rank 0, until it is known what became of it"""
        self._published_count = 0
        self._overtaken: list[int] = []

    # Step boundary (every rank)

    def reserve(self) -> bool:
        """Reserve a slot for the version of the coming optimizer step. False is this rank's no vote. Never waits."""
        started = time.perf_counter()
        reserved = self.boundary.reserve()
        self._stall_s += time.perf_counter() - started
        return reserved

    def fence(self) -> None:
        """Call right before parameters change: device work queued from now on waits for the last snapshot's copy.

        This thread waits only on the CPU. Without the fence, a snapshot in progress would be torn.
        """
        started = time.perf_counter()
        self.publisher.fence()
        self._stall_s += time.perf_counter() - started

    def commit(self, version: int, votes_against: int) -> Literal["published", "skipped"]:
        """At the boundary, on every rank with the same arguments: snapshot `version`, or skip it if any rank voted no.

        A skipped version is pending. Raises UserError if a process of the synchronisation has died too often.
        """
        taken = self._snapshot(version, lambda: self.boundary.commit(version, votes_against))
        return "published" if taken else "skipped"

    def snapshot_pending(self, version: int) -> bool:
        """On every rank, at the controller's command: snapshot the pending version while there is no data.

        If a rank has no free slot, all ranks drop the version and it stays pending. Returns whether this rank had one.
        """
        return self._snapshot(version, lambda: self.boundary.snapshot_pending(version))

    def _snapshot(self, version: int, take: Callable[[], bool]) -> bool:
        self._check_alive()
        started = time.perf_counter()
        snapshotted, seconds = take(), time.perf_counter() - started
        self._snapshot_s += seconds if snapshotted else 0.0
        if snapshotted and self.watcher is not None:
            self._taken[version] = self.boundary.serial
        self._stall_s += seconds
        return snapshotted

    @property
    def published(self) -> PublishedVersions | None:
        """The versions that this launch has published. An actor hears of a version only when it is there. None on other
        ranks than 0."""
        return None if self.registry is None else self.registry.published

    @property
    def pending_version(self) -> int | None:
        """The version that was skipped, or dropped because a rank could not snapshot it (known only on rank 0)."""
        if self.watcher is None:
            return self.boundary.pending_version(None, ())
        status = self.watcher.status()
        return self.boundary.pending_version(status["newest"], status["dropped"])

    def take_overtaken(self) -> list[int]:
        """Return the versions of which a snapshot was taken, and which a newer one has overtaken before they could be
        published, since the last call: servers were away meanwhile. Rank 0 only."""
        self._settle()
        found, self._overtaken = self._overtaken, []
        return found

    def _settle(self) -> None:
        if self.published is not None and self.watcher is not None:
            published, overtaken = self.published.settle(self._taken, self.watcher.status()["dropped"])
            self._published_count += len(published)
            self._overtaken += overtaken

    # Actors (rank 0)

    def actors(self) -> dict[str, ActorStatus]:
        """Return every actor that has joined and was not away for long. Empty on other ranks. Never waits."""
        statuses = {}
        for name, actor in self._actors().items():
            about = {field: actor[field] for field in ActorStatus._fields}
            statuses[name] = ActorStatus(**about | {"state": ActorState(actor["state"])})
        return statuses

    def _actors(self) -> dict[str, Message]:
        return {} if self.watcher is None else self.watcher.status()["actors"]

    def guests(self) -> dict[str, str]:
        """Return the name and URL of every server that has joined by itself and has not left. Never waits."""
        return {} if self.watcher is None else self.watcher.status()["guests"]

    def wait_until_applied(
        self, version: int, timeout: float, at_least: int = 0, counts_as_stall: bool = True
    ) -> SyncOutcome:
        """Wait until all live actors, and at least `at_least`, serve `version` or newer; at most `timeout` seconds.

        The wait counts as the trainer's (`time/sync_stall_s`) unless another thread waits, for example for an
        evaluation. It excludes evicted, late and pinned actors, and those that failed repeatedly and have not
        recovered. `missing` omits actors that were gone before the wait and still are. Rank 0 only.
        """
        assert self.watcher is not None
        started = time.perf_counter()
        gone_before = {name for name, actor in self._actors().items() if not _is_live(actor)}

        self.watcher.wait_for(lambda status: bool(self.failure) or all_have(status, version, at_least), timeout)
        self._check_alive()
        if counts_as_stall:
            self._stall_s += time.perf_counter() - started
        actors = self._actors()
        if len(actors) > MAX_NAMED or not all_have(self.watcher.status(), version, at_least):
            actors = self.watcher.refresh(REFRESH_TIMEOUT_SECONDS)["actors"]
        applied = set()
        missing: dict[str, str] = {}
        for name, actor in actors.items():
            stayed_away = name in gone_before and not _is_live(actor)
            if actor["serves"] and actor["version"] >= version:
                applied.add(name)
            elif not stayed_away:
                reason = f": {actor['reason']}" if actor["reason"] else ""
                missing[name] = f"{actor['state']} at version {actor['version']}{reason}"
        return SyncOutcome(frozenset(applied), missing)

    def pin(self, version: int, timeout: float = 5.0) -> None:
        """Have actors that serve `version` keep it until unpin(), for an evaluation. Rank 0 only."""
        if self.watcher is not None:
            self.watcher.pin(version)
            self.watcher.wait_for(lambda status: status.get("pinned") == version, timeout)

    def unpin(self) -> None:
        """End pin(). Does not wait."""
        if self.watcher is not None:
            self.watcher.pin(None)

    # Figures and end

    def statistics(self) -> dict[str, float]:
        """Return figures for metrics.jsonl. The two times are seconds of the trainer thread since the last call; their
        sum is all that it spent on the synchronisation. The last versions, of which nobody knows yet what will become
        of them, count as published."""
        self._settle()
        figures: dict[str, float] = {
            "weight_sync/versions_published": self._published_count + len(self._taken),
            "weight_sync/versions_skipped": self.boundary.skipped,
            "time/snapshot_s": self._snapshot_s,
            "time/sync_stall_s": self._stall_s - self._snapshot_s,
        }
        self._snapshot_s = self._stall_s = 0.0
        if self.watcher is not None:
            figures["weight_sync/evictions"] = self.watcher.status()["evictions"]
            actors = self._actors()
            for name, actor in actors.items() if len(actors) <= MAX_NAMED else ():
                figures[f"weight_sync/{name}/version"] = actor["version"]
                given = actor["figures"]
                figures |= {f"weight_sync/{name}/{key}": given[key] for key in ACTOR_FIGURES if key in given}
        return figures

    def states(self) -> dict[str, str]:
        """Return each actor's state and version, for people; of many actors, how many are in each state."""
        actors = self._actors()
        if len(actors) > MAX_NAMED and self.watcher is not None:
            return {state: str(count) for state, count in self.watcher.status()["states"].items()}
        return {name: f"{actor['state']} v{actor['version']}" for name, actor in actors.items()}

    def take_snapshots(self) -> list[Snapshot]:
        """Return this rank's snapshots whose fence was reached since the last call, at most the newest few."""
        snapshots = self.publisher.snapshots
        return [snapshots.popleft() for _ in range(len(snapshots))]

    def _check_alive(self) -> None:
        if self.failure:
            raise UserError(f"weight synchronisation has failed: {self.failure}")

    @property
    def failure(self) -> str:
        """Why no further version will be published, else empty."""
        failures = [self.publisher.failure, self.shard_server.failure]
        if self.registry is not None and self.watcher is not None:
            failures += [self.registry.failure, self.watcher.failure, self.watcher.status()["failure"]]
        return "; ".join(filter(None, failures))

    def close(self, timeout: float = 5.0) -> None:
        """End everything within about `timeout` seconds. May be called twice."""
        if self._closed:
            return
        self._closed, deadline = True, time.monotonic() + timeout
        if self.watcher is not None:
            self.watcher.close(timeout)
        self.shard_server.close(deadline)
        if self.registry is not None:
            self.registry.close(deadline)
        self.publisher.close()
        self._transport.close()


def all_have(status: Message, version: int, at_least: int = 0) -> bool:
    """Return whether at least so many actors, and all that are waited for, serve `version` or newer."""
    newest = status["newest"]
    if newest is None or newest < version:
        return False
    have_it = sum(count for served, count in status["serving"] if served >= version)
    lag_behind = any(served < version for served, _count in status["awaited"])
    return have_it >= at_least and not lag_behind


def _is_live(actor: Message) -> bool:
    return actor["state"] not in NOT_AWAITED and actor["failures"] < MAX_FAILURES
