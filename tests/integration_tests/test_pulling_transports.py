"""ipc and nccl (over gloo) with real processes: ends that freeze and die half-way, damaged buckets, failing threads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from tests.faults import inject, variables
from tests.integration_tests.test_pulling import EPOCH, ActorProcess, Job, start, wait_for
from tests.integration_tests.versioned_weights import version_held
from tests.patience import PATIENCE_S
from tests.processes import ROOT, free_ports, has_ended, status_of
from torchtitan.weight_sync import servers
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.memory import device_slots
from torchtitan.weight_sync.memory.device_slots import DeviceSlots
from torchtitan.weight_sync.memory.staging import StagedVersion
from torchtitan.weight_sync.servers import ShardServerThread
from torchtitan.weight_sync.trainer import publisher, shard_server
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

__all__ = ["start"]
TRANSPORTS = ["ipc", "nccl"]


def publish_without_skipping(job: Job, *actors: ActorProcess, times: int = 6) -> None:
    """So many versions, one after the other, none of which may find no slot."""
    for _ in range(times):
        assert job.step()
        wait_for(lambda: job.watcher.status()["newest"] == job.version, "publication")
        job.served_by(*actors)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_actors_that_stop_half_way_cost_the_others_nothing(start: Callable[..., Job], transport: str) -> None:
    job = start(transport=transport, chunk_bytes=16 * 1024)
    healthy, frozen, killed = (
        job.actor(f"actor-{number}", how and f"{how}:phase=receive,version=1,bucket=5")
        for number, how in enumerate(("", "freeze", "kill"))
    )
    job.publish()
    job.served_by(healthy, frozen, killed)
    job.publish()

    def stopped() -> bool:
        return has_ended(killed.process.pid) and status_of(frozen.process.pid) == psutil.STATUS_STOPPED

    wait_for(stopped, "they stop in the midst of version 1")
    job.served_by(healthy)
    publish_without_skipping(job, healthy)
    frozen.signal(signal.SIGCONT)
    killed.close()
    successor = job.actor("actor-2")
    job.served_by(frozen, successor)
    job.publish()
    job.served_by(healthy, frozen, successor)


@pytest.mark.exhaustive
def test_actor_that_freezes_in_the_midst_of_a_chunk(start: Callable[..., Job]) -> None:
    """At any moment, that is: also with credits given, and chunks on their way."""
    job = start(transport="nccl", chunk_bytes=1024)
    healthy, victim = job.actor("actor-0"), job.actor("actor-1")
    job.publish()
    job.served_by(healthy, victim)
    for _ in range(3):
        job.step()
        victim.signal(signal.SIGSTOP)
        wait_for(lambda: job.watcher.status()["newest"] == job.version, "publication")
        job.served_by(healthy)
        publish_without_skipping(job, healthy, times=2)
        victim.signal(signal.SIGCONT)
        job.served_by(victim)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trainer_that_freezes_half_way(
    start: Callable[..., Job], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than every deadline between it and its actors."""
    job = start(transport=transport, chunk_bytes=16 * 1024, chunk_seconds=0.5)
    actor = job.actor("actor-0")
    job.publish()
    job.served_by(actor)
    # Of the shard server's process, where it is one (the first of the two ends before the second has begun).
    inject(monkeypatch, "freeze:phase=send,version=1,bucket=5,seconds=5")
    job.publish()
    job.served_by(actor)
    job.publish()
    job.served_by(actor)


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trainer_that_dies_half_way(start: Callable[..., Job], transport: str, tmp_path: Path) -> None:
    """Its actors stay at the version that they have, and another trainer of the epoch finds them."""
    port = free_ports(2)
    names = f"transport={transport!r}, port={port}, chunk_bytes=16384"
    script = (
        "import sys; from pathlib import Path; from tests.integration_tests.test_pulling import Job\n"
        f"job = Job(Path(sys.argv[1]), {names}); job.publish()\n"
        "print(job.publication.registry_address, job.token, flush=True)\n"
        "sys.stdin.readline(); job.step(); sys.stdin.read()"
    )
    # ipc on the CPU sends from another process, which the fault would kill: version 1 must not arrive meanwhile.
    faults, action = tmp_path / "faults.txt", "kill" if transport == "nccl" else "drop"
    faults.write_text(f"{action}:phase=send,version=1,bucket=5,times=1000\n")
    dying = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "dying")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **variables(f"@{faults}")},
    )
    assert dying.stdout is not None and dying.stdin is not None
    address, token = dying.stdout.readline().decode().split()
    gone = SimpleNamespace(
        folder=tmp_path, token=token, relays=False, values=None, publication=SimpleNamespace(registry_address=address)
    )
    actor = ActorProcess(cast(Job, gone), "actor-0")
    try:
        wait_for(lambda: actor.newest() == 0, "version 0 is served")
        dying.stdin.write(b"\n")
        dying.stdin.flush()
        wait_for(lambda: list(tmp_path.glob("faults.txt.struck/*.json")), "version 1 is half-way")
        dying.kill()
        dying.wait(PATIENCE_S)
        wait_for(lambda: is_free(port) and is_free(port + 1), "its servers end with it")
        assert actor.process.is_alive() and actor.newest() == 0
        successor = start(transport=transport, port=port, token=token)
        for _ in range(3):
            successor.publish()
        successor.served_by(actor)
    finally:
        actor.close()


def thread_of(job: Job) -> ShardServerThread:
    server = job.publication.shard_server
    assert isinstance(server, ShardServerThread)
    return server


def test_thread_that_fails_is_replaced_within_a_bound(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(servers, "MAX_RESTARTS", 2)
    job = start(transport="nccl")
    actor, server = job.actor("actor-0"), thread_of(job)
    for restarts in range(3):
        job.publish()
        job.served_by(actor)
        server.runtime.post(fail)
        if restarts < 2:
            wait_for(lambda restarts=restarts: server.restarts == restarts + 1, "another one")
    wait_for(lambda: server.failure, "the bound")
    assert "failed 3 times in a row, the last time: RuntimeError('on purpose')" in job.publication.failure


@pytest.mark.parametrize("what", ["checksums", "loop"])
def test_thread_that_hangs(start: Callable[..., Job], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_server, "MAX_BUCKET_SECONDS", 0.5)
    released, hangs = threading.Event(), threading.Event()
    checksum = shard_server.checksum_function("xxh3")  # type: ignore[attr-defined]

    def late(data: Any) -> str:
        if hangs.is_set():
            hangs.clear()
            released.wait(PATIENCE_S)
        return checksum(data)

    monkeypatch.setattr(shard_server, "checksum_function", lambda _kind: late)
    job = start(transport="nccl")
    actor, server = job.actor("actor-0"), thread_of(job)
    try:
        job.publish()
        job.served_by(actor)
        if what == "checksums":
            hangs.set()
            job.publish()
            job.served_by(actor)
            assert server.restarts == 1 and not server.failure
        else:
            server.runtime.post(lambda: released.wait(PATIENCE_S) and None)
            wait_for(lambda: server.failure, "it is said")
            assert "cannot be killed" in job.publication.failure
    finally:
        released.set()


def test_slots_on_a_device_are_read_where_they_are(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ipc as on a GPU, but for CUDA's own calls: the host plays the device, and the actor is of this process."""
    exported: list[torch.Tensor] = []

    def export(tensor: torch.Tensor, uuid: str) -> dict[str, Any]:
        exported.append(tensor)
        return {"gpu": uuid, "storage": f"{len(exported) - 1:02x}", "length": len(tensor)}

    tensors = lambda count, size: [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]  # noqa: E731
    create = lambda count, size, *_: DeviceSlots(DeviceSlots.new_file(count), tensors(count, size))  # noqa: E731
    monkeypatch.setattr(publisher, "create_slots", create)
    monkeypatch.setattr(publisher, "pin", lambda _slots: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: type("Gpu", (), {"uuid": "GPU-1"}))
    monkeypatch.setattr(device_slots, "_exported", export)
    opened: list[str] = []

    def open_memory(fields: dict[str, Any]) -> torch.Tensor:
        opened.append(fields["storage"])
        return exported[int(fields["storage"], 16)]

    monkeypatch.setattr(device_slots, "open_device_memory", open_memory)
    job = start(transport="ipc")
    assert isinstance(job.publication.publisher.slots, DeviceSlots) and thread_of(job)
    assert job.publication.publisher.layout.checksum == "sum"
    held: list[tuple[int, int | None]] = []

    def apply(staged: StagedVersion) -> None:
        held.append((staged.version, version_held({name: tensor.clone() for name, tensor in staged.tensors.items()})))

    key = role_key(job.token, ACTOR, "actor-0")
    actor = SyncActor(job.publication.registry_address, "actor-0", EPOCH, key, apply)
    actor.start()
    try:
        for version in range(4):
            job.publish()
            wait_for(lambda version=version: (version, version) in held, f"version {version} is served")
        thread_of(job).runtime.stop()
        wait_for(lambda: thread_of(job).restarts == 1, "another server")
        job.publish()
        wait_for(lambda: held[-1] == (4, 4), "version 4 is served")
    finally:
        actor.close()
    assert len(exported) == 3, "every export of a tensor adds to what torch keeps for it"
    assert len(opened) == len(set(opened)), "memory is opened once"
