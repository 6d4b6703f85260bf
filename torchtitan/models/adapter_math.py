"""What a low-rank adapter adds to its module's weight, and four-bit NormalFloat, in which that may be held meanwhile.

The one definition for the trainer and for everything that merges adapters, also in processes without a model of ours,
such as workers of other engines: it needs what those have anyway, and is the same on every device.

NF4 (Dettmers et al. 2023, QLoRA) is what a frozen weight becomes where lora.base_bits = 4. bitsandbytes makes the same
bits of a bfloat16 weight (the tests hold one against the other), but those engines lack it, and torchao's NF4 has
become private.

A weight is first rounded to bfloat16, in which engines may hold it: so all get to the same four bits. It also makes
them unique. No quotient of two bfloat16 numbers comes closer to the middle between two levels than 1e-6 of it, so that
the last bit of a division never decides.
"""

from __future__ import annotations

import functools

import torch

from torchtitan.distributed.device import chunk_elements
from torchtitan.models.model_args import PROJECTIONS
from torchtitan.models.shape import BLOCK

FACTOR_A, FACTOR_B = "lora_A.weight", "lora_B.weight"
ALPHA = "lora_alpha"
"""Under this name alpha is published beside the factors: its sum is alpha"""
BASE_BITS = "lora_base_bits"
"""Under this name, where it is not 16: in how many bits the base is held that the factors were trained on"""


def is_factor(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((FACTOR_A, FACTOR_B))


def low_rank_product(scale: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """scale · B A in fp32 (float64 where the factors are): what an adapter adds to its module's weight [out, in]."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return scale * (b.to(wide) @ a.to(wide))


# Quantiles of a normal distribution, as the paper's appendix E lists them.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Cells of [-1, 1], so narrow that there is one middle between two levels in each at most.
_CELLS = 32


def is_quantized(name: str) -> bool:
    """Whether lora.base_bits = 4 is about the parameter of this name; it spares those that are trained."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.rpartition(".")[2] in PROJECTIONS


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] -> two levels a byte, the first in the upper half [out, in / 2] uint8, and the largest absolute
    value of every block [out, in / 64] bfloat16.

    Raises ValueError where a row is not made of whole blocks.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"rows of {columns} weights are not made of blocks of {BLOCK}")
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(rows, columns // BLOCK, dtype=torch.bfloat16, device=weight.device)
    below, middle = _cells(weight.device)
    at_a_time = max(1, chunk_elements(weight.device) // columns)
    for some, codes, scales in zip(*(whole.split(at_a_time) for whole in (weight, packed, absmax)), strict=True):
        blocks = some.bfloat16().float().unflatten(1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        scaled = (blocks / torch.where(largest > 0, largest, 1.0)).flatten()
        # A search among the fifteen middles takes five times as long.
        cell = ((scaled + 1) * (_CELLS / 2)).int()
        level = below.index_select(0, cell) + (scaled > middle.index_select(0, cell))
        level = level.view(len(some), columns)
        codes.copy_(level[:, ::2] << 4 | level[:, 1::2])
        scales.copy_(largest.squeeze(-1))
    return packed, absmax


def dequantize(packed: torch.Tensor, absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] that `quantize` gave these of: level × scale in fp32, rounded to `dtype` once.

    packed and absmax may have been cast to any type that holds them (older versions of FSDP2 do so).
    """
    rows, half = packed.shape
    weight = torch.empty(rows, 2 * half, dtype=dtype, device=packed.device)
    pairs = _pairs(packed.device)
    at_a_time = max(1, chunk_elements(weight.device) // max(1, 2 * half))
    for some, codes, scales in zip(*(whole.split(at_a_time) for whole in (weight, packed, absmax)), strict=True):
        levels = pairs.index_select(0, codes.int().flatten()).view(torch.float32)
        blocks = (len(some), -1, BLOCK)
        torch.mul(levels.view(blocks), scales.float().unsqueeze(-1), out=some.view(blocks))
    return weight


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """weight [out, in] as it is after four bits, in fp32. A second time changes nothing, also after bfloat16."""
    return dequantize(*quantize(weight), torch.float32)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Byte -> its two levels, as one number of 8 bytes, so that one look-up finds both [256] int64."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1).view(torch.int64).flatten().to(device)


@functools.cache
def _cells(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cell -> levels whose upper end lies below it, and the end that lies in it, or infinity."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    ends = (levels[:-1] + levels[1:]) / 2
    below = torch.bucketize(torch.arange(_CELLS + 1, dtype=torch.float32) * (2 / _CELLS) - 1, ends)
    inside = torch.cat((ends, torch.tensor([torch.inf], dtype=torch.float32)))[below]
    return below.to(device, torch.uint8), inside.to(device)
