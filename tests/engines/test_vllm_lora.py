"""Real vLLM and a trainer that publishes adapters only: what it serves, and that an adapter it lacks is noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.adapter_trainer import AdapterTrainer, training
from tests.engines.models import make_model
from tests.engines.processes import Processes
from tests.engines.test_vllm import BF16_TOLERANCE, FP32_TOLERANCE, PROMPT, differences
from tests.engines.vllm_job import TOKEN_ENV, Actor, start_actor
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.agent.client import AgentClient
from torchtitan.inference.pool import InferencePool
from torchtitan.inference.vllm.dialect import DIALECT
from torchtitan.utils.events import EventLog

SECONDS = 60.0


@pytest.fixture(scope="module")
def model(engine_model: Callable[..., Path]) -> Path:
    # Untied: the second agent's engine is not one of ours, which alone repacks tied heads.
    return engine_model(tied=False)


@pytest.fixture(scope="module")
def unmerged(module_processes: Processes) -> Path:
    """While it exists the engine leaves adapters out."""
    return module_processes.folder / "unmerged"


@pytest.fixture(scope="module")
def actor(vllm_python: Path, model: Path, unmerged: Path, module_processes: Processes) -> Actor:
    return start_actor(
        module_processes, vllm_python, model,
        "--", "--worker-extension-cls", "tests.engines.vllm_unmerged.WorkerExtension",
        TORCHTITAN_TEST_UNMERGED=str(unmerged),
    )  # fmt: skip


def beside(actor: Actor, processes: Processes, python: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Actor:
    """Another agent for the same engine, which brings weights as files."""
    token_env = "TORCHTITAN_TEST_ENGINE_TOKEN"
    monkeypatch.setenv(token_env, actor.token)
    options = ("--route", "agent", "--url", actor.engine.url, "--engine-token-env", token_env)
    other = start_actor(processes, python, model, *options, name="by-files")
    other.engine = actor.engine
    return other


def check_serves_newest(actor: Actor, trainer: AdapterTrainer, tolerance: float = FP32_TOLERANCE) -> None:
    (completion,) = actor.generate(PROMPT, 12, stop_token_ids=[])
    assert [(span.epoch, span.version) for span in completion.spans] == [(trainer.epoch, trainer.version)]
    ids = [*PROMPT, *completion.token_ids]
    expected = trainer.log_probs(ids)
    assert differences(completion.log_probs, expected[len(PROMPT) - 1 :]) < tolerance
    assert differences(actor.score(ids), expected) < tolerance
    # The adapter is no trifle.
    assert differences(expected, trainer.base_log_probs(ids)) > 0.3


@pytest.mark.parametrize(("route", "base_bits"), [("direct", 16), ("agent", 16), ("direct", 4), ("agent", 4)])
def test_adapters_are_served_as_transformers_and_peft_have_them(
    actor: Actor,
    model: Path,
    vllm_python: Path,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    base_bits: int,
) -> None:
    with training(tmp_path, model, base_bits=base_bits) as trainer:
        receiver = actor if route == "direct" else beside(actor, processes, vllm_python, model, monkeypatch)
        receiver.connect(trainer)
        for _ in range(3):
            trainer.publish()
            trainer.wait_applied()
            check_serves_newest(receiver, trainer)
        figures = trainer.journal("applied", at_least=3)[-1]["figures"]
    assert trainer.bytes <= figures["bytes_full"] < 1.2 * trainer.bytes < 0.15 * trainer.base_bytes


def test_adapters_of_another_model_are_refused_and_the_engine_serves_on(
    actor: Actor, model: Path, tmp_path: Path
) -> None:
    deeper = make_model(tmp_path / "deeper", tied=False, num_hidden_layers=4)
    (tmp_path / "fits").mkdir()
    with training(tmp_path / "fits", model) as trainer:
        actor.connect(trainer)
        trainer.publish()
        trainer.wait_applied()
        with training(tmp_path, deeper) as other:
            actor.connect(other)
            other.publish()
            other.wait_for(lambda: other.journal_tail().count('"refused"') > 1)
            assert "there is no model.layers.3." in other.journal("refused", at_least=1)[0]["reason"]
            assert not other.journal("poisoned")
        check_serves_newest(actor, trainer)


def test_an_adapter_that_was_not_applied_is_found_and_the_actor_evicted(
    actor: Actor, model: Path, unmerged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says that it holds the version; its log-probs are the base's."""
    ids = [(7 * i) % 60 + 2 for i in range(24)]
    config = JobConfig()
    config.inference.backend, config.inference.servers = "vllm", [actor.url]
    config.inference.health_interval_s = 0.2
    config.weight_sync.verify = "auto"
    events = EventLog(tmp_path / "events.jsonl")

    async def until(condition: Callable[[], Any]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, events.read()
            await asyncio.sleep(0.05)

    def of(kind: str) -> list[dict[str, Any]]:
        return [event for event in events.read() if event["kind"] == kind]

    def leave_out(adapters: bool) -> None:
        if adapters:
            unmerged.touch()
        else:
            unmerged.unlink(missing_ok=True)

    async def scenario(trainer: AdapterTrainer) -> None:
        make = lambda url, *_: AgentClient(DIALECT, url, actor.token, trainer.token)  # noqa: E731
        pool = InferencePool(config, trainer.epoch, trainer.token, tmp_path, events, make)
        await pool.start()
        try:
            await pool.connect_weights(trainer.sync.coordinator_address)

            async def publish() -> None:
                trainer.publish()
                pool.answers.expect(trainer.version, ids, trainer.log_probs(ids))
                await asyncio.to_thread(trainer.wait_applied)

            await publish()
            await until(lambda: of("weights_probed"))
            assert pool.actors == {"actor-0": "ready"} and not of("weights_differ")
            leave_out(True)
            await publish()
            await until(lambda: of("actor_evicted"))
            assert pool.actors["actor-0"] != "ready"
            leave_out(False)
            await publish()
            await until(lambda: pool.actors == {"actor-0": "ready"})
        finally:
            leave_out(False)
            await pool.close()

    monkeypatch.setenv(TOKEN_ENV, actor.token)
    with training(tmp_path, model) as trainer:
        asyncio.run(scenario(trainer))
        check_serves_newest(actor, trainer)
    (differs,) = of("weights_differ")
    (evicted,) = of("actor_evicted")
    assert differs["version"] == 1 and differs["difference"] > 0.1
    assert evicted["noticed_by"] == "parity" and "serves version 1" in evicted["reason"]


def test_adapters_for_two_workers_in_bfloat16(
    vllm_python: Path, model: Path, processes: Processes, tmp_path: Path
) -> None:
    options = ("--tensor-parallel-size", "2", "--dtype", "bfloat16")
    actor = start_actor(processes, vllm_python, model, *options)
    assert len(actor.workers()) == 2
    with training(tmp_path, model, dtype="bfloat16") as trainer:
        actor.connect(trainer)
        for _ in range(2):
            trainer.publish()
            trainer.wait_applied()
            check_serves_newest(actor, trainer, BF16_TOLERANCE)
