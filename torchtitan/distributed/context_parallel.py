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
from torch.distributed import distributed_c10d


def _exchange(x: torch.Tensor, to_heads: bool, ranks: int, group: str) -> torch.Tensor:
    if to_heads:
        send = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
    else:
        send = x.unflatten(0, (ranks, -1)).contiguous()
    got = torch.empty_like(send)
    ranks_of = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    dist.all_to_all_single(got, send, group=ranks_of)
    return got.flatten(0, 1) if to_heads else got.movedim(0, 1).flatten(1, 2).contiguous()


def _exchanged_shape(x: torch.Tensor, to_heads: bool, ranks: int, group: str) -> torch.Tensor:
    tokens, heads, *rest = x.shape
    return x.new_empty((tokens * ranks, heads // ranks, *rest) if to_heads else (tokens // ranks, heads * ranks, *rest))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.settings = inputs


def _back(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    to_heads, ranks, group = ctx.settings
    return torch.ops.torchtitan.exchange_heads(gradient, not to_heads, ranks, group), None, None, None


# The exchange is an operator, so that compiled graphs hold it as one node.
_library = torch.library.Library("torchtitan", "FRAGMENT")
_library.define("exchange_heads(Tensor x, bool to_heads, int ranks, str group) -> Tensor")
_library.impl("exchange_heads", _exchange, "CompositeExplicitAutograd")
torch.library.register_fake("torchtitan::exchange_heads", _exchanged_shape, lib=_library)
torch.library.register_autograd("torchtitan::exchange_heads", _back, setup_context=_keep, lib=_library)


class _Gather(torch.autograd.Function):
    """x [n_i, ...] of every rank, one after another. A rank's gradient is its own: all do the same with the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        padded = F.pad(x, (0,) * (2 * x.dim() - 1) + (max(sizes) - len(x),)).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[ctx.own], None, None, None


class ContextParallel:
    """This rank's place among those that share a pack."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.name = group.group_name
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
        return torch.ops.torchtitan.exchange_heads(x, True, self.ranks, self.name)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return torch.ops.torchtitan.exchange_heads(x, False, self.ranks, self.name)


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
