"""A layer's norms and activation, the steps between its matrix products, in few passes over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Numbers that torch's vectorised loops take at a time on the widest processors: those that are left over at the end of
# a loop go through other code, with an exponential of other last bits.
LANES = 32
# Fewer numbers are not shared between threads, each of which has an end of its own.
GRAIN = 32768


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension; zero: the weight is what is added to a factor of 1."""

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
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., D]; weight: [D], or [heads, D].

    On CUDA it is torch's one kernel; elsewhere torch would take six passes, and some twenty for the gradient.
    """
    if x.is_cuda:
        normed = F.rms_norm(x, x.shape[-1:], weight if weight.dim() == 1 else None, eps)
        return normed if weight.dim() == 1 else normed * weight
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return _normalize(x, weight, eps)[0]


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, to the last bit that of F.rms_norm, and 1 / sqrt(mean(x²) + eps) [..., 1] in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # One tensor of x's size for everything: fresh memory costs more than the arithmetic.
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


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, of two tensors [T, I] of one shape.

    In fp32 on a CPU a token's result does not depend on where in the batch it lies, nor on the number of threads.
    """
    if gate.is_cuda or gate.dtype != torch.float32 or torch.compiler.is_compiling():
        return F.silu(gate) * up
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate, up)
    return _silu(gate).mul_(up)


def _silu(gate: torch.Tensor) -> torch.Tensor:
    if gate.shape[-1] % LANES:
        # Written out with operations that treat all numbers alike, at twice the time.
        result = torch.neg(gate).exp_().add_(1.0)
        return torch.div(gate, result, out=result)
    threads, count = torch.get_num_threads(), gate.numel()
    if threads == 1 or count < GRAIN:
        return F.silu(gate)
    # As much as the threads can share in multiples of LANES, or pieces that are not shared, so that none has an end.
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
