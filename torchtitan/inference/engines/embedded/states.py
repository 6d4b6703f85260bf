"""What Gated DeltaNet layers remember of running sequences, beside the keys and values of attention.

A row has the state at the beginning of the chunk of tokens that its next one belongs to, that chunk's tokens so far,
and the last inputs of the convolution. A step computes the chunk again with one token more: so it gets the bits that
the trainer's whole sequence gives it (models/layers/delta_rule.py), and no more memory is read than for a
state that every token changes. What a row remembers is right at its last token only, so another
sequence may begin with all of it or with nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.layers.delta_rule import chunk_output, chunk_terms, delta_rule, next_state, places_of
from torchtitan.models.layers.gated_delta import GatedDeltaNet, Recurrence
from torchtitan.models.shape.delta_args import CHUNK
from torchtitan.models.shape.model_args import ModelArgs


class _Memory(NamedTuple):
    """Of one layer [rows, ...], or of all [layers, rows, ...]."""

    inputs: torch.Tensor
    """[tokens that the convolution looks back, channels], 0 before the sequence"""
    k: torch.Tensor
    """[key heads, CHUNK, Dk], of the chunk; after its tokens so far lies anything finite"""
    v: torch.Tensor
    """[heads, CHUNK, Dv]"""
    g: torch.Tensor
    """[heads, CHUNK]"""
    beta: torch.Tensor
    state: torch.Tensor
    """[heads, Dk, Dv], before the chunk"""


class RecurrentStates:
    """Of all rows; empty for a model without such layers."""

    def __init__(self, args: ModelArgs, dtype: torch.dtype, device: torch.device):
        self._places = {layer: place for place, layer in enumerate(args.delta_layers)}
        self._device = device
        self._shapes: list[tuple[torch.dtype, tuple[int, ...]]] = []
        if (sizes := args.delta) is not None:
            keys, values, wide = sizes.key_heads, sizes.value_heads, torch.promote_types(dtype, torch.float32)
            self._shapes = [
                (dtype, (sizes.kernel - 1, sizes.channels)),
                (wide, (keys, CHUNK, sizes.key_dim)),
                (wide, (values, CHUNK, sizes.value_dim)),
                *[(wide, (values, CHUNK))] * 2,
                (wide, (values, sizes.key_dim, sizes.value_dim)),
            ]
        self._tensors: list[torch.Tensor] = []

    @property
    def row_bytes(self) -> int:
        """Memory of a row."""
        return len(self._places) * sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._shapes)

    def allocate(self, rows: int, used_rows: int) -> None:
        """Take memory for so many rows in place of what was there, and keep rows [0, used_rows)."""
        old, layers = self._tensors if used_rows else [], len(self._places)
        self._tensors = []
        for number, (dtype, shape) in enumerate(self._shapes):
            tensor = torch.zeros(layers, rows, *shape, dtype=dtype, device=self._device)
            if used_rows:
                tensor[:, :used_rows] = old[number][:, :used_rows]
            self._tensors.append(tensor)

    def release(self) -> None:
        """Give all memory back."""
        self._tensors = []

    def copy_row(self, source: int, first: int, count: int) -> None:
        """Copy row `source` to rows [first, first + count)."""
        for tensor in self._tensors:
            tensor[:, first : first + count] = tensor[:, source : source + 1].clone()

    def read_row(self, row: int) -> list[torch.Tensor]:
        """A copy of a row."""
        return [tensor[:, row].clone() for tensor in self._tensors]

    def write_row(self, row: int, copy: list[torch.Tensor]) -> None:
        """Put what `read_row` gave into a row."""
        for tensor, part in zip(self._tensors, copy, strict=True):
            tensor[:, row] = part

    def clear_row(self, row: int) -> None:
        """Forget what a row holds, NaN included."""
        for tensor in self._tensors:
            tensor[:, row].zero_()

    def continued(self, parts: list[tuple[int, int, int]]) -> Recurrence:
        """A Recurrence over tokens that follow what rows hold. parts: (row, first position, end) of the new tokens, in
        the order of the pack; a sequence that begins anew has first position 0."""
        return _Continued(self, parts, self._device) if self._shapes else _none

    def decoded(self, positions: torch.Tensor) -> Recurrence:
        """A Recurrence over one new token for each of the first rows, at positions [B]."""
        return _Decoded(self, positions) if self._shapes else _none

    def of(self, layer: int) -> _Memory:
        """Of one layer, as views."""
        return _Memory(*(tensor[self._places[layer]] for tensor in self._tensors))


def _none(layer: GatedDeltaNet, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the model has no recurrent layers")


class _Continued:
    def __init__(self, states: RecurrentStates, parts: list[tuple[int, int, int]], device: torch.device):
        self._states, self._parts = states, parts
        # Each part is computed from the beginning of its chunk on.
        self._before = [start % CHUNK for _, start, _ in parts]
        lengths = [before + end - start for before, (_, start, end) in zip(self._before, parts, strict=True)]
        layout = PackedLayout(lengths, device)
        self._places = places_of(layout.cumulative, layout.total)
        self._offsets = layout.bounds[:, 0].tolist()
        self._total = layout.total
        is_new = np.concatenate([np.arange(n) >= before for n, before in zip(lengths, self._before, strict=True)])
        self._new = torch.from_numpy(np.flatnonzero(is_new)).to(device)
        self._rows = torch.tensor([row for row, _, _ in parts], device=device)
        self._has_begun = torch.tensor([start > 0 for _, start, _ in parts], device=device)
        chunks = torch.tensor(lengths) // CHUNK
        self._last = (F.pad((chunks + 1).cumsum(0), (1, 0))[:-1] + chunks).to(device)

    def __call__(self, layer: GatedDeltaNet, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        memory, tokens = self._states.of(layer.index), len(self._new)
        q, k, v = layer.operands(self._convolved(layer, mixed[:tokens], memory.inputs))
        new = (q, k, v, g[:tokens], beta[:tokens])
        operands = [part.new_zeros(self._total, *part.shape[1:]).index_copy_(0, self._new, part) for part in new]
        for (row, _, _), first, before in zip(self._parts, self._offsets, self._before, strict=False):
            # The queries of tokens that are known already are not asked again.
            for operand, kept in zip(operands[1:], memory[1:5], strict=True):
                operand[first : first + before] = kept[row, :, :before].transpose(0, 1)
        has_begun = self._has_begun.view(-1, 1, 1, 1)
        initial = torch.where(has_begun, memory.state[self._rows], 0.0)
        q, k, v, g, beta = operands
        out, chunked = delta_rule(q, k, v, g, beta, self._places, initial)
        for kept, last in zip(memory[1:], chunked, strict=True):
            kept[self._rows] = last[self._last]
        return F.pad(out.index_select(0, self._new), (0, 0, 0, 0, 0, len(mixed) - tokens))

    def _convolved(self, layer: GatedDeltaNet, mixed: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        back, first, length = layer.sizes.kernel - 1, 0, 0
        pieces, places = list[torch.Tensor](), list[torch.Tensor]()
        for row, start, end in self._parts:
            earlier = inputs[row] if start else inputs.new_zeros(inputs.shape[1:])
            with_earlier = torch.cat((earlier, mixed[first : first + end - start]))
            first += end - start
            places.append(torch.arange(length + back, length + len(with_earlier)))
            pieces.append(with_earlier)
            length += len(with_earlier)
            inputs[row] = with_earlier[len(with_earlier) - back :]
        joint, place = torch.cat(pieces), torch.cat(places).to(mixed.device)
        return layer.convolve([joint.index_select(0, place - offset) for offset in range(back + 1)])


class _Decoded:
    def __init__(self, states: RecurrentStates, positions: torch.Tensor):
        self._states, self._place = states, positions % CHUNK
        self._rows = torch.arange(len(positions), device=positions.device)
        self._full = self._place == CHUNK - 1
        self._any_full = bool(self._full.any())

    def __call__(self, layer: GatedDeltaNet, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        rows, place = self._rows, self._place
        memory = _Memory(*(state[: len(rows)] for state in self._states.of(layer.index)))
        earlier = memory.inputs.flip(1).unbind(1)
        q, k, v = layer.operands(layer.convolve([mixed, *earlier]))
        memory.inputs.copy_(torch.cat((memory.inputs[:, 1:], mixed[:, None]), 1))
        for kept, value in zip(memory[1:5], (k, v, g, beta), strict=True):
            kept[rows, :, place] = value
        asked = torch.zeros_like(memory.k)
        asked[rows, :, place] = q
        terms = chunk_terms(*memory[1:5])
        out = chunk_output(asked, memory.k, terms, memory.state)[rows, :, place]
        if self._any_full:
            after = next_state(memory.state, *terms[:4])
            memory.state.copy_(torch.where(self._full[:, None, None, None], after, memory.state))
        return out
