"""A trainer that publishes adapters only, and what transformers and PEFT say of its versions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.engines.models import randomize_adapters
from tests.engines.vllm_job import Trainer
from torchtitan.config.job_config import Lora
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.models import load_policy
from torchtitan.models.lora import add_adapters, base_parameters, initialize_adapters, synced_parameters
from torchtitan.models.peft_checkpoint import save_adapter
from torchtitan.weight_sync.facade import WeightSync

SETTINGS = Lora(rank=4, alpha=10.0, modules_to_save=["norm"])


class AdapterTrainer(Trainer):
    """Version n has adapters and a final norm of seed n, on the base of the model directory."""

    def __init__(self, folder: Path, model: Path, token: str = "", dtype: str = "float32"):
        self.folder, self.epoch = folder, f"e1-{secrets.token_hex(4)}"
        self.token = token or secrets.token_urlsafe(16)
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
        self.version, self._dtype = -1, getattr(torch, dtype)

    @property
    def base_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in base_parameters(self.policy).values())

    def publish(self) -> int:
        no = not self.sync.reserve()
        self.sync.fence()
        self.version += 1
        randomize_adapters(self.policy, self.version)
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
        return peft.PeftModel.from_pretrained(base, self.folder / "adapter").merge_and_unload().to(self._dtype).eval()

    def base_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        with torch.no_grad():
            rows = base(torch.tensor([list(token_ids)])).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(list(token_ids))[1:, None])[:, 0].tolist()


@contextlib.contextmanager
def training(folder: Path, model: Path, token: str = "", dtype: str = "float32") -> Iterator[AdapterTrainer]:
    """An AdapterTrainer that is closed in the end."""
    pytest.importorskip("peft")
    trainer = AdapterTrainer(folder, model, token, dtype)
    try:
        yield trainer
    finally:
        trainer.close()
