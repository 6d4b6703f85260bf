"""One matrix product for query, key and value, and one for gate and up: fewer, larger kernels for generation.

The separate weights become views into one storage, so names, loading and in-place copies stay the same, and both forms
always compute with the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.decoder import MLP, Attention, Decoder
from torchtitan.models.layers.elementwise import RotaryTables, rms_norm


def _share_storage(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate parameters along their first dimension and make each a view of the result."""
    joint = torch.cat([parameter.detach() for parameter in parameters])
    pieces = joint.split([parameter.shape[0] for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece
    return joint


class FusedQueryKeyValue:
    """x [T, hidden], rotary tables -> query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, D], ready for attention.

    This is not a module: the parameters stay registered where they were.
    """

    def __init__(self, attention: Attention):
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.weight = _share_storage([projection.weight for projection in projections])
        self.bias = None
        if attention.q_proj.bias is not None:
            self.bias = _share_storage([projection.bias for projection in projections])
        self.head_dim = attention.head_dim
        query_heads, key_heads, _ = (projection.out_features // attention.head_dim for projection in projections)
        self.query_heads, self.rotated = query_heads, query_heads + key_heads
        self.attention = attention
        self.norms: torch.Tensor | None = None
        if attention.q_norm is not None and attention.k_norm is not None:
            self.norms = _share_storage([attention.q_norm.weight, attention.k_norm.weight]).view(2, self.head_dim)
            self.eps, self.zero = attention.q_norm.eps, attention.q_norm.zero
            # Which of the two norms applies to each head.
            kinds = torch.tensor([0] * query_heads + [1] * key_heads)
            self.norm_of_head = kinds.to(self.norms.device)

    def __call__(self, x: torch.Tensor, rotary: RotaryTables | None) -> tuple[torch.Tensor, ...]:
        heads = F.linear(x, self.weight, self.bias).unflatten(-1, (-1, self.head_dim))
        rotated_heads = heads[:, : self.rotated]
        if self.norms is not None:
            norms = self.norms + 1 if self.zero else self.norms
            rotated_heads = rms_norm(rotated_heads, norms.index_select(0, self.norm_of_head), self.eps)
        rotated_heads = self.attention.apply_rotary(rotated_heads, rotary)
        return rotated_heads[:, : self.query_heads], rotated_heads[:, self.query_heads :], heads[:, self.rotated :]


class FusedGateUp:
    """x [T, hidden] -> the MLP's activated gate and up [T, intermediate]."""

    def __init__(self, mlp: MLP):
        self.activate = mlp.activate
        self.weight = _share_storage([mlp.gate_proj.weight, mlp.up_proj.weight])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.weight).chunk(2, dim=-1)
        return self.activate(gate, up)


def _blocks(policy: Decoder) -> list[Attention | MLP]:
    """The blocks that can run with fused projections."""
    return [module for module in policy.model.modules() if isinstance(module, Attention | MLP) and _joined(module)]


def _joined(block: Attention | MLP) -> list[nn.Linear]:
    """Projections that one product can replace: separate ones whose outputs go straight to heads or activation."""
    if isinstance(block, Attention):
        apart = block.joint_sizes is None and not block.whole_norm and not block.gated
        return [block.q_proj, block.k_proj, block.v_proj] if apart else []
    return [] if block.joint or block.down_proj.bias is not None else [block.gate_proj, block.up_proj]


def _fuse(block: Attention | MLP) -> None:
    if isinstance(block, Attention):
        block.fused = FusedQueryKeyValue(block)
    else:
        block.fused = FusedGateUp(block)


def _same_bits(projections: list[nn.Linear], rows: int) -> bool:
    """Whether one product of few `rows` equals separate products of many rows, to the last bit.

    A matrix kernel may split its sums by the shape of the whole product. In half precision and on a GPU, equal bits are
    not promised, so the check is skipped.
    """
    weight = projections[0].weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return True
    x = torch.randn(256, weight.shape[1], generator=torch.Generator().manual_seed(0))
    bias = None
    if projections[0].bias is not None:
        bias = torch.cat([projection.bias for projection in projections])
    joint = F.linear(x[:rows], torch.cat([projection.weight for projection in projections]), bias)
    return torch.equal(joint, torch.cat([projection(x)[:rows] for projection in projections], -1))


@torch.no_grad()
def fuse_projections(policy: Decoder) -> None:
    """Make `policy` (whole, not sharded) run with fused projections from now on, where they compute the same bits.

    For inference only. Weights may be overwritten in place afterwards; replacing a parameter or moving the policy
    undoes the sharing.
    """
    rows = policy.invariant_sizes().rows
    fits: dict[tuple[torch.Size, ...], bool] = {}
    for block in _blocks(policy):
        shapes = tuple(projection.weight.shape for projection in _joined(block))
        if shapes not in fits:
            fits[shapes] = _same_bits(_joined(block), rows)
        if fits[shapes]:
            _fuse(block)


def joint_weights(policy: Decoder) -> Iterator[tuple[object, str]]:
    """Yield (owner, attribute) of the joint tensors of all fused blocks, which share their memory with parameters."""
    for block in _blocks(policy):
        for attribute in ("weight", "bias", "norms"):
            if getattr(block.fused, attribute, None) is not None:
                yield block.fused, attribute


def take_apart(policy: Decoder) -> list[bool]:
    """Drop the fused weights before all parameters move to other memory; call `fuse_again` afterwards. Returns which
    blocks were fused."""
    fused = [block.fused is not None for block in _blocks(policy)]
    for block in _blocks(policy):
        block.fused = None
    return fused


@torch.no_grad()
def fuse_again(policy: Decoder, fused: list[bool]) -> None:
    """Fuse the same blocks again; the weights' values do not matter."""
    for block, was_fused in zip(_blocks(policy), fused, strict=True):
        if was_fused:
            _fuse(block)


@contextmanager
def separate_projections(policy: Decoder) -> Iterator[None]:
    """Run `policy` with the trainer's own products inside the block."""
    fused = [(block, block.fused) for block in _blocks(policy)]
    take_apart(policy)
    try:
        yield
    finally:
        for block, function in fused:
            block.fused = function
