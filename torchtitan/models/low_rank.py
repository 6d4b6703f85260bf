"""What a low-rank adapter is called and what it adds to its module's weight; see lora.py. Also for processes without a
model of ours, such as workers of other engines."""

from __future__ import annotations

import torch

FACTOR_A, FACTOR_B = "lora_A.weight", "lora_B.weight"
ALPHA = "lora_alpha"
"""Under this name alpha is published beside the factors: its sum is alpha"""
BASE_BITS = "lora_base_bits"
"""Under this name, where it is not 16: in how many bits the base is held that the factors were trained on"""


def is_factor(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((FACTOR_A, FACTOR_B))


def low_rank_product(scale: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """scale · B A in fp32 (float64 where the factors are): what an adapter adds to its module's weight [out, in]."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return scale * (b.to(wide) @ a.to(wide))
