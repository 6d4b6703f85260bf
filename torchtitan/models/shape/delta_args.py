"""The sizes of Gated DeltaNet layers, and how a config.json describes them. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.errors import UserError
from torchtitan.models.shape.families import DELTA_SIZES, Family

FULL = "full_attention"
# Tokens that are computed together, see delta_rule.py.
CHUNK = 64


@dataclass(frozen=True)
class Delta:
    """Gated DeltaNet layers, see models/layers/gated_delta.py. Sizes are in elements."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """How many tokens the convolution covers"""
    joint: bool
    """See Family.delta"""

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Widths of what projections that are stored as one compute side by side: query, key and value, and if `joint`
        of each key head its query, key, values and the values' gates, and its b and a."""
        share = self.value_heads // self.key_heads
        keys, values = self.key_dim, share * self.value_dim
        if self.joint:
            return {"in_proj_qkvz": (keys, keys, values, values), "in_proj_ba": (share, share)}
        return {"in_proj_qkv": (self.key_heads * keys, self.key_heads * keys, self.key_heads * values)}

    def projection_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Weights [out, in] of a layer's projections."""
        values, heads = self.value_heads * self.value_dim, self.value_heads
        widths = {"in_proj_qkv": self.channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        if self.joint:
            widths = {"in_proj_qkvz": self.channels + values, "in_proj_ba": 2 * heads}
        return {name: (width, hidden) for name, width in widths.items()} | {"out_proj": (hidden, values)}


def read_delta(config: dict[str, Any], family: Family) -> Delta | None:
    """Read the Gated DeltaNet layers; None for families without any."""
    if not family.delta:
        return None
    layers, every = config["num_hidden_layers"], config["full_attention_interval"]
    kinds = config.get("layer_types")
    if kinds:
        linear = tuple(index for index in range(layers) if kinds[index] != FULL)
    else:
        linear = tuple(index for index in range(layers) if index % every != every - 1)
    keys, values, key_dim, value_dim, kernel = (config[name] for name in DELTA_SIZES if name.startswith("linear"))
    if values % keys:
        raise UserError(f"linear_num_key_heads = {keys} in config.json must divide linear_num_value_heads = {values}")
    if len(linear) == layers:
        raise UserError("layer_types in config.json: the decoder needs a layer with full attention")
    return Delta(linear, keys, values, key_dim, value_dim, kernel, family.delta == "joint")
