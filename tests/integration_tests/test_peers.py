"""Objectives against the code of TRL and Liger, where their environment has been made (benchmarks/peers/setup.sh)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PEERS_PYTHON = REPOSITORY / "benchmarks" / "peers" / ".venv" / "bin" / "python"


@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="benchmarks/peers/setup.sh has not been run")
def test_objectives_equal_those_of_trl_and_liger() -> None:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "objectives_vs_peers.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["objectives"] >= 25 and figures["objectives_of_liger"] >= 22
    for peer, bar in (("trl", 1e-12), ("liger", 1e-5)):
        assert figures[f"{peer}_value_difference"] <= bar
        assert figures[f"{peer}_gradient_difference"] <= bar
    assert figures["advantage_difference"] <= 1e-5
