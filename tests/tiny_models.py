"""Tiny random checkpoints of any architecture that transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# What all of them have, by the names in config.json.
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def make_tiny(directory: Path, model_type: str, ones_in_norms: bool = True, **config: Any) -> Path:
    """Write one whose norms, biases and buffers are random too, so that nothing that is left out stays hidden.

    Weights of norms are about 1, where `ones_in_norms` says that they factor as they stand.
    """
    import transformers

    read = transformers.AutoConfig.for_model(model_type, **{**SHAPE, **config})
    model = transformers.AutoModelForCausalLM.from_config(read)
    make_random(model, ones_in_norms)
    model.save_pretrained(directory)
    return directory


def make_random(model: torch.nn.Module, ones_in_norms: bool) -> None:
    """Fill a model with random values, see make_tiny."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = 0.2 * torch.randn(tensor.shape, generator=generator)
            if "inv_freq" not in name:
                ones = ones_in_norms and tensor.dim() == 1 and "norm" in name and "bias" not in name
                tensor.copy_(1 + noise if ones else noise)
