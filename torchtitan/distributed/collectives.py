"""The few collectives that the training loop needs beside FSDP's and tensor parallelism's own, and context parallelism.

With context parallelism every rank of a group has an equal part of a pack's tokens, and for attention some of the
heads: around attention tokens are exchanged for heads and back (Ulysses, Jacobs et al. 2023), so attention itself sees
whole sequences. Windows, sinks and kernels are what they are on one rank, and ranks have the same work whatever the
lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from torchtitan.distributed.device import device
from torchtitan.distributed.placement import is_distributed, local_tensor


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, as a new tensor."""
    total = tensor.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def gather_parts(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """x [n, ...] of every rank of the group, whose n are the sizes."""
    padded = _padded(x, sizes)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _padded(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (max(*sizes, 1) - len(x),)).contiguous()


def _sizes(x: torch.Tensor) -> list[int]:
    """How many rows every rank has."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=x.device)
    sizes[dist.get_rank()] = len(x)
    dist.all_reduce(sizes)
    return sizes.tolist()


def gather_values(values: torch.Tensor) -> torch.Tensor:
    """The values [n] of all ranks, one after another; n may differ from rank to rank."""
    return torch.cat(gather_parts(values, _sizes(values))) if dist.is_initialized() else values


def broadcast_bytes(data: bytes | None, src: int = 0) -> bytes:
    """Bytes from rank `src` to every rank (others pass None). Nothing is unpickled."""
    if not dist.is_initialized():
        assert data is not None, "the only rank is the source"
        return data
    sends = dist.get_rank() == src
    assert not sends or data is not None, "the source passes the bytes"
    # Tensors are on the CPU: gloo carries them, also beside NCCL.
    length = torch.tensor([len(data) if sends and data is not None else 0], dtype=torch.int64)
    dist.broadcast(length, src)
    if length.item() == 0:
        return b""
    if sends and data is not None:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        payload = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(payload, src)
    return payload.numpy().tobytes()


def gather_bytes(data: bytes) -> list[bytes] | None:
    """The bytes of all ranks, in their order, on rank 0; None on the others. Nothing is unpickled."""
    if not dist.is_initialized():
        return [data]
    # Tensors are on the CPU: gloo carries them, also beside NCCL. Other ranks have no use for so many bytes.
    content = torch.from_numpy(numpy.frombuffer(bytearray(data), numpy.uint8))
    sizes = _sizes(content)
    padded = _padded(content, sizes)
    parts = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, parts)
    return None if parts is None else [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


@torch.no_grad()
def gradient_norm_and_votes(
    parameters: Iterable[nn.Parameter], votes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """L2 norm of the whole gradient, and `votes` summed over all ranks, in one all-reduce.

    Every element counts once, however it is sharded or replicated; a tied parameter is one parameter.

    Args:
        parameters: all trained parameters; those without a gradient count as zero.
        votes: float [k].

    Returns:
        (norm [] fp32, summed votes [k] fp32), equal on every rank, on the rank's device.
    """
    squares = [torch.zeros((), dtype=torch.float64, device=device())]
    for parameter in dict.fromkeys(parameters):
        gradient = parameter.grad
        if gradient is None or not _counts_here(gradient):
            continue
        norm = torch.linalg.vector_norm(local_tensor(gradient), dtype=torch.float32)
        squares.append(norm.to(device(), torch.float64).square())
    payload = torch.cat((torch.stack(squares).sum()[None], votes.to(device(), torch.float64)))
    payload = all_reduce_sum(payload)
    return payload[0].sqrt().float(), payload[1:].float()


@torch.no_grad()
def clip_gradients_(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients by max_norm / norm where `norm` (from `gradient_norm_and_votes`) is larger than max_norm."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            local.mul_(factor.to(local.device))


def _counts_here(gradient: torch.Tensor) -> bool:
    """Of the ranks that hold the same elements, the first along every replicated mesh dimension counts them."""
    if not is_distributed(gradient):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = gradient.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient is not reduced yet: {gradient.placements}")
    return all(
        coordinate[index] == 0 for index, placement in enumerate(gradient.placements) if placement.is_replicate()
    )


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
