"""QLoRA (Dettmers et al. 2023): frozen projections whose weights are held in four bits, see nf4.py.

The product makes the weight anew, in the forward and in the backward; between the two only the four bits exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.distributed.placement import full_tensor, local_region, local_tensor
from torchtitan.models.nf4 import dequantize, is_quantized, quantize
from torchtitan.models.shape import BLOCK

# These two parameters stand for a weight; only both together mean something.
HELD = ("packed", "absmax")


class QuantizedLinear(nn.Module):
    """A linear layer in the place of a frozen one of the same shape, device and bias, on meta too; without values yet.

    Its parameters are sharded by rows, as a weight is.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        rows, columns = self.shape = linear.weight.shape
        self.dtype = linear.weight.dtype
        """Of the weight that it stands for"""
        device = linear.weight.device
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        absmax = torch.empty(rows, columns // BLOCK, dtype=torch.bfloat16, device=device)
        self.packed, self.absmax = (nn.Parameter(tensor, requires_grad=False) for tensor in (packed, absmax))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out] in the type of x."""
        return _product(x, self.packed, self.absmax, self.bias)

    def region(self) -> tuple[slice, ...]:
        """The part of the weight that this rank holds: whole rows."""
        return local_region(self.packed)[0], slice(0, self.shape[1])

    @torch.no_grad()
    def copy_(self, part: torch.Tensor) -> None:
        """Hold this part of the weight, which is `region`'s."""
        for parameter, values in zip((self.packed, self.absmax), quantize(part.to(self.device)), strict=True):
            local_tensor(parameter).copy_(values)

    def full_weight(self) -> torch.Tensor:
        """The whole weight in fp32 (a collective where it is sharded)."""
        packed, absmax = (full_tensor(parameter.detach()) for parameter in (self.packed, self.absmax))
        return dequantize(packed, absmax, torch.float32)

    @property
    def device(self) -> torch.device:
        return local_tensor(self.packed).device


# These are operators and no autograd.Function, of which torch.compile makes one graph, forward and backward, that may
# keep the weight made of the bits from the one to the other.
@torch.library.custom_op("torchtitan::quantized_linear", mutates_args=())
def _product(x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, dequantize(packed, absmax, x.dtype), bias)


@torch.library.custom_op("torchtitan::quantized_linear_backward", mutates_args=())
def _product_backward(gradient: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    return gradient @ dequantize(packed, absmax, gradient.dtype)


@_product.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(packed))


@_product_backward.register_fake
def _(gradient: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], 2 * packed.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return _product_backward(gradient, *ctx.saved_tensors), None, None, None


_product.register_autograd(_backward, setup_context=_keep)


def quantize_projections(policy: nn.Module, trained: Iterable[str]) -> None:
    """Give all projections but the `trained` ones weights of four bits; load them afterwards. Comes before adapters."""
    for name, module in list(policy.named_modules()):
        parent, _, own = name.rpartition(".")
        if is_quantized(f"{name}.weight") and own not in trained:
            assert isinstance(module, nn.Linear)
            setattr(policy.get_submodule(parent), own, QuantizedLinear(module))
