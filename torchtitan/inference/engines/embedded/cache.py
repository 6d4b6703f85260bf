"""Keys and values of running sequences, and the attention functions that read and write them.

Rows [0, B) are in use, without gaps, so a step reads them as one slice and gathers nothing.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F

from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.states import RecurrentStates
from torchtitan.models.layers.attention import AttentionLayer, PackedAttention, PackedLayout, attend_masked, with_sinks
from torchtitan.models.layers.batch_invariance import InvariantSizes, key_length
from torchtitan.models.shape.model_args import ModelArgs

FIRST_ROWS = 16
FIRST_LENGTH = 64
# Layers' keys, then their values, lie in blocks of so many: few tensors, so that rows move cheaply, and yet several,
# so that growing one after the other takes little memory beside a large model's cache.
BLOCK = 8
# Tokens of one sequence that attention extends it by at a time: bounds the mask.
EXTENSION_TOKENS = 256
# Queries of one attention that batch_invariance.py has looked at.
MAX_QUERIES = 16
# For one query each and no more keys than this, torch's flash attention for CPUs takes 1.6 times as long in half
# precision as two products with fp32 scores, and there no equal bits are promised.
FEW_KEYS = 128


class KeyValueCache:
    """Keys and values, per layer with attention [rows × heads, length, head_dim], grown in powers of two up to the
    limits, and `states` for the layers that have a state instead.

    Args:
        args: the model's shape.
        max_rows: sequences at a time.
        max_length: tokens of one sequence, prompt and completion.
        max_bytes: memory limit; 0 for none.
        sizes: a forward takes a multiple of `sizes.rows` rows, where need be with dummies, and so does the cache.

    Raises UserError where the limit is too low for any sequence.
    """

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    visible: torch.Tensor
    """What attention adds to the scores: 0 for positions a row has, -inf beyond"""
    _blocks: list[torch.Tensor]
    _flat_keys: dict[int, torch.Tensor]
    _flat_values: dict[int, torch.Tensor]
    _base: torch.Tensor

    def __init__(
        self,
        args: ModelArgs,
        max_rows: int,
        max_length: int,
        max_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        sizes: InvariantSizes,
    ):
        self._attending = sorted({*range(args.num_hidden_layers)} - {*args.delta_layers})
        self.layers, self.heads, self.head_dim = len(self._attending), args.num_key_value_heads, args.head_dim
        self.states = RecurrentStates(args, dtype, device)
        self.dtype, self.device, self.sizes = dtype, device, sizes
        self.max_rows, self.max_length, self.max_bytes = max_rows, self.key_length(max_length), max_bytes
        self.rows = self.length = 0
        self.touched_at = 0.0
        """When some layer stored something, or the engine otherwise got on (time.monotonic)"""
        first_length = min(FIRST_LENGTH, self.max_length)
        if max_bytes and self.bytes_of(1, first_length) > max_bytes:
            raise UserError(
                f"a key-value cache of {max_bytes} bytes is too small for this model: {self.whole_rows(1)} sequence(s) "
                f"of {first_length} tokens take {self.bytes_of(1, first_length)}; free memory or raise the limit"
            )
        self.take()

    def take(self) -> None:
        """Room for a few short sequences, empty; more comes as it is needed."""
        length = min(FIRST_LENGTH, self.max_length)
        self._allocate(self.whole_rows(min(FIRST_ROWS, self.room(length, 0))), length, 0)

    def release(self) -> None:
        """Give all memory back; nothing may be stored before `take`."""
        self.keys, self.values, self._flat_keys, self._flat_values, self._blocks = {}, {}, {}, {}, []
        self.states.release()
        self.visible = self._base = torch.empty(0, device=self.device)
        self.rows = self.length = 0

    def key_length(self, length: int) -> int:
        """The number of keys that attention over `length` tokens runs with."""
        return key_length(length, self.head_dim, self.dtype, self.device)

    def whole_rows(self, rows: int) -> int:
        """Rows that a forward of `rows` sequences takes."""
        return rows + self.sizes.padding(rows)

    def bytes_of(self, rows: int, length: int) -> int:
        """Memory that rows × length takes: of every layer two tensors or its states, and the mask."""
        rows = self.whole_rows(rows)
        places = rows * self.heads * self.key_length(length)
        return places * (2 * self.layers * self.head_dim + 1) * self.dtype.itemsize + rows * self.states.row_bytes

    def _growth_bytes(self) -> int:
        """What growing takes beside the new cache: blocks are replaced one by one."""
        planes = min(BLOCK, 2 * self.layers)
        block = planes * self.rows * self.heads * self.length * self.head_dim * self.dtype.itemsize
        return max(block, self.rows * self.states.row_bytes)

    def room(self, length: int, used_rows: int) -> int:
        """Rows that the limits allow in all, when `length` tokens have to fit beside `used_rows` rows as they are."""
        if not self.max_bytes:
            return self.max_rows
        wanted = max(length, self.length) if used_rows else length
        most = self.max_bytes - (self._growth_bytes() if used_rows else 0)
        step = self.sizes.rows
        grown = most // self.bytes_of(step, wanted) * step
        present = self.rows if self.holds(0, length) else 0
        return min(self.max_rows, max(grown, present))

    def spare_bytes(self, rows: int, length: int, used_rows: int) -> int:
        """Memory that may be used beside the rows once they have been reserved so, and meanwhile: as much as they take,
        within the limit."""
        if self.holds(rows, length):
            own_bytes, growing = self.bytes_of(self.rows, self.length), 0
        else:
            own_bytes, growing = self.bytes_of(*self._grown(rows, length, used_rows)), self._growth_bytes()
        return min(own_bytes, self.max_bytes - own_bytes - growing) if self.max_bytes else own_bytes

    def holds(self, rows: int, length: int) -> bool:
        """Whether there is room for so many rows of up to `length` tokens without growing."""
        return rows <= self.rows and self.key_length(length) <= self.length

    def reserve(self, rows: int, length: int, used_rows: int) -> None:
        """Make room for `rows` rows (at most `room`) of up to `length` tokens, keeping rows [0, used_rows)."""
        if not self.holds(rows, length):
            self._allocate(*self._grown(rows, length, used_rows), used_rows)

    def _grown(self, rows: int, length: int, used_rows: int) -> tuple[int, int]:
        """(rows, length) after growing for that: to powers of two, where the limit allows it."""
        length = self.key_length(length)
        needed_length = max(length, self.length) if used_rows else length
        shape = (
            self.whole_rows(min(_power_of_two(max(rows, self.rows)), self.max_rows)),
            min(_power_of_two(max(length, self.length)), self.max_length),
        )
        if self.max_bytes and self.bytes_of(*shape) + (self._growth_bytes() if used_rows else 0) > self.max_bytes:
            shape = (self.whole_rows(rows), needed_length)
        return shape

    def _allocate(self, rows: int, length: int, used_rows: int) -> None:
        """New tensors in the place of the old ones, with what rows [0, used_rows) hold."""
        used, old_length = used_rows * self.heads, self.length
        # Views would keep the old memory; where nothing is kept, all of it goes first.
        self.keys, self.values, self._flat_keys, self._flat_values = {}, {}, {}, {}
        self.states.allocate(rows, used_rows)
        if not used:
            self._blocks = []
        shape = (rows * self.heads, length, self.head_dim)
        for number, first in enumerate(range(0, 2 * self.layers, BLOCK)):
            planes = min(BLOCK, 2 * self.layers - first)
            # Zeros, not garbage: a masked position still enters the products, and NaN would come through.
            block = torch.zeros((planes, *shape), dtype=self.dtype, device=self.device)
            if used:
                block[:, :used, :old_length] = self._blocks[number][:, :used]
                self._blocks[number] = block
            else:
                self._blocks.append(block)
        planes_in_order = [plane for block in self._blocks for plane in block]
        self.keys = dict(zip(self._attending, planes_in_order[: self.layers], strict=True))
        self.values = dict(zip(self._attending, planes_in_order[self.layers :], strict=True))
        visible = torch.full(shape[:2], float("-inf"), dtype=self.dtype, device=self.device)
        if used:
            visible[:used, :old_length] = self.visible[:used]
        self.visible = visible
        self._flat_keys = {layer: tensor.view(-1, self.head_dim) for layer, tensor in self.keys.items()}
        self._flat_values = {layer: tensor.view(-1, self.head_dim) for layer, tensor in self.values.items()}
        self._base = (torch.arange(rows * self.heads, device=self.device) * length).view(rows, self.heads)
        self.rows, self.length = rows, length

    def write(self, layer: int, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [N, heads, D] at flat places `index` [N × heads] (from `places`)."""
        self.touched_at = time.monotonic()
        self._flat_keys[layer].index_copy_(0, index, k.reshape(-1, self.head_dim))
        self._flat_values[layer].index_copy_(0, index, v.reshape(-1, self.head_dim))

    def places(self, rows: torch.Tensor | slice, positions: torch.Tensor) -> torch.Tensor:
        """Flat places [N × heads] of `positions` [N] in `rows` [N]."""
        return (self._base[rows] + positions[:, None]).view(-1)

    def show(self, index: torch.Tensor) -> None:
        """Make the positions at flat places `index` visible to attention."""
        self.visible.view(-1).index_fill_(0, index, 0.0)

    def start_rows(self, first: int, count: int, length: int) -> None:
        """Rows [first, first + count) begin with `length` visible positions."""
        rows = self.visible[first * self.heads : (first + count) * self.heads]
        rows[:, :length] = 0.0
        rows[:, length:] = float("-inf")

    def copy_row(self, source: int, first: int, count: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to rows [first, first + count)."""
        for block in self._blocks:
            rows = block.view(-1, self.rows, self.heads, self.length, self.head_dim)
            rows[:, first : first + count, :, :length] = rows[:, source : source + 1, :, :length]
        self.states.copy_row(source, first, count)

    def read_row(self, row: int, length: int) -> list[torch.Tensor]:
        """A copy of the first `length` positions of a row (per block [planes, heads, length, head_dim]), and of its
        states."""
        rows = slice(row * self.heads, (row + 1) * self.heads)
        return [block[:, rows, :length].clone() for block in self._blocks] + self.states.read_row(row)

    def write_row(self, row: int, copy: list[torch.Tensor], length: int) -> None:
        """Put the first `length` positions of what `read_row` gave into a row."""
        rows = slice(row * self.heads, (row + 1) * self.heads)
        for block, part in zip(self._blocks, copy, strict=False):
            block[:, rows, :length] = part[:, :, :length]
        self.states.write_row(row, copy[len(self._blocks) :])

    @torch.inference_mode()
    def move_row(self, source: int, target: int, length: int) -> None:
        """Row `source`, of `length` positions, takes the place of row `target`."""
        self.copy_row(source, target, 1, length)
        visible = self.visible.view(self.rows, self.heads, self.length)
        visible[target] = visible[source]

    @torch.inference_mode()
    def clear_row(self, row: int) -> None:
        """Forget what a row holds, NaN included."""
        for block in self._blocks:
            block[:, row * self.heads : (row + 1) * self.heads].zero_()
        self.states.clear_row(row)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class PrefillAttention:
    """Attention of whole sequences as the trainer computes it, which also stores their keys and values in rows."""

    def __init__(self, cache: KeyValueCache, layout: PackedLayout, rows: list[int]):
        self._attend = PackedAttention(layout)
        self._cache, self._total = cache, layout.total
        self.recur = cache.states.continued([(row, 0, n) for row, n in zip(rows, layout.lengths, strict=True)])
        row_of_token = torch.from_numpy(np.repeat(rows, layout.lengths)).to(cache.device)
        self._index = cache.places(row_of_token, layout.positions)

    def __call__(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer.index, self._index, k[: self._total], v[: self._total])
        return self._attend(layer, q, k, v)


class ExtensionAttention:
    """Attention of tokens that follow what rows hold already, a few at a time as `DecodeAttention` has one: so they get
    the bits that the trainer's whole sequence gives them (batch_invariance.py).

    Args:
        parts: (row, first position, end) of the new tokens, in the order of the pack.
        padding: tokens after the last part that belong to none; their output is zero.
    """

    def __init__(self, cache: KeyValueCache, parts: list[tuple[int, int, int]], padding: int):
        self._cache, self._parts, self._padding = cache, parts, padding
        self.recur = cache.states.continued(parts)
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts]).to(cache.device)
        lengths = [end - start for _, start, end in parts]
        rows = torch.from_numpy(np.repeat([row for row, _, _ in parts], lengths))
        self._index = cache.places(rows.to(cache.device), positions)
        self._total = len(positions)

    def __call__(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer.index, self._index, k[: self._total], v[: self._total])
        outputs, first = [], 0
        for row, start, end in self._parts:
            for position in range(start, end, EXTENSION_TOKENS):
                stop = min(position + EXTENSION_TOKENS, end)
                outputs.append(self._attend(layer, row, position, q[first : first + stop - position]))
                first += stop - position
        return F.pad(torch.cat(outputs), (0, 0, 0, 0, 0, self._padding))

    def _attend(self, layer: AttentionLayer, row: int, start: int, q: torch.Tensor) -> torch.Tensor:
        """q [T, heads, D] at positions start, start + 1, ... of a row -> like q."""
        cache, (tokens, heads, dim) = self._cache, q.shape
        group = heads // cache.heads
        # On CPUs as many queries at a time as were looked at; elsewhere all, and their keys are read once.
        together = max(1, MAX_QUERIES // group) if cache.device.type == "cpu" else tokens
        short = -tokens % together
        # [pieces, key heads, tokens of a piece × heads that share a key head, D]
        pieces = F.pad(q, (0, 0, 0, 0, 0, short)).view(-1, together, cache.heads, group, dim)
        queries = pieces.transpose(1, 2).flatten(2, 3)
        missing = -queries.shape[2] % cache.sizes.queries
        queries = F.pad(queries, (0, 0, 0, missing))
        keys_read = cache.key_length(start + tokens)
        last_seen = (start + torch.arange(tokens + short, device=cache.device)).clamp(max=start + tokens - 1)
        last_seen = F.pad(last_seen.view(-1, together).repeat_interleave(group, 1), (0, missing))
        places, seen_to = torch.arange(keys_read, device=cache.device), last_seen[:, None, :, None]
        hidden = places > seen_to
        if layer.window:
            hidden |= places <= seen_to - layer.window
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        row_heads = slice(row * cache.heads, (row + 1) * cache.heads)
        keys, values = (
            x[layer.index][row_heads, :keys_read].expand(len(queries), -1, -1, -1) for x in (cache.keys, cache.values)
        )
        total = None
        if layer.softcap or layer.sinks is not None:
            out, total = attend_masked(queries, keys, values, mask, layer.scale, layer.softcap)
        else:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)

        def of_tokens(rows: torch.Tensor) -> torch.Tensor:
            """[pieces, key heads, queries, ...] -> [T, heads, ...]."""
            parted = rows[:, :, : together * group].unflatten(2, (together, group)).transpose(1, 2)
            return parted.reshape(-1, heads, *rows.shape[3:])[:tokens]

        if layer.sinks is None or total is None:
            return of_tokens(out)
        return with_sinks(of_tokens(out), of_tokens(total), layer.sinks)[0]


class DecodeAttention:
    """Attention of one new token per row [0, B) over everything the row holds, itself included.

    Args:
        cache: the cache.
        positions: [B] int64, place of each row's new token.
        longest: the highest of them, plus one.

    Unused rows may take part, at position 0: their output means nothing.
    """

    def __init__(self, cache: KeyValueCache, positions: torch.Tensor, longest: int):
        self._cache = cache
        self._rows, self._longest = len(positions), cache.key_length(longest)
        self._index = cache.places(slice(0, self._rows), positions)
        cache.show(self._index)
        self._used = self._rows * cache.heads
        self.recur = cache.states.decoded(positions)
        visible = cache.visible[: self._used, None, None, : self._longest]
        self._visible = {0: visible}
        """What is added to scores, by the layer's window"""
        self._positions = positions.repeat_interleave(cache.heads)[:, None, None, None]

    def _mask(self, window: int) -> torch.Tensor:
        if window not in self._visible:
            places = torch.arange(self._longest, device=self._positions.device)
            unseen = places <= self._positions - window
            self._visible[window] = self._visible[0].masked_fill(unseen, float("-inf"))
        return self._visible[window]

    def __call__(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        cache.write(layer.index, self._index, k, v)
        keys = cache.keys[layer.index][: self._used, None, : self._longest]
        values = cache.values[layer.index][: self._used, None, : self._longest]
        # The query heads that share a key head stand where a sequence's tokens would. Two plain products and a softmax
        # are 5 % faster for tiny models, but differ from the trainer, which uses this kernel too.
        grouped = q.reshape(self._used, 1, -1, cache.head_dim)
        group = grouped.shape[2]
        missing = -group % cache.sizes.queries
        if missing:
            grouped = F.pad(grouped, (0, 0, 0, missing))
        mask = self._mask(layer.window)
        if layer.softcap or layer.sinks is not None:
            out, total = attend_masked(grouped, keys, values, mask, layer.scale, layer.softcap)
            out, total = out[:, :, :group].reshape(q.shape), total[:, :, :group].reshape(q.shape[:2])
            return out if layer.sinks is None else with_sinks(out, total, layer.sinks)[0]
        if cache.dtype == torch.float32 or cache.device.type != "cpu" or self._longest > FEW_KEYS:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=layer.scale)
        else:
            wide, wide_keys = grouped[:, 0].float(), keys[:, 0].float()
            scores = torch.baddbmm(mask[:, 0].float(), wide, wide_keys.transpose(1, 2), alpha=layer.scale)
            out = torch.bmm(scores.softmax(-1).to(q.dtype), values[:, 0])[:, None]
        return out[:, :, :group].reshape(q.shape)
