"""Public model shapes as data, by family and size. No torch here: configuration checks read this.

A checkpoint's own config.json always decides where there is one; the table serves planning and training from scratch.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.errors import UserError
from torchtitan.models.expert_args import ExpertArgs
from torchtitan.models.families import RopeScaling
from torchtitan.models.model_args import ModelArgs


def _debug(family: str, **switches: object) -> ModelArgs:
    """A shape of about a million parameters for tests and first runs."""
    shape: dict[str, object] = {
        "family": family,
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        **switches,
    }
    return ModelArgs(**shape)  # type: ignore[arg-type]


def _llama3(
    hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, rope_factor: float, tied: bool
) -> ModelArgs:
    return ModelArgs(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(rope_factor, 1.0, 4.0, 8192),
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        bos_token_id=128000,
        eos_token_ids=(128001,),
    )


def _gpt_oss(layers: int, experts: int) -> ModelArgs:
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts, "vocab_size": 201088, "hidden_size": 2880}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "eos_token_id": 200002}
    shape = {**sizes, **heads, "intermediate_size": 2880, "max_position_embeddings": 131072}
    return ModelArgs.from_hf_config({"model_type": "gpt_oss", "tie_word_embeddings": False, **shape})


def _qwen2(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    key_value_heads: int,
    context: int,
    tied: bool = False,
    eps: float = 1e-6,
    theta: float = 1000000.0,
) -> ModelArgs:
    return ModelArgs(
        family="qwen2",
        # The larger models pad the vocabulary further.
        vocab_size=151936 if tied else 152064,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=hidden // heads,
        rms_norm_eps=eps,
        rope_theta=theta,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        bos_token_id=151643,
        eos_token_ids=(151643,),
    )


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool = False) -> ModelArgs:
    return ModelArgs(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
        bos_token_id=151643,
        eos_token_ids=(151645,),
    )


def _qwen3_moe(hidden: int, expert: int, layers: int, heads: int, key_value_heads: int) -> ModelArgs:
    return replace(
        _qwen3(hidden, 3 * hidden, layers, heads),
        family="qwen3_moe",
        num_key_value_heads=key_value_heads,
        experts=ExpertArgs(count=128, per_token=8, intermediate_size=expert, normalize=True),
    )


FLAVORS: dict[str, dict[str, ModelArgs]] = {
    "llama3": {
        "debug": _debug("llama", rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 1024)),
        "3.2-1B": _llama3(2048, 8192, 16, 32, 64, 32.0, tied=True),
        "3.2-3B": _llama3(3072, 8192, 28, 24, 128, 32.0, tied=True),
        "3.1-8B": _llama3(4096, 14336, 32, 32, 128, 8.0, tied=False),
        "3.1-70B": _llama3(8192, 28672, 80, 64, 128, 8.0, tied=False),
    },
    "qwen2": {
        "debug": _debug("qwen2", tie_word_embeddings=True),
        "2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 32768, tied=True),
        "2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 131072, tied=True),
        "2.5-3B": _qwen2(2048, 11008, 36, 16, 2, 32768, tied=True),
        "2.5-7B": _qwen2(3584, 18944, 28, 28, 4, 131072),
        "2.5-14B": _qwen2(5120, 13824, 48, 40, 8, 131072, eps=1e-5),
        "2.5-32B": _qwen2(5120, 27648, 64, 40, 8, 131072, eps=1e-5),
        "2.5-72B": _qwen2(8192, 29568, 80, 64, 8, 131072, eps=1e-5),
        "2.5-Math-1.5B": _qwen2(1536, 8960, 28, 12, 2, 4096, tied=True, theta=10000.0),
        "2.5-Math-7B": _qwen2(3584, 18944, 28, 28, 4, 4096, theta=10000.0),
        "2.5-Math-72B": _qwen2(8192, 29568, 80, 64, 8, 4096, eps=1e-5, theta=10000.0),
    },
    "qwen3": {
        "debug": _debug("qwen3", tie_word_embeddings=True),
        "0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
        "1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
        "4B": _qwen3(2560, 9728, 36, 32, tied=True),
        "8B": _qwen3(4096, 12288, 36, 32),
        "14B": _qwen3(5120, 17408, 40, 40),
        "32B": _qwen3(5120, 25600, 64, 64),
    },
    "qwen3_moe": {
        "debug": _debug("qwen3_moe", experts=ExpertArgs(8, 2, 96, normalize=True)),
        "30B-A3B": _qwen3_moe(2048, 768, 48, 32, 4),
        "235B-A22B": _qwen3_moe(4096, 1536, 94, 64, 4),
    },
    "gpt_oss": {"20B": _gpt_oss(24, 32), "120B": _gpt_oss(36, 128)},
}


def find_flavor(name: str, flavor: str) -> ModelArgs:
    """The shape of `flavor` in family `name` (such as llama3). Raises UserError with what is allowed.

    With the name `auto` the flavor alone must tell the family.
    """
    families = list(FLAVORS) if name == "auto" else [name]
    if not set(families) <= set(FLAVORS):
        raise UserError(f"model.name = {name!r}: allowed are auto, {', '.join(FLAVORS)}")
    owners = [family for family in families if flavor in FLAVORS[family]]
    if len(owners) > 1:
        raise UserError(f"model.flavor = {flavor!r} exists in {', '.join(owners)}: set model.name to one of them")
    if not owners:
        known = ", ".join(known for family in families for known in FLAVORS[family])
        raise UserError(f"model.flavor = {flavor!r} is not known for model.name = {name!r}; known: {known}")
    return FLAVORS[owners[0]][flavor]
