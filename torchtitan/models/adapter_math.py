"""What a low-rank adapter adds to its module's weight, and four-bit NormalFloat, in which that weight may be held.

This is the one definition for the trainer and for everything that merges adapters, including processes without this
project's model, such as other engines' workers. It needs only what they already have, and gives the same result on
every device.

With lora.base_bits = 4, frozen weights are held in NF4 (Dettmers et al. 2023, QLoRA). bitsandbytes produces the same
bits from a bfloat16 weight (the tests compare the two), but those engines lack it, and torchao's NF4 has become
private.

A weight is first rounded to bfloat16, in which engines may hold it, so that all processes get the same four bits. The
rounding also makes the bits unambiguous: no quotient of two bfloat16 numbers lies within a relative 1e-6 of the
midpoint between two levels, so the last bit of a division never decides.
"""

from __future__ import annotations

import functools

import torch

from torchtitan.distributed.device import chunk_elements
from torchtitan.models.shape.checkpoint_shape import BLOCK
from torchtitan.models.shape.model_args import PROJECTIONS

FACTOR_A, FACTOR_B = "lora_A.weight", "lora_B.weight"
START = "start_"
"""What comes before the names of factors that are the frozen copies of those that a policy began with"""
ALPHA = "lora_alpha"
"""The name under which alpha is published beside the factors, as a tensor whose sum is alpha"""
BASE_BITS = "lora_base_bits"
"""The name under which the bits of the base that the factors were trained on are published, unless they are 16"""


def is_factor(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((FACTOR_A, FACTOR_B))


def low_rank_product(scale: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return scale · B A in fp32 (float64 if the factors are), the adapter's addition to the weight [out, in]."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return scale * (b.to(wide) @ a.to(wide))


# Quantiles of a normal distribution, as listed in the paper's appendix E.
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
# Cells of [-1, 1], narrow enough that each holds at most one midpoint between two levels.
_CELLS = 32


def is_quantized(name: str) -> bool:
    """Whether lora.base_bits = 4 applies to the parameter of this name; trained parameters are exempt."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.rpartition(".")[2] in PROJECTIONS


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weight [out, in] to two levels per byte, the first in the upper half [out, in / 2] uint8, and the
    largest absolute value of every block [out, in / 64] bfloat16.

    Raises ValueError if a row is not a whole number of blocks.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"rows of {columns} weights are not made of blocks of {BLOCK}")
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(rows, columns // BLOCK, dtype=torch.bfloat16, device=weight.device)
    below, middle = _cells(weight.device)
    at_a_time = max(1, chunk_elements(weight.device) // columns)
    for some, codes, scales in zip(*(tensor.split(at_a_time) for tensor in (weight, packed, absmax)), strict=True):
        blocks = some.bfloat16().float().unflatten(1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        scaled = (blocks / torch.where(largest > 0, largest, 1.0)).flatten()
        # A search among the fifteen midpoints would take five times as long.
        cell = ((scaled + 1) * (_CELLS / 2)).int()
        level = below.index_select(0, cell) + (scaled > middle.index_select(0, cell))
        level = level.view(len(some), columns)
        codes.copy_(level[:, ::2] << 4 | level[:, 1::2])
        scales.copy_(largest.squeeze(-1))
    return packed, absmax


def dequantize(packed: torch.Tensor, absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [out, in] behind the results of `quantize`: level × scale in fp32, rounded to `dtype` once.

    packed and absmax may have been cast to any type that holds them (older versions of FSDP2 do so).
    """
    rows, half = packed.shape
    weight = torch.empty(rows, 2 * half, dtype=dtype, device=packed.device)
    pairs = _pairs(packed.device)
    at_a_time = max(1, chunk_elements(weight.device) // max(1, 2 * half))
    for some, codes, scales in zip(*(tensor.split(at_a_time) for tensor in (weight, packed, absmax)), strict=True):
        levels = pairs.index_select(0, codes.int().flatten()).view(torch.float32)
        blocks = (len(some), -1, BLOCK)
        torch.mul(levels.view(blocks), scales.float().unsqueeze(-1), out=some.view(blocks))
    return weight


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return weight [out, in] after four-bit rounding, in fp32. Repeating this changes nothing, even via bfloat16."""
    return dequantize(*quantize(weight), torch.float32)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Map a byte to its two levels, as one 8-byte number, so that one look-up finds both [256] int64."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1).view(torch.int64).flatten().to(device)


@functools.cache
def _cells(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Map a cell to the number of levels whose upper end lies below it, and to the end inside it, or infinity."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    ends = (levels[:-1] + levels[1:]) / 2
    below = torch.bucketize(torch.arange(_CELLS + 1, dtype=torch.float32) * (2 / _CELLS) - 1, ends)
    inside = torch.cat((ends, torch.tensor([torch.inf], dtype=torch.float32)))[below]
    return below.to(device, torch.uint8), inside.to(device)
