"""Traces of single steps: when, where, and of what."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from torchtitan.config.job_config import Profiling
from torchtitan.trainer.job import profile


def test_every_so_many_steps_one_is_recorded(tmp_path: Path) -> None:
    config = Profiling(enable_profiling=True, profile_freq=3, save_traces_folder="traces")
    with profile(config, tmp_path, rank=1) as profiler:
        assert profiler is not None
        for step in range(1, 8):
            with torch.profiler.record_function(f"own {step}"):
                torch.ones(step).sum()
            profiler.step()
    for step in (3, 6):
        trace = json.loads((tmp_path / f"traces/step-{step}/rank-1.json").read_text())
        names = {str(event.get("name")) for event in trace["traceEvents"]}
        assert "aten::sum" in names and {name for name in names if name.startswith("own ")} == {f"own {step}"}
    assert len(list(tmp_path.rglob("*.json"))) == 2
    with profile(Profiling(), tmp_path, rank=0) as nothing:
        assert nothing is None
