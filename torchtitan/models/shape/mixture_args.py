"""The experts of a decoder as data, and how a config.json describes them. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.errors import UserError

MISSING = -1
"""Stands for a token's experts if no engine has reported which ones computed it"""

# The names under which a config.json may hold the number of experts.
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True)
class ExpertFamily:
    """What a family fixes.

    score: the function of the router's logits. normalize: whether the chosen scores are divided by their sum; None:
    config.json decides. bias: a correction that affects which experts are chosen, but not their weights. block and
    projections: the names in checkpoint files of the feed-forward, and of an expert's gate, up and down.
    """

    score: Score = "softmax"
    normalize: bool | None = None
    bias: bool = False
    shared: bool = False
    size_key: str = "moe_intermediate_size"
    """The config.json key of an expert's width"""
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False
    """Files hold stacked experts, as in moe.StackedExperts"""
    shared_gate: bool = False
    """The shared expert, one, has a width of its own in config.json, and its output is gated by sigmoid(gate · x)"""


_MIXTRAL: dict[str, Any] = {
    "size_key": "intermediate_size",
    "block": "block_sparse_moe",
    "projections": ("w1", "w3", "w2"),
}
EXPERT_FAMILIES: dict[str, ExpertFamily] = {
    "qwen3_moe": ExpertFamily(),
    "mixtral": ExpertFamily(normalize=True, **_MIXTRAL),
    "minimax_m2": ExpertFamily(score="sigmoid", normalize=True, bias=True, **_MIXTRAL),
    "glm4_moe": ExpertFamily(score="sigmoid", bias=True, shared=True),
    "deepseek_v3": ExpertFamily(score="sigmoid", bias=True, shared=True),
    "qwen3_next": ExpertFamily(shared_gate=True),
    "qwen3_5_moe_text": ExpertFamily(normalize=True, shared_gate=True),
    "gpt_oss": ExpertFamily(score="softmax_of_chosen", size_key="intermediate_size", stacked=True),
}


@dataclass(frozen=True)
class ExpertArgs:
    """The experts of one model. Sizes in elements."""

    count: int
    per_token: int
    intermediate_size: int
    """Width of one expert"""
    score: Score = "softmax"
    normalize: bool = False
    scale: float = 1.0
    """Multiplies the sum over the chosen experts"""
    bias: bool = False
    groups: int = 1
    """Experts form this many groups, and are chosen only from the best `best_groups` of them"""
    best_groups: int = 1
    shared_intermediate_size: int = 0
    """Width of the shared expert, which every token passes; 0: there is none"""
    shared_gate: bool = False
    """See ExpertFamily"""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary feed-forward"""
    stacked: bool = False
    """See moe.StackedExperts for this and the next two fields"""
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def active_size(self) -> int:
        """Feed-forward columns that one token passes through."""
        return self.per_token * self.intermediate_size + self.shared_intermediate_size


def read_expert_args(family: str, config: dict[str, Any]) -> ExpertArgs | None:
    """Read the experts from a Hugging Face config.json; None for a dense family. Raises UserError for missing keys."""
    if family not in EXPERT_FAMILIES:
        return None
    fixed = EXPERT_FAMILIES[family]
    count = next((config[key] for key in COUNT_KEYS if config.get(key)), None)
    size = config.get(fixed.size_key)
    needed = {" or ".join(COUNT_KEYS): count, fixed.size_key: size}
    needed["num_experts_per_tok"] = config.get("num_experts_per_tok")
    lacking = [name for name, value in needed.items() if not value]
    if count is None or size is None or lacking:
        raise UserError(f"config.json lacks {', '.join(lacking)}")
    shared = 0
    if fixed.shared:
        shared = size * (config.get("n_shared_experts") or 0)
    if fixed.shared_gate:
        shared = config["shared_expert_intermediate_size"]
    normalize = fixed.normalize
    if normalize is None:
        normalize = bool(config.get("norm_topk_prob"))
    return ExpertArgs(
        count=count,
        per_token=config["num_experts_per_tok"],
        intermediate_size=size,
        score=fixed.score,
        normalize=normalize,
        scale=config.get("routed_scaling_factor") or 1.0,
        bias=fixed.bias,
        groups=config.get("n_group") or 1,
        best_groups=config.get("topk_group") or 1,
        shared_intermediate_size=shared,
        shared_gate=fixed.shared_gate,
        dense_layers=_dense_layers(config),
        stacked=fixed.stacked,
        alpha=config.get("swiglu_alpha", 1.702),
        limit=config.get("swiglu_limit", 7.0),
    )


def _dense_layers(config: dict[str, Any]) -> tuple[int, ...]:
    layers = range(config["num_hidden_layers"])
    if config.get("mlp_layer_types"):
        return tuple(layer for layer in layers if config["mlp_layer_types"][layer] != "sparse")
    first, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    named = config.get("mlp_only_layers") or []
    return tuple(layer for layer in layers if layer < first or layer in named or (layer + 1) % step)


def expert_config(family: str, args: ExpertArgs, layers: int) -> dict[str, Any]:
    """Return the config.json entries for the experts, under the names that transformers 4 and 5 and vLLM read."""
    fixed = EXPERT_FAMILIES[family]
    config: dict[str, Any] = {"num_experts_per_tok": args.per_token, "output_router_logits": False}
    config |= dict.fromkeys(COUNT_KEYS if fixed.score == "sigmoid" else COUNT_KEYS[:2], args.count)
    if fixed.size_key == "intermediate_size":
        return config | ({} if fixed.stacked else {"sliding_window": None})
    config |= {"moe_intermediate_size": args.intermediate_size, "norm_topk_prob": args.normalize}
    if fixed.shared_gate:
        config["shared_expert_intermediate_size"] = args.shared_intermediate_size
    if fixed.score == "softmax":
        return config | {"decoder_sparse_step": 1, "mlp_only_layers": list(args.dense_layers)}
    kinds = ["dense" if layer in args.dense_layers else "sparse" for layer in range(layers)]
    return config | {
        # transformers leaves these out, but vLLM and SGLang need them.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "mlp_layer_types": kinds,
        "first_k_dense_replace": len(args.dense_layers),
        "n_group": args.groups,
        "topk_group": args.best_groups,
        "routed_scaling_factor": args.scale,
        "n_shared_experts": args.shared_intermediate_size // args.intermediate_size,
    }
