"""vLLM's own weight transfer without vLLM: what the server is told, in which order, and the agent's half."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.errors import UserError
from torchtitan.inference.agent import nccl_group
from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.vllm import broadcast
from torchtitan.inference.vllm.broadcast import BUFFER_BYTES, PACKING, VLLMBroadcastLoader, chunks
from torchtitan.weight_sync.staging import StagedVersion

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
# More than a test may take.
LONG_SECONDS = 1000.0
VERSION = StagedVersion("e1", 3, "d3", TENSORS)


def test_the_tensor_that_fills_a_piece_is_its_last() -> None:
    sizes = [3, 3, 5, 20, 1, 8, 2]
    tensors = {str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    assert list(chunks(tensors, 10)) == [["0", "1", "2"], ["3"], ["4", "5", "6"]]
    assert list(chunks(tensors, 9)) == [["0", "1", "2"], ["3"], ["4", "5", "6"]]
    assert list(chunks(tensors, 8)) == [["0", "1", "2"], ["3"], ["4", "5"], ["6"]]
    assert list(chunks({}, 10)) == []
    assert BUFFER_BYTES > 2**20


# The server's half


class Server:
    """Notes its orders; those in `fails` fail."""

    def __init__(self) -> None:
        self.version = "0.32.0"
        self.orders: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.fails: list[str] = []

    def order(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        self.orders.append(path.strip("/"))
        self.bodies[path.strip("/")] = body
        if path.strip("/") in self.fails:
            raise EngineError("no")


class Group:
    """In place of WeightGroup."""

    def __init__(self, name: str, address: str, workers: int, timeout_s: float, invite: Any):
        invite(7)
        self.sent: list[torch.Tensor] = []
        self.closed = False

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sent += tensors

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "has_gpu", lambda: False)
    monkeypatch.setattr(broadcast, "WeightGroup", Group)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions("a", "m", "", "engine", Path(), "", 0, **{"update_timeout_s": 5.0, **changes})


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("version", ["0.24.0", "0.32.0", "0.33.0rc1.dev4+g12ab", "1.0", "dev"])
def test_the_group_is_told_how_its_bytes_are_packed(version: str) -> None:
    init, update = told(version)
    assert init == {"master_address": "127.0.0.1", "master_port": 7, "rank_offset": 1, "world_size": 3, **PACKING}
    assert update == {
        "names": ["a.weight", "b.weight"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]],
    }  # fmt: skip


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("version", ["0.22.0", "0.23.1"])
def test_older_servers_are_told_with_every_update(version: str) -> None:
    init, update = told(version)
    assert "packed" not in init
    assert update.items() >= PACKING.items()


def told(version: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a server of that version and two workers hears of its group, and of an update."""
    server = Server()
    server.version = version
    loader = VLLMBroadcastLoader(server, options(tensor_parallel_size=2))  # type: ignore[arg-type]
    loader.prepare(VERSION, "e1/3")
    loader.load(VERSION, "e1/3")
    return server.bodies["init_weight_transfer_engine"]["init_info"], server.bodies["update_weights"]["update_info"]


CLEAN = ["start_weight_update", "update_weights", "finish_weight_update"]


@pytest.mark.usefixtures("on_host")
def test_an_update_takes_nothing_over_from_one_that_broke_off() -> None:
    server = Server()
    loader = VLLMBroadcastLoader(server, options())  # type: ignore[arg-type]

    def load() -> list[str]:
        server.orders = []
        loader.prepare(VERSION, "e1/3")
        loader.load(VERSION, "e1/3")
        return server.orders

    # Whoever was there before may have left something.
    assert load() == ["init_weight_transfer_engine", "start_weight_update", "finish_weight_update", *CLEAN]
    assert server.bodies["finish_weight_update"] == {"weight_version": "e1/3"}
    group: Any = loader._group
    (piece,) = group.sent
    assert piece.dtype == torch.uint8 and len(piece) == 6 * 4 + 4 * 2
    assert torch.equal(piece[:24].view(torch.float32).view(2, 3), TENSORS["a.weight"])
    assert load() == CLEAN
    for failing in ("update_weights", "finish_weight_update"):
        server.fails = [failing]
        with pytest.raises(EngineError):
            load()
        assert server.orders[-1] == "shutdown_weight_transfer_engine" and group.closed
        server.fails = []
        assert load() == ["init_weight_transfer_engine", "start_weight_update", "finish_weight_update", *CLEAN]
        group = loader._group
    loader.close()
    assert group.closed and loader._group is None


@pytest.mark.usefixtures("on_host")
def test_an_update_that_is_open_already_is_ended_first() -> None:
    server = Server()
    loader = VLLMBroadcastLoader(server, options())  # type: ignore[arg-type]
    order, refused = server.order, []

    def once(path: str, body: dict[str, Any], timeout_s: float) -> None:
        order(path, body, timeout_s)
        if path == "/start_weight_update" and not refused:
            refused.append(path)
            raise EngineError("a weight update is already active")

    server.order = once  # type: ignore[method-assign]
    loader.prepare(VERSION, "e1/3")
    loader.load(VERSION, "e1/3")
    assert server.orders[1:] == ["start_weight_update", "finish_weight_update", *CLEAN]


def test_what_is_too_old_or_has_no_gpu_to_spare_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    for version in ("0.19.1", "0.21.3"):
        server.version = version
        with pytest.raises(UserError, match=f"route = engine: vLLM {version} .* 0.22 or later"):
            VLLMBroadcastLoader(server, options())  # type: ignore[arg-type]
    server.version = "0.32.0"
    monkeypatch.setattr(broadcast, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    loader = VLLMBroadcastLoader(server, options(tensor_parallel_size=2))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="a GPU more than the engine's 2"):
        loader.prepare(VERSION, "e1/3")


# NCCL's group, without NCCL


class Work:
    def __init__(self, done: bool):
        self._done = done

    def is_completed(self) -> bool:
        return self._done


class FakeNccl:
    """What torch's process group is asked for. `stuck`: the name of a collective that does not end."""

    def __init__(self, stuck: str = ""):
        self.stuck, self.calls, self.aborted = stuck, [], False  # type: ignore[var-annotated]

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        self.calls.append(("allreduce", tensors[0].tolist()))
        return Work(self.stuck != "allreduce")

    def broadcast(self, tensors: list[torch.Tensor], how: Any) -> Work:
        assert how.rootRank == 0
        self.calls.append(("broadcast", tensors[0].tolist()))
        return Work(self.stuck != "broadcast")

    def abort(self) -> None:
        self.aborted = True


def fake_nccl(monkeypatch: pytest.MonkeyPatch, stuck: str = "") -> FakeNccl:
    fake, unique_id = FakeNccl(stuck), bytes(range(128))

    def connect(store: Any, rank: int, size: int, where: torch.device) -> FakeNccl:
        assert (rank, size) == (0, 3)
        store.set("0", unique_id)
        return fake

    monkeypatch.setattr(nccl_group, "nccl_group", connect)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return fake


def test_the_engine_is_invited_by_the_unique_id_and_meets_in_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, invited, here = fake_nccl(monkeypatch), [], threading.get_ident()

    def invite(unique_id: str) -> None:
        # The engine answers when it has joined: nobody may wait for that before joining too.
        assert threading.get_ident() != here
        invited.append(base64.b64decode(unique_id, validate=True))

    group = nccl_group.NcclWeightGroup(2, torch.device("cpu"), 5.0, invite)
    assert invited == [bytes(range(128))] and fake.calls == [("allreduce", [0.0])]
    group.broadcast([torch.ones(2, dtype=torch.uint8)])
    assert fake.calls[1:] == [("broadcast", [1, 1])]
    group.close()
    group.close()
    assert fake.aborted


@pytest.mark.parametrize("stuck", ["allreduce", "broadcast"])
def test_nothing_is_waited_for_without_an_end(monkeypatch: pytest.MonkeyPatch, stuck: str) -> None:
    fake = fake_nccl(monkeypatch, stuck)
    with pytest.raises(EngineError, match="NCCL was at it for"):
        nccl_group.NcclWeightGroup(2, torch.device("cpu"), 0.05, lambda _: None).broadcast([torch.ones(1)])
    assert fake.aborted


def test_an_engine_that_does_not_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_nccl(monkeypatch, "allreduce")

    def invite(_: str) -> None:
        raise EngineError("unknown field nccl_unique_id_b64")

    with pytest.raises(EngineError, match="unknown field"):
        nccl_group.NcclWeightGroup(2, torch.device("cpu"), LONG_SECONDS, invite)
    assert fake.aborted
