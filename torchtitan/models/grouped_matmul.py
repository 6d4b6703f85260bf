"""One matrix product per expert over rows that lie expert by expert, in one call: forward, backward, torch.compile.

torch's own grouped_mm computes exactly this, but its fp32 form does not pass torch.compile, and its backward refuses
gradients that are expanded: hence the custom operations around it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F


def _fits(dtype: torch.dtype, *sizes: int) -> bool:
    """What torch's kernel takes: half or single precision, with rows of whole 16 bytes."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and not any(s * dtype.itemsize % 16 for s in sizes)


@torch.library.custom_op("torchtitan::grouped_linear", mutates_args=())
def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [R, K] times the transposed weight [E, N, K] of each row's expert -> [R, N].

    Expert e has rows ends[e - 1] to ends[e] (int32 [E]). Rows past the last end get anything.
    """
    if _fits(x.dtype, *weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = x.new_zeros(len(x), weight.shape[1])
    for expert, rows in enumerate(_ranges(ends)):
        out[rows] = F.linear(x[rows], weight[expert])
    return out


@grouped_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("torchtitan::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """left [R, N] and right [R, K] -> [E, N, K]: per expert, the product of the transposed left rows and the right."""
    if _fits(left.dtype, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.t(), right, offs=ends)
    return torch.stack([left[rows].t() @ right[rows] for rows in _ranges(ends)])


@grouped_outer.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _ranges(ends: torch.Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    by_x = grouped_linear(gradient, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return by_x, grouped_outer(gradient, x, ends) if ctx.needs_input_grad[1] else None, None


grouped_linear.register_autograd(_backward, setup_context=_save)
