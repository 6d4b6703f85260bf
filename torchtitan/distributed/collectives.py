"""Collectives that the training loop needs beside those of FSDP and tensor parallelism, and context parallelism.

With context parallelism, each rank of a group has an equal part of a pack's tokens, and in attention some of the heads.
Around attention, tokens are exchanged for heads and back (Ulysses, Jacobs et al. 2023), so attention itself sees whole
sequences. Windows, sinks and kernels are the same as on one rank, and all ranks do equal work whatever the lengths.
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
    """Return x [n, ...] of every rank of the group; `sizes` lists each rank's n."""
    padded = _padded(x, sizes)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _padded(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    missing_rows = max(*sizes, 1) - len(x)
    # F.pad begins with the last dimension: only the end of the first one, at the very end, is padded.
    padding = (*[0] * (2 * x.dim() - 1), missing_rows)
    return F.pad(x, padding).contiguous()


def _sizes(x: torch.Tensor) -> list[int]:
    """Return the number of rows of every rank."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=x.device)
    sizes[dist.get_rank()] = len(x)
    dist.all_reduce(sizes)
    return sizes.tolist()


def gather_values(values: torch.Tensor) -> torch.Tensor:
    """Concatenate the values [n] of all ranks; n may differ from rank to rank."""
    return torch.cat(gather_parts(values, _sizes(values))) if dist.is_initialized() else values


def broadcast_bytes(data: bytes | None) -> bytes:
    """Bytes from rank 0 to every rank (others pass None). Nothing is unpickled."""
    if not dist.is_initialized():
        assert data is not None, "the only rank is the source"
        return data
    assert data is not None or dist.get_rank() > 0, "rank 0 passes the bytes"
    # Tensors are on the CPU: gloo carries them, also beside NCCL.
    length = torch.tensor([len(data or b"")])
    dist.broadcast(length, 0)
    payload = torch.from_numpy(numpy.frombuffer(bytearray(data or int(length)), numpy.uint8))
    dist.broadcast(payload, 0)
    return payload.numpy().tobytes()


def gather_bytes(data: bytes) -> list[bytes] | None:
    """Return the bytes of all ranks, in rank order, on rank 0; None on the others. Nothing is unpickled."""
    if not dist.is_initialized():
        return [data]
    # The tensors are on the CPU, so gloo carries them, even beside NCCL. Other ranks need not receive so many bytes.
    content = torch.from_numpy(numpy.frombuffer(bytearray(data), numpy.uint8))
    sizes = _sizes(content)
    padded = _padded(content, sizes)
    if dist.get_rank() > 0:
        dist.gather(padded)
        return None
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, parts)
    return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


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
    """Scale gradients by max_norm / norm if `norm` (from `gradient_norm_and_votes`) exceeds max_norm."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            local.mul_(factor.to(local.device))


def _counts_here(gradient: torch.Tensor) -> bool:
    """Whether this rank counts its elements. Of equal copies, only the first along each mesh dimension counts."""
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
    """Concatenates x [n_i, ...] of all ranks. A rank keeps its slice of the gradient, as all use the result alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.rank_rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return torch.cat(gather_parts(x, sizes, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[ctx.rank_rows], None, None, None


class ContextParallel:
    """This rank's position among the ranks that share a pack."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def part(self, tokens: int) -> slice:
        """This rank's part of a pack's tokens, whose number is a multiple of the ranks."""
        each = tokens // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def bounds(self, rows: torch.Tensor, tokens: int) -> list[int]:
        """Where each rank's part of `tokens` begins in the ascending positions `rows`; [ranks + 1]."""
        first = torch.arange(self.ranks + 1, device=rows.device) * (tokens // self.ranks)
        return torch.searchsorted(rows, first).tolist()

    def gather(self, x: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """Gather the rows of all ranks on each rank. Gradients return to the rank that they belong to."""
        sizes = [end - start for start, end in itertools.pairwise(bounds)]
        return _Gather.apply(x, sizes, self.rank, self.group)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens of this rank, heads, D] -> [all tokens, heads of this rank, D]."""
        parts = x.unflatten(1, (self.ranks, -1)).movedim(1, 0).contiguous()
        return all_to_all_single_autograd(parts, None, None, self.group).flatten(0, 1)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Invert `to_heads`."""
        parts = x.unflatten(0, (self.ranks, -1)).contiguous()
        return all_to_all_single_autograd(parts, None, None, self.group).movedim(0, 1).flatten(1, 2)


class ContextAttention:
    """Attention over ranks, based on attention of whole packs: [tokens of this rank, heads, D] each.

    Key heads are repeated until the ranks divide their number. If the ranks do not divide q's heads, heads of zeros are
    added to queries and keys, at a cost of at most one head per rank.
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
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        if missing:
            zero_heads = (0, 0, 0, missing)
            q, k, v = F.pad(q, zero_heads), F.pad(k, zero_heads), F.pad(v, zero_heads)
        q, k, v = self.context.to_heads(q), self.context.to_heads(k), self.context.to_heads(v)
        if layer.sinks is not None:
            sinks = F.pad(layer.sinks, (0, missing)).unflatten(0, (ranks, -1))[self.context.rank]
            # The layer from this rank's perspective has only the sinks of its own heads.
            layer = SimpleNamespace(window=layer.window, scale=layer.scale, softcap=layer.softcap, sinks=sinks)
        out = self.context.to_tokens(self.attend(layer, q, k, v))
        return out[:, :heads] if missing else out
