"""The shape of a model that transformers computes: what its config.json and the headers of its files tell. No torch
here, but for those headers."""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.models.expert_args import COUNT_KEYS
from torchtitan.models.families import FAMILIES, Family
from torchtitan.models.model_args import ModelArgs, read_json, read_model_args

REQUIRED_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# Other kinds mix what lies in a pack, or depend on how long the longest sequence in it is.
ATTENTION = {"full_attention", "sliding_attention"}
ROPES = {"default", "linear", "llama3", "yarn", "proportional"}


@dataclass(frozen=True)
class ForeignArgs(ModelArgs):
    """A decoder whose layers are transformers' own. Known are the sizes that memory and time depend on."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)
    """Names and shapes of the tensors in its files"""

    @property
    def kind(self) -> Family:
        return Family("its own")

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        return json.loads(self.source) | {"torch_dtype": dtype, "dtype": dtype}

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Of the layers' matrices, those of experts left out."""
        return {
            _module(name): (shape[0], shape[1])
            for name, shape in self.shapes
            if len(shape) == 2 and self.vocab_size not in shape and "experts" not in name and name.endswith(".weight")
        }

    def weights_per_token(self) -> dict[str, int]:
        config = json.loads(self.source)
        experts = next((config[key] for key in COUNT_KEYS if key in config), 1)
        counts = self.module_parameters()
        counts = {name: counts[name] for name in ("experts", *self.projection_shapes()) if name in counts}
        return counts | {"experts": counts.get("experts", 0) * config.get("num_experts_per_tok", 1) // experts}

    def module_parameters(self) -> dict[str, int]:
        counts = Counter[str]()
        for name, shape in self.shapes:
            counts[_module(name)] += math.prod(shape)
        return dict(counts)


def _module(name: str) -> str:
    return "experts" if ".experts." in name else name.rpartition(".")[0].rpartition(".")[2]


def read_args(directory: str | Path, implementation: str = "auto") -> ModelArgs:
    """The shape of a checkpoint directory; a ForeignArgs where transformers is to compute it: "transformers", or "auto"
    and the decoder lacks the family.

    Raises UserError where files are missing or broken, and for what neither of them computes.
    """
    config = read_json(Path(directory) / "config.json")
    if implementation == "native" or (implementation == "auto" and config.get("model_type") in FAMILIES):
        return read_model_args(directory)
    if importlib.util.find_spec("transformers") is None:
        text = "only transformers computes it, which is not installed: pip install 'torchtitan-grpo[transformers]'"
        raise UserError(f"{directory}: model_type {config.get('model_type')!r}: {text}")
    try:
        return _read_foreign(Path(directory), config)
    except UserError as error:
        raise UserError(f"{directory}: model_type {config.get('model_type')!r}: {error}") from error


def _read_foreign(directory: Path, config: dict[str, Any]) -> ForeignArgs:
    from torchtitan.models.checkpoint_files import open_tensors, tensor_files

    lacking = [key for key in REQUIRED_KEYS if not config.get(key)]
    if lacking:
        kind = config.get("model_type")
        raise UserError(f"config.json of model_type {kind!r} lacks {', '.join(lacking)}: no decoder of text alone")
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [one for one in ropes.values() if isinstance(one, dict)] or [ropes]
    strange = sorted({*(config.get("layer_types") or ())} - ATTENTION)
    strange += sorted({one.get("rope_type") or one.get("type") or "default" for one in each} - ROPES)
    strange += ["quantization_config"] * bool(config.get("quantization_config"))
    if strange:
        raise UserError(f"{', '.join(strange)} in config.json: not trained here, whatever computes it")
    files = tensor_files(directory)
    handles = {path: open_tensors(path) for path in set(files.values())}
    shapes = {name: tuple(handles[path].get_slice(name).get_shape()) for name, path in files.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ForeignArgs(
        family=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config.get("intermediate_size") or 4 * hidden,
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", "lm_head.weight" not in shapes)),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        source=json.dumps(config),
        shapes=tuple(shapes.items()),
    )
