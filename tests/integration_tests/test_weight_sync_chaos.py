"""Twenty seeded faults in a trainer, its shard server and registry, and three actors: nothing torn, stopped or leaked.
And what benchmarks make of a run that went wrong, or of single versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import weight_sync_chaos, weight_sync_delta
from torchtitan.errors import UserError
from torchtitan.weight_sync import faults, launch
from torchtitan.weight_sync.facade import WeightSync

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_twenty_faults(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/weight_sync_chaos.py", "--faults", "20", "--seed", "1", "--json"]
    command += ["--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    expected = {
        "faults": 20,
        "training_stops": 0,
        "torn_or_unknown_tokens": 0,
        "leaked_slots": 0,
        "leaked_descriptors": 0,
        "actors_not_recovered": 0,
    }
    assert {key: figures[key] for key in expected} == expected, done.stderr
    assert done.returncode == 0
    assert figures["tokens"] > 1000 and figures["memory_growth_mb"] <= 32


def test_a_raise_in_the_trainer_is_a_training_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = WeightSync.commit

    def commit_until(self: WeightSync, version: int, noes: int) -> object:
        if version == 1:
            raise UserError("died too often")
        return commit(self, version, noes)

    monkeypatch.setattr(WeightSync, "commit", commit_until)
    for name in ("LOOK_SECONDS", "FROZEN_LOOKS", "HEALTHY_SECONDS"):
        monkeypatch.setattr(launch, name, getattr(launch, name))  # the benchmark changes them for its process
    monkeypatch.setenv(faults.VARIABLE, "")
    arguments = ["chaos", "--faults", "2", "--transport", "tcp", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    threads = torch.get_num_threads()
    try:
        assert weight_sync_chaos.main() == 1
    finally:
        torch.set_num_threads(threads)
        faults._plans.clear()
    output = capsys.readouterr()
    figures = json.loads(output.out.splitlines()[-1])["figures"]
    assert figures["training_stops"] == 1 and figures["faults"] == 0 and figures["actors_not_recovered"] == 3
    assert "died too often" in output.err


def test_the_largest_delta_is_that_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([[0.1, 0.2], [0.2, 0.9], [0.6, 0.7], [0.5, 0.5]])
    monkeypatch.setattr(weight_sync_delta, "trained_policy", lambda folder, steps: folder)
    monkeypatch.setattr(weight_sync_delta, "train", lambda *arguments: tmp_path)
    monkeypatch.setattr(weight_sync_delta, "ratios", lambda run_dir: next(found))
    monkeypatch.setattr(weight_sync_delta, "seconds_ratio", lambda *arguments: 0.5)
    monkeypatch.setattr(sys, "argv", ["delta", "--quick", "--json"])
    assert weight_sync_delta.main() == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["delta_ratio_max"] == figures["delta_ratio_max_lr_1e-5"] == 0.9
    assert figures["delta_ratio_largest_mean"] == pytest.approx(0.65)
    assert figures["delta_ratio_lr_1e-6"] == pytest.approx(0.15)
