"""What a parameter is for, which decides how an optimizer treats it. Its shape does not tell: the biases of stacked
experts have two dimensions, and their matrices three."""

from __future__ import annotations

from enum import Enum

from torch import nn

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
