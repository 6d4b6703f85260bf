"""Context parallelism: every rank of a group has an equal part of a pack's tokens, and for attention some of the heads.

Around attention tokens are exchanged for heads and back (Ulysses, Jacobs et al. 2023), so attention itself sees whole
sequences: windows, sinks and kernels are what they are on one rank, and ranks have the same work whatever the lengths.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd

from torchtitan.distributed.collectives import gather_parts


class _Gather(torch.autograd.Function):
    """x [n_i, ...] of every rank, one after another. A rank's gradient is its own: all do the same with the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return torch.cat(gather_parts(x, sizes, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[ctx.own], None, None, None


class ContextParallel:
    """This rank's place among those that share a pack."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def part(self, tokens: int) -> slice:
        """This rank's of a pack's tokens, which the ranks divide."""
        each = tokens // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def bounds(self, rows: torch.Tensor, tokens: int) -> list[int]:
        """Where in the ascending positions `rows` each rank's part of `tokens` begins; [ranks + 1]."""
        first = torch.arange(self.ranks + 1, device=rows.device) * (tokens // self.ranks)
        return torch.searchsorted(rows, first).tolist()

    def gather(self, x: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """What the ranks have of every row, whole on each. A gradient comes back to the rank that it is of."""
        sizes = [end - start for start, end in itertools.pairwise(bounds)]
        return _Gather.apply(x, sizes, self.rank, self.group)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens of this rank, heads, D] -> [all tokens, heads of this rank, D]."""
        parts = x.unflatten(1, (self.ranks, -1)).movedim(1, 0).contiguous()
        return all_to_all_single_autograd(parts, None, None, self.group).flatten(0, 1)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The way back."""
        parts = x.unflatten(0, (self.ranks, -1)).contiguous()
        return all_to_all_single_autograd(parts, None, None, self.group).movedim(0, 1).flatten(1, 2)


class ContextAttention:
    """Attention of tokens that are spread over ranks, through one of whole packs: [tokens of this rank, heads, D] each.

    Key heads are repeated until the ranks divide them. Where the ranks do not divide q's heads, heads of zeros are
    added to both, which cost at most one head per rank.
    """

    def __init__(self, attend: Any, context: ContextParallel):
        self.attend, self.context = attend, context
        self.cumulative, self.bounds = attend.cumulative, attend.bounds

    def __call__(self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ranks, heads, key_heads = self.context.ranks, q.shape[1], k.shape[1]
        missing = -heads % ranks
        repeats = 1
        if missing:
            repeats = heads // key_heads
        elif key_heads % ranks:
            repeats = ranks // key_heads if ranks % key_heads == 0 else heads // key_heads
        k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
        q, k, v = (self.context.to_heads(F.pad(x, (0, 0, 0, missing)) if missing else x) for x in (q, k, v))
        if layer.sinks is not None:
            sinks = F.pad(layer.sinks, (0, missing)).unflatten(0, (ranks, -1))[self.context.rank]
            # The layer as this rank sees it: with the sinks of its heads.
            layer = SimpleNamespace(window=layer.window, scale=layer.scale, softcap=layer.softcap, sinks=sinks)
        out = self.context.to_tokens(self.attend(layer, q, k, v))
        return out[:, :heads] if missing else out
