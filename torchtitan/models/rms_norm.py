"""Root-mean-square normalisation in few passes over memory, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


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
