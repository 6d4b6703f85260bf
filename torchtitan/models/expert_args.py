"""The shape of a mixture of experts as data: what distinguishes the families. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.errors import UserError

MISSING = -1
"""In place of a token's experts: no engine has said which ones computed it"""

# Under which of these names a config.json holds the number of experts.
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True)
class ExpertFamily:
    """What a family fixes.

    score: what becomes of the router's logits. normalize: whether the chosen scores are divided by their sum; None:
    config.json says. bias: a correction that helps to choose and does not weigh.
    block and projections: what checkpoint files call the feed-forward, and an expert's gate, up and down.
    """

    score: Score = "softmax"
    normalize: bool | None = None
    bias: bool = False
    shared: bool = False
    size_key: str = "moe_intermediate_size"
    """Where config.json holds the width of an expert"""
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False
    """Files hold stacks, as moe.StackedExperts has them"""


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
    "gpt_oss": ExpertFamily(score="softmax_of_chosen", size_key="intermediate_size", stacked=True),
}


@dataclass(frozen=True)
class ExpertArgs:
    """The experts of one model. Sizes in elements."""

    count: int
    per_token: int
    intermediate_size: int
    """Of one expert"""
    score: Score = "softmax"
    normalize: bool = False
    scale: float = 1.0
    """Of what all chosen experts add up to"""
    bias: bool = False
    groups: int = 1
    """The experts form so many groups, of which only the best `best_groups` are chosen from"""
    best_groups: int = 1
    shared_intermediate_size: int = 0
    """Of the expert that every token passes; 0: there is none"""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary feed-forward"""
    stacked: bool = False
    """See moe.StackedExperts, as the next two"""
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def active_size(self) -> int:
        """Feed-forward columns that one token passes."""
        return self.per_token * self.intermediate_size + self.shared_intermediate_size


def read_expert_args(family: str, config: dict[str, Any]) -> ExpertArgs | None:
    """The experts in a Hugging Face config.json; None for a dense family. Raises UserError for what is missing."""
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
    return ExpertArgs(
        count=count,
        per_token=config["num_experts_per_tok"],
        intermediate_size=size,
        score=fixed.score,
        normalize=bool(config.get("norm_topk_prob")) if fixed.normalize is None else fixed.normalize,
        scale=config.get("routed_scaling_factor") or 1.0,
        bias=fixed.bias,
        groups=config.get("n_group") or 1,
        best_groups=config.get("topk_group") or 1,
        shared_intermediate_size=size * (config.get("n_shared_experts") or 0) if fixed.shared else 0,
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
    """What a config.json says of the experts, under the names that transformers 4 and 5 and vLLM read."""
    fixed = EXPERT_FAMILIES[family]
    config: dict[str, Any] = {"num_experts_per_tok": args.per_token, "output_router_logits": False}
    config |= dict.fromkeys(COUNT_KEYS if fixed.score == "sigmoid" else COUNT_KEYS[:2], args.count)
    if fixed.size_key == "intermediate_size":
        return config | ({} if fixed.stacked else {"sliding_window": None})
    config |= {"moe_intermediate_size": args.intermediate_size, "norm_topk_prob": args.normalize}
    if fixed.score == "softmax":
        return config | {"decoder_sparse_step": 1, "mlp_only_layers": list(args.dense_layers)}
    kinds = ["dense" if layer in args.dense_layers else "sparse" for layer in range(layers)]
    return config | {
        # transformers leaves out what vLLM and SGLang need to be told.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "mlp_layer_types": kinds,
        "first_k_dense_replace": len(args.dense_layers),
        "n_group": args.groups,
        "topk_group": args.best_groups,
        "routed_scaling_factor": args.scale,
        "n_shared_experts": args.shared_intermediate_size // args.intermediate_size,
    }


def names_in_files(family: str, args: ExpertArgs | None, name: str) -> list[tuple[str, int | None]]:
    """What checkpoint files, engines and weight synchronisation call a parameter of ours, the one rule for all of them:
    [(name, None)], or for a stack of experts the name of each, with its place along the stack's first dimension."""
    if args is None:
        return [(name, None)]
    fixed = EXPERT_FAMILIES[family]
    if fixed.stacked:
        return [(name.replace(".mlp.gate.", ".mlp.router."), None)]
    name = name.replace(".mlp.", f".{fixed.block}.")
    if fixed.block != "mlp":
        name = name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
    before, stacked, projection = name.partition(".experts.")
    if not stacked:
        return [(name, None)]
    projection, _, leaf = projection.partition(".")
    renamed = dict(zip(("gate_proj", "up_proj", "down_proj"), fixed.projections, strict=True))[projection]
    return [(f"{before}.experts.{expert}.{renamed}.{leaf}", expert) for expert in range(args.count)]
