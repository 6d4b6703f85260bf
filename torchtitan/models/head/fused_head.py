"""Log-probs and entropy of target tokens without ever holding [N, V]: the kernel of the log-prob head.

There are two ways over the tiles of logit_tiles.py:

- two passes (`fused_log_probs`): the forward keeps one normaliser per row, and the backward recomputes the logits;
- one pass (`fused_objective`): once a tile's log-probs are known, so are the loss's derivatives. The gradients of
  hidden states and weight are formed at once, in the buffer that held the logits; the backward only scales them.

Under tensor parallelism each rank holds a part of the vocabulary, and rows cost one max and one sum reduction.
Gradients formed in the forward are Liger's idea (Hsu et al. 2024, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtitan.distributed.device import matmul_operand
from torchtitan.models.head.logit_tiles import (
    CUT_OFF,
    GradientSums,
    Projection,
    RowStatistics,
    logit_gradients_,
    on_gpu,
)

# (log-probs [n], entropy [n], slice of the rows) -> loss of each row [n], differentiable in the first two.
TokenObjective = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]


def statistics(projection: Projection) -> tuple[RowStatistics, torch.Tensor | None]:
    """Statistics over all rows and columns. A single tile also gives its e^(z - maximum of this rank's columns)."""
    rows = projection.row_tiles()
    columns = projection.column_tiles()
    found = RowStatistics(len(projection.targets), projection.targets.device)
    last_tile: torch.Tensor | None = None
    for column in columns:
        operands = projection.operands(column)
        for row in rows:
            last_tile, _ = projection.logits(row, column, operands)
            found.take_(projection, last_tile, row, column, row)
    is_single = len(rows) == len(columns) == 1
    return found, last_tile if is_single and projection.softcap is None else None


def second_pass(
    projection: Projection,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    by_log_prob: torch.Tensor,
    by_entropy: torch.Tensor | None,
    sums: GradientSums,
) -> list[torch.Tensor | None]:
    """Form the gradients from recomputed logits."""
    for columns in projection.column_tiles():
        operands = projection.operands(columns)
        sums.begin(columns)
        for rows in projection.row_tiles():
            logits, slope = projection.logits(rows, columns, operands)
            logits.sub_(normalizer[rows, None]).exp_()
            by_entropy_here = None if by_entropy is None else by_entropy[rows]
            gradient = logit_gradients_(
                projection, logits, None, slope, rows, columns, by_log_prob[rows], by_entropy_here, entropy[rows]
            )
            sums.add(rows, gradient, operands)
        sums.end()
    return sums.results()


def places_of(weights: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """Existing gradients to which a weight's can be added directly, so that later micro-batches allocate none."""
    places: list[torch.Tensor | None] = []
    for weight, need in zip(weights, needed, strict=True):
        place = weight.grad if need and weight.is_leaf else None
        usable = (
            place is not None
            and type(place) is torch.Tensor
            and place.is_contiguous()
            # A hook on the weight expects to see each gradient.
            and not weight._backward_hooks
            and not getattr(weight, "_post_accumulate_grad_hooks", None)
        )
        places.append(place if usable else None)
    return places


class TwoPass(torch.autograd.Function):
    """(projection, accumulate, *hidden, *weight) -> (log-probs [N], entropy [N])."""

    @staticmethod
    def forward(ctx: Any, projection: Projection, accumulate: bool, *operands: torch.Tensor) -> Any:
        if not projection.derive and not projection.cut and (few := _whole_rows(projection)) is not None:
            return few.score(projection)
        found, last_tile = statistics(projection)
        projection.release()
        local_maximum = found.maximum.clone() if last_tile is not None else None
        found.reduce_(projection.group)
        log_probs, normalizer = found.log_probs(), found.normalizer
        entropy = found.entropy() if projection.entropy else torch.zeros_like(log_probs)
        if not (projection.derive and any(ctx.needs_input_grad)):
            return log_probs, entropy
        ctx.projection, ctx.accumulate = projection, accumulate
        scale = None if local_maximum is None else (local_maximum - normalizer).exp()
        # The first backward consumes these; another one recomputes the logits.
        ctx.exponentials = last_tile
        ctx.save_for_backward(normalizer, entropy, scale, *operands)
        ctx.set_materialize_grads(False)
        if not projection.entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, by_log_prob: torch.Tensor | None, by_entropy: torch.Tensor | None) -> Any:
        normalizer, entropy, scale, *operands = ctx.saved_tensors
        exponentials, ctx.exponentials = ctx.exponentials, None
        projection: Projection = ctx.projection
        pairs = len(operands) // 2
        # FSDP frees and gathers weights between the passes; the saved operands are the current weights.
        projection.hidden, projection.weight = operands[:pairs], operands[pairs:]
        needed = ctx.needs_input_grad[2:]
        places = places_of(projection.weight, needed[pairs:]) if ctx.accumulate else [None] * pairs
        sums = GradientSums(projection, needed, places)
        if by_log_prob is None:
            by_log_prob = torch.zeros_like(normalizer)
        if exponentials is None:
            gradients = second_pass(projection, normalizer, entropy, by_log_prob, by_entropy, sums)
        else:
            rows, columns = projection.row_tiles()[0], projection.column_tiles()[0]
            weights = projection.operands(columns)
            gradient = logit_gradients_(
                projection, exponentials, scale, None, rows, columns, by_log_prob, by_entropy, entropy
            )
            sums.begin(columns)
            sums.add(rows, gradient, weights)
            sums.end()
            gradients = sums.results()
        projection.release()
        return (None, None, *gradients)


class WholeRows:
    """A tile of whole rows of logits [r, V] on a GPU: log-probs, entropy and gradients in as few of torch's operators
    as possible. A tile there takes tens of milliseconds, bound by memory bandwidth, and an operator that allocates its
    result adds a pass over memory, so each writes into one of two existing buffers.

    dtype: of the matrix products that use the gradients.
    """

    def __init__(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device):
        self._beside = torch.empty(rows * vocabulary, device=device)
        self._gradients = self._beside.view(dtype)
        self._minus_one = torch.full((rows, 1), -1.0, device=device)

    def take_(
        self, logits: torch.Tensor, targets: torch.Tensor, log_probs: torch.Tensor, truncated: bool
    ) -> torch.Tensor:
        """Write log_probs [r] of targets [r] alone, see normalize_. Returns all of them [r, V] in the second buffer."""
        beside = self._beside[: logits.numel()].view_as(logits)
        torch.log_softmax(logits, -1, out=beside)
        torch.gather(beside, -1, targets[:, None], out=log_probs[:, None])
        if truncated:
            log_probs.masked_fill_(log_probs <= CUT_OFF / 2, -torch.inf)
        return beside

    def score(self, projection: Projection) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [N], entropy [N], or zeros where it is not asked for), without gradients."""
        log_probs, entropy = torch.zeros(2, len(projection.targets), device=projection.targets.device).unbind()
        columns, truncated = projection.column_tiles()[0], projection.kept is not None
        weights = projection.operands(columns)
        for rows in projection.row_tiles():
            logits, targets = projection.logits(rows, columns, weights)[0], projection.targets[rows]
            if projection.entropy:
                self.normalize_(logits, targets, log_probs[rows], entropy[rows], truncated)
            else:
                self.take_(logits, targets, log_probs[rows], truncated)
        projection.release()
        return log_probs, entropy

    def normalize_(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        truncated: bool,
    ) -> None:
        """Turn logits [r, V] into probabilities; writes log_probs [r] of targets [r], and entropy [r] if given.

        truncated: logits hold CUT_OFF for tokens that were not kept; a target among them has log-prob -inf.
        """
        beside = self.take_(logits, targets, log_probs, truncated)
        torch.exp(beside, out=logits)
        if entropy is not None:
            torch.special.entr(logits, out=beside)
            torch.sum(beside, -1, out=entropy)

    def gradients(self, probabilities: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """factor_r · (p_rj - [j = target_r]), [r, V], rounded once; overwrites probabilities [r, V]. factor [r]."""
        probabilities.scatter_add_(-1, targets[:, None], self._minus_one[: len(targets)])
        result = self._gradients[: probabilities.numel()].view_as(probabilities)
        return torch.mul(probabilities, factor[:, None], out=result)


class OnePass(torch.autograd.Function):
    """(projection, objective, accumulate, *hidden, *weight) -> (loss [], log-probs [N], entropy [N])."""

    @staticmethod
    def forward(
        ctx: Any, projection: Projection, objective: TokenObjective, accumulate: bool, *operands: torch.Tensor
    ) -> Any:
        pairs = len(operands) // 2
        needed = [projection.derive and need for need in ctx.needs_input_grad[3:]]
        # A forward within a backward is a recomputation by activation checkpointing, whose gradients may be discarded.
        in_place = accumulate and torch._C._current_graph_task_id() == -1
        places = places_of(operands[pairs:], needed[pairs:]) if in_place else [None] * pairs
        count, device = len(projection.targets), projection.targets.device
        log_probs, entropy = torch.empty(2, count, device=device).unbind()
        loss = torch.zeros((), device=device)
        columns = projection.column_tiles()
        # All ranks of a group take the same branch, even if their parts differ in size, because the collectives differ.
        if projection.cut or not any(needed):
            found, _ = statistics(projection)
            found.reduce_(projection.group)
            log_probs.copy_(found.log_probs())
            if projection.entropy:
                entropy.copy_(found.entropy())
            loss, by_log_prob, by_entropy = _ask(objective, log_probs, entropy, slice(0, count), any(needed))
            if any(needed):
                sums = GradientSums(projection, needed, places)
                ctx.gradients = second_pass(projection, found.normalizer, entropy, by_log_prob, by_entropy, sums)
        else:
            sums = GradientSums(projection, needed, places)
            weights = projection.operands(columns[0])
            few = _whole_rows(projection)
            sums.begin(columns[0])
            for rows in projection.row_tiles():
                logits, slope = projection.logits(rows, columns[0], weights)
                targets, scale = projection.targets[rows], None
                if few is not None:
                    spread = entropy[rows] if projection.entropy else None
                    few.normalize_(logits, targets, log_probs[rows], spread, projection.kept is not None)
                else:
                    found = RowStatistics(len(logits), device)
                    found.take_(projection, logits, rows, columns[0], slice(None))
                    local_maximum = found.maximum.clone()
                    found.reduce_(projection.group)
                    log_probs[rows] = found.log_probs()
                    entropy[rows] = found.entropy() if projection.entropy else 0.0
                    scale = (local_maximum - found.normalizer).exp()
                part, by_log_prob, by_entropy = _ask(objective, log_probs[rows], entropy[rows], rows, True)
                loss += part
                if few is not None and by_entropy is None and slope is None:
                    gradient = few.gradients(logits, targets, by_log_prob * (-1 / projection.temperature))
                else:
                    gradient = logit_gradients_(
                        projection, logits, scale, slope, rows, columns[0], by_log_prob, by_entropy, entropy[rows]
                    )
                sums.add(rows, gradient, weights)
            sums.end()
            few = None
            projection.release()
            ctx.gradients = sums.results()
        projection.release()
        ctx.accumulated = any(place is not None for place in places)
        ctx.mark_non_differentiable(log_probs, entropy)
        ctx.set_materialize_grads(False)
        return loss, log_probs, entropy

    @staticmethod
    def backward(ctx: Any, by_loss: torch.Tensor, *_: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("fused_objective: its gradients were used up by the first backward")
        is_one = not on_gpu(by_loss) and by_loss.item() == 1.0
        if ctx.accumulated and not is_one:
            torch._assert_async(
                by_loss == 1.0, "fused_objective(accumulate=True): its loss must be what backward() is called on"
            )
        if not is_one:
            gradients = [None if gradient is None else gradient.mul_(by_loss) for gradient in gradients]
        return (None, None, None, *gradients)


def _whole_rows(projection: Projection) -> WholeRows | None:
    """Return the operators over whole rows if the tile is on a GPU and this rank holds all columns."""
    dtypes = {matmul_operand(weight[:0]).dtype for weight in projection.weight}
    same = len(dtypes) == 1
    if not on_gpu(projection.targets) or projection.group is not None or not same:
        return None
    tiling = projection.tiling
    return WholeRows(tiling.rows, tiling.columns, dtypes.pop(), projection.targets.device)


def _ask(
    objective: TokenObjective, log_probs: torch.Tensor, entropy: torch.Tensor, rows: slice, derive: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the objective summed over the rows, and its derivatives by log-prob and entropy (None if absent)."""
    with torch.enable_grad():
        leaves = log_probs.detach().requires_grad_(derive), entropy.detach().requires_grad_(derive)
        loss = objective(*leaves, rows).sum()
    if not loss.requires_grad:
        return loss.detach(), torch.zeros_like(log_probs), None
    by_log_prob, by_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), torch.zeros_like(log_probs) if by_log_prob is None else by_log_prob, by_entropy
