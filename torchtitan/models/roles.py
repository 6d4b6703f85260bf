"""What a parameter is for, which decides how an optimizer treats it. Its shape does not tell: the biases of stacked
experts have two dimensions, and their matrices three."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

from torch import nn

from torchtitan.models.decoder import MLP, Attention
from torchtitan.models.layers.gated_delta import GatedDeltaNet
from torchtitan.models.layers.mixture import StackedExperts

# Modules whose weights multiply a token, or a short window, and not an activation.
TOKEN_MODULES = {"embed_tokens", "lm_head"}


class Role(Enum):
    """vector: norms, biases and sinks, which do not decay. matrix: what multiplies activations, alone or in a stack
    [..., rows, columns], for which Muon is meant. other: embeddings, the head and convolutions."""

    VECTOR = "vector"
    MATRIX = "matrix"
    OTHER = "other"


def role_of(policy: nn.Module, name: str) -> Role:
    """The role of the policy's parameter of this name, also in layers by transformers."""
    owner, _, leaf = name.rpartition(".")
    module = policy.get_submodule(owner)
    if policy.get_parameter(name).dim() < 2 or leaf.endswith("bias") or "norm" in type(module).__name__.lower():
        return Role.VECTOR
    looks_up = isinstance(module, nn.Embedding) or not TOKEN_MODULES.isdisjoint(owner.split("."))
    return Role.OTHER if looks_up or isinstance(module, nn.modules.conv._ConvNd) else Role.MATRIX


def matrices_of(policy: nn.Module, name: str) -> list[tuple[Sequence[int], range]]:
    """The rows and columns of each matrix in the policy's parameter of this name, which has the role of one or of a
    stack of them: several where a family stores query, key and value, or gate and up, as one.

    Rows are ascending. They are a range, except where a family stores the parts of one head after those of another.
    """
    *_, rows, columns = policy.get_parameter(name).shape
    owner, _, leaf = name.removesuffix(".weight").removesuffix(".lora_B").rpartition(".")
    module = policy.get_submodule(owner)
    if isinstance(module, StackedExperts) and leaf == "gate_up_proj":
        return [(range(rows), range(first, columns, 2)) for first in range(2)]
    sizes, heads = _parts(module, leaf, rows)
    ends = itertools.accumulate(sizes)
    apart = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if heads == 1:
        return [(part, range(columns)) for part in apart]
    starts = range(0, rows, sum(sizes))
    matrices: list[tuple[Sequence[int], range]] = []
    for part in apart:
        of_all_heads = [start + row for start in starts for row in part]
        matrices.append((of_all_heads, range(columns)))
    return matrices


def _parts(module: nn.Module, leaf: str, rows: int) -> tuple[tuple[int, ...], int]:
    """(The rows of each matrix that is stored here, so many times): more than once where each head has some of all.

    rows: of the whole parameter, of which this rank may hold a part.
    """
    sizes: tuple[int, ...] = (rows,)
    if isinstance(module, Attention) and leaf == "qkv_proj" and module.joint_sizes is not None:
        sizes = module.joint_sizes
    elif isinstance(module, Attention) and leaf == "q_proj" and module.gated:
        sizes = (module.head_dim, module.head_dim)
    elif isinstance(module, MLP) and leaf == "gate_up_proj":
        sizes = (rows // 2, rows // 2)
    elif isinstance(module, GatedDeltaNet) and leaf in (joint := module.sizes.parts):
        sizes = joint[leaf]
        if not module.sizes.joint:
            # Of all heads, not of those that are this rank's.
            sizes = tuple(size * rows // sum(sizes) for size in sizes)
    return sizes, rows // sum(sizes)
