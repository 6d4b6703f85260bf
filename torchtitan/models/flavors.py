"""Public model shapes as data, by family and size. No torch here: configuration checks read this.

A checkpoint's own config.json always decides where there is one; the table serves planning and training from scratch.
"""

from __future__ import annotations

from typing import Any

from torchtitan.errors import UserError
from torchtitan.models.expert_args import ExpertArgs
from torchtitan.models.families import Scaling
from torchtitan.models.model_args import ModelArgs


def _shape(family: str, vocabulary: int, context: int, *sizes: int, **others: Any) -> ModelArgs:
    """sizes: hidden, intermediate, layers, heads, key-value heads. others: further fields; without a head_dim the heads
    share the hidden size."""
    hidden, intermediate, layers, heads, key_value_heads = sizes
    sized = {"vocab_size": vocabulary, "max_position_embeddings": context, "head_dim": hidden // heads}
    return ModelArgs(
        family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        **sized | others,
    )


def _debug(family: str, **others: Any) -> ModelArgs:
    """A shape of about a million parameters for tests and first runs."""
    return _shape(family, 2048, 2048, 128, 384, 4, 4, 2, **others)


def _llama3(factor: float, *sizes: int, tied: bool = False) -> ModelArgs:
    scaling, tokens = Scaling("llama3", factor, 8192), {"bos_token_id": 128000, "eos_token_ids": (128001,)}
    rotary = {"rope_theta": 500000.0, "rope_scaling": scaling}
    return _shape("llama", 128256, 131072, *sizes, 8, rms_norm_eps=1e-5, tie_word_embeddings=tied, **rotary, **tokens)


def _qwen2(context: int, *sizes: int, tied: bool = False, eps: float = 1e-6, theta: float = 1000000.0) -> ModelArgs:
    # The larger models pad the vocabulary further.
    vocabulary, tokens = 151936 if tied else 152064, {"bos_token_id": 151643, "eos_token_ids": (151643,)}
    others = {"rms_norm_eps": eps, "rope_theta": theta, "tie_word_embeddings": tied}
    return _shape("qwen2", vocabulary, context, *sizes, **others, **tokens)


def _qwen3(*sizes: int, tied: bool = False, family: str = "qwen3", experts: ExpertArgs | None = None) -> ModelArgs:
    tokens = {"bos_token_id": 151643, "eos_token_ids": (151645,)}
    others = {"head_dim": 128, "rope_theta": 1000000.0, "tie_word_embeddings": tied, "experts": experts}
    return _shape(family, 151936, 40960, *sizes, **others, **tokens)


def _qwen3_moe(expert: int, *sizes: int) -> ModelArgs:
    return _qwen3(*sizes, family="qwen3_moe", experts=ExpertArgs(128, 8, expert, normalize=True))


def _gpt_oss(layers: int, experts: int) -> ModelArgs:
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts, "vocab_size": 201088, "hidden_size": 2880}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "eos_token_id": 200002}
    shape = {**sizes, **heads, "intermediate_size": 2880, "max_position_embeddings": 131072}
    return ModelArgs.from_hf_config({"model_type": "gpt_oss", "tie_word_embeddings": False, **shape})


FLAVORS: dict[str, dict[str, ModelArgs]] = {
    "llama3": {
        "debug": _debug("llama", rope_theta=500000.0, rope_scaling=Scaling("llama3", 8.0, 1024)),
        "3.2-1B": _llama3(32.0, 2048, 8192, 16, 32, tied=True),
        "3.2-3B": _llama3(32.0, 3072, 8192, 28, 24, tied=True),
        "3.1-8B": _llama3(8.0, 4096, 14336, 32, 32),
        "3.1-70B": _llama3(8.0, 8192, 28672, 80, 64),
    },
    "qwen2": {
        "debug": _debug("qwen2", tie_word_embeddings=True),
        "2.5-0.5B": _qwen2(32768, 896, 4864, 24, 14, 2, tied=True),
        "2.5-1.5B": _qwen2(131072, 1536, 8960, 28, 12, 2, tied=True),
        "2.5-3B": _qwen2(32768, 2048, 11008, 36, 16, 2, tied=True),
        "2.5-7B": _qwen2(131072, 3584, 18944, 28, 28, 4),
        "2.5-14B": _qwen2(131072, 5120, 13824, 48, 40, 8, eps=1e-5),
        "2.5-32B": _qwen2(131072, 5120, 27648, 64, 40, 8, eps=1e-5),
        "2.5-72B": _qwen2(131072, 8192, 29568, 80, 64, 8, eps=1e-5),
        "2.5-Math-1.5B": _qwen2(4096, 1536, 8960, 28, 12, 2, tied=True, theta=10000.0),
        "2.5-Math-7B": _qwen2(4096, 3584, 18944, 28, 28, 4, theta=10000.0),
        "2.5-Math-72B": _qwen2(4096, 8192, 29568, 80, 64, 8, eps=1e-5, theta=10000.0),
    },
    "qwen3": {
        "debug": _debug("qwen3", tie_word_embeddings=True),
        "0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
        "1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
        "4B": _qwen3(2560, 9728, 36, 32, 8, tied=True),
        "8B": _qwen3(4096, 12288, 36, 32, 8),
        "14B": _qwen3(5120, 17408, 40, 40, 8),
        "32B": _qwen3(5120, 25600, 64, 64, 8),
    },
    "qwen3_moe": {
        "debug": _debug("qwen3_moe", experts=ExpertArgs(8, 2, 96, normalize=True)),
        "30B-A3B": _qwen3_moe(768, 2048, 6144, 48, 32, 4),
        "235B-A22B": _qwen3_moe(1536, 4096, 12288, 94, 64, 4),
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
