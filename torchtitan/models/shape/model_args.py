"""The shape of a decoder as data. Does not import torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import read_json
from torchtitan.models.shape.composite import Composite, read_text, with_dtype
from torchtitan.models.shape.delta_args import Delta, read_delta
from torchtitan.models.shape.families import (
    FAMILIES,
    Family,
    Latent,
    Rope,
    Scaling,
    check_types,
    find_family,
    read_latent,
    read_nope_layers,
    read_ropes,
    read_windows,
)
from torchtitan.models.shape.mixture_args import EXPERT_FAMILIES, ExpertArgs, expert_config, read_expert_args
from torchtitan.models.shape.stacked_experts import StackedExperts

# The decoder's modules for a layer's matrices have these names.
LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", *LATENT_PROJECTIONS, "o_proj")
DELTA_PROJECTIONS = (*("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),)
FEED_FORWARD_PROJECTIONS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
PROJECTIONS = (*ATTENTION_PROJECTIONS, *DELTA_PROJECTIONS, *FEED_FORWARD_PROJECTIONS)

# Exports take these from the decoder, whatever the source config.json said.
SHAPE_KEYS = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
# These have the same names in a config.json and in the decoder.
REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
WRITTEN_KEYS = (
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "attention_bias", "mlp_bias"),
    *("tie_word_embeddings", "max_position_embeddings", "bos_token_id"),
)


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
    rope_scaling: Scaling | None = None
    sliding_rope: Rope | None = None
    """Rotary positions of layers with a window, if they differ"""
    rotary_share: float = 1.0
    """The share of a head, from its start, that is rotated"""
    nope_layers: tuple[int, ...] = ()
    """Layers without rotary positions"""
    windows: tuple[int, ...] = ()
    """For each layer, how many tokens a token attends to, including itself; 0: all. (): all layers attend to all"""
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float = 0.0
    """Multiplies the products of q and k; 0: 1 / √head_dim"""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    """Logits become softcap · tanh(logits / softcap); 0: unchanged"""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what attention and feed-forward add to the residual stream"""
    logit_divisor: float = 1.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    latent: Latent | None = None
    delta: Delta | None = None
    """Gated DeltaNet in place of attention in some layers"""
    experts: ExpertArgs | None = None
    normed_heads: bool = True
    """False: the norms of q and k that the family has are left out"""
    composite: Composite | None = None
    """Where the text model is in the files of a composite checkpoint; None: the files hold nothing else"""
    source: str = field(default="", compare=False, repr=False)
    """The config.json that this was read from (of a composite, the text model's part); exports keep its further keys"""

    @property
    def kind(self) -> Family:
        """The family's row in FAMILIES."""
        return FAMILIES[self.family]

    @property
    def qkv_bias(self) -> bool:
        return self.kind.qkv_bias or self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.kind.output_bias and self.attention_bias

    @property
    def qk_norm(self) -> str:
        return self.kind.qk_norm if self.normed_heads else ""

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary positions that the layers use, see `rope_of`."""
        first = Rope(self.rope_theta, self.rope_scaling)
        return (first,) if self.sliding_rope is None else (first, self.sliding_rope)

    @property
    def undivided(self) -> str:
        """What prevents tensor parallelism from sharding a layer; empty if nothing does."""
        kind = self.kind
        joint = "projections that are stored as one" if kind.joint_qkv or kind.joint_gate_up else ""
        joint = joint if self.latent is None else "latent attention"
        return joint or ("norms over all heads" if kind.qk_norm == "whole" else "attention sinks" * kind.sinks)

    @property
    def rotary_width(self) -> int:
        """How many elements of a head are rotated."""
        return int(self.head_dim * self.rotary_share) if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """The width of a head's value."""
        return self.head_dim if self.latent is None else self.latent.values

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers with a recurrent state, in which what a token computes depends on all tokens before it in order."""
        return () if self.delta is None else self.delta.layers

    def layers_with(self, projection: str) -> int:
        """The number of layers that have this projection of `projection_shapes`."""
        if projection in FEED_FORWARD_PROJECTIONS:
            return len(self.dense_layers)
        recurrent = len(self.delta_layers)
        return recurrent if projection in DELTA_PROJECTIONS else self.num_hidden_layers - recurrent

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer attends to, including itself; 0: all."""
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> int | None:
        """Return the index in `ropes` of a layer's rotary positions; None if it has none."""
        if layer in self.nope_layers:
            return None
        return 1 if self.window(layer) and self.sliding_rope is not None else 0

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense feed-forward."""
        return tuple(range(self.num_hidden_layers)) if self.experts is None else self.experts.dense_layers

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelArgs:
        """Read a Hugging Face config.json. Raises UserError for a family or switch that the decoder lacks."""
        family = find_family(config)
        name = config["model_type"]
        source, config = json.dumps(config), family.defaults | config
        lacking = [key for key in REQUIRED_KEYS if not config.get(key)]
        if lacking:
            raise UserError(f"config.json lacks {', '.join(lacking)}")
        (rope, sliding_rope), share = read_ropes(config)
        windows = read_windows(config, family)
        if sliding_rope is not None and not windows:
            sliding_rope = None
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        scalar = config.get("query_pre_attn_scalar")
        scale = scalar**-0.5 if scalar else config.get("attention_multiplier")
        key_heads = config.get("num_key_value_heads") or heads
        latent = read_latent(config)
        if latent is not None:
            head_dim, key_heads = latent.nope_dim + latent.rope_dim, heads
            warmth = 1.0 if rope.scaling is None else rope.scaling.temperature()
            scale = head_dim**-0.5 * warmth**2
        return cls(
            family=name,
            **{key: config[key] for key in REQUIRED_KEYS},
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            sliding_rope=sliding_rope,
            rotary_share=share,
            nope_layers=read_nope_layers(config),
            windows=windows,
            attention_bias=bool(config.get("attention_bias")) and not family.qkv_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            attention_scale=scale or (1.0 if name == "granite" else 0.0),
            attention_softcap=config.get("attn_logit_softcapping") or 0.0,
            logit_softcap=config.get("final_logit_softcapping") or 0.0,
            embedding_scale=hidden**0.5 if family.scaled_embedding else config.get("embedding_multiplier", 1.0),
            residual_scale=config.get("residual_multiplier", 1.0),
            logit_divisor=config.get("logits_scaling", 1.0),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
            latent=latent,
            delta=read_delta(config, family),
            experts=read_expert_args(name, config),
            normed_heads=bool(config.get("use_qk_norm", True)),
            source=source,
        )

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """Return a config.json that both transformers 4 and 5 read back as this shape; of a composite its own."""
        if self.composite is not None:
            return with_dtype(json.loads(self.composite.config), dtype)
        ends = self.eos_token_ids
        eos = list(ends) if len(ends) > 1 else next(iter(ends), None)
        kept = {key: value for key, value in json.loads(self.source or "{}").items() if key not in SHAPE_KEYS}
        # transformers 5 reads the older form too, but fails on both together if layer types have their own positions.
        rope = kept.get("rope_parameters") or {}
        if "factor" not in rope:
            rope = None if self.rope_scaling is None else self.rope_scaling.to_hf_config()
        written = {
            "architectures": [self.kind.architecture],
            "model_type": self.family,
            **{key: getattr(self, key) for key in (*REQUIRED_KEYS, *WRITTEN_KEYS)},
            "hidden_act": self.kind.activation,
            "head_dim": self.head_dim if self.latent is None else self.latent.rope_dim,
            "rope_scaling": rope,
            "eos_token_id": eos,
            "use_cache": True,
        }
        if self.experts is not None:
            written |= expert_config(self.family, self.experts, self.num_hidden_layers)
        return written | kept | {"torch_dtype": dtype, "dtype": dtype, "eos_token_id": eos}

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Weight [out, in] of every projection of the layers, of a feed-forward that of a dense one."""
        hidden, wide = self.hidden_size, self.intermediate_size
        heads, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        # A gate of the output doubles it.
        query = heads if self.delta is None else 2 * heads
        shapes = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        if self.kind.joint_qkv:
            shapes = {"qkv_proj": (heads + 2 * kv, hidden)}
        if self.latent is not None:
            shapes = self.latent.projection_shapes(hidden, self.num_attention_heads)
        shapes["o_proj"] = (hidden, self.num_attention_heads * self.value_dim)
        if self.delta is not None:
            shapes |= self.delta.projection_shapes(hidden)
        if self.kind.joint_gate_up:
            shapes["gate_up_proj"] = (2 * wide, hidden)
        else:
            shapes |= {"gate_proj": (wide, hidden), "up_proj": (wide, hidden)}
        return shapes | {"down_proj": (hidden, wide)}

    def has_bias(self, projection: str) -> bool:
        """Whether this projection adds a bias."""
        if projection == "o_proj":
            return self.output_bias
        if projection in DELTA_PROJECTIONS:
            return False
        if self.latent is not None and projection in ATTENTION_PROJECTIONS:
            return self.attention_bias and projection in ("q_a_proj", "kv_a_proj_with_mqa")
        return self.qkv_bias if projection in ATTENTION_PROJECTIONS else self.mlp_bias

    def weights_per_token(self) -> dict[str, int]:
        """Elements of the matrices that a token passes through in all layers, by module name."""
        layers, dense = self.num_hidden_layers, len(self.dense_layers)
        counts = {
            name: self.layers_with(name) * rows * columns for name, (rows, columns) in self.projection_shapes().items()
        }
        if self.delta is not None:
            counts["conv1d"] = len(self.delta.layers) * self.delta.channels * self.delta.kernel
        if self.experts is not None:
            counts["experts"] = (layers - dense) * 3 * self.hidden_size * self.experts.active_size
            counts["gate"] = (layers - dense) * (self.experts.count + self.experts.shared_gate) * self.hidden_size
        return counts

    def module_parameters(self) -> dict[str, int]:
        """Parameters in elements over all layers, by module name. A tied head has none of its own."""
        hidden, layers = self.hidden_size, self.num_hidden_layers
        counts = {
            name: self.layers_with(name) * rows * (columns + self.has_bias(name))
            for name, (rows, columns) in self.projection_shapes().items()
        }
        if (experts := self.experts) is not None:
            mixed, matrix = layers - len(self.dense_layers), 3 * hidden
            counts["experts"] = mixed * experts.count * matrix * experts.intermediate_size
            counts["shared_expert_gate"] = mixed * hidden * experts.shared_gate
            counts["shared_experts"] = mixed * matrix * experts.shared_intermediate_size
            counts["gate"] = mixed * experts.count * (hidden + (experts.bias or experts.stacked))
            counts["experts"] += mixed * experts.count * (2 * experts.intermediate_size + hidden) * experts.stacked
        if self.latent is not None:
            counts |= {"q_a_layernorm": layers * self.latent.queries, "kv_a_layernorm": layers * self.latent.keys}
        counts["sinks"] = layers * self.num_attention_heads * self.kind.sinks
        if self.qk_norm:
            heads = (self.num_attention_heads, self.num_key_value_heads) if self.qk_norm == "whole" else (1, 1)
            attended = self.layers_with("o_proj")
            counts |= {name: attended * n * self.head_dim for name, n in zip(("q_norm", "k_norm"), heads, strict=True)}
        if (delta := self.delta) is not None:
            counts["linear_attn"] = len(delta.layers) * 2 * delta.value_heads
            counts |= {"conv1d": len(delta.layers) * delta.channels * delta.kernel}
        counts |= dict.fromkeys((name for name in self.kind.norms if name), layers * hidden)
        head = 0 if self.tie_word_embeddings else self.vocab_size * hidden
        norms = hidden if self.delta is None else hidden + len(self.delta.layers) * self.delta.value_dim
        return counts | {"norm": norms, "embed_tokens": self.vocab_size * hidden, "lm_head": head}

    def names_in_files(self, name: str) -> list[tuple[str, int | None]]:
        """Return the names of one of our parameters in checkpoint files, engines and weight synchronisation. All of
        them use this rule. The result is [(name, None)], or for a stack of experts each one's name and its index along
        the stack's first dimension."""
        names = self._names_of_text(name)
        if self.composite is None:
            return names
        return [(self.composite.name_in_files(part), index) for part, index in names]

    def names_of_modules(self, name: str) -> list[tuple[str, int | None]]:
        """As names_in_files, as transformers names its modules' parameters."""
        names = self._names_of_text(name)
        if self.composite is None:
            return names
        return [(self.composite.name_of_module(part), index) for part, index in names]

    def _names_of_text(self, name: str) -> list[tuple[str, int | None]]:
        """As names_in_files, in a checkpoint of text alone."""
        if self.experts is None:
            return [(name, None)]
        fixed = EXPERT_FAMILIES[self.family]
        if fixed.stacked:
            return [(name.replace(".mlp.gate.", ".mlp.router."), None)]
        name = name.replace(".mlp.", f".{fixed.block}.")
        if fixed.shared_gate:
            name = name.replace(".shared_experts.", ".shared_expert.")
        if fixed.block != "mlp":
            name = name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
        before, stacked, projection = name.partition(".experts.")
        if not stacked:
            return [(name, None)]
        projection, _, leaf = projection.partition(".")
        renamed = dict(zip(("gate_proj", "up_proj", "down_proj"), fixed.projections, strict=True))[projection]
        return [(f"{before}.experts.{expert}.{renamed}.{leaf}", expert) for expert in range(self.experts.count)]

    @property
    def stacked_experts(self) -> StackedExperts | None:
        """How files stack experts; None: each matrix is a tensor of its own, or the parameter is the file's tensor."""
        return None if self.composite is None else self.composite.stacked

    def stored_name(self, name: str) -> str:
        """Return which tensor in files holds the one that engines and weight synchronisation call by this name."""
        matrix = None if self.stacked_experts is None else self.stacked_experts.find(name)
        return name if matrix is None else matrix.name

    def is_untrained(self, name: str) -> bool:
        """Whether a tensor in files is neither trained nor sent to engines, but kept in exports: of another part of a
        composite, or of the multi-token-prediction layers that some families have."""
        if self.composite is not None and self.composite.name_of_text(name) is None:
            return True
        return self.is_prediction_layer(name)

    def is_prediction_layer(self, name: str) -> bool:
        """Whether a tensor in files is of multi-token-prediction layers, beside the decoder's or after its last one."""
        if self.composite is not None:
            name = self.composite.name_of_text(name) or name
        if self.delta is not None and name.startswith("mtp."):
            return True
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return self.experts is not None and found is not None and int(found[1]) >= self.num_hidden_layers

    def num_parameters(self) -> int:
        """Parameters in elements; tied embeddings count once."""
        return sum(self.module_parameters().values())


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def read_model_args(directory: str | Path) -> ModelArgs:
    """Read the shape from `directory`/config.json, and add end tokens that only generation_config.json lists.

    Raises UserError if a file is missing or broken, or describes an unsupported model.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; a checkpoint directory needs a config.json")
    config = read_json(path)
    try:
        text, composite = read_text(directory, config)
        args = replace(ModelArgs.from_hf_config(text), composite=composite)
    except UserError as error:
        raise UserError(f"{directory}: {error}") from error
    except KeyError as error:
        raise UserError(f"{directory}: config.json lacks {error.args[0]}") from error
    generation = directory / "generation_config.json"
    if generation.is_file():
        config = read_json(generation)
        check_types(config, ("eos_token_id",), str(generation))
        more = _token_ids(config.get("eos_token_id"))
        args = replace(args, eos_token_ids=tuple(dict.fromkeys(args.eos_token_ids + more)))
    return args
