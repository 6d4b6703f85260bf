"""Rotary positions (Su et al. 2021) with the scalings that checkpoints ask for."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from torchtitan.models.model_args import ModelArgs


@functools.lru_cache(maxsize=16)
def inverse_frequencies(args: ModelArgs, device: str) -> torch.Tensor:
    """Rotary frequencies [head_dim / 2] in fp32, with Llama 3's scaling where the model has it.

    Computed, never stored as a buffer: meta initialisation and `to_empty` would wipe it.
    """
    exponent = torch.arange(0, args.head_dim, 2, dtype=torch.int64).float() / args.head_dim
    frequencies = 1.0 / (args.rope_theta**exponent)
    scaling = args.rope_scaling
    if scaling is not None:
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


def rotary_tables(args: ModelArgs, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for positions [T], each [T, 1, head_dim]: (cos, cos) and (-sin, sin) over the two halves."""
    angles = positions.float()[:, None] * inverse_frequencies(args, str(positions.device))[None, :]
    cosine, sine = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


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


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to x [T, heads, D] (the half-split convention of Hugging Face checkpoints).

    cosine, sine: as of `rotary_tables`.
    """
    return _Rotate.apply(x, cosine, sine) if torch.is_grad_enabled() else _turn(x, cosine, sine)
