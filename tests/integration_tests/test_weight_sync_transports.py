"""nccl (over gloo) and ipc with real processes: two sender ranks, actors that freeze, die and find corrupt bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed_launcher import REPOSITORY, run_distributed
from tests.integration_tests.test_weight_sync import Served, running_job
from tests.integration_tests.weight_sync_actor import SHAPES, parameter_values
from tests.journals import journal_of
from tests.patience import PATIENCE_S
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.distributed.device import ensure_process_group
from torchtitan.errors import UserError
from torchtitan.weight_sync import publisher
from torchtitan.weight_sync.courier_thread import CourierThread
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.faults import VARIABLE as FAULTS
from torchtitan.weight_sync.transports.collective import CollectiveSendCarrier
from torchtitan.weight_sync.wire import TOKEN_VARIABLE

TOKEN, EPOCH = "a-token-of-this-test", "e1-test"


class Ranks:
    """All ranks of a trainer without a model; rank 0 says when they step. Parameters are a function of the version."""

    def __init__(self, run_dir: Path, device: str, **config: Any):
        self.run_dir, self.rank = run_dir, dist.get_rank()
        self.mesh = init_device_mesh(device, (dist.get_world_size(),))
        self.parameters = {f"p{i}": self._sharded(0, i) for i in range(len(SHAPES))}
        settings = WeightSyncConfig(
            **{
                "bucket_bytes": 64 * 1024,
                "offer_timeout_s": 1.5,
                "progress_timeout_s": 2.0,
                "apply_timeout_s": 3.0,
                "chunk_bytes": 16 * 1024,
                "chunk_timeout_s": 1.0,
                **config,
            }
        )
        options: dict[str, Any] = {
            "epoch": EPOCH,
            "token": TOKEN,
            "run_dir": run_dir,
            "rank": self.rank,
            "world_size": dist.get_world_size(),
        }
        address: list[Any] = [None]
        if self.rank == 0:
            self.sync = WeightSync(settings, self.parameters, **options)
            address = [self.sync.coordinator_address]
        dist.broadcast_object_list(address)
        if self.rank:
            self.sync = WeightSync(settings, self.parameters, coordinator_address=address[0], **options)
        self.version = -1

    def _sharded(self, version: int, index: int) -> torch.Tensor:
        whole = parameter_values(version, index).to(self.mesh.device_type)
        placement = Shard(0) if whole.dim() else Replicate()
        return distribute_tensor(whole, self.mesh, [placement], src_data_rank=None)

    def step(self) -> str:
        """Rank 0 takes all ranks along to the next version."""
        if self.rank == 0:
            dist.broadcast_object_list(["step"])
        votes = torch.tensor([0 if self.sync.reserve() else 1])
        dist.all_reduce(votes)
        self.version += 1
        self.sync.fence()
        for index, parameter in enumerate(self.parameters.values()):
            assert isinstance(parameter, DTensor)
            values = self._sharded(self.version, index)
            assert isinstance(values, DTensor)
            parameter._local_tensor.copy_(values._local_tensor)
        outcome = self.sync.commit(self.version, int(votes.item()))
        self.sync.fence()
        for parameter in self.parameters.values():
            assert isinstance(parameter, DTensor)
            parameter._local_tensor.fill_(-1.0)  # whatever reads the parameters from here on is wrong
        return outcome

    def follow(self) -> None:
        """The other ranks: step with rank 0 until it stops."""
        while True:
            order: list[Any] = [None]
            dist.broadcast_object_list(order)
            if order[0] == "stop":
                return
            self.step()

    def publish(self) -> None:
        """Rank 0: one more version that is not skipped."""
        self.wait_for(lambda: self.step() == "published")

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s; actors: {self.sync.actors()}"
            time.sleep(0.02)

    def wait_until_served(self, *names: str) -> None:
        """Until these actors serve the last version."""

        def served() -> bool:
            actors = self.sync.actors()
            return all(name in actors and actors[name].version == self.version for name in names)

        self.wait_for(served)

    def journal(self, event: str, at_least: int = 0) -> list[dict[str, Any]]:
        return journal_of(self.run_dir, event, at_least)


class Actors:
    """Actor processes of rank 0's test, each with faults of its own."""

    def __init__(self, ranks: Ranks, where: str):
        self._ranks, self._where = ranks, where
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.names: list[str] = []

    def start(self, name: str, faults: str = "") -> subprocess.Popen[bytes]:
        arguments = {
            "coordinator": self._ranks.sync.coordinator_address,
            "actor": name,
            "epoch": EPOCH,
            "log": str(self._ranks.run_dir / f"{name}.jsonl"),
            "where": self._where,
        }
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("RANK", "LOCAL_", "WORLD"))
        }
        environment |= {TOKEN_VARIABLE: TOKEN, FAULTS: faults}
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.integration_tests.weight_sync_actor", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment,
        )
        self.names.append(name)
        return self.processes[name]

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(PATIENCE_S)

    def is_stopped(self, name: str) -> bool:
        return psutil.Process(self.processes[name].pid).status() == psutil.STATUS_STOPPED

    def served(self, name: str) -> list[dict[str, Any]]:
        path = self._ranks.run_dir / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


def on_ranks(
    run_dir: str, scenario: str, device: str = "cpu", where: str = "cpu", checksum: str = "", **config: Any
) -> Any:
    """On each rank: rank 0 plays the scenario, the others follow. device: of the parameters; where: the actors';
    checksum: the kind, if not the one that goes with the device."""
    ensure_process_group()
    kind = publisher.checksum_kind(torch.device(device), True)
    with mock.patch.object(publisher, "checksum_kind", return_value=checksum or kind):
        ranks = Ranks(Path(run_dir), device, **config)
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        if ranks.rank:
            ranks.follow()
            return None
        actors = Actors(ranks, where)
        try:
            result = globals()[scenario](ranks, actors)
        finally:
            actors.close()
        # With its actors gone a trainer has no more open than before they came.
        ranks.wait_for(lambda: all(actor.state == "EVICTED" for actor in ranks.sync.actors().values()))
        ranks.publish()
        if device == "cpu":  # a GPU's driver opens files as it likes
            ranks.wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)
        published = {record["digest"]: record["version"] for record in ranks.journal("publish")}
        for name in set(actors.names):
            for line in actors.served(name):
                assert line["held"] == line["announced"] == published[line["digest"]], f"{name} served {line}"
        return result
    finally:
        if ranks.rank == 0:
            dist.broadcast_object_list(["stop"])
        dist.barrier()
        ranks.sync.close()


def faults_one_after_the_other(ranks: Ranks, actors: Actors) -> dict[str, Any]:
    """Frozen in mid-transfer and continued, killed in mid-transfer and replaced, a corrupt byte: others go on."""
    actors.start("a")
    frozen = actors.start("b", "freeze:phase=receive,actor=b,version=3-")
    for _ in range(3):
        ranks.publish()
        ranks.wait_until_served("a", "b")
    while not actors.is_stopped("b"):
        ranks.publish()
        ranks.wait_until_served("a")
    for _ in range(6):
        ranks.publish()
        ranks.wait_until_served("a")
    held = [line["announced"] for line in actors.served("b")]
    assert held and held == sorted(set(held)) and held[-1] < ranks.version - 5
    ranks.wait_for(lambda: any(record["actor"] == "b" for record in ranks.journal("abort")))
    frozen.send_signal(signal.SIGCONT)
    ranks.publish()
    ranks.wait_until_served("a", "b")

    actors.kill("b")
    dying = actors.start("b", "kill:phase=receive,actor=b")
    ranks.wait_for(lambda: dying.poll() is not None)
    assert dying.returncode == -signal.SIGKILL
    ranks.publish()
    ranks.wait_until_served("a")
    actors.start("b")
    ranks.publish()
    ranks.wait_until_served("a", "b")

    actors.start("c", f"corrupt:phase=receive,actor=c,rank={dist.get_world_size() - 1},times=2")
    ranks.publish()
    ranks.wait_until_served("a", "b", "c")
    corrupt = [record for record in ranks.journal("abort") if record["actor"] == "c" and "checksum" in record["reason"]]
    a = [line["announced"] for line in actors.served("a")]
    return {"corrupt": len(corrupt) > 0, "in order": a == sorted(set(a)), "last": a[-1] == ranks.version}


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "checksum"), [("nccl", "sum"), ("ipc", "xxh3")])
def test_receivers_that_freeze_die_and_find_corrupt_bytes(transport: str, checksum: str, tmp_path: Path) -> None:
    """`sum` is what GPUs have, and works on the CPU too."""
    result = run_distributed(
        "tests.integration_tests.test_weight_sync_transports:on_ranks",
        2,
        timeout=280,
        run_dir=str(tmp_path),
        scenario="faults_one_after_the_other",
        transport=transport,
        checksum=checksum,
    )
    assert result == [{"corrupt": True, "in order": True, "last": True}, None]
    layouts = [json.loads((tmp_path / "weight_sync" / f"layout-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert all(layout["checksum"] == checksum for layout in layouts)


def test_communicators_are_made_before_there_is_a_version(tmp_path: Path) -> None:
    engine = Served()
    with running_job(tmp_path, transport="nccl") as job:
        job.receive("a", engine)
        courier = job.sync._courier
        assert isinstance(courier, CourierThread)
        links = courier._courier._links

        def made() -> CollectiveSendCarrier | None:
            carrier = links["a", 0, 0]._carrier if links else None
            return carrier if isinstance(carrier, CollectiveSendCarrier) and carrier._ready else None

        job.wait_for(lambda: made() is not None)
        ahead = made()
        assert job.sync.published_version is None
        job.step()
        assert job.sync.wait_until_applied(0, PATIENCE_S, at_least=1).applied == {"a"}
        assert made() is ahead, "the version went over another communicator"
    assert engine.versions == [0]


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_a_courier_thread_that_fails_is_replaced(transport: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    engine = Served()
    with running_job(tmp_path, transport=transport, max_restarts=2) as job:
        job.receive("a", engine)
        courier = job.sync._courier
        assert isinstance(courier, CourierThread)
        for version in range(3):
            job.step()
            assert job.sync.wait_until_applied(version, PATIENCE_S, at_least=1).applied == {"a"}
            if version < 2:
                courier._courier._loop.call_from_thread(fail)
                job.wait_for(lambda version=version: courier.restarts == version + 1)  # type: ignore[misc]
        courier._courier._loop.call_from_thread(fail)
        job.wait_for(lambda: bool(courier.failure))
        with pytest.raises(UserError, match="failed 3 times in a row.*on purpose"):
            job.step()
    assert engine.versions == [0, 1, 2]
    assert not any("courier" in thread.name for thread in threading.enumerate())
