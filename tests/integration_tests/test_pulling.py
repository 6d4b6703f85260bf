"""Publishing and pulling with real processes, sockets and shared memory: every part is killed, and frozen."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from examples.version_folder import read_weights
from tests.faults import inject, variables
from tests.integration_tests import pulling_actor
from tests.integration_tests.versioned_weights import SHAPES, parameter_values, sparse_values
from tests.journals import journal_of
from tests.patience import until
from tests.processes import fork, free_ports
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.errors import UserError
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.transports import nccl
from torchtitan.weight_sync.transports.stores import Folder
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

EPOCH = "e1-test"


def wait_for(condition: Callable[[], Any], what: str) -> None:
    until(condition, why=lambda: f"waited in vain: {what}")


class ActorProcess:
    """One pulling_actor."""

    def __init__(self, job: Job, name: str, faults: str = "", where: str = "cpu"):
        self.job, self.name = job, name
        self.log = job.folder / f"{name}.log"
        self.log.touch()
        arguments = {
            "registry": job.publication.registry_address,
            "name": name,
            "epoch": EPOCH,
            "key": role_key(job.token, ACTOR, name),
            "log": str(self.log),
            "relay_host": "127.0.0.1" if job.relays else "",
            "sparse": job.values is sparse_values,
            "where": where,
        }
        self.process = fork(pulling_actor.run, arguments, **variables(faults))

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def newest(self) -> int:
        """The version that it serves; everything that it has ever served was whole."""
        lines = self.lines()
        for line in lines:
            assert line["announced"] == line["held"], line
        return lines[-1]["announced"] if lines else -1

    def close(self) -> None:
        self.process.kill()
        self.process.join()


class Job:
    """A trainer without a model: parameters are a function of (version, index). transport: also "delta" (tcp) and
    "disk delta", with bfloat16 weights of which one in 32 changes with each version."""

    def __init__(
        self,
        folder: Path,
        transport: str = "tcp",
        port: int = 0,
        token: str = "",
        device: str = "cpu",
        chunk_bytes: int = nccl.CHUNK_BYTES,
        chunk_seconds: float = nccl.CHUNK_SECONDS,
        **changes: Any,
    ):
        self.folder, self.token = folder, token or secrets.token_urlsafe(16)
        self.values = parameter_values
        dtype, table = "float32", dict[str, bool]()
        if "delta" in transport:
            self.values, dtype = sparse_values, "bfloat16"
            table["delta"] = True
            transport = "disk" if "disk" in transport else "tcp"
        self.parameters = {f"p{i}": self.values(0, i).float().to(device) for i in range(len(SHAPES))}
        self.relays = "relay_fanout" in changes
        config = WeightSyncConfig(transport=transport, port=port)
        config.bucket_bytes = 64 * 1024
        vars(config).update({"progress_timeout_s": 1.5, **changes})
        vars(config.table).update(table, relay=self.relays)
        self.chunks = mock.patch.multiple(nccl, CHUNK_BYTES=chunk_bytes, CHUNK_SECONDS=chunk_seconds)
        self.chunks.start()
        self.publication = WeightSync(
            config, self.parameters, epoch=EPOCH, token=self.token, run_dir=folder, dtype=dtype
        )
        assert self.publication.watcher is not None and self.publication.registry is not None
        self.watcher, self.registry = self.publication.watcher, self.publication.registry
        self.version = -1
        self.skipped = 0
        self.actors: list[ActorProcess] = []

    def step(self) -> bool:
        """The optimizer makes the next version. False where there was no slot for it."""
        boundary = self.publication.boundary
        no = not boundary.reserve()
        self.publication.publisher.fence()
        self.version += 1
        for index, parameter in enumerate(self.parameters.values()):
            parameter.copy_(self.values(self.version, index))
        published = boundary.commit(self.version, int(no))
        self.skipped += not published
        return published

    def publish(self) -> int:
        """Step until a version has been published, and the registry says so."""
        wait_for(self.step, "a free slot")
        wait_for(lambda: self.watcher.status()["newest"] == self.version, f"version {self.version}")
        return self.version

    def actor(self, name: str, faults: str = "", where: str = "cpu") -> ActorProcess:
        self.actors.append(ActorProcess(self, name, faults, where))
        return self.actors[-1]

    def figures(self, name: str) -> dict[str, float]:
        """Of the newest version, which this actor serves."""

        def shown() -> dict[str, Any]:
            known: dict[str, Any] = self.watcher.status()["actors"][name]
            return known

        wait_for(lambda: shown()["version"] == self.version, "the trainer is told")
        figures: dict[str, float] = shown()["figures"]
        return figures

    def served_by(self, *actors: ActorProcess, version: int | None = None) -> None:
        wanted = self.version if version is None else version
        for actor in actors:
            wait_for(lambda actor=actor: actor.newest() >= wanted, f"{actor.name} serves {wanted}")

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
        self.publication.close()
        self.chunks.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**changes: Any) -> Job:
        jobs.append(Job(tmp_path / str(len(jobs)), **changes))
        return jobs[-1]

    yield make
    for job in reversed(jobs):
        job.close()


@pytest.mark.parametrize("transport", ["tcp", "disk delta", "ipc", "nccl"])
def test_actors_serve_every_version_whole(start: Callable[..., Job], transport: str) -> None:
    job = start(transport=transport)
    actors = [job.actor("actor-0"), job.actor("actor-1")]
    for _ in range(5):
        job.publish()
        job.served_by(*actors)
    assert [line["announced"] for line in actors[0].lines()][-5:] == [0, 1, 2, 3, 4]
    wanted = {"actor-0": ("ready", 4), "actor-1": ("ready", 4)}

    def shown() -> dict[str, tuple[str, int]]:
        actors = job.watcher.status()["actors"]
        return {name: (actor["state"], actor["version"]) for name, actor in actors.items()}

    wait_for(lambda: shown() == wanted, "the trainer is told")


def test_actors_pass_versions_on_and_a_dead_parent_costs_its_children_a_moment(start: Callable[..., Job]) -> None:
    job = start(relay_fanout=1)
    actors = [job.actor(f"actor-{number}") for number in range(3)]
    wait_for(lambda: len(job.watcher.status()["actors"]) == 3, "all have joined")
    for _ in range(4):
        job.publish()
        job.served_by(*actors)
    wait_for(lambda: job.watcher.status()["actors"]["actor-0"]["version"] == 3, "the trainer is told")

    def relayed() -> list[bool]:
        return sorted(bool(actor["figures"]["bytes_relayed"]) for actor in job.watcher.status()["actors"].values())

    # On a busy machine shard servers may count late who has got the first versions.
    for _ in range(20):
        if relayed() == [False, True, True]:
            break
        job.publish()
        job.served_by(*actors)
    assert relayed() == [False, True, True]
    for victim in actors[:2]:
        victim.signal(signal.SIGSTOP)
    job.publish()
    job.served_by(actors[2])


def test_ports_can_be_fixed(tmp_path: Path) -> None:
    port = free_ports(2)
    job = Job(tmp_path, port=port)
    try:
        assert job.publication.registry_address == f"127.0.0.1:{port}"
        assert job.publication.shard_server.address == f"127.0.0.1:{port + 1}"
    finally:
        job.close()


def supervised(job: Job, part: str) -> Any:
    return job.registry if part == "registry" else job.publication.shard_server


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("part", "how", "transport"),
    [("registry", signal.SIGSTOP, "tcp"), ("shard server", signal.SIGKILL, "delta")],
)
def test_servers_are_started_again(start: Callable[..., Job], part: str, how: signal.Signals, transport: str) -> None:
    job = start(transport=transport)
    actor = job.actor("actor-0")
    job.publish()
    job.served_by(actor)
    process = supervised(job, part)
    number = process.process.pid
    os.kill(number, how)
    # The trainer goes on meanwhile; whatever it skips, the next version that it publishes arrives.
    wait_for(lambda: process.process.pid != number, f"another {part}")
    version = job.publish()
    job.served_by(actor, version=version)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_actor_costs_the_others_nothing(start: Callable[..., Job], how: signal.Signals) -> None:
    job = start()
    healthy, victim = job.actor("actor-0"), job.actor("actor-1")
    job.publish()
    job.served_by(healthy, victim)
    victim.signal(how)
    for _ in range(6):
        assert job.step()
        wait_for(lambda: job.watcher.status()["newest"] == job.version, "publication")
        job.served_by(healthy)
    wait_for(lambda: job.watcher.status()["actors"]["actor-1"]["state"] == "evicted", "the loss is noticed")
    assert job.skipped == 0
    if how == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        job.served_by(victim)
    else:
        job.served_by(job.actor("actor-1"))


def test_deltas_are_small_and_damaged_ones_are_replaced_by_the_bucket(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On its way, so that it makes other bytes or none. The memory that it was for is no base any more.
    inject(monkeypatch, "corrupt:phase=send,version=2,bucket=3")
    job = start(transport="delta")
    size = sum(2 * parameter.numel() for parameter in job.parameters.values())
    actor = job.actor("actor-0")
    received = []
    for _ in range(4):
        job.publish()
        job.served_by(actor)
        received.append(job.figures("actor-0"))
    assert received[0]["bytes_delta"] == 0 and received[0]["bytes_full"] >= size
    assert [figures["bytes_full"] for figures in received[1:]] == [0, 64 * 1024, 0]
    # Those that change lie at equal distances: next to nothing has to be said.
    assert all(0 < figures["bytes_delta"] < 0.02 * size for figures in received[1:])
    # A new process holds nothing, and gets everything.
    actor.close()
    job.publish()
    actor = job.actor("actor-0")
    job.served_by(actor)
    assert job.figures("actor-0")["bytes_full"] >= size
    assert [line["announced"] for line in actor.lines()][-2:] == [3, 4]


def check_latest(job: Job, version: int) -> None:
    """What a reader finds who knows nothing of all this."""
    latest = job.folder / "weights" / "latest"
    wait_for(lambda: read_weights(latest).version >= version, f"version {version} in the folder")
    found = read_weights(latest)
    plain = load_file(latest / "model.safetensors")
    assert plain.keys() == found.tensors.keys() == job.parameters.keys()
    for index, name in enumerate(job.parameters):
        assert torch.equal(plain[name], parameter_values(found.version, index))
        assert torch.equal(found.tensors[name], plain[name])


@pytest.mark.exhaustive
def test_damaged_files_are_replaced_by_their_bytes_and_a_full_disk_drops_a_version(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["corrupt:phase=write,version=1,bucket=2", "drop:phase=write,version=2,bucket=3", "full_disk:version=3"]
    inject(monkeypatch, ";".join(plan))
    job = start(transport="disk")
    actors = [job.actor("actor-0"), job.actor("actor-1")]
    for _ in range(3):
        job.publish()
        job.served_by(*actors)
    job.step()
    wait_for(lambda: job.watcher.status()["dropped"], "version 3 is dropped")
    status = job.watcher.status()
    assert [version for _, version in status["dropped"]] == [3] and not job.publication.failure
    (dropped,) = journal_of(job.folder, "drop", at_least=1)
    assert dropped["version"] == 3 and dropped["reason"].startswith("rank 0: ")
    assert "No space left on device" in dropped["reason"] and "model.safetensors" in dropped["reason"]
    # As the trainer does with a pending version.
    assert job.publication.boundary.pending_version(2, status["dropped"]) == 3
    wait_for(lambda: job.publication.boundary.snapshot_pending(3), "a free slot")
    job.served_by(*actors)
    job.publish()
    job.served_by(*actors)
    check_latest(job, 4)
    versions = job.folder / "weights" / EPOCH
    wait_for(lambda: len(list(versions.iterdir())) == 2, "older versions are deleted")
    assert not list(versions.glob("**/.*"))
    assert [line["announced"] for line in actors[0].lines()] == [0, 1, 2, 3, 4]


@pytest.mark.exhaustive
def test_rank_0_owns_the_folder_of_files_until_it_closes(tmp_path: Path) -> None:
    config = WeightSyncConfig(transport="disk")
    options: dict[str, Any] = {"epoch": EPOCH, "token": "t", "run_dir": tmp_path, "world_size": 2}
    first = WeightSync(config, {"p": torch.zeros(8)}, **options)
    with contextlib.closing(first):
        with pytest.raises(UserError, match="another job"):
            Folder(str(tmp_path / "weights")).claim("another")
        with contextlib.closing(
            WeightSync(config, {"p": torch.zeros(8)}, **options, rank=1, registry=first.registry_address)
        ):
            pass
    Folder(str(tmp_path / "weights")).claim("another")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.exhaustive
def test_training_goes_on_while_the_run_folder_is_full(small_disk: Path) -> None:
    """Not even the registry can write its journal; a version takes 0.7 MB."""
    job = Job(small_disk, "disk")
    try:
        job.publish()
        actor = job.actor("actor-0")
        job.served_by(actor)
        numbers = [supervised(job, part).process.pid for part in ("registry", "shard server")]
        with (small_disk / "filler").open("wb", buffering=0) as filler:
            with pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
            dropped: set[int] = set()
            while len(dropped) < 5:
                job.step()
                wait_for(lambda: job.skipped or job.watcher.status()["dropped"], "it is told")
                dropped |= {version for _, version in job.watcher.status()["dropped"]}
            check_latest(job, 0)
            filler.truncate(0)
        job.publish()
        # The actor's log was in the full folder, too; the trainer hears all the same.
        wait_for(lambda: job.watcher.status()["actors"]["actor-0"]["version"] == job.version, "it is served")
        check_latest(job, job.version)
        assert numbers == [supervised(job, part).process.pid for part in ("registry", "shard server")]
        assert not list((small_disk / "weights").glob("**/.*"))
    finally:
        job.close()
