"""Tiny random composite checkpoints, as transformers writes them: a text model, a vision tower and what joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.delta_models import DELTA, settle
from tests.tiny_models import SHAPE, make_random

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_SIGLIP = {**_VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_QWEN3_VISION = {**_QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HEADS = {"head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# The text model's keys besides SHAPE, the vision tower's, and the whole's.
COMPOSITES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ({**DELTA, "linear_num_key_heads": 2}, _QWEN3_VISION, {}),
    "qwen3_5_moe": (
        {**DELTA, **_EXPERTS, "shared_expert_intermediate_size": 20},
        _QWEN3_VISION,
        {},
    ),
    "gemma3": ({**_HEADS, "query_pre_attn_scalar": 20, "sliding_window": 9}, _SIGLIP, {"mm_tokens_per_image": 4}),
    "gemma4": (
        {
            **_HEADS,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 9,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "pad_token_id": 0,
        },
        {**_SIGLIP, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
        {"audio_config": None},
    ),
    "mistral3": (
        {"model_type": "mistral", **_HEADS},
        {"model_type": "pixtral", **_SIGLIP, "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": _ROPE},
        {**_QWEN_VISION, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
        {},
    ),
    "qwen3_vl": (
        {**_HEADS, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": (
        {**_HEADS, **_EXPERTS, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
        {},
    ),
}
# Norms that multiply by 1 + weight.
ZERO_NORMS = ("qwen3_5", "qwen3_5_moe", "gemma3")
# A head of multi-token prediction, as Qwen3.5's files have one, which transformers does not read.
PREDICTION = {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)}


def make_composite(directory: Path, family: str, **text: Any) -> Path:
    """Write one in bfloat16, whose tensors are all random. text: further keys of text_config."""
    import transformers

    of_text, vision, whole = COMPOSITES[family]
    config = transformers.AutoConfig.for_model(
        family, text_config={**SHAPE, **of_text, **text}, vision_config=vision, **whole
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    make_random(model, family not in ZERO_NORMS)
    model.bfloat16().save_pretrained(directory)
    if family.startswith("qwen3_5"):
        path = directory / "model.safetensors"
        generator = torch.Generator().manual_seed(4)
        heads = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in PREDICTION.items()}
        tensors = load_file(path)
        settle(tensors, {**of_text, **text})
        save_file(tensors | heads, path, metadata={"format": "pt"})
    return directory
