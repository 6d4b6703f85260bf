"""How the families of decoders differ, and how their config.json is read. Does not import torch.

A family is a row of `FAMILIES`. Keys of a config.json that are not honoured here are refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchtitan.errors import UserError

# A layer's norms: before and after attention, before and after the feed-forward; "" for none.
BEFORE = ("input_layernorm", "", "post_attention_layernorm", "")
AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GLM = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
GEMMA = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """What is fixed for a family; config.json holds the rest."""

    architecture: str
    qkv_bias: bool = False
    """q, k and v have biases whatever config.json says of attention_bias"""
    qk_norm: str = ""
    """RMSNorm of q and k: of each of the "heads", or of all heads as a "whole\""""
    norms: tuple[str, str, str, str] = BEFORE
    zero_norms: bool = False
    """Norms multiply by 1 + weight"""
    joint_qkv: bool = False
    """One qkv_proj instead of q_proj, k_proj and v_proj"""
    joint_gate_up: bool = False
    """One gate_up_proj instead of gate_proj and up_proj"""
    output_bias: bool = True
    """attention_bias applies to o_proj, too"""
    rotary_pairs: bool = False
    """Rotary positions rotate neighbouring elements together, instead of the two halves of a head"""
    activation: str = "silu"
    sinks: bool = False
    """Every head has one more key, with its own score and value 0"""
    scaled_embedding: bool = False
    """Embeddings are multiplied by √hidden_size"""
    defaults: dict[str, Any] = field(default_factory=dict, hash=False)
    """Values of keys that a config.json leaves out, as in transformers"""
    delta: str = ""
    """Layers of type linear_attention are Gated DeltaNet, whose projections are stored "apart" or, for each key head
    together, "joint"; full attention is gated by a second half of q_proj"""
    full_every: int = 0
    """Without layer_types, every n-th layer has full attention and the others a window; 0: see _layer_types"""
    keys: tuple[str, ...] = ()
    """Further keys of config.json that are honoured"""
    only: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further keys that are honoured with one value only, and that value"""


def _gemma(**defaults: Any) -> dict[str, Any]:
    common = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    common |= {"tie_word_embeddings": True, "sliding_window": 4096}
    return {
        "norms": GEMMA,
        "zero_norms": True,
        "activation": "gelu_pytorch_tanh",
        "scaled_embedding": True,
        "keys": ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"),
        "defaults": common | defaults,
    }


# Keys of mixtures of experts, which mixture_args.read_expert_args reads.
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"),
    *("decoder_sparse_step", "mlp_only_layers", "mlp_layer_types", "output_router_logits", "router_aux_loss_coef"),
    *("router_jitter_noise",),
)
# Keys of multi-token-prediction layers, which are not loaded.
_MTP = ("num_nextn_predict_layers", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
# DeepSeek-V3's latent attention, and those of its experts' settings that GLM-4.5 shares.
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_ROUTED = {"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPED = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
_NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_SWITCHED = {"use_sliding_window": False}
_HEADS_OF_128 = {"head_dim": 128, **_SWITCHED}
# For other families, transformers ignores partial_rotary_factor, but some engines do not.
_PARTLY_TURNED = ("phi3", "glm4", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_SHARED = {"shared_expert_intermediate_size": 512}
_MTP_KEYS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def _gated_delta(key_heads: int, joint: bool = False, experts: bool = False, **defaults: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"num_key_value_heads": key_heads, "head_dim": 256}
    sizes |= {"partial_rotary_factor": 0.25, **DELTA_SIZES}
    keys = (*DELTA_SIZES, *_MTP_KEYS)
    if experts:
        sizes |= _SHARED
        keys = (*_EXPERTS, *DELTA_SIZES, *_SHARED, *_MTP_KEYS)
    return {
        "qk_norm": "heads",
        "zero_norms": True,
        "delta": "joint" if joint else "apart",
        "keys": keys,
        # Text has one position per token, whichever axis of an image's positions it is.
        "only": {"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
        "defaults": sizes | defaults,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family(
        "Qwen2ForCausalLM", qkv_bias=True, output_bias=False, defaults={"num_key_value_heads": 32, **_SWITCHED}
    ),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="heads", defaults={"num_key_value_heads": 32, **_HEADS_OF_128}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qk_norm="heads", keys=_EXPERTS, defaults={"num_key_value_heads": 4, **_HEADS_OF_128}
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        keys=_EXPERTS,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        qk_norm="whole",
        keys=(*_EXPERTS, "rotary_dim", "use_qk_norm", *_MTP),
        only={"scoring_func": "sigmoid", "use_routing_bias": True, "qk_norm_type": "per_layer"},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        qk_norm="heads",
        output_bias=False,
        keys=(*_EXPERTS, "use_qk_norm", *_MTP),
        only=_NOAUX,
        defaults={
            **_ROUTED,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        rotary_pairs=True,
        # The last three matter only in DeepSeek's own training.
        keys=(*_EXPERTS, *_LATENT, "qk_head_dim", *_MTP, "ep_size", "aux_loss_alpha", "seq_aux"),
        only={**_NOAUX, "rope_interleave": True, "moe_layer_freq": 1},
        defaults=_LATENT | _ROUTED | _GROUPED,
    ),
    "qwen3_next": Family("Qwen3NextForCausalLM", **_gated_delta(2, joint=True, experts=True, norm_topk_prob=True)),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", **_gated_delta(4)),
    # It has no dense layers, whose width the first number would be.
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", **_gated_delta(2, experts=True, intermediate_size=512)),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        sinks=True,
        full_every=2,
        keys=(*_EXPERTS, "swiglu_alpha", "swiglu_limit", "experts_per_token", "initial_context_length"),
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "rope_scaling": _GPT_OSS_YARN,
        },
    ),
    "mistral": Family("MistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "olmo2": Family("Olmo2ForCausalLM", qk_norm="whole", norms=AFTER, defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        qk_norm="whole",
        norms=AFTER,
        full_every=4,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        keys=("no_rope_layers", "no_rope_layer_interval"),
        defaults={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True, **_SWITCHED},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        norms=GLM,
        joint_gate_up=True,
        output_bias=False,
        rotary_pairs=True,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", full_every=2, **_gemma(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm="heads",
        full_every=6,
        **_gemma(
            rope_theta=1000000.0,
            rope_local_base_freq=10000.0,
            vocab_size=262208,
            num_attention_heads=8,
            max_position_embeddings=131072,
        ),
    ),
    "phi3": Family("Phi3ForCausalLM", joint_qkv=True, joint_gate_up=True, defaults={"rms_norm_eps": 1e-5}),
    "granite": Family(
        "GraniteForCausalLM",
        keys=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
}

# These keys are read for every family.
HONOURED = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor", "tie_word_embeddings"),
    *("max_position_embeddings", "original_max_position_embeddings", "bos_token_id", "eos_token_id", "attention_bias"),
    *("mlp_bias", "use_sliding_window", "sliding_window", "sliding_window_pattern", "max_window_layers"),
    *("layer_types", "_sliding_window_pattern"),
)
# These keys do not affect a token's log-prob. Training applies no dropout, and neither do the engines.
MEANINGLESS = (
    *("architectures", "transformers_version", "dtype", "torch_dtype", "initializer_range", "use_cache"),
    *("pad_token_id", "attention_dropout", "resid_pdrop", "embd_pdrop", "_name_or_path", "auto_map", "pretraining_tp"),
    *("cache_implementation", "is_decoder", "output_attentions", "output_hidden_states", "return_dict"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "unsloth_version", "attn_implementation"),
    *("unsloth_fixed", "is_llama_config", "transformers.js_config", "_attn_implementation_autoset", "tokenizer_class"),
)

# The types of keys that do not hold a whole number. null is allowed for all keys but those of _NEVER_NULL.
_FRACTIONS = (
    *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "logits_scaling", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit"),
    *("router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"),
    *("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
)
_SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "use_qk_norm"),
    *("output_router_logits", "use_mtp", "mtp_use_dedicated_embeddings", "seq_aux", "truncate"),
)
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(_FRACTIONS, ("a number", (int, float))),
    **dict.fromkeys(_SWITCHES, ("true or false", (bool,))),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), ("a list of strings", (list,))),
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers"), ("a list of whole numbers", (list,))),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "full_attention", "sliding_attention"), ("an object", (dict,))),
    **dict.fromkeys(("model_type", "hidden_act", "hidden_activation", "rope_type", "type"), ("a string", (str,))),
    "eos_token_id": ("a whole number or a list of whole numbers", (int, list)),
}
_NEVER_NULL = (
    *("rms_norm_eps", "max_position_embeddings", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("max_window_layers", "no_rope_layer_interval", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *DELTA_SIZES,
)


def check_types(config: dict[str, Any], keys: Iterable[str], file: str = "config.json") -> None:
    """Raise UserError if one of these keys of a file holds a value of the wrong type."""
    wrong = []
    for key in sorted(config.keys() & {*keys}):
        value, (words, types) = config[key], _TYPES.get(key, ("a whole number", (int,)))
        fits = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
        fits = fits or (value is None and key not in _NEVER_NULL)
        if fits and isinstance(value, list):
            item_type = str if "string" in words else int
            fits = all(type(item) is item_type for item in value)
        if not fits:
            wrong.append(f"{key} must be {words}, not {json.dumps(value)}")
    if wrong:
        raise UserError(f"in {file} {', '.join(wrong)}")
    layers = config.get("num_hidden_layers") or 0
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if config.get(key) and len(config[key]) < layers:
            raise UserError(f"{key} in config.json names {len(config[key])} of {layers} layers")


def find_family(config: dict[str, Any]) -> Family:
    """Return the row for a config.json. Raises UserError for an unknown family, and for keys that are not honoured."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"model_type {name!r} in config.json is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    check_types(config, (*HONOURED, *family.keys))
    known = {*HONOURED, *MEANINGLESS, *family.keys}
    wrong = {key for key, value in family.only.items() if config.get(key, value) not in (value, None)}
    # Private keys with text are notes of the library that wrote the file, such as _model_name_or_path.
    notes = {key for key, value in config.items() if key.startswith("_") and isinstance(value, str)}
    known |= {*family.only, *notes}
    ignored = sorted(wrong | {key for key, value in config.items() if key not in known and value})
    if ignored:
        not_honoured = ", ".join(f"{key} = {config[key]!r}" for key in ignored)
        raise UserError(f"{not_honoured} in config.json: the decoder does not honour that for model_type {name}")
    activation = config.get("hidden_activation") or config.get("hidden_act") or family.activation
    if activation != family.activation:
        raise UserError(f"hidden_act {activation!r} in config.json is not supported; supported: {family.activation}")
    return family


LENGTH = "original_max_position_embeddings"
# How the positions of an image's axes share the elements of a head.
_SECTIONS = ("mrope_section", "mrope_interleaved")
# The parameters of a rope_type beside theta.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "linear": ("factor",),
    "yarn": ("factor", LENGTH, "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
}


@dataclass(frozen=True)
class Scaling:
    """How a rope_type changes the rotary frequencies: as in llama3 or yarn (Peng et al. 2023), or linear, which divides
    positions by the factor. Each uses the fields that `SCALINGS` lists."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """Multiplies cosine and sine"""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0
    """DeepSeek multiplies scores by the square of `temperature`, which depends on this"""

    def temperature(self) -> float:
        return _temperature(self.factor, self.mscale_all_dim)

    def to_hf_config(self) -> dict[str, Any]:
        """Return the rope_parameters of a config.json, without theta."""
        return {"rope_type": self.rope_type} | {
            name: getattr(self, name) for name in SCALINGS[self.rope_type] if name != "mscale"
        }


@dataclass(frozen=True)
class Rope:
    """Rotary positions of some layers."""

    theta: float
    scaling: Scaling | None = None


def read_ropes(config: dict[str, Any]) -> tuple[tuple[Rope, Rope | None], float]:
    """Return ((rotary positions, those of windowed layers if they differ), share of a head that is rotated)."""
    # transformers 5 nests theta and scaling in rope_parameters, per layer type if they differ; 4 keeps them apart.
    nested = config.get("rope_parameters") or {}
    check_types(nested, ("full_attention", "sliding_attention"))
    theta = config.get("rope_theta") or 10000.0
    if "full_attention" in nested or "sliding_attention" in nested:
        full = nested.get("full_attention") or {}
        sliding = nested.get("sliding_attention") or {}
    else:
        given = [rope for rope in (nested, config.get("rope_scaling")) if rope]
        is_said = config.get("rope_scaling") is not FAMILIES[config["model_type"]].defaults.get("rope_scaling")
        if is_said and len({_rope(rope, theta, config) for rope in given}) > 1:
            # transformers 5 uses the second, without the first one's theta.
            raise UserError("rope_parameters and rope_scaling in config.json differ: keep one, and its rope_theta")
        full = given[0] if given else {}
        sliding = full
        if config["model_type"] in ("gemma3_text", "olmo3"):
            sliding = {"rope_theta": config.get("rope_local_base_freq") or theta}
    share = full.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if config.get("rotary_dim") and "partial_rotary_factor" not in full:
        share = config["rotary_dim"] / config["head_dim"]
    if share != 1.0 and config["model_type"] not in _PARTLY_TURNED:
        raise UserError(f"partial_rotary_factor = {share} in config.json is not supported for {config['model_type']}")
    full_rope, windowed = _rope(full, theta, config), _rope(sliding, theta, config)
    return (full_rope, None if windowed == full_rope else windowed), share


def _rope(parameters: dict[str, Any], theta: float, config: dict[str, Any]) -> Rope:
    check_types(parameters, {"rope_type", "type", "rope_theta", "partial_rotary_factor"}.union(*SCALINGS.values()))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # Positions of images have several axes, whose sections of a head text rotates by one position.
    kind = "default" if kind == "mrope" else kind
    if kind not in SCALINGS:
        raise UserError(f"rope_type {kind!r} in config.json is not supported; supported: {', '.join(SCALINGS)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SECTIONS, *SCALINGS[kind]}
    ignored = [f"{key} = {value!r}" for key, value in parameters.items() if key not in known and value is not None]
    if ignored and kind != "default":
        raise UserError(f"{', '.join(ignored)} in config.json: not honoured for rope_type {kind}")
    scaling = None
    if kind in ("yarn", "llama3"):
        # transformers prefers the outer value, as in Phi-3.
        outer = config.get(LENGTH) or parameters.get(LENGTH) or config.get("max_position_embeddings")
        parameters = {**parameters, LENGTH: outer}
    check_scaling(kind, parameters)
    if kind == "yarn":
        fields = [name for name in SCALINGS[kind] if name != "mscale" and parameters.get(name) is not None]
        given = {name: parameters[name] for name in fields} | {"attention_factor": _attention_factor(parameters)}
        scaling = Scaling(kind, **given)
    elif kind != "default":
        scaling = Scaling(kind, **{name: parameters[name] for name in SCALINGS[kind]})
    return Rope(parameters.get("rope_theta") or theta, scaling)


def check_scaling(kind: str, parameters: dict[str, Any]) -> None:
    """Raise UserError if rotary parameters lack what their kind computes with; the rest of yarn's have defaults."""
    needed = ("factor", LENGTH) if kind == "yarn" else SCALINGS[kind]
    lacking = [name for name in needed if parameters.get(name) is None]
    if lacking:
        raise UserError(
            f"rope_scaling of rope_type {kind} in config.json lacks {', '.join(lacking)}: take the published file"
        )


def _attention_factor(parameters: dict[str, Any]) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    factor, mscale, all_dim = (parameters.get(name, 0.0) for name in ("factor", "mscale", "mscale_all_dim"))
    return _temperature(factor, mscale) / _temperature(factor, all_dim) if mscale and all_dim else _temperature(factor)


def _temperature(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2). Sizes are in elements."""

    queries: int
    """Width of the vector that a token's queries are computed from; 0: they are computed from its hidden state"""
    keys: int
    """Width of the vector that a token's keys and values are computed from"""
    nope_dim: int
    """Width of the part of a head that has no position"""
    rope_dim: int
    """Width of the part of a head that is rotated; all heads share this part of a key"""
    values: int
    """Width of a head's value"""

    def projection_shapes(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """Weights [out, in] of the projections that compute queries, keys and values."""
        query = heads * (self.nope_dim + self.rope_dim)
        shapes = {"q_proj": (query, hidden)}
        if self.queries:
            shapes = {"q_a_proj": (self.queries, hidden), "q_b_proj": (query, self.queries)}
        joint = {"kv_a_proj_with_mqa": (self.keys + self.rope_dim, hidden)}
        return shapes | joint | {"kv_b_proj": (heads * (self.nope_dim + self.values), self.keys)}


def read_latent(config: dict[str, Any]) -> Latent | None:
    """Read the sizes of latent attention; None for families with ordinary keys and values."""
    if not config.get("kv_lora_rank"):
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = Latent(config.get("q_lora_rank") or 0, *(config[name] for name in names))
    if latent.values > latent.nope_dim + latent.rope_dim:
        raise UserError(f"v_head_dim = {latent.values} in config.json: values must be no wider than keys")
    return latent


def read_windows(config: dict[str, Any], family: Family) -> tuple[int, ...]:
    """Return the window of every layer, 0 for full attention; () if all layers have full attention."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window") or 0
    kinds = config.get("layer_types") or _layer_types(config, family, layers)
    switched = not config.get("use_sliding_window", True)
    unknown = sorted(set(kinds) - {"full_attention", "linear_attention" if family.delta else "sliding_attention"})
    if unknown:
        raise UserError(f"layer_types {', '.join(unknown)} in config.json: the decoder has no such attention")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])
    return () if switched or not window or not any(windows) else windows


def _layer_types(config: dict[str, Any], family: Family, layers: int) -> list[str]:
    sliding, full = "sliding_attention", "full_attention"
    name = config["model_type"]
    if family.full_every:
        every = config.get("sliding_window_pattern") or family.full_every
        return [full if (index + 1) % every == 0 else sliding for index in range(layers)]
    if name in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return [sliding if index >= first else full for index in range(layers)]
    if name == "smollm3":
        nope_layers = read_nope_layers(config)
        return [sliding if index in nope_layers else full for index in range(layers)]
    return [sliding if name in ("mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2") else full] * layers


def read_nope_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the layers without rotary positions."""
    if config["model_type"] != "smollm3":
        return ()
    layers, every = range(config["num_hidden_layers"]), config.get("no_rope_layer_interval", 4)
    if every < 1:
        raise UserError(f"no_rope_layer_interval in config.json must be 1 or more, not {every}")
    rotary = config.get("no_rope_layers") or [int((index + 1) % every != 0) for index in layers]
    return tuple(index for index in layers if not rotary[index])
