"""A layer's norms, activation and rotary positions: the work between its matrix products, in few passes over memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.head.logit_tiles import on_gpu
from torchtitan.models.shape.families import Rope, Scaling
from torchtitan.models.shape.model_args import ModelArgs

# The elements that torch's vectorised loops take at a time on the widest processors. Elements left over at the end of a
# loop go through other code, whose exponential differs in the last bits.
LANES = 32
# Fewer elements than this are not split over threads, each of which would have such an end.
GRAIN = 32768

# Cosine and sine, see rotary_tables.
RotaryTables = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension; zero: the factor is 1 + weight."""

    def __init__(self, size: int, eps: float, zero: bool = False):
        super().__init__()
        self.eps, self.zero = eps, zero
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.zero:
            wide = torch.promote_types(x.dtype, torch.float32)
            return rms_norm(x.to(wide), self.weight.to(wide) + 1, self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., D]; weight: [D], or [heads, D or 1].

    On CUDA this is torch's single kernel; elsewhere torch would take six passes, and some twenty for the gradient.
    """
    if x.is_cuda:
        normed = F.rms_norm(x, x.shape[-1:], weight if weight.dim() == 1 else None, eps)
        return normed if weight.dim() == 1 else normed * weight
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return _normalize(x, weight, eps)[0]


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, equal to F.rms_norm to the last bit, and 1 / sqrt(mean(x²) + eps) [..., 1], at least fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # One tensor of x's size serves every step, because fresh memory costs more than the arithmetic.
    buffer = wide * wide
    scale = buffer.mean(-1, keepdim=True).add_(eps).rsqrt_()
    return torch.mul(wide, scale, out=buffer).mul_(weight).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        result, scale = _normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """With s = scale and n = x s: dw = Σ g n over the rows, dx = (g w - n · mean(g n w)) s."""
        x, weight, scale = ctx.saved_tensors
        wide, g = x.to(scale.dtype), gradient.to(scale.dtype)
        buffer = (g * wide).mul_(scale)
        rows = list(range(x.dim() - weight.dim()))
        by_weight = buffer.sum(rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = buffer.mul_(weight).mean(-1, keepdim=True)
        by_x = torch.mul(g, weight, out=buffer).mul_(scale).addcmul_(wide, mean.mul_(scale).mul_(scale), value=-1)
        return by_x.to(x.dtype), by_weight, None


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid from operations that treat all elements alike wherever they lie in the batch, as a GPU's own does."""
    if x.is_cuda:
        return x.sigmoid()
    # Without a bound, the exponential could overflow and its gradient would be NaN.
    return (x.clamp(min=-80).neg().exp() + 1.0).reciprocal()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), likewise; above 20 that is x to the last bit of fp32."""
    if x.is_cuda:
        return F.softplus(x)
    return x.clamp(max=20).exp().log1p() + (x - 20).clamp(min=0)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, for two tensors [T, I].

    In fp32 on a CPU a token's result depends neither on its place in the batch nor on the number of threads.
    """
    if gate.is_cuda or gate.dtype != torch.float32 or torch.compiler.is_compiling():
        return F.silu(gate) * up
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate, up)
    return _silu(gate).mul_(up)


def _silu(gate: torch.Tensor) -> torch.Tensor:
    if gate.shape[-1] % LANES:
        # These operations treat all elements alike, at twice the time.
        result = torch.neg(gate).exp_().add_(1.0)
        return torch.div(gate, result, out=result)
    threads, count = torch.get_num_threads(), gate.numel()
    if threads == 1 or count < GRAIN:
        return F.silu(gate)
    # Take what the threads can split in multiples of LANES, or unsplit pieces, so that no loop has leftovers.
    shared = count - count % (LANES * threads) if count >= GRAIN * threads else GRAIN - LANES
    result = torch.empty(gate.shape)
    for part, place in zip(gate.reshape(-1).split(shared), result.view(-1).split(shared), strict=True):
        torch.ops.aten.silu.out(part, out=place)
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)


@functools.lru_cache(maxsize=16)
def inverse_frequencies(rope: Rope, width: int, device: str) -> torch.Tensor:
    """Rotary frequencies [width / 2] in fp32, for the first `width` elements of a head.

    They are computed and never stored as a buffer, which meta initialisation and `to_empty` would wipe.
    """
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequencies = 1.0 / (rope.theta**exponent)
    scaling = rope.scaling
    if scaling is None:
        return frequencies.to(device)
    if scaling.rope_type == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.rope_type == "yarn":
        frequencies = _yarn(frequencies, rope.theta, scaling, width)
    else:
        low = scaling.original_max_position_embeddings / scaling.low_freq_factor
        high = scaling.original_max_position_embeddings / scaling.high_freq_factor
        wavelength = 2 * math.pi / frequencies
        smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
        smooth = smooth / (scaling.high_freq_factor - scaling.low_freq_factor)
        scaled = frequencies / scaling.factor
        between = (1 - smooth) * scaled + smooth * frequencies
        frequencies = torch.where(wavelength > low, scaled, frequencies)
        frequencies = torch.where((wavelength <= low) & (wavelength >= high), between, frequencies)
    return frequencies.to(device)


def _yarn(frequencies: torch.Tensor, theta: float, scaling: Scaling, width: int) -> torch.Tensor:
    """Keep frequencies that turn often within the original context, and divide slow ones (Peng et al. 2023, 3.2)."""

    def place(turns: float) -> float:
        """The index of the element that makes this many turns."""
        return (
            width * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, width - 1.0)
    if low == high:
        high += 0.001
    unscaled_share = 1 - ((torch.arange(width // 2).float() - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - unscaled_share) + frequencies * unscaled_share


def rotary_tables(args: ModelArgs, positions: torch.Tensor, dtype: torch.dtype) -> list[RotaryTables]:
    """For each of `args.ropes`, cosine and sine for positions [T], each [T, 1, rotated part of a head]: (cos, cos) and
    (-sin, sin) over the two halves."""
    width, tables = args.rotary_width, []
    for rope in args.ropes:
        angles = positions.float()[:, None] * inverse_frequencies(rope, width, str(positions.device))[None, :]
        cosine, sine = angles.cos()[:, None, :], angles.sin()[:, None, :]
        if rope.scaling is not None and rope.scaling.attention_factor != 1.0:
            cosine, sine = cosine * rope.scaling.attention_factor, sine * rope.scaling.attention_factor
        tables.append((torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)))
    return tables


def _turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    if on_gpu(x):
        # Five passes over memory in place of nine, and one rounding less.
        turned, half = x * cosine, x.shape[-1] // 2
        turned[..., :half].addcmul_(x[..., half:], sine[..., :half])
        turned[..., half:].addcmul_(x[..., :half], sine[..., half:])
        return turned
    return x.roll(x.shape[-1] // 2, -1).mul_(sine).add_(x * cosine)


class _Rotate(torch.autograd.Function):
    """The backward rotates the gradient back, in as few passes over memory as the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        cosine, sine = ctx.saved_tensors
        return _turn(gradient, cosine, -sine), None, None


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, pairs: bool = False) -> torch.Tensor:
    """Apply rotary positions to x [T, heads, D].

    cosine, sine: from `rotary_tables`; elements of a head beyond their width stay unchanged. pairs: neighbouring
    elements are rotated, not halves. The result then has another order, the same in queries and keys, so that their
    products agree.
    """
    width = cosine.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cosine, sine, pairs), x[..., width:]), -1)
    if pairs:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return _Rotate.apply(x, cosine, sine) if torch.is_grad_enabled() else _turn(x, cosine, sine)
