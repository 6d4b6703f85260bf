"""SGLang without SGLang: files that its workers read, and their cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.inference.json_server import serving
from torchtitan.inference.agent.applier import FileLoader
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.sglang import engine as sglang_engine
from torchtitan.inference.sglang.engine import SGLangControl
from torchtitan.weight_sync.staging import StagedVersion

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(3, dtype=torch.bfloat16),
    "c.weight": torch.arange(8.0).view(4, 2).t(),
    "d.weight": torch.tensor(7.0),
}
VERSION = StagedVersion("e1", 3, "d3", TENSORS)
LABEL = "e1/3"


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
