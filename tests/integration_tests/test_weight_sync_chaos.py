"""A dozen seeded faults in a trainer, its shard server and registry and three actors: nothing torn, stopped, leaked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_a_dozen_faults(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.weight_sync", "chaos", "--faults", "12", "--seed", "1", "--json"]
    # On a busy machine, the scheduler alone may hold a step for seconds; a step that really waits never ends.
    command += ["--keep", str(tmp_path), "--stall_s", "60"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=840)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    expected = {
        "faults": 12,
        "training_stops": 0,
        "torn_or_unknown_tokens": 0,
        "leaked_slots": 0,
        "leaked_descriptors": 0,
        "actors_not_recovered": 0,
    }
    assert {key: figures[key] for key in expected} == expected, done.stderr
    assert done.returncode == 0
    assert figures["tokens"] > 1000 and figures["memory_growth_mb"] <= 32
