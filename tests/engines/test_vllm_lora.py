"""Real vLLM and a trainer that publishes adapters only: what it serves, and that an adapter it lacks is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.adapter_trainer import AdapterTrainer, training
from tests.engines.job import PROMPT, TOKEN, Actor, check_log_probs, start_actor
from tests.engines.models import make_model
from tests.patience import eventually
from tests.processes import Processes
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.sidecar.sidecar_process import AgentClient
from torchtitan.inference.engines.vllm.engine import ENGINE
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.utils.json_lines import EventLog, read_json_lines


@pytest.fixture(scope="module")
def model(engine_model: Callable[..., Path]) -> Path:
    return engine_model(tied=False)


@pytest.fixture(scope="module", params=["direct", "agent"])
def receiver(
    request: pytest.FixtureRequest, untied_actor: Actor, vllm_python: Path, model: Path, module_processes: Processes
) -> Actor:
    """The agent of the engine, or another one for it, which brings weights as files."""
    if request.param == "direct":
        return untied_actor
    options = ("--route", "agent")
    return start_actor(module_processes, "vllm", vllm_python, model, *options, name="by-files", beside=untied_actor)


def check_serves_newest(actor: Actor, trainer: AdapterTrainer) -> None:
    (completion,) = actor.generate(PROMPT, 12, stop_token_ids=[])
    check_log_probs(actor, trainer, completion)
    trainer.check_matters([*PROMPT, *completion.token_ids])


def test_adapters_are_served_as_transformers_and_peft_have_them(
    receiver: Actor, untied_actor: Actor, model: Path, tmp_path: Path
) -> None:
    """By the route direct on a base of 16 bits, and by files on one of four."""
    with training(tmp_path, model, base_bits=16 if receiver is untied_actor else 4) as trainer:
        receiver.connect(trainer)
        for _ in range(3):
            trainer.bring()
            check_serves_newest(receiver, trainer)
        figures = trainer.deliveries("applied", at_least=3)[-1]["figures"]
    assert trainer.bytes <= figures["bytes_full"] < 1.2 * trainer.bytes < 0.15 * trainer.base_bytes


def test_adapters_of_another_model_are_refused_and_the_engine_serves_on(
    untied_actor: Actor, model: Path, tmp_path: Path
) -> None:
    deeper = make_model(tmp_path / "deeper", tied=False, num_hidden_layers=4)
    (tmp_path / "fits").mkdir()
    with training(tmp_path / "fits", model) as trainer:
        untied_actor.connect(trainer)
        trainer.bring()
    with training(tmp_path, deeper) as other:
        untied_actor.connect(other)
        other.publish()
        refused = other.deliveries("refused", at_least=1)
        assert "there is no model.layers.3." in refused[0]["reason"]
        assert not other.journal("poisoned")
    check_serves_newest(untied_actor, trainer)


def test_an_adapter_that_was_not_applied_is_found_and_the_actor_evicted(
    untied_actor: Actor, model: Path, unmerged: Path, tmp_path: Path
) -> None:
    """The engine says that it holds the version; its log-probs are the base's."""
    ids = [(7 * i) % 60 + 2 for i in range(24)]
    config = JobConfig()
    config.inference.backend, config.inference.servers = "vllm", [untied_actor.url]
    config.weight_sync.verify = "auto"
    events = EventLog(tmp_path / "events.jsonl")

    def of(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(events.path) if event["kind"] == kind]

    def leave_out(adapters: bool) -> None:
        if adapters:
            unmerged.touch()
        else:
            unmerged.unlink(missing_ok=True)

    async def scenario(trainer: AdapterTrainer) -> None:
        pool = InferencePool(
            config, trainer.epoch, trainer.token, tmp_path, events, lambda url, _: AgentClient(ENGINE, url, TOKEN)
        )
        await pool.start()
        try:
            await pool.connect_weights(trainer.sync.registry_address)

            async def publish() -> None:
                trainer.publish()
                pool.answers.expect(trainer.version, ids, trainer.log_probs(ids))
                await asyncio.to_thread(trainer.wait_applied)

            await publish()
            await eventually(lambda: of("weights_probed"))
            assert pool.actors == {"actor-0": "ready"} and not of("weights_differ")
            leave_out(True)
            await publish()
            await eventually(lambda: of("actor_evicted"))
            assert pool.actors["actor-0"] != "ready"
            leave_out(False)
            await publish()
            await eventually(lambda: pool.actors == {"actor-0": "ready"})
        finally:
            leave_out(False)
            await pool.close()

    with training(tmp_path, model) as trainer:
        asyncio.run(scenario(trainer))
        check_serves_newest(untied_actor, trainer)
    (differs,) = of("weights_differ")
    (evicted,) = of("actor_evicted")
    assert differs["version"] == 1 and differs["difference"] > 0.1
    assert evicted["noticed_by"] == "parity" and "serves version 1" in evicted["reason"]
