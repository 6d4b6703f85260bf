"""What the training loop sees of the weight synchronisation, with real processes and sockets, without any model."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launcher import run_distributed
from tests.integration_tests.versioned_weights import SHAPES, parameter_values, version_held
from tests.journals import deliveries_of, journal_of
from tests.patience import PATIENCE_S, until
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.memory.staging import StagedVersion
from torchtitan.weight_sync.servers import ServerProcess
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key


def quick_config(**changes: Any) -> WeightSyncConfig:
    config = WeightSyncConfig()
    vars(config).update({"apply_timeout_s": 2.0, "bucket_bytes": 64 * 1024, "progress_timeout_s": 1.5, **changes})
    return config


class Job:
    """A trainer without a model: parameters are a function of (version, index) and change right after each snapshot."""

    def __init__(self, run_dir: Path, **changes: Any):
        self.run_dir = run_dir
        self.parameters = {f"p{i}": parameter_values(0, i) for i in range(len(SHAPES))}
        self.epoch, self.token = "e1-test", secrets.token_urlsafe(16)
        self.sync = WeightSync(
            quick_config(**changes), self.parameters, epoch=self.epoch, token=self.token, run_dir=run_dir
        )
        self.version = -1
        self._actors: list[SyncActor] = []

    def step(self) -> str:
        """The optimizer makes the next version, and it is published or skipped."""
        no = not self.sync.reserve()
        self.version += 1
        self._fill()
        outcome = self.sync.commit(self.version, int(no))
        self._forget()
        return outcome

    def snapshot_pending(self) -> bool:
        """What the controller commands while there is no data."""
        self._fill()
        snapshotted = self.sync.snapshot_pending(self.version)
        self._forget()
        return snapshotted

    def _fill(self) -> None:
        for index, parameter in enumerate(self.parameters.values()):
            parameter.copy_(parameter_values(self.version, index))

    def _forget(self) -> None:
        self.sync.fence()
        for parameter in self.parameters.values():
            parameter.fill_(-1.0)  # whatever reads the parameters after the boundary is wrong

    def actor(self, name: str, apply: Callable[[StagedVersion], float | None], **options: Any) -> SyncActor:
        """An actor as a thread of this process."""
        epoch, token = options.pop("epoch", self.epoch), options.pop("token", self.token)
        actor = SyncActor(self.sync.registry_address, name, epoch, role_key(token, ACTOR, name), apply, **options)
        actor.start()
        self._actors.append(actor)
        return actor

    def journal(self, event: str, at_least: int = 0) -> list[dict[str, Any]]:
        return journal_of(self.run_dir, event, at_least)

    def wait_for(self, condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
        until(condition, timeout, why=lambda: f"waited {timeout} s; actors: {self.sync.actors()}")

    def close(self) -> None:
        for actor in self._actors:
            actor.close()
        self.sync.close()
        servers = self.sync.registry, self.sync.shard_server
        assert all(server.process.poll() is not None for server in servers if isinstance(server, ServerProcess))


@contextlib.contextmanager
def running_job(run_dir: Path, **changes: Any) -> Iterator[Job]:
    job = Job(run_dir, **changes)
    try:
        yield job
    finally:
        job.close()


class Served:
    """An engine that remembers what it was given."""

    def __init__(self) -> None:
        self.versions: list[int | None] = []
        self.hold: threading.Event | None = None

    def __call__(self, staged: StagedVersion) -> float | None:
        if self.hold is not None:
            self.hold.wait(PATIENCE_S)
        held = version_held(staged.tensors)
        self.versions.append(held if held == staged.version else None)
        return 0.001


def test_blocking_mode_serves_every_version(tmp_path: Path) -> None:
    engines = {"a": Served(), "b": Served()}
    with running_job(tmp_path) as job:
        actors = [job.actor(name, engine) for name, engine in engines.items()]
        for _ in range(20):
            assert job.step() == "published"
            outcome = job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=2)
            assert outcome.applied == {"a", "b"} and not outcome.missing
        figures = job.sync.statistics()
        assert figures["weight_sync/versions_published"] == 20 and figures["weight_sync/versions_skipped"] == 0
        assert figures["time/sync_stall_s"] > figures["time/snapshot_s"] > 0
        assert figures["weight_sync/a/pause_s"] == 0.001
        digests = {record["digest"] for record in job.journal("publish", at_least=20)}
        assert {actor.status()["digest"] for actor in actors} <= digests
        (first, *_) = (record["figures"] for record in deliveries_of(tmp_path, "applied", at_least=40))
        assert first["bytes_full"] > 0 and first["source"] == "trainer"
    assert all(engine.versions == list(range(20)) for engine in engines.values())


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_the_registry_is_where_the_configuration_says(host: str, tmp_path: Path) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    engine = Served()
    with running_job(tmp_path, host=host) as job:
        # What others are told is an address, never a name that they may resolve to something else.
        assert job.sync.registry_address.startswith(("127.0.0.1:", "[::1]:"))
        job.actor("a", engine)
        job.step()
        assert job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=1).applied == {"a"}
    assert engine.versions == [0]


def test_evaluation_pins_a_version(tmp_path: Path) -> None:
    engine = Served()
    with running_job(tmp_path) as job:
        job.actor("a", engine)
        job.step()
        job.sync.wait_until_applied(0, PATIENCE_S, at_least=1)
        job.sync.pin(0)
        for version in range(1, 6):
            assert job.step() == "published"
            job.journal("publish", version + 1)
        assert job.sync.wait_until_applied(job.version, 0.5).missing, "pinned actors are not waited for"
        assert job.sync.actors()["a"].version == 0
        job.sync.unpin()
        job.wait_for(lambda: job.sync.actors()["a"].version == job.version)
    assert engine.versions == [0, 5]


def sync_sharded_model(run_dir: str, transport: str) -> dict[str, Any]:
    """On each rank: FSDP2 × TP, published shard by shard, received on rank 0, held against full_tensor()."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    model = nn.Sequential()
    model.add_module("rows", nn.Linear(6, 10, bias=True))  # 10 rows over tp × dp: 5 over 2 is uneven
    model.add_module("columns", nn.Linear(7, 3, bias=False))
    model.add_module("norm", nn.LayerNorm(5))
    placements = {"rows.weight": Shard(0), "rows.bias": Shard(0), "columns.weight": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.split(".")[0])
        sharded = distribute_tensor(parameter.detach(), tp, [placements.get(name, Replicate())])
        setattr(owner, name.split(".")[1], nn.Parameter(sharded))
    fully_shard(model, mesh=mesh["dp"])
    address: list[Any] = [None]
    options: dict[str, Any] = {
        "epoch": "1-e",
        "token": "t",
        "run_dir": Path(run_dir),
        "rank": rank,
        "world_size": ranks,
    }
    parameters = dict(model.named_parameters())
    config = quick_config()
    # Smaller than a configuration may say, so that small tensors have several.
    config.bucket_bytes, config.transport = 64, transport
    if rank == 0:
        sync = WeightSync(config, parameters, **options)
        address = [sync.registry_address]
    dist.broadcast_object_list(address)
    if rank:
        sync = WeightSync(config, parameters, registry=address[0], **options)
    received: dict[int, dict[str, torch.Tensor]] = {}

    def apply(staged: StagedVersion) -> None:
        received[staged.version] = {name: tensor.clone() for name, tensor in staged.tensors.items()}

    actors: list[SyncActor] = []
    if rank == 0:
        actors.append(SyncActor(address[0], "a", "1-e", role_key("t", ACTOR, "a"), apply))
        actors[-1].start()
    equal = []
    for version in range(3):
        full = {name: p.full_tensor().clone() for name, p in parameters.items()}  # type: ignore[attr-defined]
        # On version 1 the last rank has no slot: all ranks must skip it.
        votes = torch.tensor([0 if sync.reserve() and not (version == 1 and rank == ranks - 1) else 1])
        dist.all_reduce(votes)
        outcome = sync.commit(version, int(votes.item()))
        sync.fence()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        if rank == 0 and outcome == "published":
            assert sync.wait_until_applied(version, 30, at_least=1).applied == {"a"}
            equal.append(all(torch.equal(received[version][name], value) for name, value in full.items()))
            assert received[version].keys() == full.keys()
        dist.barrier()
    elements = sum(math.prod(shard.shape) for shard in sync.publisher.layout.ranks[0])
    statistics = sync.statistics()
    dist.barrier()
    for actor in actors:
        actor.close()
    sync.close()
    return {"equal": equal, "elements": elements, "skipped": statistics["weight_sync/versions_skipped"]}


@pytest.mark.parametrize(("ranks", "transport"), [(4, "tcp"), (2, "nccl")])
def test_shards_of_all_ranks_become_the_full_tensors(tmp_path: Path, ranks: int, transport: str) -> None:
    job = "tests.integration_tests.test_weight_sync:sync_sharded_model"
    results = run_distributed(job, ranks, run_dir=str(tmp_path), transport=transport)
    assert results[0]["equal"] == [True] * 2
    assert [result["skipped"] for result in results] == [1] * ranks, "all ranks skip the same versions"
    assert sum(result["elements"] for result in results) == 10 * 6 + 10 + 3 * 7 + 5 + 5
    assert max(result["elements"] for result in results) < 60, "no rank sends the whole model"
