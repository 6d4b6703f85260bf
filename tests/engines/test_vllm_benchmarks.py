"""The benchmarks of a real vLLM run, and say what they promise. What they measure here means nothing.

benchmarks/colocate_vs_server.py is not among them: it is two whole runs, which test_colocated_runs.py and
test_vllm_runs.py have too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration_tests.test_benchmarks import CORES, KEYS, run_quickly

pytestmark = pytest.mark.skipif(CORES < 2, reason="needs two cores")


def test_one_version_against_vllms_own_trainer(vllm_python: Path) -> None:
    run_quickly("vllm_sync", {"pause_ratio", "total_ratio", "token_ms"})


def test_stall_of_a_trainer_with_a_frozen_server(vllm_python: Path) -> None:
    run_quickly("weight_sync_stall", KEYS["weight_sync_stall"], "--backend", "vllm")
