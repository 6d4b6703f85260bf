"""The text model of a composite checkpoint: a folder whose config.json describes a vision tower or other parts beside a
decoder of text. Does not import torch.

The decoder has the names of a checkpoint of text alone; a `Composite` says which names its tensors have in the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import read_json, tensor_files
from torchtitan.models.shape.stacked_experts import StackedExperts, find_stacked_experts

_QWEN2 = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
_QWEN3 = {"num_key_value_heads": 32, "rope_theta": 500000.0}
_QWEN3_MOE = {"num_key_value_heads": 16, "rope_theta": 500000.0, "norm_topk_prob": True}
# Text models under names that only composites have: the family that computes the same, and the values of keys that a
# config.json leaves out, where transformers has others for them.
TEXT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", _QWEN2),
    "qwen2_5_vl_text": ("qwen2", _QWEN2),
    "qwen3_vl_text": ("qwen3", _QWEN3),
    "qwen3_vl_moe_text": ("qwen3_moe", _QWEN3_MOE),
}
# Some published files have the text model's keys at the top level, beside vision_config.
FLAT_FAMILIES = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
REFUSED_FAMILIES = {
    "kimi_k25": "its experts are published in four bits (compressed-tensors), and quantised weights are not read"
}
# Where the files of composites hold the text model's layers, and its head. The first that is there counts.
STACK_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD_PREFIXES = ("language_model.lm_head.", "lm_head.")
MODULE_STACK = "model.language_model."
# The decoder's own names.
STACK, HEAD = "model.", "lm_head."
EMBEDDING = "embed_tokens.weight"
# What a composite's config.json may say at its top level of the text model.
DTYPE_KEYS = ("dtype", "torch_dtype")
OUTER_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", *DTYPE_KEYS)


@dataclass(frozen=True)
class Composite:
    """Where the text model is in the files of a composite checkpoint."""

    family: str
    stack: str
    """The prefix of its embedding, layers and final norm"""
    head: str
    """The prefix of its head, which files with a tied head lack"""
    stacked: StackedExperts | None = None
    """How files hold experts; None: each matrix is a tensor of its own"""
    config: str = field(default="", compare=False, repr=False)
    """The whole config.json, which exports keep"""

    def name_in_files(self, name: str) -> str:
        """Return the name in the files of a tensor of the decoder."""
        if name.startswith(STACK):
            return self.stack + name.removeprefix(STACK)
        return self.head + name.removeprefix(HEAD) if name.startswith(HEAD) else name

    def name_of_module(self, name: str) -> str:
        """Return how transformers calls this module or tensor of the decoder in its own composite, whatever the names
        in the files; PEFT's adapters have these names."""
        return replace(self, stack=MODULE_STACK, head=HEAD).name_in_files(name)

    def name_of_text(self, name: str) -> str | None:
        """Return the decoder's name of a tensor in the files; None for tensors of other parts."""
        if name.startswith(self.stack):
            return STACK + name.removeprefix(self.stack)
        return HEAD + name.removeprefix(self.head) if name.startswith(self.head) else None


def read_text(directory: Path, config: dict[str, Any]) -> tuple[dict[str, Any], Composite | None]:
    """Return the text model's part of a checkpoint's config.json, and where it is in the files: all of it and None for
    a checkpoint of text alone. Raises UserError for files that are broken, or hold no text model."""
    text = text_config(config)
    if text is config:
        return config, None
    if not any(directory.glob("*.safetensors")):
        # A plan needs no weights, and whoever loads them says that they are missing.
        composite = Composite(str(config.get("model_type")), MODULE_STACK, HEAD, config=json.dumps(config))
        return text | {"tie_word_embeddings": _is_tied(config, False)}, composite
    files = tensor_files(directory)
    stack = next((prefix for prefix in STACK_PREFIXES if prefix + EMBEDDING in files), None)
    if stack is None:
        known = ", ".join(prefix + EMBEDDING for prefix in STACK_PREFIXES)
        raise UserError(f"config.json describes a text model in a composite, but the safetensors have none of {known}")
    head = next((prefix for prefix in HEAD_PREFIXES if f"{prefix}weight" in files), None)
    tied = _is_tied(config, head is not None)
    stacked = find_stacked_experts(files, text.get("hidden_size") or 0)
    composite = Composite(str(config.get("model_type")), stack, head or HEAD, stacked, json.dumps(config))
    return text | {"tie_word_embeddings": tied}, composite


def _is_tied(config: dict[str, Any], has_head: bool) -> bool:
    """Whether head and embedding share a weight. The head belongs to the whole, but files of transformers 4 say so in
    text_config, and some leave it to the defaults of a class."""
    sections = config, config.get("text_config") or {}
    given = [section["tie_word_embeddings"] for section in sections if "tie_word_embeddings" in section]
    if has_head:
        return bool(given and given[0])
    return not given or any(given)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's part of a config.json, with what the whole says of it; the very argument where there are
    no other parts. Raises UserError."""
    family = config.get("model_type")
    if family in REFUSED_FAMILIES:
        raise UserError(f"model_type {family!r} is not trained here: {REFUSED_FAMILIES[family]}")
    if "text_config" in config:
        inner = config["text_config"]
        if not isinstance(inner, dict):
            raise UserError(f"text_config in config.json must be an object, not {json.dumps(inner)}")
        outer = {key: config[key] for key in OUTER_KEYS if config.get(key) is not None}
        text = {**inner, **outer, **{key: value for key, value in inner.items() if value is not None}}
    elif family in FLAT_FAMILIES:
        text = {key: value for key, value in config.items() if not _is_of_another_part(key)}
        text["model_type"] = FLAT_FAMILIES[family]
    else:
        return config
    kind = text.get("model_type")
    if kind not in TEXT_FAMILIES:
        return text
    name, defaults = TEXT_FAMILIES[kind]
    return {**defaults, **text, "model_type": name}


def is_composite(directory: str | Path) -> bool:
    """Whether a checkpoint directory holds other parts beside the text model. Raises UserError."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        return False
    config = read_json(path)
    return text_config(config) is not config


def _is_of_another_part(key: str) -> bool:
    return key == "vision_config" or key.startswith(("image_", "video_", "vision_"))


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a composite's config.json whose text model has weights of this type; one that says so already as it is."""
    text = config.get("text_config") or {}
    given = {section[key] for section in (config, text) for key in DTYPE_KEYS if section.get(key) is not None}
    if given == {dtype}:
        return config
    changed = {key: value for key, value in config.items() if key not in DTYPE_KEYS} | {"dtype": dtype}
    if text:
        changed["text_config"] = {key: value for key, value in text.items() if key not in DTYPE_KEYS}
        changed["text_config"]["dtype"] = dtype
    return changed
