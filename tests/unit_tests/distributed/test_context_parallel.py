"""Attention of tokens that are spread over ranks against attention of the whole pack on one."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.distributed_launcher import run_distributed
from torchtitan.distributed.collectives import ContextAttention, ContextParallel
from torchtitan.models.layers.attention import PackedAttention, PackedLayout

LENGTHS = [5, 17, 2, 9]
# Query and key heads: divided, more of them than ranks, repeated.
HEADS = [(6, 3), (4, 2), (3, 1)]


def attend_with_all() -> list[dict[str, float]]:
    return [attend_in_parts(*heads) for heads in HEADS]


def attend_in_parts(heads: int, key_heads: int) -> dict[str, float]:
    """Largest differences of this rank's part, forward and backward, and of what is gathered from all parts."""
    assert dist.group.WORLD is not None
    context = ContextParallel(dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)
    tokens = -(-sum(LENGTHS) // context.ranks) * context.ranks
    shapes = [(tokens, heads, 8), (tokens, key_heads, 8), (tokens, key_heads, 8), (heads,)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    by = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    layer = SimpleNamespace(index=0, window=6, scale=0.3, softcap=0.0, sinks=whole[3])
    attend = PackedAttention(PackedLayout(LENGTHS))
    expected = attend(layer, *whole[:3])
    gradients = torch.autograd.grad(expected, whole, by)
    part = context.part(tokens)
    parts = [x.detach()[part].clone().requires_grad_() for x in whole[:3]]
    out = ContextAttention(attend, context)(layer, *parts)
    found = torch.autograd.grad(out, [*parts, whole[3]], by[part])
    # Every rank has the gradient of its heads' sinks.
    sinks = found[3].clone()
    dist.all_reduce(sinks)
    rows = torch.tensor([0, 3, 4, 19, 20, 32])
    bounds = context.bounds(rows, tokens)
    own_rows = rows[bounds[context.rank] : bounds[context.rank + 1]].double().requires_grad_()
    gathered = context.gather(own_rows, bounds)
    gathered.square().sum().backward()
    assert own_rows.grad is not None
    return {
        "out": float((out - expected[part]).abs().max()),
        "gradient": max(float((f - g[part]).abs().max()) for f, g in zip(found[:3], gradients[:3], strict=True)),
        "sinks": float((sinks - gradients[3]).abs().max()),
        "gathered": float((gathered - rows).abs().max()),
        "of_gathered": float((own_rows.grad - 2 * own_rows).abs().sum()),
    }


def test_three_ranks_attend_as_one() -> None:
    for rank in run_distributed("tests.unit_tests.distributed.test_context_parallel:attend_with_all", 3):
        for heads, found in zip(HEADS, rank, strict=True):
            assert max(found.values()) < 1e-12, (heads, found)
