"""A trainer that publishes adapters only, and what transformers and PEFT say of its versions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.job import Trainer, differences
from tests.engines.models import randomize_adapters
from torchtitan.config.job_config import Lora
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.models.hf_checkpoint import load_into, load_policy, save_adapter
from torchtitan.models.lora import add_adapters, initialize_adapters, quantize_projections, synced_parameters
from torchtitan.weight_sync.facade import WeightSync

SETTINGS: dict[str, Any] = {"rank": 4, "alpha": 10.0, "modules_to_save": ["norm"]}


class AdapterTrainer(Trainer):
    """Version n has adapters and a final norm of seed n, on the base of the model directory, in that many bits."""

    def __init__(self, folder: Path, model: Path, dtype: str = "float32", base_bits: int = 16):
        self.folder, self.epoch, self.token = folder, f"e1-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        self._base = model
        self.policy = load_policy(model)
        self.base_bytes = sum(parameter.nbytes for parameter in self.policy.parameters())
        if base_bits == 4:
            quantize_projections(self.policy, [])
            load_into(self.policy, model)
        add_adapters(self.policy, Lora(base_bits=base_bits, **SETTINGS))
        initialize_adapters(self.policy, 0)
        parameters = synced_parameters(self.policy)
        self.bytes = sum(tensor.nbytes for tensor in parameters.values())
        config = WeightSyncConfig()
        config.bucket_bytes = 16 * 1024
        self.sync = WeightSync(
            config, parameters,
            epoch=self.epoch, token=self.token, run_dir=folder, dtype=dtype,
        )  # fmt: skip
        self.version, self._dtype = -1, getattr(torch, dtype)

    def change(self, version: int) -> None:
        randomize_adapters(self.policy, version)

    def _policy(self, version: int | None) -> torch.nn.Module:
        """transformers' model of the base with PEFT's adapters, which read what we export."""
        import peft
        import transformers

        assert version is None
        save_adapter(self.policy, self.folder / "adapter", base_model=str(self._base))
        base = transformers.AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32).eval()
        if self.policy.lora is not None and self.policy.lora.base_bits == 4:
            round_projections(base)
        return peft.PeftModel.from_pretrained(base, self.folder / "adapter").merge_and_unload().to(self._dtype).eval()

    def check_matters(self, token_ids: Sequence[int]) -> None:
        """What the adapter changes in the log-probs is no trifle."""
        assert differences(self.log_probs(token_ids), self.base_log_probs(token_ids)) > 0.3

    def base_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        with torch.no_grad():
            rows = base(torch.tensor([list(token_ids)])).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(list(token_ids))[1:, None])[:, 0].tolist()


def round_projections(model: torch.nn.Module) -> None:
    """Make the projections of transformers' model what bitsandbytes makes of them."""
    functional = pytest.importorskip("bitsandbytes.functional")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                packed, state = functional.quantize_4bit(parameter.bfloat16(), blocksize=64, quant_type="nf4")
                state.dtype = torch.float32
                parameter.copy_(functional.dequantize_4bit(packed, state))


@contextlib.contextmanager
def training(folder: Path, model: Path, dtype: str = "float32", base_bits: int = 16) -> Iterator[AdapterTrainer]:
    """An AdapterTrainer that is closed in the end."""
    pytest.importorskip("peft")
    trainer = AdapterTrainer(folder, model, dtype, base_bits)
    try:
        yield trainer
    finally:
        trainer.close()
