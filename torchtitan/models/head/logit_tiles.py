"""Tiles of logits, the steps of the log-prob head (fused_head.py): in one buffer, each tile is computed, reduced to
statistics and turned into gradients.

Rows (tokens) and columns (vocabulary) are cut into tiles of a byte budget. Logits are fp32 whatever the operands:
rounding them to bfloat16 was measured to cost 2.7 % gradient error. The online normaliser is that of Milakov and
Gimelshein (2018), algorithm 3. If sampling was truncated, log-probs are normalised over the tokens that it kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.distributed.device import matmul, matmul_operand, queued_copy

CUT_OFF = -1e30
"""Logit of a token that was not kept: finite, so that 0 · logit is 0, and far below any real logit"""
ROW_STEP = 16
COLUMN_STEP = 64
# Rows of a tile if the vocabulary is cut.
TILE_ROWS = 256
# On a CPU, row-wise arithmetic works on blocks of this size, which stay in the cache.
BLOCK_BYTES = 1 << 20


class KeptTokens:
    """The tokens that truncated sampling (top-p, top-k, min-p) kept, per target.

    Args:
        offsets: [N + 1] int64; row i keeps token_ids[offsets[i]:offsets[i + 1]]; an empty row keeps all.
        token_ids: [sum of rows] int64.
        bounds: the offsets as numbers; where they are not given, the device is asked for them.
    """

    def __init__(self, offsets: torch.Tensor, token_ids: torch.Tensor, bounds: list[int] | None = None):
        self.offsets = offsets
        self.token_ids = token_ids
        self.bounds: list[int] = offsets.tolist() if bounds is None else bounds

    @classmethod
    def from_rows(cls, rows: list[list[int]], device: torch.device | str = "cpu") -> KeptTokens | None:
        """From one list of ids per target, where an empty list keeps all; None if every row keeps all."""
        token_ids = [token for row in rows for token in row]
        if not token_ids:
            return None
        bounds = [0, *itertools.accumulate(map(len, rows))]
        ids = torch.tensor(token_ids, dtype=torch.int64)
        return cls(queued_copy(torch.tensor(bounds), device), queued_copy(ids, device), bounds)

    def part(self, rows: slice) -> KeptTokens:
        """The kept tokens of some targets."""
        some = slice(rows.start, rows.stop + 1)
        return KeptTokens(self.offsets[some], self.token_ids, self.bounds[some])

    def cut_off_(self, logits: torch.Tensor, rows: slice, first: int = 0) -> torch.Tensor:
        """Set logits [r, c] of tokens that were not kept to CUT_OFF, in place.

        The tile holds the targets `rows`, and columns from token id `first` on.
        """
        counts, width = self.offsets[rows.start : rows.stop + 1].diff(), logits.shape[-1]
        begin, end = self.bounds[rows.start], self.bounds[rows.stop]
        ids = self.token_ids[begin:end] - first
        row = torch.arange(len(counts), device=logits.device).repeat_interleave(counts, output_size=end - begin)
        inside = (ids >= 0) & (ids < width)
        if on_gpu(logits):
            # How many are inside is not asked of the device: the others give CUT_OFF to a place that has no less.
            place, flat = row * width + ids.clamp(0, width - 1), logits.view(-1)
            values = torch.where(inside, flat[place], CUT_OFF)
            logits.masked_fill_((counts > 0)[:, None], CUT_OFF)
            flat.scatter_reduce_(0, place, values, "amax")
            return logits
        row, ids = row[inside], ids[inside]
        values = logits[row, ids]
        logits.masked_fill_((counts > 0)[:, None], CUT_OFF)
        logits[row, ids] = values
        return logits


@dataclass(frozen=True)
class Tiling:
    """Tiles of `rows` × `columns` logits, of which one is held at a time."""

    rows: int
    columns: int


def choose_tiling(
    rows: int,
    vocabulary: int,
    hidden: int,
    budget: int,
    *,
    whole_rows: int = ROW_STEP,
    buffers: int = 1,
    converts: bool = False,
) -> Tiling:
    """Choose the tile whose buffers fit `budget` bytes: all columns if so many whole rows fit, else a part of both.

    buffers: fp32 arrays of the tile's size. converts: the weight's tile is first converted to fp32, which counts too.
    """
    rows, vocabulary = max(rows, 1), max(vocabulary, 1)
    room = budget - (vocabulary * hidden * 4 if converts else 0)
    fitting = room // (4 * buffers * vocabulary)
    if fitting >= min(rows, whole_rows):
        return Tiling(rows if fitting >= rows else fitting // ROW_STEP * ROW_STEP, vocabulary)
    tall = min(rows, TILE_ROWS)
    column = 4 * (buffers * tall + (hidden if converts else 0))
    return Tiling(tall, min(vocabulary, max(COLUMN_STEP, budget // column // COLUMN_STEP * COLUMN_STEP)))


@dataclass
class Projection:
    """The operands of one call: logits = softcap(Σ hidden_i weight_iᵀ) / temperature, and targets.

    hidden_i [N, H_i], weight_i [V, H_i]; more than one pair is a low-rank addition to the weight. `first` is the token
    id of the weight's first row, if the ranks of `group` share the vocabulary.
    """

    hidden: Sequence[torch.Tensor]
    weight: Sequence[torch.Tensor]
    targets: torch.Tensor
    temperature: float
    softcap: float | None
    kept: KeptTokens | None
    tiling: Tiling
    entropy: bool
    group: dist.ProcessGroup | None
    first: int
    cut: bool
    """Whether the largest part of the vocabulary takes several tiles"""
    derive: bool
    """Whether any gradients are needed (a Function does not see no_grad)"""
    row_step: int
    """Products run over multiples of this many rows"""
    _buffer: torch.Tensor | None = None

    def release(self) -> None:
        """Free the tile's memory."""
        self._buffer = None

    def row_tiles(self) -> list[slice]:
        return _tiles(len(self.targets), self.tiling.rows)

    def column_tiles(self) -> list[slice]:
        return _tiles(len(self.weight[0]), self.tiling.columns)

    def operands(self, columns: slice) -> list[torch.Tensor]:
        """The weights' rows of one tile, in the type that the matrix product takes."""
        return [matmul_operand(weight[columns]) for weight in self.weight]

    def logits(
        self, rows: slice, columns: slice, operands: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [r, c] in fp32, valid until the next call, and with a softcap its slope [r, c]."""
        count, width = rows.stop - rows.start, columns.stop - columns.start
        missing = -count % self.row_step
        if self._buffer is None:
            most = self.tiling.rows + -self.tiling.rows % self.row_step
            self._buffer = torch.empty(most * self.tiling.columns, device=self.targets.device)
        # All tiles share one buffer, because a new tile would be allocated while the last one still exists.
        product = self._buffer[: (count + missing) * width].view(-1, width)
        for index, (hidden, operand) in enumerate(zip(self.hidden, operands, strict=True)):
            some = matmul_operand(hidden[rows])
            some = F.pad(some, (0, 0, 0, missing)) if missing else some
            matmul(some, operand.t(), out=product, accumulate=index > 0)
        logits, slope = product[:count], None
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_()
            slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1)
            logits.mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.kept is not None:
            self.kept.cut_off_(logits, rows, self.first + columns.start)
        return logits, slope

    def chosen(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the column of each row's target within the tile [r], and whether the target lies in the tile [r]."""
        column, width = self.targets[rows] - (self.first + columns.start), columns.stop - columns.start
        return column.clamp(0, width - 1), (column >= 0) & (column < width)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether kernel launches and passes over memory determine the speed, rather than caches."""
    return tensor.device.type != "cpu"


def _tiles(count: int, step: int) -> list[slice]:
    return [slice(low, min(low + step, count)) for low in range(0, count, step)]


def blocks(tile: torch.Tensor) -> list[slice]:
    # On a GPU blocks do not help, and each would launch its own kernels.
    fitting = len(tile) if on_gpu(tile) else BLOCK_BYTES // (4 * tile.shape[-1])
    return _tiles(len(tile), max(1, fitting))


def exponentials_(logits: torch.Tensor, with_moment: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn logits [r, c] into e^(z - the row's maximum). Returns the maximum, Σ e^(z - max) and, on request, Σ e^(z -
    max) (z - max), [r] each. A row's values are independent of the other rows, to the last bit."""
    largest = logits.amax(-1)
    total, moment = torch.empty_like(largest), torch.zeros_like(largest)
    for block in blocks(logits):
        part = logits[block]
        if with_moment:
            shifted = part - largest[block, None]
            torch.exp(shifted, out=part)
            moment[block] = _row_sums(shifted.mul_(part))
        else:
            part.sub_(largest[block, None]).exp_()
        total[block] = _row_sums(part)
    return largest, total, moment


def _row_sums(part: torch.Tensor) -> torch.Tensor:
    """[r, c] -> [r]. torch splits one long row over its threads, in another order, so it is summed as two rows."""
    return part.expand(2, -1).sum(-1)[:1] if len(part) == 1 and not on_gpu(part) else part.sum(-1)


class RowStatistics:
    """Per row, over the columns seen: maximum, Σ e^(z - max), Σ e^(z - max) (z - max), and the target's logit."""

    def __init__(self, count: int, device: torch.device):
        self.maximum = torch.full((count,), -torch.inf, device=device)
        self.total, self.moment, self.target = torch.zeros(3, count, device=device).unbind()

    def take_(
        self, projection: Projection, logits: torch.Tensor, rows: slice, columns: slice, statistics_rows: slice
    ) -> None:
        """Add a tile of logits [r, c], which is overwritten with e^(z - the row's maximum in this tile).

        statistics_rows: which of these statistics the rows belong to.
        """
        column, inside = projection.chosen(rows, columns)
        self.target[statistics_rows] += torch.where(inside, logits.gather(-1, column[:, None]).squeeze(-1), 0.0)
        largest, total, moment = exponentials_(logits, projection.entropy)
        before = self.maximum[statistics_rows]
        maximum = torch.maximum(before, largest)
        old_total, old_moment = _rescaled(self.total[statistics_rows], self.moment[statistics_rows], before - maximum)
        new_total, new_moment = _rescaled(total, moment, largest - maximum)
        self.maximum[statistics_rows] = maximum
        self.total[statistics_rows] = old_total + new_total
        self.moment[statistics_rows] = old_moment + new_moment

    def reduce_(self, group: dist.ProcessGroup | None) -> None:
        """Combine with the ranks that hold the other columns: one maximum, one sum."""
        if group is None:
            return
        own_maximum = self.maximum.clone()
        dist.all_reduce(self.maximum, dist.ReduceOp.MAX, group=group)
        sums = torch.stack((*_rescaled(self.total, self.moment, own_maximum - self.maximum), self.target))
        dist.all_reduce(sums, group=group)
        self.total, self.moment, self.target = sums.unbind()

    @property
    def normalizer(self) -> torch.Tensor:
        """log Σ e^z, [r]."""
        return self.maximum + self.total.log()

    def log_probs(self) -> torch.Tensor:
        """[r]; -inf for a target that truncated sampling excluded."""
        return torch.where(self.target <= CUT_OFF / 2, -torch.inf, self.target - self.normalizer)

    def entropy(self) -> torch.Tensor:
        """-Σ p log p, [r]."""
        return self.total.log() - self.moment / self.total


def _rescaled(total: torch.Tensor, moment: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rescale both sums to a maximum that is larger by -shift. A shift of -inf comes with sums of 0."""
    scale = shift.exp()
    return total * scale, scale * (moment + total * shift.clamp(min=CUT_OFF))


class GradientSums:
    """Gradients of hidden states and weights, summed tile by tile: all rows of some columns, then the next columns.

    needed: which of (hidden_i..., weight_i...) need a gradient. into: existing gradients to which those of the weights
    are added in place, instead of allocating new tensors.
    """

    def __init__(self, projection: Projection, needed: Sequence[bool], into: Sequence[torch.Tensor | None]):
        self.projection = projection
        pairs = len(projection.hidden)
        covers_vocabulary = projection.tiling.columns >= len(projection.weight[0])
        self.hidden = [
            torch.empty(tensor.shape, device=tensor.device) if need else None
            for tensor, need in zip(projection.hidden, needed[:pairs], strict=True)
        ]
        self.into = into
        self.weight: list[torch.Tensor | None] = []
        for tensor, need, place in zip(projection.weight, needed[pairs:], into, strict=True):
            # If tiles cover only some of the columns, sums are rounded as soon as they are complete.
            dtype = torch.float32 if covers_vocabulary else tensor.dtype
            if need and place is None:
                place = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            self.weight.append(place)
        self._sums: list[torch.Tensor | None] = []
        self._started = False
        self._columns = slice(0)

    def begin(self, columns: slice) -> None:
        """Start summing over the rows of these columns."""
        self._columns, self._started = columns, False
        # float() makes a copy of other types only: fp32 gradients are summed in place.
        self._sums = [None if gradient is None else gradient[columns].float() for gradient in self.weight]

    def add(self, rows: slice, logit_gradients: torch.Tensor, operands: list[torch.Tensor]) -> None:
        """Add one tile [r, c]: gradients of the loss with respect to Σ hidden_i weight_iᵀ."""
        for index, operand in enumerate(operands):
            factor, gradient, total = logit_gradients.to(operand.dtype), self.hidden[index], self._sums[index]
            if gradient is not None:
                if self._columns.start == 0:
                    matmul(factor, operand, out=gradient[rows])
                else:
                    gradient[rows] += matmul(factor, operand)
            if total is not None:
                source = matmul_operand(self.projection.hidden[index][rows])
                if self._started or self.into[index] is not None:
                    matmul(factor.t(), source, out=total, accumulate=True)
                else:
                    matmul(factor.t(), source, out=total)
        self._started = True

    def end(self) -> None:
        """Finish the sums of these columns."""
        for gradient, total, place in zip(self.weight, self._sums, self.into, strict=True):
            if gradient is None or total is None:
                continue
            if not self._started and place is None:
                total.zero_()
            if gradient.dtype != torch.float32:
                gradient[self._columns] = total
        self._sums = []

    def results(self) -> list[torch.Tensor | None]:
        """In the order of `needed`, in the operands' types; None for a weight whose gradient was added in place."""
        hidden = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(self.hidden, self.projection.hidden, strict=True)
        ]
        weight = []
        for index, (tensor, place) in enumerate(zip(self.projection.weight, self.into, strict=True)):
            gradient, self.weight[index] = self.weight[index], None
            weight.append(gradient.to(tensor.dtype) if gradient is not None and place is None else None)
        return [*hidden, *weight]


def logit_gradients_(
    projection: Projection,
    exponentials: torch.Tensor,
    scale: torch.Tensor | None,
    slope: torch.Tensor | None,
    rows: slice,
    columns: slice,
    by_log_prob: torch.Tensor,
    by_entropy: torch.Tensor | None,
    entropy: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the loss with respect to logits before temperature and softcap, in the buffer of exponentials.

    With p = exponentials · scale: ∂ log p_target / ∂z_j = [j = target] - p_j and ∂H / ∂z_j = -p_j (log p_j + H).
    by_log_prob, by_entropy: the loss's derivatives, [r] each.
    """
    factor = 1.0 / projection.temperature
    if by_entropy is None:
        exponentials.mul_((-by_log_prob * factor if scale is None else -by_log_prob * scale * factor)[:, None])
    else:
        if scale is not None:
            exponentials.mul_(scale[:, None])
        straight, curved = -(by_log_prob + by_entropy * entropy) * factor, by_entropy * factor
        for block in blocks(exponentials):
            part = exponentials[block]
            surprise = torch.special.entr(part).mul_(curved[block, None])
            part.mul_(straight[block, None]).add_(surprise)
    column, inside = projection.chosen(rows, columns)
    exponentials.scatter_add_(-1, column[:, None], torch.where(inside, by_log_prob * factor, 0.0)[:, None])
    return exponentials if slope is None else exponentials.mul_(slope)
