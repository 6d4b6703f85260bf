"""Rotary positions (Su et al. 2021) with the scalings that checkpoints ask for."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from torchtitan.models.families import Rope, Scaling
from torchtitan.models.model_args import ModelArgs

RotaryTables = tuple[torch.Tensor, torch.Tensor]


@functools.lru_cache(maxsize=16)
def inverse_frequencies(rope: Rope, width: int, device: str) -> torch.Tensor:
    """Rotary frequencies [width / 2] in fp32, of the first `width` elements of a head.

    Computed, never stored as a buffer: meta initialisation and `to_empty` would wipe it.
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
    """Frequencies that turn often within the original context stay, slow ones are divided (Peng et al. 2023, 3.2)."""

    def place(turns: float) -> float:
        """Which element turns so often."""
        return (
            width * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, width - 1.0)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(width // 2).float() - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def rotary_tables(args: ModelArgs, positions: torch.Tensor, dtype: torch.dtype) -> list[RotaryTables]:
    """For each of `args.ropes` cosine and sine for positions [T], each [T, 1, turned part of a head]: (cos, cos) and
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
    return x.roll(x.shape[-1] // 2, -1).mul_(sine).add_(x * cosine)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is turned back: as few passes over memory as the forward."""

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

    cosine, sine: as of `rotary_tables`; what they are too narrow for stays. pairs: neighbours are turned, not halves.
    Their elements come out in another order, the same in queries and keys, whose products do not depend on it.
    """
    width = cosine.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cosine, sine, pairs), x[..., width:]), -1)
    if pairs:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return _Rotate.apply(x, cosine, sine) if torch.is_grad_enabled() else _turn(x, cosine, sine)
