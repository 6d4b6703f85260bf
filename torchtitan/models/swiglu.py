"""The feed-forward's activation: silu(gate) · up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# Numbers that torch's vectorised loops take at a time on the widest processors: those that are left over at the end of
# a loop go through other code, with an exponential of other last bits.
LANES = 32
# Fewer numbers are not shared between threads, each of which has an end of its own.
GRAIN = 32768


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
