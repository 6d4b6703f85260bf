"""Manifest, slots and wire: nothing else is believed."""

from __future__ import annotations

import errno
import json
import math
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.patience import PATIENCE_S, until
from torchtitan.distributed.boxes import Box
from torchtitan.distributed.placement import LocalTensors, StackPart, unique_parameters
from torchtitan.errors import UserError
from torchtitan.utils.addresses import resolve_host
from torchtitan.weight_sync import servers
from torchtitan.weight_sync.memory.manifest import LayoutError, Manifest, content_digest
from torchtitan.weight_sync.memory.slots import LiveSlots, SharedSlots, SlotState, SlotWriter
from torchtitan.weight_sync.memory.staging import Staging
from torchtitan.weight_sync.servers import ServerProcess
from torchtitan.weight_sync.trainer.plan import Placed, placed_parameters, plan_rank
from torchtitan.weight_sync.trainer.publisher import Publisher
from torchtitan.weight_sync.wire import runtime as wire


def test_manifest_is_believed_only_whole() -> None:
    manifest = Manifest("e", 3, "layout", ("a", "c"), content_digest("layout", ["a", "c"]))
    data = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(data) == manifest
    data["table_digests"][1] = "x"
    with pytest.raises(LayoutError, match="digest"):
        Manifest.from_json(data)
    with pytest.raises(LayoutError, match="malformed"):
        Manifest.from_json({"epoch": "e"})


def test_tied_parameters_go_once() -> None:
    shared = torch.nn.Parameter(torch.zeros(2))
    names = unique_parameters({"embed": shared, "norm": torch.zeros(1), "head": shared})
    assert list(names) == ["embed", "norm"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_snapshot_is_cast_fenced_and_assembled(dtype: str) -> None:
    parameters = {f"w{n}": torch.randn(5, n) for n in range(1, 6)} | {"scalar": torch.tensor(2.5)}
    expected = {name: value.clone().to(getattr(torch, dtype)) for name, value in parameters.items()}
    publisher = Publisher(parameters, rank=0, dtype=dtype, num_slots=2, bucket_bytes=100)
    with pytest.raises(RuntimeError, match="without a reserved slot"):
        publisher.snapshot(0, 1)
    assert publisher.reserve() and publisher.reserve(), "reserving twice is one reservation"
    publisher.snapshot(7, 1)
    publisher.fence()
    for value in parameters.values():
        value.add_(1)  # the next optimizer step
    slots = publisher.slots
    live = LiveSlots(slots.state_words)
    until(live.filled)
    assert live.filled() == {1: (0, 7)}
    staging = Staging(publisher.layout)
    staging.memory[0][0][:] = slots.slot(0)
    for name, tensor in staging.tensors.items():
        assert torch.equal(tensor, expected[name]), name
    assert publisher.reserve()
    publisher.release()
    assert publisher.server_bell.recv(10) == b"!"
    publisher.close()


def test_publisher_never_blocks_on_a_dead_shard_server() -> None:
    publisher = Publisher({"w": torch.zeros(1)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=8)
    for serial in range(2):
        assert publisher.reserve()
        publisher.snapshot(serial, serial + 1)
    assert publisher.doorbell.gettimeout() == 0
    assert not publisher.reserve()
    for serial in range(20000):
        publisher.fail(2, serial + 3)
    assert publisher.slots.failed[-1] == (20002, 2), "of which the shard server tells"
    # More rings than the bell holds: those that found no room are gone, and nobody waited for room.
    assert 0 < len(publisher.server_bell.recv(20000)) < 20000
    publisher.server_bell.close()
    publisher.fail(2, 30000)
    publisher.doorbell.close()
    publisher.slots.close_files()


def test_slots_that_are_larger_than_a_file_may_be_are_refused() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    try:
        with pytest.raises(UserError, match=r"weight-sync-slots\) of .* bytes: File too large.* \(ulimit -f\)"):
            SharedSlots.create(3, 4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_slots_are_shared_through_their_descriptors() -> None:
    slots = SharedSlots.create(3, 5000)
    other = SharedSlots(slots.words_fd, slots.data_fd, 3, 5000)
    writer, live = SlotWriter(slots.state_words), LiveSlots(other.state_words)
    assert writer.reserve()
    index = writer.begin(4, 9)
    slots.slot(index)[:3] = b"abc"
    writer.finish(index)
    assert live.filled() == {9: (index, 4)} and bytes(other.slot(index)[:3]) == b"abc"
    live.live(8, (), (9,), 0.0)
    assert writer.view(index).state is SlotState.FREE
    slots.set_failed(3, 2)
    slots.set_failed(4, 2)
    assert other.failed == [(3, 2), (4, 2)], "a shard server that was away hears of every one"
    for serial in range(5, 200):
        slots.set_failed(serial, serial + 1)
    assert other.failed == [(serial, serial + 1) for serial in range(136, 200)]


def test_process_that_cannot_be_started_again_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "short_life.py").write_text("")
    started = subprocess.Popen

    def start_once(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr("torchtitan.utils.child_process.subprocess.Popen", no_start)
        return started(*arguments, **options)

    def no_start(*_arguments: Any, **_options: Any) -> Any:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("torchtitan.utils.child_process.subprocess.Popen", start_once)
    monkeypatch.setattr(servers, "MODULE", "short_life")
    process = ServerProcess("helper", {}, {}, "token", tmp_path / "log", ("127.0.0.1", 0, 3), int)
    process._thread.join(PATIENCE_S)
    assert not process._thread.is_alive() and "no more processes" in process.failure


def test_process_that_takes_long_to_start_is_not_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no sign of life before its modules are read; after the first one it is killed when there are no more."""
    monkeypatch.setattr(servers, "CHECK_SECONDS", 0.05)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)")
    beats, checks = [0], threading.Semaphore(0)

    def heartbeat() -> int:
        checks.release()
        return beats[0]

    monkeypatch.setattr(servers, "MODULE", "slow")
    process = ServerProcess("helper", {}, {}, "token", tmp_path / "log", ("127.0.0.1", 0, 9), heartbeat)
    try:
        for _ in range(20):
            assert checks.acquire(timeout=PATIENCE_S)
        assert process.restarts == 0
        beats[0] += 1
        until(lambda: process.restarts == 1)
    finally:
        process.close(time.monotonic() + PATIENCE_S)


@pytest.mark.parametrize(("host", "address"), [("rank-0", "127.0.1.1"), ("rank-0", "::1"), ("localhost", "127.0.0.1")])
def test_name_of_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch, host: str, address: str) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(None, None, None, "", (address, 0))])
    if host == "localhost":
        assert resolve_host(host, "weight_sync.host") == address
        return
    with pytest.raises(UserError, match=f"weight_sync.host = rank-0 is {address} on .*no other machine reaches"):
        resolve_host(host, "weight_sync.host")


def test_rank_that_does_not_reach_the_registry_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert servers.local_address_towards(address) == "127.0.0.1"
    with pytest.raises(UserError, match=f"does not reach the weight registry at {address}"):
        servers.local_address_towards(address)


@pytest.mark.parametrize("address", ["host", ":1", "host:", "host:0", "host:65536", "host:²", "host:" + "1" * 5000])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(wire.ProtocolError, match="not an address"):
        wire.parse_address(address)


@pytest.fixture
def mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """Makes the mesh of such a shape, as this rank of some has it."""

    def make(rank: int, world: int, *shape: int) -> DeviceMesh:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), _init_backend=False)

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "coordinate"), [(1, (0, 1)), (2, (1, 0)), (4, None)])
def test_placements_are_read_as_they_are(rank: int, coordinate: Any, mesh: Callable[..., DeviceMesh]) -> None:
    """Rank 4 is outside of the mesh: it has no part in what it does not hold."""
    placements, whole = (Shard(1), Replicate()), {"shape": (3, 4), "stride": (4, 1)}
    shard = DTensor.from_local(torch.zeros(3, 2), mesh(rank, 5, 2, 2), placements, run_check=False, **whole)
    ((name, placed),) = placed_parameters({"w": shard})
    assert (name, vars(placed)) == ("w", vars(Placed((3, 4), (2, 2), coordinate, placements)))


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_parts_of_a_stack_are_sent_by_their_place_in_it(rank: int | None, mesh: Callable[..., DeviceMesh]) -> None:
    """Four experts, of which each of two ranks has two, or one rank all: a part is found among those that it has."""
    stack = torch.arange(4 * 6 * 2).float().view(4, 6, 2)
    parts = [(expert, rows) for expert in range(4) for rows in [(0, 2), (2, 6), None]]
    expected = {(expert, rows): stack[expert][slice(*(rows or (None,)))] for expert, rows in parts}
    held = parts if rank is None else parts[6 * rank : 6 * rank + 6]
    two, tensor = mesh(rank or 0, 2, 2), stack
    if rank is not None:
        whole, local = {"shape": stack.shape, "stride": stack.stride()}, stack[2 * rank : 2 * rank + 2]
        tensor = DTensor.from_local(local, two, [Shard(0)], run_check=False, **whole)
    found = LocalTensors([StackPart(tensor, *part) for part in held]).now()
    placed = placed_parameters({str(part): StackPart(tensor, *part) for part in parts})
    layout = plan_rank(placed, rank or 0, "float32", 64)
    assert all(torch.equal(piece, expected[part]) for piece, part in zip(found, held, strict=True))
    assert {entry.name: entry.shape for entry in layout.parameters} == {
        str(part): tuple(piece.shape) for part, piece in expected.items()
    }
    sent = [(parts[shard.parameter], Box(shard.offset, shard.shape)) for shard in layout.ranks[0]]
    assert sent == [(part, Box((0, 0), tuple(expected[part].shape))) for part in held]


def test_placement_that_nothing_can_be_sent_from_is_refused(mesh: Callable[..., DeviceMesh]) -> None:
    partial_sums = DTensor.from_local(torch.zeros(3), mesh(0, 2, 2), (Partial(),), run_check=False)
    with pytest.raises(UserError, match="cannot send w shard by shard: it is placed as P"):
        placed_parameters({"norm": torch.zeros(1), "w": partial_sums})
