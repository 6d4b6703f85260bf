"""The weight synchronisation with real processes, sockets and shared memory, without any model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed_launcher import run_distributed
from tests.integration_tests.weight_sync_actor import SHAPES, parameter_values, version_held
from tests.journals import journal_of
from tests.patience import PATIENCE_S
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.connection import Connection, dial
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.faults import VARIABLE as FAULTS
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.receiver import Receiver
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused
from torchtitan.weight_sync.wire import TOKEN_VARIABLE
from torchtitan.weight_sync.worker import Worker

REPOSITORY = Path(__file__).parents[2]
# While nothing is wrong: what later ones are compared with.
USUAL_STEPS = 15


def quick_config(**changes: Any) -> WeightSyncConfig:
    values = {"bucket_bytes": 64 * 1024, "offer_timeout_s": 1.5, "progress_timeout_s": 1.5, "apply_timeout_s": 2.0}
    return WeightSyncConfig(**{**values, **changes})


class Job:
    """A trainer without a model: parameters are a function of (version, index) and change right after each snapshot."""

    dtype = "float32"
    values = staticmethod(parameter_values)

    def __init__(self, run_dir: Path, **changes: Any):
        self.run_dir = run_dir
        self.parameters = {f"p{i}": self.values(0, i) for i in range(len(SHAPES))}
        self.epoch, self.token = "e1-test", secrets.token_urlsafe(16)
        config = quick_config(**changes)
        self.sync = WeightSync(
            config,
            self.parameters,
            epoch=self.epoch,
            token=self.token,
            run_dir=run_dir,
            dtype=self.dtype,
            host=config.host,
        )
        self.version = -1
        self.receivers: list[Receiver] = []
        self.work: list[float] = []
        """Seconds of processor time that each step spent on the synchronisation: what a busy machine does not change"""

    def step(self) -> str:
        """The optimizer makes the next version, and it is published or skipped."""
        no = not self.sync.reserve()
        self.version += 1
        for index, parameter in enumerate(self.parameters.values()):
            parameter.copy_(self.values(self.version, index))
        worked = time.thread_time()
        outcome = self.sync.commit(self.version, int(no))
        self.work.append(time.thread_time() - worked)
        self.sync.fence()
        for parameter in self.parameters.values():
            parameter.fill_(-1.0)  # whatever reads the parameters after the boundary is wrong
        return outcome

    def worked_for_others(self, steps_before: int) -> bool:
        """Whether a typical step after the first so many, when nobody was frozen, spent far more processor time."""
        before, after = self.work[:steps_before], self.work[steps_before:]
        # What it may lie above leaves room for a machine that others keep busy.
        return statistics.median(after) > 5 * statistics.median(before) + time.get_clock_info("thread_time").resolution

    def receive(self, name: str, apply: Callable[[StagedVersion], float | None], **options: Any) -> Receiver:
        """An actor as a thread of this process."""
        receiver = Receiver(
            self.sync.coordinator_address, name, options.pop("epoch", self.epoch), self.token, apply, **options
        )
        receiver.start()
        self.receivers.append(receiver)
        return receiver

    def journal(self, event: str, at_least: int = 0) -> list[dict[str, Any]]:
        return journal_of(self.run_dir, event, at_least)

    def wait_for(self, condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout} s; actors: {self.sync.actors()}")
            time.sleep(0.02)

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.sync.close()


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
        self.fail_next = self.refuse_next = False
        self.hold: threading.Event | None = None

    def __call__(self, staged: StagedVersion) -> float | None:
        if self.hold is not None:
            self.hold.wait(PATIENCE_S)
        if self.refuse_next:
            self.refuse_next = False
            raise WeightsRefused("not for this model")
        if self.fail_next:
            self.fail_next = False
            raise MemoryError("engine failed half-way")
        held = version_held(staged.tensors)
        self.versions.append(held if held == staged.version else None)
        return 0.001


def freeze(job: Job, name: str) -> threading.Thread:
    """An actor that joins, says that it is ready, and then never again says or reads anything."""
    loop = EventLoop()
    listener = socket.create_server(("127.0.0.1", 0))
    fields = {
        "actor": name,
        "epoch": job.epoch,
        "data": [f"127.0.0.1:{listener.getsockname()[1]}"],
        "served": None,
        "poisoned": False,
    }

    def on_ready(connection: Connection, welcome: dict[str, Any]) -> None:
        def on_message(_connection: Connection, message: dict[str, Any]) -> None:
            if message["type"] == "layout":
                from torchtitan.weight_sync.manifest import Layout

                connection.send({"type": "ready", "layout_id": Layout.from_json(message["layout"]).layout_id()})

        connection.on_message, connection.on_close = on_message, lambda *_: (listener.close(), loop.stop())

    dial(loop, job.sync.coordinator_address, job.token, "actor", fields, on_ready, lambda reason: loop.stop())
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    return thread


def test_blocking_mode_serves_every_version(tmp_path: Path) -> None:
    engines = {"a": Served(), "b": Served()}
    with running_job(tmp_path) as job:
        for name, engine in engines.items():
            job.receive(name, engine)
        for _ in range(20):
            assert job.step() == "published"
            outcome = job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=2)
            assert outcome.applied == {"a", "b"} and not outcome.missing
        figures = job.sync.statistics()
        assert figures["weight_sync/versions_published"] == 20 and figures["weight_sync/versions_skipped"] == 0
        assert figures["time/sync_stall_s"] > figures["time/snapshot_s"] > 0
        assert figures["weight_sync/a/pause_s"] == 0.001
        digests = {record["digest"] for record in job.journal("publish")}
        assert {actor.digest for actor in job.sync.actors().values()} <= digests
    assert all(engine.versions == list(range(20)) for engine in engines.values())


@pytest.mark.parametrize(("host", "bind"), [("::1", "::1"), ("127.0.0.1", "0.0.0.0"), ("::1", "::")])
def test_any_address_over_several_streams(host: str, bind: str, tmp_path: Path) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    engine = Served()
    with running_job(tmp_path, host=host, streams=3) as job:
        job.receive("a", engine, host=bind)
        for _ in range(2):
            job.step()
            assert job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=1).applied == {"a"}
        (first, _) = (record["figures"] for record in job.journal("applied", at_least=2))
        assert first["bytes_full"] == first["bytes_resulting"] > 0 and first["source"] == "trainer"
        assert first["transfer_begin"] <= first["transfer_end"] <= first["apply_begin"] <= first["apply_end"]
    assert engine.versions == [0, 1]


def test_corrupt_byte_is_refused_counted_and_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "corrupt:version=1,times=2")
    engine = Served()
    with running_job(tmp_path) as job:
        receiver = job.receive("a", engine)
        for _ in range(3):
            job.step()
            assert job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=1).applied == {"a"}
        assert receiver.status().versions_refused == 2
        reasons = [record["reason"] for record in job.journal("abort", at_least=2)]
        assert len(reasons) == 2 and all("checksum" in reason for reason in reasons)
        assert "FAULT INJECTION IS ON" in (tmp_path / "weight_sync" / "courier-rank0.log").read_text()
    assert engine.versions == [0, 1, 2]


def test_poisoned_engine_does_not_serve_until_it_applied(tmp_path: Path) -> None:
    engine = Served()
    with running_job(tmp_path) as job:
        receiver = job.receive("a", engine)
        job.step()
        job.sync.wait_until_applied(0, PATIENCE_S, at_least=1)
        engine.fail_next = True
        job.step()
        assert job.sync.wait_until_applied(1, PATIENCE_S, at_least=1).applied == {"a"}
        assert [record["reason"] for record in job.journal("poisoned", at_least=1)] == [
            "MemoryError('engine failed half-way')"
        ]
        assert not receiver.poisoned and job.sync.actors()["a"].serves
    assert engine.versions == [0, 1]


def joins_of(job: Job, name: str) -> list[dict[str, Any]]:
    return [record for record in job.journal("join") if record["actor"] == name]


def test_actor_that_always_fails_costs_blocking_mode_one_wait(tmp_path: Path) -> None:
    def fail(_staged: StagedVersion) -> None:
        raise MemoryError("never fits")

    with running_job(tmp_path) as job:
        job.receive("healthy", Served())
        job.receive("bad", fail)
        job.wait_for(lambda: [actor.state for actor in job.sync.actors().values()].count("READY") == 2)
        job.step()
        outcome = job.sync.wait_until_applied(0, PATIENCE_S, at_least=1)
        assert outcome.applied == {"healthy"} and "never fits" in outcome.missing["bad"]
        deadline = time.monotonic() + PATIENCE_S
        while len(job.journal("poisoned")) < 5 or job.version < 10:
            assert time.monotonic() < deadline
            job.step()
            outcome = job.sync.wait_until_applied(job.version, 20)
            assert outcome.applied == {"healthy"} and not outcome.missing, "told once, then left out"
            time.sleep(0.1)
        job.wait_for(lambda: len(joins_of(job, "bad")) >= 4)
        joins = joins_of(job, "bad")[:4]
        assert [record["backoff_s"] for record in joins] == [0, 0.5, 1, 2], (
            "it is offered something less and less often"
        )
        for joined in joins[1:3]:
            offered = next(
                record["time"]
                for record in job.journal("offer")
                if record["actor"] == "bad" and record["time"] >= joined["time"]
            )
            # The journal's clock is not the one that was waited by.
            assert offered - joined["time"] > 0.9 * joined["backoff_s"]


def test_an_engine_that_refuses_a_version_goes_on_with_its_own(tmp_path: Path) -> None:
    engine = Served()
    with running_job(tmp_path) as job:
        receiver = job.receive("a", engine)
        job.step()
        job.sync.wait_until_applied(0, PATIENCE_S, at_least=1)
        engine.refuse_next = True
        job.step()
        assert job.sync.wait_until_applied(1, PATIENCE_S, at_least=1).applied == {"a"}
        assert [record["reason"] for record in job.journal("refused", at_least=1)] == ["not for this model"]
        assert receiver.status().versions_refused == 1 and not job.journal("poisoned")
    assert engine.versions == [0, 1]


def test_stuck_apply_is_evicted_and_its_acknowledgement_settled(tmp_path: Path) -> None:
    stuck, healthy = Served(), Served()
    with running_job(tmp_path) as job:
        job.receive("stuck", stuck)
        job.receive("healthy", healthy)
        job.step()
        assert len(job.sync.wait_until_applied(0, PATIENCE_S, at_least=2).applied) == 2
        stuck.hold = threading.Event()
        job.step()
        outcome = job.sync.wait_until_applied(1, 20)
        assert outcome.applied == {"healthy"} and "APPLYING" in outcome.missing["stuck"]
        assert job.sync.actors()["stuck"].state == "EVICTED"
        stuck.hold.set()
        job.wait_for(lambda: job.sync.actors()["stuck"].version == 1)
        assert stuck.versions == [0, 1], "what it applied meanwhile is believed, not sent again"


def test_other_epoch_or_token_is_refused(tmp_path: Path) -> None:
    with running_job(tmp_path) as job:
        old = job.receive("old", Served(), epoch="e0-test", retry_for_s=0.5)
        job.wait_for(lambda: old.status().failure is not None)
        assert "epoch" in str(old.status().failure)
        stranger = Receiver(job.sync.coordinator_address, "x", job.epoch, "guess", Served(), retry_for_s=0.5)
        stranger.start()
        job.wait_for(lambda: stranger.status().failure is not None)
        assert "wrong token" in str(stranger.status().failure)
        stranger.close()
        assert job.sync.actors() == {}


def test_frozen_actors_starve_nobody_and_skipped_versions_are_owed(tmp_path: Path) -> None:
    engine = Served()
    frozen = {"frozen-0", "frozen-1"}
    with running_job(tmp_path, num_slots=2) as job:
        job.receive("healthy", engine)
        for name in sorted(frozen):
            freeze(job, name)
        job.wait_for(lambda: [actor.state for actor in job.sync.actors().values()].count("READY") == 3)
        deadline = time.monotonic() + PATIENCE_S
        while any(job.sync.actors()[name].state != "EVICTED" for name in frozen):
            assert time.monotonic() < deadline, job.sync.actors()
            outcome = job.step()
            assert (job.sync.owed == job.version) is (outcome == "skipped")
            time.sleep(0.03)
        suspected = [record for record in job.journal("suspect", at_least=2) if record["actor"] in frozen]
        assert {(record["actor"], record["phase"]) for record in suspected} == {(name, "OFFERED") for name in frozen}
        # While nothing was known against them.
        unharmed = [record for record in job.journal("applied") if record["time"] < suspected[0]["time"]]
        assert len({record["version"] for record in unharmed}) > 2, "frozen actors kept versions from a healthy one"
        # The trainer runs out of data: whoever hands it out has the owed version snapshotted.
        deadline = time.monotonic() + PATIENCE_S
        while job.sync.owed is not None and time.monotonic() < deadline:
            if job.sync.has_free_slot:
                for index, parameter in enumerate(job.parameters.values()):
                    parameter.copy_(parameter_values(job.version, index))
                job.sync.snapshot_owed(job.version)
            time.sleep(0.01)
        outcome = job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=1)
        assert outcome.applied == {"healthy"}
    assert None not in engine.versions
    assert engine.versions == sorted(engine.versions)  # type: ignore[type-var]


def test_evaluation_pins_a_version(tmp_path: Path) -> None:
    engine = Served()
    with running_job(tmp_path) as job:
        job.receive("a", engine)
        job.step()
        job.sync.wait_until_applied(0, PATIENCE_S, at_least=1)
        assert job.sync.pin(0) == {"a"}
        for version in range(1, 6):
            assert job.step() == "published"
            job.wait_for(lambda version=version: job.sync.published_version == version)  # type: ignore[misc]
        assert job.sync.wait_until_applied(job.version, 0.5).missing, "pinned actors are not waited for"
        assert job.sync.actors()["a"].version == 0
        job.sync.unpin()
        job.wait_for(lambda: job.sync.actors()["a"].version == job.version)
    assert engine.versions == [0, 5]


def test_nothing_outlives_a_killed_trainer(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from tests.integration_tests.test_weight_sync import Job
job = Job(Path({str(tmp_path)!r}))
job.step()
print("pids", job.sync._courier.process.pid, job.sync._coordinator.supervised.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    processes = [int(text) for text in done.stdout.split()[1:]]
    deadline = time.monotonic() + PATIENCE_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in processes):
        assert time.monotonic() < deadline, "courier or coordinator outlived the trainer"
        time.sleep(0.05)


@pytest.mark.parametrize("which", ["courier", "coordinator"])
def test_frozen_process_is_replaced_and_stalls_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    # A courier gives a sign of life every second.
    monkeypatch.setattr("torchtitan.weight_sync.launch.LOOK_SECONDS", 0.5)
    monkeypatch.setattr("torchtitan.weight_sync.launch.FROZEN_LOOKS", 6)
    with running_job(tmp_path, max_restarts=20) as job:
        job.receive("a", Served())
        job.step()
        assert job.sync.wait_until_applied(0, PATIENCE_S, at_least=1).applied == {"a"}
        # What steps cost that are published, and those that are skipped, while nothing is wrong.
        for _ in range(USUAL_STEPS):
            job.step()
            time.sleep(0.05)
        assert job.sync._coordinator is not None
        usual = job.version
        supervised = job.sync._courier if which == "courier" else job.sync._coordinator.supervised
        frozen = supervised.process
        frozen.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while supervised.restarts == 0:
            job.step()
            time.sleep(0.05)
            assert time.monotonic() < deadline
        assert frozen.wait(PATIENCE_S) == -signal.SIGKILL
        # Three seconds pass until it is noticed: whoever waits for the process comes one or two steps far.
        assert job.version - usual > 5 and not job.worked_for_others(USUAL_STEPS), "the trainer waited"
        deadline = time.monotonic() + PATIENCE_S
        while job.sync.owed is not None and time.monotonic() < deadline:
            if job.sync.has_free_slot:
                for index, parameter in enumerate(job.parameters.values()):
                    parameter.copy_(parameter_values(job.version, index))
                job.sync.snapshot_owed(job.version)
            time.sleep(0.01)
        assert job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=1).applied == {"a"}


class ActorProcesses:
    """Actors as processes of their own, that can be killed and frozen."""

    def __init__(self, job: Job):
        self.job = job
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, **more: str) -> None:
        arguments = {
            "coordinator": self.job.sync.coordinator_address,
            "actor": name,
            "epoch": self.job.epoch,
            "log": str(self.job.run_dir / f"{name}.jsonl"),
            **more,
        }
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.integration_tests.weight_sync_actor", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, TOKEN_VARIABLE: self.job.token, "OMP_NUM_THREADS": "1"},
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)
        if number is signal.SIGKILL:
            self.processes[name].wait(PATIENCE_S)

    def log(self, name: str) -> list[dict[str, Any]]:
        path = self.job.run_dir / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(PATIENCE_S)


@pytest.mark.slow
def test_real_faults_tear_nothing_and_stall_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL in mid-bucket, SIGSTOP, dead courier, dead coordinator: one run, three actors."""
    # One version takes about 0.15 s on the wire, so that most faults hit a transfer.
    monkeypatch.setenv(FAULTS, "throttle:bytes_per_s=5000000")
    random_numbers = random.Random(5)
    with running_job(tmp_path, max_restarts=20) as job, contextlib.closing(ActorProcesses(job)) as actors:
        sync = job.sync
        assert sync._coordinator is not None
        for name in ("healthy", "killed", "frozen"):
            actors.start(name)
        job.step()
        assert len(sync.wait_until_applied(0, 60, at_least=3).applied) == 3

        def train(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                job.step()
                time.sleep(0.03)

        def progress_of_healthy(seconds: float) -> None:
            before = len(actors.log("healthy"))
            train(seconds)
            job.wait_for(lambda: len(actors.log("healthy")) > before)

        for _ in range(USUAL_STEPS):
            job.step()
            time.sleep(0.03)
        actors.signal("frozen", signal.SIGSTOP)
        before = job.version
        for _ in range(2):
            progress_of_healthy(0.5 + random_numbers.random() * 0.3)
            actors.signal("killed", signal.SIGKILL)
            actors.start("killed")
        progress_of_healthy(1.0)
        sync._courier.process.kill()
        progress_of_healthy(1.5)
        sync._coordinator.supervised.process.kill()
        progress_of_healthy(1.5)
        # Seven seconds, each deadline more than one: whoever waits for one of these processes comes a few steps far.
        assert job.version - before > 20, "the trainer waited"
        given_up = job.journal("suspect") + job.journal("evict")
        assert any(record["actor"] == "frozen" and record["phase"] == "OFFERED" for record in given_up)
        actors.signal("frozen", signal.SIGCONT)
        sync._courier.process.kill()
        sync._coordinator.supervised.process.kill()
        train(1.0)
        while job.step() == "skipped":
            time.sleep(0.05)
        last = job.version
        job.wait_for(lambda: sync.published_version == last)
        job.wait_for(lambda: sum(actor.version == last for actor in sync.actors().values()) == 3, 40)
        assert sync._courier.restarts == 2 and sync._coordinator.supervised.restarts == 2
        published = {record["digest"]: record["version"] for record in job.journal("publish")}
        terms = {record["term"] for record in job.journal("start")}
        assert terms == {1, 2, 3}
        for name in ("healthy", "killed", "frozen"):
            lines = actors.log(name)
            assert lines[-1]["announced"] == last
            for line in lines:
                assert line["held"] == line["announced"] == published[line["digest"]], f"{name} served torn weights"
        healthy = [line["announced"] for line in actors.log("healthy")]
        assert healthy == sorted(set(healthy)), "a healthy actor never goes back, whoever dies beside it"
        assert not job.worked_for_others(USUAL_STEPS), "the trainer worked for the others"


def halves_of(shapes: dict[str, Any], half: int) -> dict[str, Box]:
    """What one of two tensor-parallel workers holds: rows of one parameter, columns of the next, some not at all."""
    boxes = {}
    for index, (name, shape) in enumerate(shapes.items()):
        dim = index % len(shape)
        size = shape[dim] // 2
        offset, extent = [0] * len(shape), list(shape)
        offset[dim], extent[dim] = half * size, size if half == 0 else shape[dim] - size
        if index != 1 or half == 0:
            boxes[name] = Box(tuple(offset), tuple(extent))
    return boxes


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))


def apply_on_workers(staged: StagedVersion) -> None:
    assert staged.apply_on_workers is not None
    staged.apply_on_workers()


def sync_sharded_model(run_dir: str) -> dict[str, Any]:
    """On each of four ranks: FSDP2 × TP, published shard by shard, received on rank 0, held against full_tensor().

    One actor holds everything, one has two workers that cut the parameters otherwise.
    """
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
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
    options: dict[str, Any] = {"epoch": "1-e", "token": "t", "run_dir": Path(run_dir), "rank": rank, "world_size": 4}
    parameters = dict(model.named_parameters())
    config = quick_config()
    # Smaller than a configuration may say, so that small tensors have several.
    config.bucket_bytes = 64
    if rank == 0:
        sync = WeightSync(config, parameters, **options)
        address = [sync.coordinator_address]
    dist.broadcast_object_list(address)
    if rank:
        sync = WeightSync(config, parameters, coordinator_address=address[0], **options)
    received: dict[int, dict[str, torch.Tensor]] = {}

    def apply(staged: StagedVersion) -> None:
        received[staged.version] = {name: tensor.clone() for name, tensor in staged.tensors.items()}

    receivers: list[Receiver] = []
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    boxes = [halves_of({name: parameter.shape for name, parameter in parameters.items()}, half) for half in range(2)]
    if rank == 0:
        receivers.append(Receiver(address[0], "a", "1-e", "t", apply))
        receivers.append(Receiver(address[0], "b", "1-e", "t", apply_on_workers, workers=2))
        leader = receivers[1].workers_address

        def keep(half: int) -> Callable[[StagedVersion], None]:
            return lambda staged: parts[half].update({name: t.clone() for name, t in staged.tensors.items()})

        receivers += [Worker(leader, "b", half, "1-e", "t", keep(half), boxes[half]) for half in range(2)]
        for receiver in receivers:
            receiver.start()
    equal = []
    for version in range(3):
        full = {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in parameters.items()}
        # On version 1 rank 3 has no slot: all ranks must skip it.
        votes = torch.tensor([0 if sync.reserve() and not (version == 1 and rank == 3) else 1])
        dist.all_reduce(votes)
        outcome = sync.commit(version, int(votes.item()))
        sync.fence()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        if rank == 0 and outcome == "published":
            assert sync.wait_until_applied(version, 30, at_least=2).applied == {"a", "b"}
            equal.append(all(torch.equal(received[version][name], value) for name, value in full.items()))
            assert received[version].keys() == full.keys()
            for half in range(2):
                expected = {name: full[name][slices(box)] for name, box in boxes[half].items()}
                assert parts[half].keys() == expected.keys()
                equal.append(all(torch.equal(parts[half][name], value) for name, value in expected.items()))
        dist.barrier()
    own = sum(shard.elements for shard in sync._publisher.layout.ranks[0].shards)
    statistics = sync.statistics()
    dist.barrier()
    for receiver in receivers:
        receiver.close()
    sync.close()
    return {"equal": equal, "elements": own, "skipped": statistics["weight_sync/versions_skipped"]}


@pytest.mark.slow
def test_shards_of_four_ranks_become_the_full_tensors(tmp_path: Path) -> None:
    results = run_distributed("tests.integration_tests.test_weight_sync:sync_sharded_model", 4, run_dir=str(tmp_path))
    assert results[0]["equal"] == [True] * 6
    assert [result["skipped"] for result in results] == [1, 1, 1, 1], "all ranks skip the same versions"
    assert sum(result["elements"] for result in results) == 10 * 6 + 10 + 3 * 7 + 5 + 5
    assert max(result["elements"] for result in results) < 60, "no rank sends the whole model"
