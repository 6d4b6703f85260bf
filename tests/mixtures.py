"""Tiny random mixtures of experts, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import SHAPE

# What they have beside a shape of their own, below.
COMMON: dict[str, Any] = {
    **SHAPE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# By family: its own switches, none of them at its default. One layer is dense where a family can have that.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "glm4_moe": {
        "head_dim": 32,
        "n_routed_experts": 8,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 32,
        },
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 8,
        "sliding_window": 9,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "minimax_m2": {
        "head_dim": 32,
        "num_local_experts": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}


def make_mixture(directory: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint whose weights are large enough for logits of several units; norms and biases are random."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **{**COMMON, **MIXTURES[family], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(0.2 * noise)
            elif isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(1 + 0.2 * noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    return directory
