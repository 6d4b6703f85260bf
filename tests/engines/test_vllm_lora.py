"""Real vLLM and a trainer that publishes adapters only: what it serves, and that an adapter it lacks is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.processes import Processes
from tests.engines.test_vllm import FP32_TOLERANCE, PROMPT, differences
from tests.engines.vllm_job import TOKEN_ENV, Actor, Trainer, start_actor
from torchtitan.components.events import EventLog
from torchtitan.config.job_config import JobConfig, Lora
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.inference.engine_handling import EngineHandler
from torchtitan.inference.pool import InferencePool
from torchtitan.inference.vllm.dialect import DIALECT
from torchtitan.models import load_policy
from torchtitan.models.lora import add_adapters, base_parameters, initialize_adapters, synced_parameters
from torchtitan.models.low_rank import is_factor
from torchtitan.models.peft_checkpoint import save_adapter
from torchtitan.weight_sync.facade import WeightSync

SETTINGS = Lora(rank=4, alpha=10.0, modules_to_save=["norm"])
SECONDS = 60.0


class AdapterTrainer(Trainer):
    """Version n has adapters and a final norm of seed n, on the base of the model directory."""

    def __init__(self, folder: Path, model: Path, dtype: str = "float32"):
        self.folder, self.epoch, self.token = folder, f"e1-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        self._base = model
        self.policy = load_policy(model)
        add_adapters(self.policy, SETTINGS)
        initialize_adapters(self.policy, 0)
        parameters = synced_parameters(self.policy)
        self.bytes = sum(tensor.nbytes for tensor in parameters.values())
        self.sync = WeightSync(
            WeightSyncConfig(bucket_bytes=16 * 1024), parameters,
            epoch=self.epoch, token=self.token, run_dir=folder, dtype=dtype,
        )  # fmt: skip
        self.version, self._dtype = -1, torch.float32

    @torch.no_grad()
    def change(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for name, parameter in self.policy.named_parameters():
            if is_factor(name):
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        norm = self.policy.get_parameter("model.norm.weight")
        norm.copy_(1 + 0.1 * torch.randn(norm.shape, generator=generator))

    def publish(self) -> int:
        no = not self.sync.reserve()
        self.sync.fence()
        self.version += 1
        self.change(self.version)
        assert self.sync.commit(self.version, int(no)) == "published"
        self.sync.fence()
        return self.version

    def _policy(self, version: int | None) -> torch.nn.Module:
        """transformers' model of the base with PEFT's adapters, which read what we export."""
        import peft
        import transformers

        assert version is None
        save_adapter(self.policy, self.folder / "adapter", base_model=str(self._base))
        base = transformers.AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32).eval()
        return peft.PeftModel.from_pretrained(base, self.folder / "adapter").eval()

    def base_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        with torch.no_grad():
            rows = base(torch.tensor([list(token_ids)])).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(list(token_ids))[1:, None])[:, 0].tolist()


@contextlib.contextmanager
def training(folder: Path, model: Path) -> Iterator[AdapterTrainer]:
    pytest.importorskip("peft")
    trainer = AdapterTrainer(folder, model)
    try:
        yield trainer
    finally:
        trainer.close()


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


def check_serves_newest(actor: Actor, trainer: AdapterTrainer) -> None:
    (completion,) = actor.generate(PROMPT, 12, stop_token_ids=[])
    assert [(span.epoch, span.version) for span in completion.spans] == [(trainer.epoch, trainer.version)]
    ids = [*PROMPT, *completion.token_ids]
    expected = trainer.log_probs(ids)
    assert differences(completion.log_probs, expected[len(PROMPT) - 1 :]) < FP32_TOLERANCE
    assert differences(actor.score(ids), expected) < FP32_TOLERANCE
    # The adapter is no trifle.
    assert differences(expected, trainer.base_log_probs(ids)) > 0.3


@pytest.mark.parametrize("route", ["direct", "agent"])
def test_adapters_are_served_as_transformers_and_peft_have_them(
    actor: Actor,
    model: Path,
    vllm_python: Path,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
) -> None:
    with training(tmp_path, model) as trainer:
        receiver = actor if route == "direct" else beside(actor, processes, vllm_python, model, monkeypatch)
        receiver.connect(trainer)
        for _ in range(3):
            trainer.publish()
            trainer.wait_applied()
            check_serves_newest(receiver, trainer)
        figures = trainer.journal("applied")[-1]["figures"]
    whole = 4 * sum(parameter.numel() for parameter in base_parameters(trainer.policy).values())
    assert trainer.bytes <= figures["bytes_full"] < 1.2 * trainer.bytes < 0.15 * whole


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
        make = lambda url, *_: EngineHandler(DIALECT, url, actor.token, trainer.token)  # noqa: E731
        pool = InferencePool(config, trainer.epoch, trainer.token, tmp_path, events, make)
        await pool.start()
        try:
            await pool.connect_weights(trainer.sync.coordinator_address)

            async def publish() -> None:
                trainer.publish()
                pool.expect(trainer.version, ids, trainer.log_probs(ids))
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
