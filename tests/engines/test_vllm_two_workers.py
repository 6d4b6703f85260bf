"""Real vLLM with two tensor-parallel workers in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import adapter_trainer
from tests.engines.job import PROMPT, Actor, check_log_probs, start_actor
from tests.engines.models import BF16_TOLERANCE
from tests.engines.two_ranks import check_two_ranks
from tests.journals import deliveries_of
from tests.processes import Processes


@pytest.fixture(scope="module")
def model(engine_model: Callable[..., Path]) -> Path:
    return engine_model(tied=False)


@pytest.fixture(scope="module")
def actor(vllm_python: Path, model: Path, module_processes: Processes) -> Actor:
    options = ("--tensor-parallel-size", "2", "--dtype", "bfloat16")
    started = start_actor(module_processes, "vllm", vllm_python, model, *options)
    assert len(started.workers()) == 2
    return started


def test_two_ranks_publish_to_two_workers(actor: Actor, model: Path, tmp_path: Path) -> None:
    check_two_ranks(actor, model, tmp_path, "bfloat16", BF16_TOLERANCE)
    # Each worker has received its share of the elements alone, which the file holds in twice as many bytes.
    figures = deliveries_of(tmp_path, "applied", at_least=3)[-1]["figures"]
    assert 0 < figures["worker_bytes"] < 0.6 * (tmp_path / "whole.safetensors").stat().st_size / 2


def test_adapters_for_two_workers(actor: Actor, model: Path, tmp_path: Path) -> None:
    with adapter_trainer.training(tmp_path, model, dtype="bfloat16") as trainer:
        actor.connect(trainer)
        for _ in range(2):
            trainer.bring()
            (completion,) = actor.generate(PROMPT, 12, stop_token_ids=[])
            check_log_probs(actor, trainer, completion, BF16_TOLERANCE)
            trainer.check_matters([*PROMPT, *completion.token_ids])
