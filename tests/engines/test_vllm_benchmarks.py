"""A benchmark of a real vLLM runs, and says what it promises. What it measures here means nothing.

colocate_vs_server.py is not here: it is two whole runs, which test_colocated_runs.py and test_vllm_runs.py have too;
nor is weight_sync_stall.py with vLLM: test_benchmarks.py runs it with actors of its own, test_vllm.py freezes vLLM's
worker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration_tests.test_benchmarks import CORES, run_quickly

pytestmark = [pytest.mark.benchmark, pytest.mark.skipif(CORES < 2, reason="needs two cores")]


def test_one_version_against_vllms_own_trainer(vllm_python: Path) -> None:
    run_quickly("vllm_sync", {"pause_ratio", "total_ratio", "token_ms"})
