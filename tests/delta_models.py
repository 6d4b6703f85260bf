"""Tiny random checkpoints with Gated DeltaNet layers, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_tiny

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
# Three key heads serve six value heads, of another width.
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 20}
DELTA_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_num_key_heads": 2},
    "qwen3_next": {**_SHARED, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": _SHARED,
}


def make_delta(directory: Path, family: str, **config: Any) -> Path:
    """Write one whose values are as settle() makes them."""
    config = {**DELTA, **DELTA_FAMILIES[family], **config}
    make_tiny(directory, family, False, **config)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    settle(tensors, config)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def settle(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Change random weights of a model in place to those of one that remembers for some ten tokens, and whose keys
    resemble its queries: what is read is divided by its size, and where that is small, rounding grows."""
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor -= 2.5
        elif name.endswith("linear_attn.norm.weight"):
            tensor += 1
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            tensor[heads * width : 2 * heads * width] += 2 * tensor[: heads * width]
        elif name.endswith("in_proj_qkvz.weight"):
            by_head = tensor.view(heads, -1, tensor.shape[-1])
            by_head[:, width : 2 * width] += 2 * by_head[:, :width]
