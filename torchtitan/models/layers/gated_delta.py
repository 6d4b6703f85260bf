"""Gated DeltaNet (Yang et al. 2024; Qwen3-Next, Qwen3.5): a layer whose memory of earlier tokens is a state of fixed
size in place of keys and values. Query, key and value pass a short causal convolution, the gated delta rule
(delta_rule.py) takes the place of attention, and its output is normed per head and gated.

Convolution and state begin anew in every sequence of a pack.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from torchtitan.distributed.placement import local_copy, local_tensor
from torchtitan.models.layers.delta_rule import delta_rule, places_of
from torchtitan.models.layers.elementwise import RMSNorm, RotaryTables, rms_norm, sigmoid, softplus, swiglu

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan.models.layers.attention import PackedAttention
    from torchtitan.models.shape.delta_args import Delta
    from torchtitan.models.shape.model_args import ModelArgs

logger = logging.getLogger(__name__)

# Of the lengths of queries and keys, as in transformers and fla.
NORM_EPS = 1e-6

# (layer, convolution's input [T, channels], g [T, heads], beta [T, heads]) -> [T, heads, Dv]
Recurrence = Callable[["GatedDeltaNet", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _width(pieces: list[slice]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


class HeadShard:
    """This rank's heads of a Gated DeltaNet, whose joint projection and convolution have channels of queries, then of
    keys, then of values: the rank has a part of each."""

    def __init__(self, mesh: DeviceMesh, sizes: Delta):
        self.rank, self.ranks, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        self.widths = (keys, keys, values)

    def rank_channels(self, channels: torch.Tensor) -> torch.Tensor:
        """[channels, ...] -> [this rank's channels, ...]."""
        return torch.cat([kind.chunk(self.ranks)[self.rank] for kind in channels.split(self.widths)])

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """From the channels [T, channels / ranks] that a projection by rows gives this rank to those of its heads."""
        ranks = range(self.ranks)
        leaving = [self._pieces(self.rank, other) for other in ranks]
        coming = [self._pieces(other, self.rank) for other in ranks]
        received = [_width(pieces) for pieces in coming]
        sent = [_width(pieces) for pieces in leaving]
        rows = torch.cat([x[:, piece] for pieces in leaving for piece in pieces], 1).t().contiguous()
        return all_to_all_single_autograd(rows, received, sent, self.group).t()

    def _pieces(self, holder: int, owner: int) -> list[slice]:
        """Where the channels of the owner's heads are among those that the projection gives the holder."""
        part, pieces = sum(self.widths) // self.ranks, []
        start = -holder * part
        for width in self.widths:
            first = start + owner * width // self.ranks
            low, high = max(first, 0), min(first + width // self.ranks, part)
            pieces += [slice(low, high)] if low < high else []
            start += width
        return pieces


class GatedDeltaNet(nn.Module):
    """The caller decides where sequences begin, and with which state: `attend` is a PackedAttention, or has a method
    `recur`, which is a Recurrence (the embedded engine's)."""

    # A family has the first two, or the other four.
    in_proj_qkvz: nn.Linear
    in_proj_ba: nn.Linear
    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear
    out_proj: nn.Linear

    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        assert args.delta is not None
        self.index, self.sizes = index, args.delta
        for name, (rows, columns) in args.delta.projection_shapes(args.hidden_size).items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))
        channels, kernel = args.delta.channels, args.delta.kernel
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(args.delta.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(args.delta.value_heads))
        self.norm = RMSNorm(args.delta.value_dim, args.rms_norm_eps)
        # Set if tensor parallelism divides the heads; `sizes` are then those of this rank.
        self.shard: HeadShard | None = None

    def forward(self, x: torch.Tensor, rotary: RotaryTables | None, attend: Any) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        mixed, z, b, a = self._project(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        rate, bias = (local_tensor(parameter).to(wide) for parameter in (self.A_log, self.dt_bias))
        g = -rate.exp() * softplus(a + bias)
        recur: Recurrence = getattr(attend, "recur", None) or functools.partial(recur_pack, attend)
        out = self.norm(recur(self, mixed, g, sigmoid(b.to(wide))).to(x.dtype))
        return self.out_proj(swiglu(z, out.flatten(-2)))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, H] -> input of the convolution [T, channels], the output's gate [T, heads · Dv], b and a [T, heads]."""
        sizes = self.sizes
        if not sizes.joint:
            joint = self.in_proj_qkv(x) if self.shard is None else self.shard.exchanged(self.in_proj_qkv(x))
            return joint, self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        # Each key head's rows lie together.
        rows = self.in_proj_qkvz(x).unflatten(-1, (sizes.key_heads, -1))
        *mixed, z = (part.flatten(-2) for part in rows.split(sizes.parts["in_proj_qkvz"], -1))
        b, a = self.in_proj_ba(x).unflatten(-1, (sizes.key_heads, -1)).split(sizes.parts["in_proj_ba"], -1)
        return torch.cat(mixed, -1), z, b.flatten(-2), a.flatten(-2)

    def convolve(self, taps: list[torch.Tensor]) -> torch.Tensor:
        """taps: the tokens' inputs [T, channels], those of the tokens before them, and so on, 0 before a sequence ->
        the convolution's output, activated."""
        weight = local_copy(self.conv1d.weight).squeeze(1)
        weight = weight if self.shard is None else self.shard.rank_channels(weight)
        newest, *earlier = reversed(weight.unbind(1))
        out = taps[0] * newest
        for tap, by in zip(taps[1:], earlier, strict=True):
            out = out + tap * by
        return F.silu(out) if out.is_cuda else out * sigmoid(out)

    def operands(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, channels] -> queries and keys [T, key heads, Dk] of lengths 1 / √Dk and 1, and values [T, heads, Dv]."""
        sizes = self.sizes
        wide = torch.promote_types(convolved.dtype, torch.float32)
        parts = convolved.split((2 * sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim), -1)
        qk, v = (part.to(wide) for part in parts)
        # The norm's mean of squares is their sum / Dk, so what it returns has length √Dk.
        scale = qk.new_full((2 * sizes.key_heads, 1), sizes.key_dim**-0.5)
        scale[: sizes.key_heads].fill_(1 / sizes.key_dim)
        # Of a strided tensor, a norm that runs in place is no node of a compiled graph.
        heads = qk.contiguous().unflatten(-1, (2 * sizes.key_heads, -1))
        q, k = rms_norm(heads, scale, NORM_EPS / sizes.key_dim).chunk(2, 1)
        return q, k, v.unflatten(-1, (sizes.value_heads, -1))


def recur_pack(
    attend: PackedAttention, layer: GatedDeltaNet, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """A Recurrence over the whole sequences of a pack. Rows past the last sequence mean nothing."""
    places = attend.places
    if places is None or torch.compiler.is_compiling():
        # A graph that is given them would be specific to more sizes.
        places = places_of(attend.cumulative, len(mixed))
    position = places.position[:, None]
    earlier = [mixed.roll(back, 0).masked_fill(position < back, 0.0) for back in range(1, layer.sizes.kernel)]
    q, k, v = layer.operands(layer.convolve([mixed, *earlier]))
    halves = mixed.is_cuda and mixed.dtype in (torch.bfloat16, torch.float16)
    if halves and not torch.compiler.is_compiling() and (kernel := fla_kernel()) is not None:
        return _by_kernel(kernel, q, k, v, g, beta, attend.cumulative, int(attend.bounds[-1, 0])).to(v.dtype)
    return delta_rule(q, k, v, g, beta, places)[0]


def _by_kernel(
    kernel: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cumulative: torch.Tensor,
    used: int,
) -> torch.Tensor:
    share = v.shape[1] // k.shape[1]
    q, k = (heads.repeat_interleave(share, 1) for heads in (q, k))
    # Its products are in half precision, like the layer's; decays stay fp32.
    operands = [operand[None, :used].bfloat16() for operand in (q, k, v)]
    out, _ = kernel(*operands, g[None, :used], beta[None, :used].bfloat16(), scale=1.0, cu_seqlens=cumulative.long())
    return F.pad(out[0], (0, 0, 0, 0, 0, len(v) - used))


@functools.lru_cache(maxsize=1)
def fla_kernel() -> Callable[..., Any] | None:
    """flash-linear-attention's kernel for the gated delta rule on GPUs; None if the package is not installed."""
    if importlib.util.find_spec("fla") is None:
        logger.info("Gated DeltaNet runs in plain torch: the package flash-linear-attention is not installed")
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    logger.info("Gated DeltaNet runs with the kernel of flash-linear-attention")
    found: Callable[..., Any] = chunk_gated_delta_rule
    return found
