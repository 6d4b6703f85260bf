"""The shape of a decoder as data: what distinguishes Llama 3, Qwen2/2.5 and Qwen3."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.models.expert_args import ExpertArgs, expert_config, names_in_files, read_expert_args

# What a family fixes: (architecture name, bias on q/k/v, RMSNorm on the heads of q and k).
FAMILIES: dict[str, tuple[str, bool, bool]] = {
    "llama": ("LlamaForCausalLM", False, False),
    "qwen2": ("Qwen2ForCausalLM", True, False),
    "qwen3": ("Qwen3ForCausalLM", False, True),
    "qwen3_moe": ("Qwen3MoeForCausalLM", False, True),
    "mixtral": ("MixtralForCausalLM", False, False),
}

# The matrices of a layer; under these names they are modules of the decoder.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelArgs:
    """Shape and switches of one decoder. Sizes in elements; names follow Hugging Face's config.json."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    experts: ExpertArgs | None = None

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.family][1]

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family][2]

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with an ordinary feed-forward."""
        return tuple(range(self.num_hidden_layers)) if self.experts is None else self.experts.dense_layers

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelArgs:
        """Read a Hugging Face config.json. Raises UserError for a family or switch that the decoder lacks."""
        lacking = [key for key in REQUIRED_KEYS if key not in config]
        if config.get("model_type") in FAMILIES and lacking:
            raise UserError(f"config.json lacks {', '.join(lacking)}")
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UserError(f"model_type {family!r} in config.json is not supported; supported: {', '.join(FAMILIES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"hidden_act {config['hidden_act']!r} in config.json is not supported; supported: silu")
        if config.get("use_sliding_window"):
            raise UserError("use_sliding_window = true in config.json is not supported")
        if family == "llama" and (config.get("attention_bias") or config.get("mlp_bias")):
            raise UserError("attention_bias / mlp_bias of llama in config.json are not supported")
        # transformers 5 nests theta and scaling in rope_parameters; 4 keeps them apart.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "llama3"):
            raise UserError(f"rope_type {rope_type!r} in config.json is not supported; supported: default, llama3")
        scaling = None
        if rope_type == "llama3":
            scaling = RopeScaling(
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_position_embeddings=rope["original_max_position_embeddings"],
            )
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            # Where the key is absent, transformers takes 128 for Qwen3.
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else config["hidden_size"] // heads),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
            experts=read_expert_args(family, config),
        )

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """The config.json that transformers 4 and 5 both read back as this shape."""
        eos: int | list[int] | None = list(self.eos_token_ids)
        if len(self.eos_token_ids) <= 1:
            eos = self.eos_token_ids[0] if self.eos_token_ids else None
        scaling = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **vars(self.rope_scaling)}
        config = {
            "architectures": [FAMILIES[self.family][0]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_theta": self.rope_theta, **(scaling or {"rope_type": "default"})},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "torch_dtype": dtype,
            "use_cache": True,
        }
        if self.experts is not None:
            config |= expert_config(self.family, self.experts, self.num_hidden_layers)
        return config

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Weight [out, in] of every projection of a layer, its feed-forward an ordinary one."""
        hidden, wide = self.hidden_size, self.intermediate_size
        heads, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = ((heads, hidden), (kv, hidden), (kv, hidden), (hidden, heads))
        return dict(zip(PROJECTIONS, (*attention, (wide, hidden), (wide, hidden), (hidden, wide)), strict=True))

    def weights_per_token(self) -> dict[str, int]:
        """Elements of the matrices that a token passes in all layers, by the name of their module."""
        layers, dense = self.num_hidden_layers, len(self.dense_layers)
        counts = {
            name: (layers if name in PROJECTIONS[:4] else dense) * rows * columns
            for name, (rows, columns) in self.projection_shapes().items()
        }
        if self.experts is not None:
            counts["experts"] = (layers - dense) * 3 * self.hidden_size * self.experts.active_size
            counts["gate"] = (layers - dense) * self.experts.count * self.hidden_size
        return counts

    def module_parameters(self) -> dict[str, int]:
        """Parameters in elements by the name of their module, over all layers. Tied, the head has none of its own."""
        hidden, layers = self.hidden_size, self.num_hidden_layers
        counts = {name: layers * rows * columns for name, (rows, columns) in self.projection_shapes().items()}
        if (experts := self.experts) is not None:
            mixed, matrix = layers - len(self.dense_layers), 3 * hidden
            counts |= {name: counts[name] // layers * len(self.dense_layers) for name in PROJECTIONS[4:]}
            counts["experts"] = mixed * experts.count * matrix * experts.intermediate_size
            counts["shared_experts"] = mixed * matrix * experts.shared_intermediate_size
            counts["gate"] = mixed * experts.count * (hidden + experts.bias)
        for name in PROJECTIONS[:3] if self.qkv_bias else ():
            counts[name] += layers * self.projection_shapes()[name][0]
        counts |= {name: layers * self.head_dim for name in ("q_norm", "k_norm") if self.qk_norm}
        counts |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), layers * hidden)
        head = 0 if self.tie_word_embeddings else self.vocab_size * hidden
        return counts | {"norm": hidden, "embed_tokens": self.vocab_size * hidden, "lm_head": head}

    def names_in_files(self, name: str) -> list[tuple[str, int | None]]:
        """See expert_args.names_in_files."""
        return names_in_files(self.family, self.experts, name)

    def num_parameters(self) -> int:
        """Parameters in elements; tied embeddings count once."""
        return sum(self.module_parameters().values())


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def read_model_args(directory: str | Path) -> ModelArgs:
    """The shape in `directory`/config.json, with the end tokens of generation_config.json where it has more.

    Raises UserError where a file is missing, broken or describes a model that is not supported.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; a checkpoint directory needs a config.json")
    try:
        args = ModelArgs.from_hf_config(_read_json(path))
    except UserError as error:
        raise UserError(f"{directory}: {error}") from error
    generation = directory / "generation_config.json"
    if generation.is_file():
        more = _token_ids(_read_json(generation).get("eos_token_id"))
        args = replace(args, eos_token_ids=tuple(dict.fromkeys(args.eos_token_ids + more)))
    return args


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path.name} is not a JSON object")
    return value
