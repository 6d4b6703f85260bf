"""A mixture of experts from our trainer into real vLLM, version after version: each expert comes under its file's name,
and what vLLM computes with afterwards is what was sent."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from scripts.make_debug_checkpoint import write_tokenizer
from tests.engines.adapter_trainer import SETTINGS
from tests.engines.job import PROMPT, Trainer, differences, start_actor
from tests.engines.models import END, VOCABULARY, randomize, randomize_adapters
from tests.mixtures import make_mixture
from tests.processes import Processes
from torchtitan.config.job_config import JobConfig, Lora
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.inference.pool.weight_probe import probe_tolerance
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.lora import add_adapters, synced_parameters
from torchtitan.weight_sync.facade import WeightSync

TOLERANCE = 1e-4
# More of them: TORCHTITAN_TEST_UPDATES=50 pytest -s tests/engines/test_vllm_experts.py
UPDATES = int(os.environ.get("TORCHTITAN_TEST_UPDATES", "3"))


class MixtureTrainer(Trainer):
    """Publishes the weights of our decoder, or adapters; version n has those of seed n."""

    def __init__(self, folder: Path, model: Path, adapters: bool = False):
        self.folder, self.epoch, self.token = folder, f"e1-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        self.policy, self.randomize = load_policy(model), randomize
        if adapters:
            add_adapters(self.policy, Lora(**SETTINGS))
            self.randomize = randomize_adapters
        config = WeightSyncConfig()
        config.bucket_bytes = 256 * 1024
        self.sync = WeightSync(
            config, synced_parameters(self.policy),
            epoch=self.epoch, token=self.token, run_dir=folder, dtype="float32",
        )  # fmt: skip
        self.version = -1

    def change(self, version: int) -> None:
        self.randomize(self.policy, version)

    def logits(self, token_ids: Any, version: int | None = None) -> torch.Tensor:
        assert version is None
        with torch.no_grad():
            return self.policy.logits(torch.tensor([list(token_ids)]))[0]


def test_vllm_computes_with_the_experts_of_every_version(
    vllm_python: Path, processes: Processes, tmp_path: Path
) -> None:
    # vLLM refuses to load again what it has to pad.
    shape = {"vocab_size": VOCABULARY, "eos_token_id": END, "bos_token_id": None, "moe_intermediate_size": 64}
    model = make_mixture(tmp_path / "model", "qwen3_moe", **shape)
    write_tokenizer(model)
    unpacked = tmp_path / "unpacked"
    actor = start_actor(
        processes, "vllm", vllm_python, model,
        "--", "--worker-extension-cls", "tests.engines.vllm_unpacked.WorkerExtension",
        TORCHTITAN_TEST_UNPACKED=str(unpacked),
    )  # fmt: skip
    trainer = MixtureTrainer(tmp_path / "run", model)
    try:
        actor.connect(trainer)
        before: list[float] = []
        largest = 0.0
        for _ in range(UPDATES):
            trainer.bring()
            (completion,) = actor.generate(PROMPT, 24, temperature=1.0, seed=trainer.version, stop_token_ids=[])
            ids = [*PROMPT, *completion.token_ids]
            expected = trainer.log_probs(ids)
            sampled = differences(completion.log_probs, expected[len(PROMPT) - 1 :])
            largest = max(largest, sampled, differences(actor.score(ids), expected))
            assert largest < TOLERANCE
            # The versions are far apart, so what is left of an older one cannot hide.
            now = trainer.log_probs(PROMPT)
            assert not before or differences(now, before) > 1
            before = now
        print(f"{UPDATES} updates: log-probs of vLLM and trainer differ by at most {largest:.1e}")
        # Without the packing every version is served and none is right: the probe of a run sees that.
        unpacked.touch()
        trainer.bring()
        wrong = differences(actor.score(PROMPT), trainer.log_probs(PROMPT))
        assert wrong > 100 * probe_tolerance(JobConfig())
        unpacked.unlink()
        trainer.bring()
        assert differences(actor.score(PROMPT), trainer.log_probs(PROMPT)) < TOLERANCE
    finally:
        trainer.close()
    adapted = MixtureTrainer(tmp_path / "adapters", model, adapters=True)
    try:
        actor.connect(adapted)
        adapted.bring(2)
        assert differences(actor.score(PROMPT), adapted.log_probs(PROMPT)) < TOLERANCE
        base = load_policy(model).logits(torch.tensor([PROMPT]))[0].log_softmax(-1).detach()
        assert (adapted.logits(PROMPT).log_softmax(-1) - base).abs().max() > 1
    finally:
        adapted.close()
