"""SGLang without SGLang: what it is asked for tokens and made of its answers, as real ones gave them; files that its
workers read, and their cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.json import encode as sent

from tests.unit_tests.inference.json_server import serving
from torchtitan.inference.actor_client import ActorError
from torchtitan.inference.engines.sglang import engine as sglang_engine
from torchtitan.inference.engines.sglang.engine import ENGINE as SGLANG
from torchtitan.inference.engines.sglang.engine import MAX_KEPT, SGLangControl
from torchtitan.inference.engines.sidecar.applier import FileLoader
from torchtitan.inference.engines.sidecar.foreign_engine import EngineOptions, Malformed
from torchtitan.inference.engines.sidecar.sidecar_process import AgentClient, reachable_url
from torchtitan.inference.types import (
    GenerateRequest,
    SamplingParameters,
    make_label,
    parse_label,
)
from torchtitan.weight_sync.memory.staging import StagedVersion

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(3, dtype=torch.bfloat16),
    "c.weight": torch.arange(8.0).view(4, 2).t(),
    "d.weight": torch.tensor(7.0),
}
VERSION = StagedVersion("e1", 3, "d3", TENSORS)
LABEL = "e1/3"


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", [5, 6, 7], SamplingParameters(**{"max_tokens": 4, **sampling}))


def sglang_answer(**changes: Any) -> dict[str, Any]:
    about = {
        "finish_reason": {"type": "stop", "matched": 1},
        "weight_version": "epoch-1/4",
        "weight_versions": [
            {"version": "epoch-1/3", "start": 0, "end": 2},
            {"version": "epoch-1/4", "start": 2, "end": 3},
        ],
        "input_token_logprobs": [],
        "output_token_logprobs": [[-1.5, 9, None], [-0.25, 8, None], [-3.0, 1, None]],
    }
    return {"output_ids": [9, 8, 1], "meta_info": {**about, **changes}}


def test_labels_come_back() -> None:
    for epoch, version in (("1-abc", 0), ("a/b", 12)):
        assert parse_label(make_label(epoch, version)) == (epoch, version)
    for foreign in ("default", "", "7", "/7", "epoch/", "epoch/-1", "epoch/x", None, 7):
        assert parse_label(foreign) is None
    with pytest.raises(ValueError, match="cannot be a label"):
        make_label("", 3)


def test_an_engine_is_where_its_agent_is() -> None:
    assert reachable_url("http://127.0.0.1:8000", "http://gpu01:7000") == "http://gpu01:8000"
    assert reachable_url("http://[::1]:8000", "http://[fd00::1]:7000") == "http://[fd00::1]:8000"
    assert reachable_url("http://127.0.0.1:8000", "http://127.0.0.1:7000") == "http://127.0.0.1:8000"
    assert reachable_url("https://elsewhere/x", "http://gpu01:7000") == "https://elsewhere/x"


def test_sglang_gets_each_sample_with_its_seed() -> None:
    call = SGLANG.generate(request(n=3, temperature=0.7, seed=5, stop_token_ids=[1]))
    assert call.path == "/generate" and call.body["input_ids"] == [[5, 6, 7]] * 3
    seeds = [sampling["sampling_seed"] for sampling in call.body["sampling_params"]]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    again = SGLANG.generate(request(n=2, seed=5)).body["sampling_params"]
    assert [sampling["sampling_seed"] for sampling in again] == seeds[:2]
    assert call.body["sampling_params"][0]["ignore_eos"] is False and again[0]["ignore_eos"] is True
    assert call.body["sampling_params"][0]["top_k"] == -1 and call.body["return_sampling_mask"] is False
    truncated = SGLANG.generate(request(top_p=0.9, top_k=10**6)).body
    assert truncated["return_sampling_mask"] and truncated["sampling_params"][0]["top_k"] == MAX_KEPT


def test_sglang_may_call_the_last_token_of_a_scored_text_another_and_no_other_one() -> None:
    assert SGLANG.score([5, 6, 7]).body["logprob_start_len"] == 0
    rows = [[None, 5, None], [-1.0, 6, None], [-2.0, 0, None]]
    versions = [{"version": "epoch-1/3", "start": 0, "end": 1}]
    answer = sglang_answer(input_token_logprobs=rows, weight_versions=versions)
    assert SGLANG.scored([5, 6, 63], sent(answer)).log_probs == [-1.0, -2.0]
    with pytest.raises(Malformed):
        SGLANG.scored([5, 8, 7], sent(answer))


def test_sglang_refusals_are_about_the_request() -> None:
    assert SGLANG.refused(400, "top_p must be in (0, 1]") and SGLANG.refused(422, "input_ids")
    assert (
        not SGLANG.refused(400, "Aborted by abort_all") and not SGLANG.refused(500, "") and not SGLANG.refused(401, "")
    )


def test_an_engine_of_somebody_else_never_gets_our_token(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = AgentClient(SGLANG, "http://127.0.0.1:1", "ours")
    monkeypatch.setenv("ENGINES", "theirs")
    assert [handler._engine_token(variable) for variable in (None, "", "ENGINES")] == ["ours", "", "theirs"]
    with pytest.raises(ActorError, match="token is in NOWHERE: set it here too"):
        handler._engine_token("NOWHERE")


@pytest.mark.parametrize(("workers", "questions"), [(1, 0), (2, 1), (3, 2), (4, 2), (8, 3)])
def test_files_stay_until_the_last_worker_has_time_to_read_them(workers: int, questions: int, tmp_path: Path) -> None:
    """The order is answered by the first; a question is answered when one more level of the others has obeyed."""
    folder = tmp_path / "not-yet"
    files_exist: list[bool] = []

    def read(path: str, body: bytes) -> tuple[int, Any]:
        nonlocal folder
        assert path == "/update_weights_from_disk"
        folder = Path(json.loads(body)["model_path"])
        files_exist.append((folder / "model.safetensors").exists())
        return 200, {"success": True, "message": ""}

    def facts(_path: str) -> tuple[int, Any]:
        files_exist.append((folder / "model.safetensors").exists())
        return 200, {"version": "0.5.20", "disable_radix_cache": True, "tp_size": workers}

    with serving(read, facts) as url:
        options = EngineOptions("a", str(tmp_path), "", "agent", Path(), "", 0, disk_path=str(tmp_path / "versions"))
        control = SGLangControl(url, "", options)
        assert control.describe().world_size == workers
        loader = FileLoader(options, control.read_files)
        loader.prepare(VERSION, LABEL)
        loader.load(VERSION, LABEL)
        assert files_exist == [False] + [True] * (1 + questions) and not folder.exists()
        loader.close()


def test_workers_on_a_cpu_are_told_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "usable_cores", lambda: [0, 1, 4, 5])
    monkeypatch.setattr(sglang_engine, "numa_nodes", lambda: 1)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)

    def bound_cores(workers: int, gpu: bool = False) -> str | None:
        monkeypatch.setattr(sglang_engine, "has_gpu", lambda: gpu)
        options = EngineOptions("a", "m", "", "agent", Path(), "", 0, tensor_parallel_size=workers)
        return sglang_engine.ENGINE.command(options)[1].get("SGLANG_CPU_OMP_THREADS_BIND")

    assert [bound_cores(workers) for workers in (1, 2, 3, 5)] == [None, "0,1|4,5", "0|1|4,5", "0|0|1|4|5"]
    assert bound_cores(2, gpu=True) is None
    monkeypatch.setattr(sglang_engine, "numa_nodes", lambda: 2)  # it gives each worker one by itself
    assert bound_cores(2) is None and bound_cores(3) is not None
    monkeypatch.setattr(sglang_engine, "numa_nodes", lambda: 1)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "7|8")
    assert bound_cores(2) == "7|8"
