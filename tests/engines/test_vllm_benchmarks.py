"""A benchmark of a real vLLM runs, and says what it promises. What it measures here means nothing.

The scenario `stall` with vLLM is not here: test_benchmarks.py runs it with actors of its own, test_vllm.py freezes
vLLM's worker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration_tests.test_benchmarks import CORES, run_scenario

pytestmark = [pytest.mark.benchmark, pytest.mark.skipif(CORES < 2, reason="needs two cores")]


def test_one_version_against_vllms_own_trainer(vllm_python: Path) -> None:
    run_scenario("vllm", {"pause_ratio", "total_ratio", "token_ms"})
