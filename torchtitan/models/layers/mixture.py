"""A mixture of experts in place of a feed-forward: the router, the experts' stacked weights, and how tokens are
dispatched to the experts and combined."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.distributed.placement import local_copy, local_tensor
from torchtitan.models.head.logit_tiles import on_gpu
from torchtitan.models.layers.batch_invariance import InvariantSizes
from torchtitan.models.layers.elementwise import sigmoid, swiglu
from torchtitan.models.shape.mixture_args import MISSING, ExpertArgs

# On a GPU in half precision, the rows of every expert begin at a multiple of 16 bytes.
GPU_ROWS = 8


class Routing(NamedTuple):
    """What a forward passes to its mixtures of experts.

    routes: [T, layers, k] integers, the experts that an engine chose for each token, or MISSING; None: none are known.
    rows: each expert computes with a multiple of this many rows.
    """

    routes: torch.Tensor | None
    rows: int


def expert_rows(sizes: InvariantSizes, device: torch.device) -> int:
    """Return Routing.rows for a device. On a CPU a token's result must not depend on which tokens share its expert."""
    return GPU_ROWS if device.type == "cuda" else sizes.rows


class Router(nn.Module):
    """Chooses experts for each token, and their weights."""

    bias: torch.Tensor | None
    e_score_correction_bias: torch.Tensor | None

    def __init__(self, args: ExpertArgs, hidden_size: int):
        super().__init__()
        self.args = args
        self.weight = nn.Parameter(torch.empty(args.count, hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(args.count)) if args.stacked else None)
        # A buffer has no gradient, but is loaded, saved and sent like a parameter; it stays fp32 (Decoder._apply).
        self.register_buffer("e_score_correction_bias", torch.zeros(args.count) if args.bias else None)

    def forward(self, x: torch.Tensor, routes: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (experts [T, k] int64, their weights [T, k] like x).

        routes [T, k]: experts that are given; a row with MISSING is chosen here. The weights always come from the
        router's own scores, so that it learns in either case.
        """
        args = self.args
        # Tensor-parallel ranks route different tokens.
        weight = local_copy(self.weight)
        if args.score == "sigmoid":
            scores = sigmoid(F.linear(x.float(), weight.float()))
        elif args.score == "softmax_of_chosen":
            scores = F.linear(x, weight, self.bias).float()
        else:
            scores = F.linear(x, weight).float().softmax(-1)
        with torch.no_grad():
            experts = self._choose(scores)
            if routes is not None:
                experts = torch.where(routes[:, :1] == MISSING, experts, routes.long())
        chosen = scores.gather(-1, experts)
        if args.score == "softmax_of_chosen":
            chosen = chosen.softmax(-1)
        if args.normalize:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + (1e-20 if args.score == "sigmoid" else 0.0))
        return experts, (chosen * args.scale).to(x.dtype)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        args = self.args
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if args.groups > 1:
            grouped = scores.unflatten(-1, (args.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(args.best_groups, dim=-1).indices
            left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            scores = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
        return scores.topk(args.per_token, dim=-1).indices


class ExpertRows(NamedTuple):
    """Row indices that group items by expert.

    place: int64 [T, ...] like the items, the row of each; token: int64 [rows], which of the T tokens has an item there,
    or any token if none has; counts: int64 [experts], items of each; ends: int32 [experts], where the rows of each end.
    """

    place: torch.Tensor
    token: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor


def places_of(experts: torch.Tensor, count: int, step: int) -> ExpertRows:
    """Group items by their expert [T, ...] in stable order; each expert's rows are rounded up to a multiple of `step`.

    Does not synchronise with the device, so that there may be unused rows at the end.
    """
    expert = experts.flatten()
    counts = torch.zeros(count, dtype=torch.int64, device=expert.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    rounded = (counts + step - 1) // step * step
    ends = rounded.cumsum(0)
    order = expert.argsort(stable=True)
    # Rounding up the experts before its own shifts an item's row.
    shift = (ends - rounded) - (counts.cumsum(0) - counts)
    sorted_place = torch.arange(len(expert), device=expert.device) + shift[expert[order]]
    place = torch.empty_like(order).index_copy_(0, order, sorted_place)
    token = order.new_zeros(len(expert) + min(count, len(expert)) * (step - 1))
    token.index_copy_(0, sorted_place, order // max(1, experts[:1].numel()))
    return ExpertRows(place.view(experts.shape), token, counts, ends.to(torch.int32))


def _sums(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """rows [R, H], place [T, k] -> each token's rows summed [T, H], by weights [T, k] if given.

    On a GPU one kernel reads each row once and adds in fp32; elsewhere the rows are gathered first.
    """
    if on_gpu(rows):
        return F.embedding_bag(place, rows, mode="sum", per_sample_weights=weights)
    taken = rows.index_select(0, place.flatten()).unflatten(0, place.shape)
    return (taken if weights is None else taken * weights[..., None]).sum(1)


def _products(rows: torch.Tensor, place: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
    """rows [R, H], place [T, k], of_tokens [T, H] -> the scalar products of each token's rows with its own [T, k]."""
    if on_gpu(rows):
        # The gradient of embedding_bag by its weights.
        first = torch.arange(0, place.numel(), place.shape[1], device=place.device)
        token = torch.arange(len(place), device=place.device)[:, None].expand_as(place).flatten()
        return torch.ops.aten._embedding_bag_per_sample_weights_backward(
            of_tokens.contiguous(), rows, place.flatten(), first, token, 0
        ).view(place.shape)
    taken = rows.index_select(0, place.flatten()).unflatten(0, place.shape)
    return (taken * of_tokens[:, None]).sum(-1)


class _Spread(torch.autograd.Function):
    """x [T, H], place [T, k], token [R] -> rows [R, H]: each token at all of its k places, any token elsewhere. Its
    gradient is summed in the order of the places."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return _sums(gradient.contiguous(), place), None, None


class _Combine(torch.autograd.Function):
    """rows [R, H], place [T, k], token [R], weights [T, k] -> the weighted sum of each token's rows [T, H]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, place: torch.Tensor, token: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, place, token, weights)
        return _sums(rows, place, weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, place, token, weights = ctx.saved_tensors
        # A row without a token gets no gradient: its weight is 0.
        of_row = weights.new_zeros(len(token)).index_copy_(0, place.flatten(), weights.flatten())
        by_rows = gradient.index_select(0, token).mul_(of_row[:, None])
        return by_rows, None, None, _products(rows, place, gradient)


# How rows reach experts on other ranks, see parallelize.ExpertExchange: rows [R, H] in the order of all experts and
# their counts [E] -> the results of compute(rows, experts), which runs on the ranks that hold the experts.
Exchange = Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], torch.Tensor]


# torch's own grouped_mm computes exactly these products, one per expert over contiguous rows. But its fp32 form does
# not support torch.compile, and its backward rejects expanded gradients, hence these operators.


def _fits(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether torch's kernel takes these: half or single precision, and rows of a multiple of 16 bytes."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and not any(s * dtype.itemsize % 16 for s in sizes)


@torch.library.custom_op("torchtitan::grouped_linear", mutates_args=())
def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply x [R, K] by the transposed weight [E, N, K] of each row's expert -> [R, N].

    Expert e has rows ends[e - 1] to ends[e] (int32 [E]). Rows past the last end are undefined.
    """
    if _fits(x.dtype, *weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = x.new_zeros(len(x), weight.shape[1])
    for expert, rows in enumerate(_ranges(ends)):
        out[rows] = F.linear(x[rows], weight[expert])
    return out


@grouped_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("torchtitan::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """left [R, N], right [R, K] -> [E, N, K]: each expert's transposed left rows times its right rows."""
    if _fits(left.dtype, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.t(), right, offs=ends)
    return torch.stack([left[rows].t() @ right[rows] for rows in _ranges(ends)])


@grouped_outer.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _ranges(ends: torch.Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _save_inputs(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    by_x = grouped_linear(gradient, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return by_x, grouped_outer(gradient, x, ends) if ctx.needs_input_grad[1] else None, None


grouped_linear.register_autograd(_grouped_backward, setup_context=_save_inputs)


class ExpertLinear(nn.Module):
    """A projection of all experts, with their weights stacked [E, out, in]."""

    def __init__(self, count: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """rows [R, in], grouped by expert with ends [E] -> [R, out]."""
        return grouped_linear(rows, local_tensor(self.weight).to(rows.dtype), ends)


class Experts(nn.Module):
    """SwiGLU feed-forwards."""

    down_proj: Any
    """StackedExperts has a parameter here"""

    def __init__(self, args: ExpertArgs, hidden_size: int):
        super().__init__()
        self.count = args.count
        self.gate_proj = ExpertLinear(args.count, hidden_size, args.intermediate_size)
        self.up_proj = ExpertLinear(args.count, hidden_size, args.intermediate_size)
        self.down_proj = ExpertLinear(args.count, args.intermediate_size, hidden_size)
        # Set if experts are spread over several ranks.
        self.exchange: Exchange | None = None

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, step: int) -> torch.Tensor:
        """x [T, H], each token's experts [T, k] and their weights [T, k] -> [T, H]."""
        places = places_of(experts, self.count, step if self.exchange is None else 1)
        out = _Spread.apply(x, places.place, places.token)
        if self.exchange is None:
            out = self._rows(out, places.ends)
        else:
            out = self.exchange(out, places.counts, lambda rows, expert: self._unordered(rows, expert, step))
        return _Combine.apply(out, places.place, places.token, weights)

    def _unordered(self, rows: torch.Tensor, expert: torch.Tensor, step: int) -> torch.Tensor:
        """Compute rows [R, H] for this rank's experts [R], in any order."""
        places = places_of(expert[:, None], local_tensor(next(self.parameters())).shape[0], step)
        out = self._rows(_Spread.apply(rows, places.place, places.token), places.ends)
        return out.index_select(0, places.place.flatten())

    def _rows(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(rows, ends), self.up_proj(rows, ends)), ends)


class StackedExperts(Experts):
    """gpt-oss: gate_up [E, H, 2 I] interleaves the columns of gate and up, down is [E, I, H], and both have biases.
    gate and up are clamped to `limit`, and the activation is (up + 1) · gate · sigmoid(alpha · gate)."""

    def __init__(self, args: ExpertArgs, hidden_size: int):
        nn.Module.__init__(self)
        self.count, self.alpha, self.limit, wide = args.count, args.alpha, args.limit, args.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(args.count, hidden_size, 2 * wide))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(args.count, 2 * wide))
        self.down_proj = nn.Parameter(torch.empty(args.count, wide, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.empty(args.count, hidden_size))
        self.exchange = None

    def _rows(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        # Rows past the last end are undefined; they use a row of zeros appended to the experts' biases.
        expert = torch.searchsorted(ends, torch.arange(len(rows), device=ends.device, dtype=ends.dtype), right=True)

        def project(x: torch.Tensor, stack: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            weight, bias = local_tensor(stack).to(x.dtype), local_tensor(bias).to(x.dtype)
            return grouped_linear(x, weight.transpose(1, 2), ends) + F.pad(bias, (0, 0, 0, 1))[expert]

        both = project(rows, self.gate_up_proj, self.gate_up_proj_bias)
        gate, up = both[:, ::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit)
        activated = swiglu(self.alpha * gate, (up + 1) / self.alpha)
        return project(activated, self.down_proj, self.down_proj_bias)


class MoE(nn.Module):
    """Router and experts, and the shared expert that every token passes if the family has one."""

    def __init__(self, args: ExpertArgs, hidden_size: int, index: int, shared: nn.Module | None = None):
        super().__init__()
        self.index = index
        self.gate = Router(args, hidden_size)
        self.experts = (StackedExperts if args.stacked else Experts)(args, hidden_size)
        self.shared_experts = shared
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False) if args.shared_gate else None
        # Routes cover the whole pack; under sequence parallelism this rank takes its part of `parts`.
        self.part, self.parts = 0, 1
        # Set to record the chosen experts: record(layer, experts [T, k]).
        self.record: Callable[[int, torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        routes = None if routing.routes is None else routing.routes[:, self.index]
        if routes is not None and self.parts > 1:
            routes = routes.chunk(self.parts)[self.part]
        experts, weights = self.gate(x, routes)
        if self.record is not None:
            self.record(self.index, experts)
        out = self.experts(x, experts, weights, routing.rows)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            # A sum over each row: a product with one output would depend on the number of rows.
            shared = sigmoid((x * local_copy(self.shared_expert_gate.weight)).sum(-1, keepdim=True)) * shared
        return out + shared
