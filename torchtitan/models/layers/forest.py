"""Packs as forests: runs of tokens that continue others, and the mapping between a pack and equal rectangles of it.

A run attends to its path: the runs that it continues, and itself. A pack of whole sequences is a forest of roots.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtitan.distributed.device import queued_copy
from torchtitan.models.layers.batch_invariance import key_length, padded_length

# A bucket takes runs down to this share of its longest, so at most a quarter of its rows is padding (plus rounding).
BUCKET_FILL = 0.75


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with rows of zeros behind it, `rows` in all."""
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (rows - len(x),)) if len(x) < rows else x


class Forest:
    """What the offset and the parent of each run (PackedLayout.bounds) say of it.

    lengths, starts: its tokens, and the position of its first one; paths: the rows of its path, its own ones last.
    """

    def __init__(self, bounds: tuple[tuple[int, int], ...]):
        self.total = bounds[-1][0]
        self.lengths, self.starts, self.parents = [], [], [parent for _, parent in bounds[:-1]]
        self.paths: list[torch.Tensor] = []
        for (offset, parent), (end, _) in itertools.pairwise(bounds):
            run = torch.arange(offset, end)
            self.paths.append(run if parent < 0 else torch.cat((self.paths[parent], run)))
            self.lengths.append(end - offset)
            self.starts.append(len(self.paths[-1]) - len(run))
        self._key_rows = torch.cat(self.paths)
        self._key_ends = torch.tensor([0, *itertools.accumulate(map(len, self.paths))], dtype=torch.int32)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def keys(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
        """For kernels that take keys of variable length: the rows of all paths one after another, where each path ends
        [runs + 1] int32, and the longest path. All layers of a pack take the same ones, and none waits for them."""
        rows, ends = queued_copy(self._key_rows, device), queued_copy(self._key_ends, device)
        return rows, ends, max(map(len, self.paths))


@functools.lru_cache(maxsize=16)
def _forest(bounds: tuple[tuple[int, int], ...]) -> Forest:
    return Forest(bounds)


def forest_of(bounds: torch.Tensor) -> Forest:
    """The forest of a pack; all its layers ask for the same one."""
    return _forest(tuple(map(tuple, bounds.tolist())))


class Buckets:
    """The mapping between a pack [T, heads, D] and buckets of runs of similar length that begin at the same position.

    A key head and its query heads are treated as a separate run: a bucket is [runs × key heads, width, ...], so that
    keys need no copy per query head. Its keys are those of whole paths. Padding lies to the right of a run, where
    causality hides it from every real token.
    """

    def __init__(self, forest: Forest, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.total, self.heads = forest.total, heads
        self.starts: list[int] = []
        """The position at which the runs of each bucket begin"""
        self.widths: list[tuple[int, int, int]] = []
        """(runs × key heads, queries of each, keys of each) per bucket"""
        self._ancestors: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of each bucket: which of its different parents each run has [runs], and the rows of the parents' paths"""
        lengths = forest.lengths
        order = sorted(range(len(lengths)), key=lambda run: (forest.starts[run], -lengths[run]))
        queries, keys = _Rows(self.total, heads), _Rows(self.total, heads)
        first = 0
        while first < len(order):
            longest, start = lengths[order[first]], forest.starts[order[first]]
            end = first
            while end < len(order) and forest.starts[order[end]] == start:
                if lengths[order[end]] < BUCKET_FILL * longest:
                    break
                end += 1
            members, width = order[first:end], padded_length(longest)
            further = key_length(start + width, head_dim, dtype, device)
            self.starts.append(start)
            self.widths.append((len(members) * heads, width, further))
            paths = [forest.paths[run] for run in members]
            queries.add([path[start:] for path in paths], 0, width)
            keys.add(paths, start, further)
            which = torch.empty(0, dtype=torch.int64)
            rows = which[:, None]
            if start:
                parents = list(dict.fromkeys(forest.parents[run] for run in members))
                number = {parent: place for place, parent in enumerate(parents)}
                which = torch.tensor([number[forest.parents[run]] for run in members], dtype=torch.int64)
                rows = torch.stack([forest.paths[parent] for parent in parents])
            rows = (rows[:, None] * heads + torch.arange(heads)[:, None]).flatten()
            self._ancestors.append((which.to(device), rows.to(device)))
            first = end
        self.queries, self.keys = queries.done(device), keys.done(device)

    def split(self, x: torch.Tensor, padding: float | None = None) -> list[torch.Tensor]:
        """x [T or more, heads of q, ...] -> [runs × key heads, query heads of each, width, ...] of each bucket.

        padding: the value of padding; None: it is undefined.
        """
        rows = x.unflatten(1, (self.heads, -1)).flatten(0, 1).index_select(0, self.queries.tokens)
        if padding is not None:
            rows.index_fill_(0, self.queries.padding, padding)
        parts = rows.split([count * width for count, width, _ in self.widths])
        return [
            part.unflatten(0, (count, width)).transpose(1, 2)
            for part, (count, width, _) in zip(parts, self.widths, strict=True)
        ]

    def split_keys(self, x: torch.Tensor, repeats: int) -> list[torch.Tensor]:
        """x [T or more, key heads, D] -> [runs × key heads, repeats, keys, D] of each bucket, not copied per repeat."""
        rows = x.flatten(0, 1).index_select(0, self.keys.tokens)
        parts = rows.split([count * width for count, _, width in self.widths])
        return [
            part.unflatten(0, (count, 1, width)).expand(-1, repeats, -1, -1)
            for part, (count, _, width) in zip(parts, self.widths, strict=True)
        ]

    def join(self, parts: list[torch.Tensor], rows: int) -> torch.Tensor:
        """Invert `split`: [runs × key heads, width, ...] to `rows` rows; those past the last token are 0."""
        return padded(self._own_rows(parts, self.queries).flatten(1, 2), rows)

    def join_keys(self, parts: list[torch.Tensor], rows: int) -> torch.Tensor:
        """The transpose of `split_keys`: [runs × key heads, keys, D], summed over the paths that a token is in."""
        joint = self._own_rows(parts, self.keys)
        for part, start, (which, ancestors) in zip(parts, self.starts, self._ancestors, strict=True):
            if start:
                # Runs that continue the same one are summed first, as whole blocks.
                each = part[:, :start].reshape(len(which), -1)
                count = len(ancestors) // (self.heads * start)
                summed = each.new_zeros(count, each.shape[1]).index_add_(0, which, each)
                joint.flatten(0, 1).index_add_(0, ancestors, summed.view(-1, part.shape[-1]))
        return padded(joint, rows)

    def _own_rows(self, parts: list[torch.Tensor], of: _Rows) -> torch.Tensor:
        """Every token's row of its own run [T, key heads, ...]."""
        flat = [part.flatten(0, 1) for part in parts]
        joint = (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, of.places)
        return joint.unflatten(0, (self.total, self.heads))


class _Rows:
    """Index tensors between rows (token, key head) and the places of all buckets in sequence."""

    def __init__(self, total: int, heads: int):
        self.heads, self.base = heads, 0
        self.tokens = self.padding = torch.empty(0, dtype=torch.int64)
        """The row of each place (any row for padding), and the places that are padding"""
        self.places = torch.empty(total * heads, dtype=torch.int64)
        """The place of each row in its own run"""

    def add(self, members: list[torch.Tensor], start: int, width: int) -> None:
        """A bucket with these rows of the pack in each member, of which its own ones begin at column `start`."""
        rows = pad_sequence(members, batch_first=True, padding_value=-1)
        rows = F.pad(rows, (0, width - rows.shape[1]), value=-1)[:, None].expand(-1, self.heads, -1)
        inside = rows >= 0
        token = torch.where(inside, rows * self.heads + torch.arange(self.heads)[:, None], 0)
        place = self.base + torch.arange(token.numel()).view(token.shape)
        is_own_token = inside & (torch.arange(width) >= start)
        self.places[token[is_own_token]] = place[is_own_token]
        self.tokens = torch.cat((self.tokens, token.flatten()))
        self.padding = torch.cat((self.padding, place[~inside]))
        self.base += token.numel()

    def done(self, device: torch.device) -> _Rows:
        self.tokens, self.padding, self.places = (x.to(device) for x in (self.tokens, self.padding, self.places))
        return self


@functools.lru_cache(maxsize=16)
def buckets_of(
    forest: Forest, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, threads: int
) -> Buckets:
    """The buckets of a pack; all its layers ask for the same ones. Suitable key lengths may depend on `threads`."""
    return Buckets(forest, heads, head_dim, dtype, device)
