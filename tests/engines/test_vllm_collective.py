"""Real vLLM without a weight-transfer backend of ours: the agent broadcasts into vLLM's own group.

vLLM's backend is `nccl` but for the communicator (vllm_gloo_backend.py). The last test kills the server.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines import adapter_trainer
from tests.engines.job import PROMPT, Actor, Trainer, check_serves_newest, differences, start_actor, training
from tests.engines.models import FP32_TOLERANCE
from tests.patience import PATIENCE_S
from tests.processes import Processes

UPDATE_SECONDS = 20.0
BACKEND = "gloo_in_place_of_nccl"


@pytest.fixture(scope="module")
def model(engine_model: Callable[..., Path]) -> Path:
    return engine_model(tied=True)


def start(processes: Processes, python: Path, model: Path, name: str, *options: str) -> Actor:
    return start_actor(
        processes, "vllm", python, model, "--route", "engine", "--update-timeout", str(UPDATE_SECONDS), *options,
        "--", "--worker-extension-cls", "tests.engines.vllm_gloo_backend.WorkerExtension",
        "--weight-transfer-config", json.dumps({"backend": BACKEND}),
        name=name, TORCHTITAN_TEST_FOLDER=str(processes.folder),
    )  # fmt: skip


@pytest.fixture(scope="module")
def actor(vllm_python: Path, model: Path, module_processes: Processes) -> Actor:
    return start(module_processes, vllm_python, model, "by-group")


@pytest.fixture
def trainer(actor: Actor, model: Path, tmp_path: Path) -> Iterator[Trainer]:
    with training(tmp_path, model, apply_timeout_s=2 * UPDATE_SECONDS) as running:
        actor.connect(running)
        yield running


def test_versions_by_vllms_own_group(actor: Actor, trainer: Trainer) -> None:
    for _ in range(3):
        trainer.bring()
        check_serves_newest(actor, trainer)
    assert actor.health()["engine"]["capabilities"]["route"] == "engine"
    assert not trainer.journal("poisoned")


def test_adapters_by_vllms_own_group(actor: Actor, model: Path, tmp_path: Path) -> None:
    with adapter_trainer.training(tmp_path, model) as trainer:
        actor.connect(trainer)
        for _ in range(2):
            trainer.bring()
            assert differences(actor.score(PROMPT), trainer.log_probs(PROMPT)) < FP32_TOLERANCE
            trainer.check_matters(PROMPT)


def test_an_update_that_fails_half_way_is_never_served_and_heals_whole(actor: Actor, trainer: Trainer) -> None:
    """Sent once more, it does not count what layers had got before."""
    trainer.bring()
    (actor.processes.folder / "fail").touch()
    trainer.bring()
    (poisoned,) = trainer.journal("poisoned", at_least=1)
    assert poisoned["version"] == trainer.version and "half of it" in poisoned["reason"]
    assert actor.health()["status"] == "ok"
    check_serves_newest(actor, trainer)


def test_a_server_that_is_killed_in_an_update_is_evicted_and_replaced(
    actor: Actor, trainer: Trainer, model: Path, vllm_python: Path, module_processes: Processes
) -> None:
    hold = actor.processes.folder / "hold"
    trainer.bring()
    hold.touch()
    trainer.publish()
    trainer.wait_for(hold.with_suffix(".begun").exists)
    agent = psutil.Process(actor.health()["pid"])
    actor.workers()[0].send_signal(signal.SIGKILL)
    assert agent.wait(PATIENCE_S) == 1, "without its engine the agent ends too"
    trainer.wait_for(lambda: trainer.sync.actors()["actor-0"].state == "EVICTED")
    hold.unlink()
    hold.with_suffix(".begun").unlink()
    other = start(module_processes, vllm_python, model, "its-successor", "--tensor-parallel-size", "2")
    assert len(other.workers()) == 2
    other.connect(trainer)
    trainer.wait_applied()
    check_serves_newest(other, trainer)
    trainer.bring()
    check_serves_newest(other, trainer)
