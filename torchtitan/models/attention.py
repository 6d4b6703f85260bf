"""What attention needs to know of a pack of sequences and of a layer.

A pack is one row of tokens [T] that holds whole sequences one after another. Projections run over the row, so no
padding is computed there; attention runs per sequence (attention_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from torchtitan.models.attention_kernels import packed_attention


class PackedLayout:
    """Where each sequence lies in a pack of tokens.

    Args:
        lengths: tokens of each sequence, in the order of the pack; their sum is T.
        device: where the index tensors live.

    Attributes:
        positions: [T] int64, the position of each token in its own sequence.
        cumulative: [sequences + 1] int32, offsets of the sequences (for varlen kernels).
        bounds: the same in int64 on the host.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs sequences of at least one token, got lengths {lengths}")
        self.lengths = list(lengths)
        self.total = sum(lengths)
        size = torch.tensor(lengths)
        self.bounds = F.pad(size.cumsum(0), (1, 0))
        self.positions = (torch.arange(self.total) - self.bounds[:-1].repeat_interleave(size)).to(device)
        self.cumulative = self.bounds.to(torch.int32).to(device)


class AttentionLayer(Protocol):
    """What a layer says of its attention; see `attention_kernels.packed_attention`."""

    index: int
    """Which layer it is"""
    window: int
    scale: float
    softcap: float
    sinks: torch.Tensor | None


# (layer, query [T, heads, D], key [T, key-value heads, D], value like key) -> [T, heads, D]
AttentionFunction = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PackedAttention:
    """Attention of a pack, as the decoder calls it: (layer, q [T, Hq, D], k [T, Hkv, D], v) -> [T, Hq, D].

    T may be larger than the layout's: what belongs to no sequence comes out as zero.
    """

    def __init__(self, layout: PackedLayout):
        self.cumulative, self.bounds = layout.cumulative, layout.bounds

    def __call__(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Its index is not looked at: compiled graphs would be one layer's only.
        return packed_attention(
            q,
            k,
            v,
            self.cumulative,
            self.bounds,
            window=layer.window,
            scale=layer.scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
