"""The language-model head: log-probs and entropy of target tokens from hidden states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from typing_extensions import Unpack

from torchtitan.distributed.device import matmul, matmul_converts, matmul_operand
from torchtitan.models.head.fused_head import OnePass, TokenObjective, TwoPass
from torchtitan.models.head.logit_tiles import (
    BLOCK_BYTES,
    COLUMN_STEP,
    CUT_OFF,
    ROW_STEP,
    KeptTokens,
    Projection,
    Tiling,
    choose_tiling,
    on_gpu,
)
from torchtitan.models.shape.costs import default_head_budget

if TYPE_CHECKING:
    from torchtitan.models.lora import Adapter
    from torchtitan.models.parallelize import VocabularyShard


def scale_logits(logits: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Logits [N, V] in fp32, divided by the temperature (a number, or [N, 1])."""
    scaled = logits.float()
    if isinstance(temperature, torch.Tensor) or temperature != 1.0:
        scaled = scaled / temperature
    return scaled


def full_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, kept: KeptTokens | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of targets [N] and entropy [N], both fp32, under softmax(logits [N, V] / temperature).

    The plain computation, as a reference for the fused one.
    """
    scaled = scale_logits(logits, temperature)
    if kept is not None:
        scaled = scaled.masked_fill(kept.cut_off_(torch.zeros_like(scaled), slice(0, len(targets))) < 0, -torch.inf)
    log_probs = torch.log_softmax(scaled, dim=-1)
    # nll_loss picks the targets, because FSDP warns about outputs that are views, such as those of gather and squeeze.
    chosen = -F.nll_loss(log_probs, targets, reduction="none")
    # Log-probs are clamped, because 0 · -inf is NaN.
    return chosen, -(log_probs.exp() * log_probs.clamp(min=CUT_OFF)).sum(-1)


class VocabularyPart(NamedTuple):
    """This rank's rows of a sharded weight."""

    start: int
    """Token id of the first row"""
    total: int
    """Size of the whole vocabulary"""
    largest: int
    """Rows of the largest part, so that all ranks use the same tiles"""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the parts. hidden and targets are the same on all of them, and the gradient of hidden is this
    rank's summand"""


class HeadOptions(TypedDict, total=False):
    """Options of fused_log_probs and fused_objective."""

    temperature: float
    """Logits are divided by it; default 1"""
    softcap: float | None
    """Logits become softcap · tanh(logits / softcap)"""
    chunk_tokens: int | Literal["auto"]
    """Rows of logits at a time, with all columns; "auto" (default) chooses rows and columns by budget_bytes"""
    budget_bytes: int | None
    """Memory for logits at a time, summed over all ranks that hold parts of the vocabulary"""
    entropy: bool
    """False returns zeros instead of the entropy; True by default"""
    vocabulary: VocabularyPart | None
    """This rank's part; None: all of it"""
    kept: KeptTokens | None
    """The tokens that truncated sampling kept"""
    row_step: int
    """Products run over multiples of this many rows, padded with zeros (batch_invariance.py); default 1"""


# (hidden [n, H_i], weight [V, H_i], targets [n], options) -> tensors [n]: what a head computes of its operands.
HeadFunction = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor, HeadOptions], tuple[torch.Tensor, ...]
]


def fused_log_probs(
    hidden: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    *,
    accumulate: bool = False,
    **options: Unpack[HeadOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob [N] of targets and entropy [N] in fp32 under softmax(softcap(hidden weightᵀ) / temperature).

    Differentiable once in hidden and weight, through both results; [N, V] is never held (see fused_head.py).

    Args:
        hidden: [N, H]; or several, whose products with their weights are added (a low-rank addition).
        weight: [V, H], or several likewise; under tensor parallelism this rank's part of the vocabulary.
        targets: [N] int64, token ids of the whole vocabulary.
        accumulate: backward() adds in place to the gradient that a plain leaf weight already has, instead of making
            another [V, H] first. For backward() only, not for torch.autograd.grad.
        options: see HeadOptions.

    Raises:
        ValueError: mismatched shapes, a target outside the vocabulary, or a chunk size that is not positive.
        TypeError: an unknown option.
    """
    projection = make_projection(hidden, weight, targets, options)
    log_probs, entropy = TwoPass.apply(projection, accumulate, *projection.hidden, *projection.weight)
    return log_probs, entropy


def fused_objective(
    hidden: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    objective: TokenObjective,
    *,
    accumulate: bool = False,
    **options: Unpack[HeadOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum a token-separable objective and compute its gradients in the forward: three matrix products instead of four.

    Other arguments and errors are those of fused_log_probs. objective(log_probs [n], entropy [n], rows) returns the
    losses [n] of those rows; a row's loss must not depend on other rows. Returns (loss [], log-probs [N], entropy [N]),
    the last two without gradient. accumulate: the forward adds to the weight's existing gradient; `backward()` must
    then be called on this loss itself.
    """
    projection = make_projection(hidden, weight, targets, options)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    result = OnePass.apply(projection, objective, accumulate, *projection.hidden, *projection.weight)
    return result


def _fit(hidden: list[torch.Tensor], weight: list[torch.Tensor], targets: torch.Tensor) -> bool:
    """Whether these are hidden [N, H_i], weight [V, H_i] and targets [N]."""
    if len(hidden) != len(weight) or targets.dim() != 1 or any(tensor.dim() != 2 for tensor in hidden + weight):
        return False
    for states, matrix in zip(hidden, weight, strict=True):
        if states.shape != (len(targets), matrix.shape[1]) or len(matrix) != len(weight[0]):
            return False
    return True


def make_projection(
    hidden: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    options: HeadOptions,
    whole_rows: int = ROW_STEP,
) -> Projection:
    unknown = sorted(options.keys() - HeadOptions.__optional_keys__)
    if unknown:
        raise TypeError(f"there is no option {', '.join(unknown)}; there are {', '.join(HeadOptions.__annotations__)}")
    hidden = [hidden] if isinstance(hidden, torch.Tensor) else list(hidden)
    weight = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    if not _fit(hidden, weight, targets):
        shapes = f"hidden {[list(t.shape) for t in hidden]} and weight {[list(t.shape) for t in weight]}"
        raise ValueError(f"hidden [N, H] and weight [V, H] are needed for targets {list(targets.shape)}, not {shapes}")
    chunk = options.get("chunk_tokens", "auto")
    if chunk != "auto" and chunk < 1:
        raise ValueError(f"chunk_tokens must be 'auto' or at least 1, not {chunk}")
    part, softcap = options.get("vocabulary"), options.get("softcap")
    part = part or VocabularyPart(0, len(weight[0]), len(weight[0]))
    if len(weight[0]) == 0:
        raise ValueError(f"this rank has no part of the vocabulary of {part.total} tokens: use fewer ranks for it")
    check_targets(targets, part.total)
    if chunk == "auto":
        width, converts = max(tensor.shape[1] for tensor in weight), matmul_converts(weight[0])
        budget = options.get("budget_bytes")
        if budget is None:
            budget = default_head_budget(len(targets), part.total, width, converts, on_gpu(targets))
        tiling = choose_tiling(
            len(targets),
            part.largest,
            width,
            budget // (1 if part.group is None else dist.get_world_size(part.group)),
            whole_rows=whole_rows,
            buffers=1 if softcap is None else 3,
            converts=converts,
        )
    else:
        tiling = Tiling(chunk, part.largest)
    return Projection(
        hidden=hidden,
        weight=weight,
        targets=targets,
        temperature=options.get("temperature", 1.0),
        softcap=softcap,
        kept=options.get("kept"),
        tiling=tiling,
        entropy=options.get("entropy", True),
        group=part.group,
        first=part.start,
        cut=tiling.columns < part.largest,
        derive=torch.is_grad_enabled(),
        row_step=options.get("row_step", 1),
    )


def check_targets(targets: torch.Tensor, vocabulary: int) -> None:
    """Raise ValueError for a target outside [0, vocabulary); on CUDA the kernel asserts it without synchronisation."""
    outside = (targets < 0) | (targets >= vocabulary)
    if targets.device.type != "cpu":
        torch._assert_async(~outside.any(), "a target lies outside the vocabulary")
    elif outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(f"target {int(targets[row])} of row {row} lies outside the vocabulary of {vocabulary} tokens")


class LogProbHead(nn.Module):
    """Projects hidden states to the vocabulary and reduces them to what the objective needs.

    It is a separate module so that FSDP2 gathers its weight like any other.
    """

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.mode: Literal["one_pass", "two_pass", "full"] = "one_pass"
        """one_pass holds no full logits and forms gradients in the forward if the objective is separable by token
        (otherwise it is two_pass); two_pass computes the logits again in the backward; full holds all logits, for
        comparison"""
        self.softcap, self.divisor = 0.0, 1.0
        """Logits are divided by the divisor, and with a soft cap become softcap · tanh(logits / softcap)"""
        self.budget_bytes: int | None = None
        # Set if tensor parallelism shards the vocabulary.
        self.shard: VocabularyShard | None = None
        # Set if the head has a low-rank adapter.
        self.adapter: Adapter | None = None

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        temperature: float = 1.0,
        kept: KeptTokens | None = None,
        rows: torch.Tensor | None = None,
        objective: TokenObjective | None = None,
        row_step: int = 1,
        function: HeadFunction | None = None,
        entropy: bool = True,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """hidden [N, H] -> logits [N, V] without targets; with targets [N], (log-probs [N], entropy [N]) in fp32.

        rows [n]: the positions of hidden that the targets [n] belong to. With a token-separable objective the result is
        (loss [], log-probs [n], entropy [n]), and only the loss has a gradient; call backward() on it, unscaled.
        function: the result is what it makes of the operands, in place of log-probs and entropy. entropy: False gives
        zeros in its place (a head in the mode full always computes it).

        If the weight already has a gradient, backward() adds to it in place (see fused_log_probs). To get the weight's
        gradient from torch.autograd.grad, call fused_log_probs.
        """
        weight: torch.Tensor = self.weight
        options: HeadOptions = {"temperature": temperature, "kept": kept, "budget_bytes": self.budget_bytes}
        options |= {"row_step": row_step, "softcap": self.softcap or None, "entropy": entropy}
        if self.divisor != 1.0:
            hidden = hidden / self.divisor
        if self.shard is not None:
            hidden, weight = self.shard.local(hidden, weight)
            options["vocabulary"] = self.shard.part(self.weight)
        if targets is not None:
            hidden = hidden[: len(targets)] if rows is None else hidden[rows]
        hiddens, weights = [hidden], [weight]
        if self.adapter is not None and self.adapter.enabled:
            reduced, widening = self.adapter.pair(self, hidden)
            hiddens, weights = [hidden, reduced], [weight, widening]
        if targets is None:
            logits = self._capped(_project(hiddens, weights))
            return logits if self.shard is None else self.shard.full_logits(logits, self.weight)
        if function is not None:
            return function(hiddens, weights, targets, options)
        if objective is not None:
            return fused_objective(hiddens, weights, targets, objective, accumulate=True, **options)
        if self.mode != "full" or self.shard is not None:
            return fused_log_probs(hiddens, weights, targets, accumulate=True, **options)
        return full_log_probs(self._capped(_project(hiddens, weights)), targets, temperature, kept)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return self.softcap * (logits / self.softcap).tanh() if self.softcap else logits


def _project(hidden: list[torch.Tensor], weight: list[torch.Tensor]) -> torch.Tensor:
    """Logits Σ hidden_i weight_iᵀ [..., V] in fp32 from operands [..., H] and [V, H] of any type; logit_tiles.py
    explains why in fp32."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or on_gpu(weight[0]):
        products = (F.linear(h.float(), w.float()) for h, w in zip(hidden, weight, strict=True))
        return functools.reduce(torch.add, products)
    # Few tokens times a large vocabulary: rows of the weight are converted and multiplied while they are in the cache.
    wide, (vocabulary, size) = [h.float().flatten(0, -2) for h in hidden], weight[0].shape
    step = max(COLUMN_STEP, BLOCK_BYTES // (4 * size) // COLUMN_STEP * COLUMN_STEP)
    # A short rest goes with the rows before it, because kernels may sum narrow products in another order.
    starts = range(0, max(1, vocabulary - step // 2), step)
    logits = wide[0].new_empty(len(wide[0]), vocabulary)
    for start, end in zip(starts, [*starts[1:], vocabulary], strict=True):
        for index, (h, w) in enumerate(zip(wide, weight, strict=True)):
            matmul(h, matmul_operand(w[start:end]).t(), out=logits[:, start:end], accumulate=index > 0)
    return logits.view(*hidden[0].shape[:-1], vocabulary)
