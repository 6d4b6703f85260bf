"""Causal attention over packed sequences, and rotary positions.

A pack is one row of tokens [T] that holds whole sequences one after another. Projections run over the row, so no
padding is computed there; attention runs per bucket of sequences of similar length.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.models.batch_invariance import key_length, padded_length
from torchtitan.models.model_args import ModelArgs

# A bucket takes sequences down to this share of its longest one, so at most a quarter of its rows is padding
# (and what rounding adds).
BUCKET_FILL = 0.75


class PackedLayout:
    """Where each sequence lies in a pack of tokens.

    Args:
        lengths: tokens of each sequence, in the order of the pack; their sum is T.
        device: where the index tensors live.

    Attributes:
        positions: [T] int64, the position of each token in its own sequence.
        cumulative: [sequences + 1] int32, offsets of the sequences (for varlen kernels).
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs sequences of at least one token, got lengths {lengths}")
        self.lengths = list(lengths)
        self.total = sum(lengths)
        self.longest = max(lengths)
        size = torch.tensor(lengths)
        offsets = F.pad(size.cumsum(0), (1, 0))
        self.positions = (torch.arange(self.total) - offsets[:-1].repeat_interleave(size)).to(device)
        self.cumulative = offsets.to(torch.int32).to(device)
        self.uniform = len(set(lengths)) == 1 and self.longest == padded_length(self.longest)
        self.buckets: list[tuple[int, int]] = []
        if not self.uniform:
            self._fill_buckets(size, offsets, device)

    def _fill_buckets(self, size: torch.Tensor, offsets: torch.Tensor, device: torch.device | str) -> None:
        """Buckets (sequences, width), and how a pack [T] becomes all their rows [P], one after another, and back.

        tokens [P]: the token of each place, any for padding; padding: the places that hold none; places [T].
        """
        order = size.argsort(descending=True, stable=True).tolist()
        places = torch.empty(self.total, dtype=torch.int64)
        tokens, padding = [], []
        base, start = 0, 0
        while start < len(order):
            width = padded_length(self.lengths[order[start]])
            least = BUCKET_FILL * self.lengths[order[start]]
            end = start
            while end < len(order) and self.lengths[order[end]] >= least:
                end += 1
            members = torch.tensor(order[start:end])
            column = torch.arange(width)
            inside = column[None, :] < size[members][:, None]
            token = torch.where(inside, offsets[members][:, None] + column[None, :], 0)
            place = base + torch.arange(len(members) * width).view(len(members), width)
            places[token[inside]] = place[inside]
            tokens.append(token.flatten())
            padding.append(place[~inside])
            self.buckets.append((len(members), width))
            base += len(members) * width
            start = end
        self.tokens, self.padding = torch.cat(tokens).to(device), torch.cat(padding).to(device)
        self.places = places.to(device)


class _ToBuckets(torch.autograd.Function):
    """x [T, ...] of a pack -> the rows of its buckets [P, ...]. Padding must have no gradient: causality sees to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.index_select(0, ctx.layout.places), None


class _FromBuckets(torch.autograd.Function):
    """The way back: [P, ...] -> [T, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        layout = ctx.layout
        return gradient.index_select(0, layout.tokens).index_fill_(0, layout.padding, 0.0), None


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of whole sequences: q, k, v [S, L, heads, D] (k and v may have fewer heads) -> like q."""
    length = query.shape[1]
    further = key_length(length, query.shape[-1], query.dtype, query.device) - length
    if further:
        # Keys after the last token, which causality hides from all of them.
        key, value = F.pad(key, (0, 0, 0, 0, 0, further)), F.pad(value, (0, 0, 0, 0, 0, further))
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


@functools.cache
def _variable_length_kernel() -> Callable[..., torch.Tensor] | None:
    """torch's flash attention over packed sequences as (q, k, v, cumulative, longest), where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Grouped heads became an argument after torch 2.11.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cumulative: torch.Tensor, longest: int) -> Any:
        repeats = q.shape[1] // k.shape[1]
        options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
        if grouped:
            options["enable_gqa"] = repeats > 1
        elif repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return varlen_attn(q, k, v, cumulative, cumulative, longest, longest, **options)

    return attend


def packed_kernel(q: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """The one choice of attention for packs: a variable-length kernel, or None for SDPA over buckets.

    The kernel is flash attention: CUDA since Ampere, half precision, head sizes in steps of 8 up to 256.
    """
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    if q.shape[-1] % 8 or q.shape[-1] > 256 or torch.cuda.get_device_capability(q.device) < (8, 0):
        return None
    return _variable_length_kernel()


class PackedAttention:
    """Attention of a pack, as the decoder calls it: (layer, q [T, Hq, D], k [T, Hkv, D], v) -> [T, Hq, D].

    Padding inside a bucket lies to the right of its sequence: causality hides it from every real token.

    Args:
        layout: the sequences.
        padding: positions at the end of the pack that belong to none of them; their output is zero.
    """

    def __init__(self, layout: PackedLayout, padding: int = 0):
        self.layout = layout
        self.padding = padding

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.padding:
            total = self.layout.total
            return F.pad(self._attend(q[:total], k[:total], v[:total]), (0, 0, 0, 0, 0, self.padding))
        return self._attend(q, k, v)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        kernel = packed_kernel(q)
        if kernel is not None:
            return kernel(q, k, v, layout.cumulative, layout.longest)
        if layout.uniform:
            shape = (len(layout.lengths), layout.longest)
            return causal_attention(q.unflatten(0, shape), k.unflatten(0, shape), v.unflatten(0, shape)).flatten(0, 1)
        sizes = [sequences * width for sequences, width in layout.buckets]
        parts = zip(*(_ToBuckets.apply(x, layout).split(sizes) for x in (q, k, v)), strict=True)
        outputs = [
            causal_attention(*(x.unflatten(0, bucket) for x in part)).flatten(0, 1)
            for bucket, part in zip(layout.buckets, parts, strict=True)
        ]
        return _FromBuckets.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], layout)


@functools.cache
def keep_out_of_graphs() -> None:
    """Attention is no part of compiled graphs: call this before compiling a decoder.

    As a decorator, torch.compiler.disable would import the compiler into every engine (1.4 s of its 3.3 s).
    """
    PackedAttention.__call__ = torch.compiler.disable(PackedAttention.__call__)  # type: ignore[method-assign]


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
