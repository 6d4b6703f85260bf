"""SGLang without SGLang: what its own weight group is told, by its version, in which order, which bytes; its workers.

The server answers as those of 0.5.20 and 0.5.21 do; the receiving half cuts a bucket up as their source does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.inference.json_server import serving
from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.agent.loading import FileLoader
from torchtitan.inference.sglang import broadcast
from torchtitan.inference.sglang import engine as sglang_engine
from torchtitan.inference.sglang.broadcast import BUCKET_BYTES, SGLangBroadcastLoader, buckets, known_features
from torchtitan.inference.sglang.control import SGLangControl
from torchtitan.weight_sync.staging import StagedVersion

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(3, dtype=torch.bfloat16),
    "c.weight": torch.arange(8.0).view(4, 2).t(),
    "d.weight": torch.tensor(7.0),
}
VERSION = StagedVersion("e1", 3, "d3", TENSORS)
LABEL = "e1/3"
UPDATE = "/update_weights_from_distributed"
SESSION = ["/begin_weight_update", UPDATE, UPDATE, "/end_weight_update"]
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"


class Server:
    """The routes that a loader uses. fails: one more order to these fails, after it did its work."""

    def __init__(self, version: str):
        self.version = version
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.fails: list[str] = []
        self.open = False

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.orders]

    def updates(self) -> list[dict[str, Any]]:
        return [body for path, body in self.orders if path == UPDATE]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.orders.append((path, body))
        has_sessions = self.version.startswith("0.5.2") and not self.version.startswith("0.5.20")
        if path.endswith("_weight_update"):
            if not has_sessions:
                return 404, {"detail": "Not Found"}
            if self.open == (path == "/begin_weight_update"):
                return 400, {"success": False, "message": "already open" if self.open else "none is open"}
            self.open = not self.open
        if path == UPDATE and has_sessions and not self.open:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        if path in self.fails:
            self.fails.remove(path)
            return 400, {"success": False, "message": "partially updated"}
        return 200, {"success": True, "message": ""}


class Group:
    """In place of WeightGroup."""

    def __init__(self, name: str, address: str, workers: int, timeout_s: float, invite: Any):
        invite(7)
        self.sent: list[list[torch.Tensor]] = []
        self.closed = False

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sent.append(list(tensors))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Server, SGLangBroadcastLoader]]:
    """A server that says it is the version of the test's parameter, with the loader of its agent."""
    engine = Server(request.param)

    def facts(_path: str) -> tuple[int, Any]:
        return 200, {"version": engine.version, "disable_radix_cache": True}

    with serving(lambda path, body: engine.answer(path, json.loads(body)), facts) as url:
        control = SGLangControl(url, "", 5.0, "keep")
        options = EngineOptions("a", "m", "", "engine", Path(), "", 0, tensor_parallel_size=2, update_timeout_s=5.0)
        yield engine, SGLangBroadcastLoader(control, options)


@pytest.fixture(autouse=True)
def without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "WeightGroup", Group)


def of(*versions: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", versions, indirect=True)


def load(server: tuple[Server, SGLangBroadcastLoader]) -> tuple[list[str], Any]:
    """Have the version handed over; returns the paths of the orders, and the group."""
    engine, loader = server
    engine.orders = []
    loader.prepare(VERSION, LABEL)
    group = loader._group
    loader.load(VERSION, LABEL)
    return engine.paths, group


def received(update: dict[str, Any], pieces: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What SGLang makes of one order and its broadcasts."""
    types = [getattr(torch, name) for name in update["dtypes"]]
    empty = [torch.empty(shape, dtype=kind) for shape, kind in zip(update["shapes"], types, strict=True)]
    if update.get("load_format") != "flattened_bucket":
        assert [(piece.shape, piece.dtype) for piece in pieces] == [(one.shape, one.dtype) for one in empty]
        return dict(zip(update["names"], pieces, strict=True))
    (piece,) = pieces
    assert piece.dtype == torch.uint8 and len(piece) == sum(one.nbytes for one in empty)
    start, tensors = 0, {}
    for name, one in zip(update["names"], empty, strict=True):
        tensors[name] = piece[start : start + one.nbytes].view(one.dtype).reshape(one.shape)
        start += one.nbytes
    return tensors


def check_all_arrived(engine: Server, group: Any) -> None:
    got: dict[str, torch.Tensor] = {}
    for update, pieces in zip(engine.updates(), group.sent, strict=True):
        got |= received(update, pieces)
    assert list(got) == list(TENSORS)
    assert all(torch.equal(got[name], TENSORS[name]) and got[name].dtype == TENSORS[name].dtype for name in got)
    # The version is named with what completes it.
    assert [update["weight_version"] for update in engine.updates()] == [None] * (len(group.sent) - 1) + [LABEL]
    assert all(update["flush_cache"] is False for update in engine.updates())


@of("0.5.20")
def test_a_bucket_is_one_broadcast(server: Any) -> None:
    paths, group = load(server)
    assert paths == [INIT, UPDATE, UPDATE]
    assert server[0].orders[0][1].items() >= {"world_size": 3, "rank_offset": 1, "backend": "gloo"}.items()
    # The odd number of two-byte elements ends the first bucket: SGLang could not read four bytes behind it.
    assert [update["names"] for update in server[0].updates()] == [["a.weight", "b.weight"], ["c.weight", "d.weight"]]
    check_all_arrived(server[0], group)
    assert load(server)[0] == [UPDATE, UPDATE]


@of("0.5.17", "0.0.0.dev0", "")
def test_servers_of_which_nothing_is_known_get_every_parameter_by_itself(server: Any) -> None:
    paths, group = load(server)
    assert paths == [INIT, UPDATE, UPDATE]
    assert "load_format" not in server[0].updates()[0] and len(group.sent[0]) == 2
    check_all_arrived(server[0], group)


@of("0.5.21", "0.5.23", "0.5.22rc1")
def test_an_update_has_a_beginning_and_an_end(server: Any) -> None:
    paths, group = load(server)
    assert paths == [INIT, *SESSION] and not server[0].open
    check_all_arrived(server[0], group)
    assert load(server)[0] == SESSION


@of("0.5.21")
@pytest.mark.parametrize("failing", [UPDATE, "/end_weight_update"])
def test_an_update_that_broke_off_is_ended_before_the_next(server: Any, failing: str) -> None:
    engine, loader = server
    engine.fails = [failing]
    loader.prepare(VERSION, LABEL)
    group = loader._group
    with pytest.raises(EngineError, match=f"{failing} .*partially updated"):
        loader.load(VERSION, LABEL)
    assert group.closed and engine.paths[-1] == DESTROY
    left_open = engine.open
    assert left_open == (failing == UPDATE)
    again = ["/begin_weight_update", "/end_weight_update"] if left_open else []
    paths, group = load(server)
    assert paths == [INIT, *again, *SESSION] and not engine.open
    check_all_arrived(engine, group)
    loader.close()
    assert group.closed and loader._group is None


@of("0.5.21")
def test_a_beginning_that_fails_is_named(server: Any) -> None:
    engine, loader = server
    loader.prepare(VERSION, LABEL)
    # Not what it said when the group was made.
    engine.version = "0.5.20"
    with pytest.raises(EngineError, match="/begin_weight_update answered 404"):
        loader.load(VERSION, LABEL)
    assert UPDATE not in engine.paths
    # Another group asks for the version again.
    assert load(server)[0] == [INIT, UPDATE, UPDATE]


def test_buckets_are_of_bounded_size_and_aligned() -> None:
    sizes = [3, 3, 5, 20, 1, 8, 2]
    tensors = {str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    assert list(buckets(tensors, 10)) == [["0", "1"], ["2"], ["3"], ["4", "5"], ["6"]]
    assert list(buckets(tensors, 11)) == [["0", "1", "2"], ["3"], ["4", "5", "6"]]
    assert list(buckets({}, 10)) == []
    mixed = {"0": torch.empty(2), "1": torch.empty(1, dtype=torch.bfloat16), "2": torch.empty(1, dtype=torch.bfloat16)}
    assert list(buckets({**mixed, "3": torch.empty(1)})) == [["0", "1", "2", "3"]]
    assert list(buckets({"1": mixed["1"], "3": torch.empty(1)})) == [["1"], ["3"]]
    # A model of billions of parameters in bfloat16 needs few.
    layers = {str(number): torch.empty(2**25, dtype=torch.bfloat16, device="meta") for number in range(96)}
    assert len(list(buckets(layers))) == 24 and BUCKET_BYTES == 2**28


@pytest.mark.parametrize(
    ("version", "flattened", "sessions"),
    [
        ("0.5.9", False, False),
        ("0.5.18", True, False),
        ("0.5.20.post1", True, False),
        ("0.5.21", True, True),
        ("0.6.0", True, True),
        ("1.0.0+local", True, True),
        ("unknown", False, False),
    ],
)
def test_the_version_decides(version: str, flattened: bool, sessions: bool) -> None:
    assert known_features(version) == (flattened, sessions)


@pytest.mark.parametrize(("workers", "questions"), [(1, 0), (2, 1), (3, 2), (4, 2), (8, 3)])
def test_files_stay_until_the_last_worker_has_had_time_to_read_them(
    workers: int, questions: int, tmp_path: Path
) -> None:
    """The order is answered by the first; a question is answered when one more level of the others has obeyed."""
    folder = tmp_path / "not-yet"
    there: list[bool] = []

    def read(path: str, body: bytes) -> tuple[int, Any]:
        nonlocal folder
        assert path == "/update_weights_from_disk"
        folder = Path(json.loads(body)["model_path"])
        there.append((folder / "model.safetensors").exists())
        return 200, {"success": True, "message": ""}

    def facts(_path: str) -> tuple[int, Any]:
        there.append((folder / "model.safetensors").exists())
        return 200, {"version": "0.5.20", "disable_radix_cache": True, "tp_size": workers}

    with serving(read, facts) as url:
        control = SGLangControl(url, "", 5.0, "keep")
        assert control.describe().world_size == workers
        options = EngineOptions("a", str(tmp_path), "", "agent", Path(), "", 0, disk_path=str(tmp_path / "versions"))
        loader = FileLoader(options, control.read_files)
        loader.prepare(VERSION, LABEL)
        loader.load(VERSION, LABEL)
        assert there == [False] + [True] * (1 + questions) and not folder.exists()
        loader.close()


def test_workers_on_a_cpu_are_told_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "usable_cores", lambda: [0, 1, 4, 5])
    monkeypatch.setattr(sglang_engine, "numa_nodes", lambda: 1)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)

    def told(workers: int, gpu: bool = False) -> str | None:
        monkeypatch.setattr(sglang_engine, "has_gpu", lambda: gpu)
        options = EngineOptions("a", "m", "", "agent", Path(), "", 0, tensor_parallel_size=workers)
        return sglang_engine.ENGINE.command(options)[1].get("SGLANG_CPU_OMP_THREADS_BIND")

    assert [told(workers) for workers in (1, 2, 3, 5)] == [None, "0,1|4,5", "0|1|4,5", "0|0|1|4|5"]
    assert told(2, gpu=True) is None
    monkeypatch.setattr(sglang_engine, "numa_nodes", lambda: 2)  # it gives each worker one by itself
    assert told(2) is None and told(3) is not None
    monkeypatch.setattr(sglang_engine, "numa_nodes", lambda: 1)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "7|8")
    assert told(2) == "7|8"
