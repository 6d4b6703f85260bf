"""The divergence of a policy from its teacher over the whole vocabulary, without ever holding [N, V]: a second kernel
of the log-prob head, on the tiles of logit_tiles.py. The backward recomputes them, as that of fused_head.py does.

With p the policy's distribution at a position, q the teacher's, and m = β q + (1 - β) p (Agarwal et al. 2024, GKD,
section 2; the gradient is that by the policy's logit z_j):

    forward_kl   KL(q ‖ p)                          p_j - q_j
    reverse_kl   KL(p ‖ q)                          p_j (log p_j - log q_j - KL(p ‖ q))
    jsd          β KL(q ‖ m) + (1 - β) KL(p ‖ m)    (1 - β) p_j (log p_j - log m_j - KL(p ‖ m))

A teacher in the process has hidden states and a weight of its own, of any width, and each of its tiles exists beside
the policy's. Of a teacher behind a server only the likeliest tokens are known: all others form one more symbol for
both, whose probability is what is missing to 1. That is a lower bound of the divergence (data-processing inequality).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from torchtitan.distributed.device import matmul_converts
from torchtitan.models.head.fused_head import places_of
from torchtitan.models.head.logit_tiles import TILE_ROWS, GradientSums, Projection, blocks, on_gpu
from torchtitan.models.head.logprob_head import HeadOptions, check_targets, make_projection
from torchtitan.models.shape.costs import default_head_budget

# (log p, log q, β) over all symbols [N, V] -> the divergence [N]: the plain computation, for few symbols.
KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "forward_kl": lambda policy, teacher, beta: (teacher.exp() * (teacher - policy)).sum(-1),
    "reverse_kl": lambda policy, teacher, beta: (policy.exp() * (policy - teacher)).sum(-1),
    "jsd": lambda policy, teacher, beta: (
        beta * teacher.exp() * (teacher - policy - _above(teacher - policy, beta))
        - (1 - beta) * policy.exp() * _above(teacher - policy, beta)
    ).sum(-1),
}
# Beyond e^80 a quotient of two probabilities is as good as infinite, and still a number.
LARGEST_LOG_QUOTIENT = 80.0
# What is missing to 1 is rounding, if less than this.
LEAST_REST = 1e-7
# Servers write -inf and large negative numbers for what they exclude.
LEAST_LOG_PROB = -100.0


def _above(quotient: torch.Tensor, beta: float) -> torch.Tensor:
    """log(m / p) from log(q / p)."""
    return quotient.clamp(max=LARGEST_LOG_QUOTIENT).expm1().mul(beta).log1p()


class TeacherStates(NamedTuple):
    """A teacher in the process: logits = softcap(Σ hidden_i weight_iᵀ), without gradient."""

    hidden: Sequence[torch.Tensor]
    """[N, H_i] each"""
    weight: Sequence[torch.Tensor]
    """[V, H_i] each; under tensor parallelism this rank's part of the vocabulary, as of the policy's weight"""
    softcap: float | None = None


class TopTokens(NamedTuple):
    """The likeliest tokens of a teacher behind a server, different ones in a row."""

    token_ids: torch.Tensor
    """[N, k] int64"""
    log_probs: torch.Tensor
    """[N, k]"""


@dataclass(frozen=True)
class Comparison:
    """The divergence from `teacher`: forward_kl, reverse_kl or jsd, the last with the teacher's share beta of the
    mixture."""

    teacher: TeacherStates | TopTokens
    kind: str
    beta: float = 0.5

    def __call__(
        self,
        hidden: Sequence[torch.Tensor],
        weight: Sequence[torch.Tensor],
        targets: torch.Tensor,
        options: HeadOptions,
    ) -> tuple[torch.Tensor, ...]:
        """What LogProbHead returns with this as its function: fused_divergence, which adds to existing gradients."""
        return fused_divergence(hidden, weight, targets, self, accumulate=True, **options)


def fused_divergence(
    hidden: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    targets: torch.Tensor,
    comparison: Comparison,
    *,
    accumulate: bool = False,
    **options: Unpack[HeadOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob [N] of the targets, entropy [N] and divergence from the teacher [N] in nats, all fp32.

    Differentiable once in hidden and weight, through all three. Arguments and errors are those of fused_log_probs; both
    distributions are at options["temperature"], and over options["kept"], but for a teacher behind a server, whose
    log-probs are taken as they are.
    """
    # Tiles have all columns only if many whole rows fit. A few would not save the backward its own products, and the
    # gradient of the whole weight would be read and written for each few.
    teacher = comparison.teacher
    part, width = options.get("vocabulary"), max(matrix.shape[1] for matrix in weight)
    total = len(weight[0]) if part is None else part.total
    budget = options.get("budget_bytes")
    if budget is None:
        budget = default_head_budget(len(targets), total, width, matmul_converts(weight[0]), on_gpu(targets))
    if isinstance(teacher, TopTokens):
        policy = make_projection(hidden, weight, targets, {**options, "budget_bytes": budget}, TILE_ROWS)
        check_targets(teacher.token_ids, total)
        policy.targets = torch.cat((targets[:, None], teacher.token_ids), -1)
        log_probs, entropy, _ = _TwoPass.apply(policy, None, comparison, accumulate, *policy.hidden, *policy.weight)
        policy_log_probs = _with_rest(log_probs[:, 1:])
        teacher_log_probs = _with_rest(teacher.log_probs.clamp(min=LEAST_LOG_PROB))
        return log_probs[:, 0], entropy, KINDS[comparison.kind](policy_log_probs, teacher_log_probs, comparison.beta)
    # Two tiles are held at a time.
    options["budget_bytes"] = budget // 2
    policy = make_projection(hidden, weight, targets, options, TILE_ROWS)
    teacher_projection = make_projection(
        teacher.hidden, teacher.weight, targets, {**options, "softcap": teacher.softcap}
    )
    if len(teacher_projection.weight[0]) != len(policy.weight[0]):
        raise ValueError(
            f"policy and teacher have {len(policy.weight[0])} and {len(teacher_projection.weight[0])} tokens"
        )
    policy.targets = targets[:, None]
    teacher_projection.tiling, teacher_projection.row_step = policy.tiling, policy.row_step
    operands = (*policy.hidden, *policy.weight, *teacher_projection.hidden, *teacher_projection.weight)
    log_probs, entropy, divergence = _TwoPass.apply(policy, teacher_projection, comparison, accumulate, *operands)
    return log_probs[:, 0], entropy, divergence


def _with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """log-probs [N, k] of some symbols -> [N, k + 1], the last of all others together."""
    known = log_probs.logsumexp(-1, keepdim=True).clamp(max=-LEAST_REST)
    return torch.cat((log_probs, (-known.expm1()).log()), -1)


class _Online:
    """Per row in float64, over the columns seen: the maximum, and Σ e^(z - maximum) x for x = 1 and others."""

    def __init__(self, rows: int, others: int, device: torch.device):
        self.maximum = torch.full((rows,), -torch.inf, dtype=torch.float64, device=device)
        self.sums = torch.zeros(1 + others, rows, dtype=torch.float64, device=device)

    def add(self, rows: slice, z: torch.Tensor, *others: torch.Tensor) -> None:
        """Logits z [r, c] and what is weighted with their exponentials, [r, c] each."""
        largest = z.amax(-1)
        exponentials = (z - largest[:, None]).exp_()
        sums = torch.stack([exponentials.sum(-1), *((exponentials * other).sum(-1) for other in others)])
        before = self.maximum[rows]
        maximum = torch.maximum(before, largest)
        self.sums[:, rows] = self.sums[:, rows] * (before - maximum).exp() + sums * (largest - maximum).exp()
        self.maximum[rows] = maximum

    def reduce_(self, group: dist.ProcessGroup | None) -> None:
        """Combine with the ranks that hold the other columns."""
        if group is not None:
            own_maximum = self.maximum.clone()
            dist.all_reduce(self.maximum, dist.ReduceOp.MAX, group=group)
            self.sums *= (own_maximum - self.maximum).exp()
            dist.all_reduce(self.sums, group=group)

    @property
    def normalizer(self) -> torch.Tensor:
        """log Σ e^z, [N]."""
        return self.maximum + self.sums[0].log()

    def mean(self, place: int) -> torch.Tensor:
        """The mean of the `place`-th of the others under the softmax, [N]."""
        return self.sums[place] / self.sums[0]


def _tiles(
    policy: Projection, teacher: Projection | None, sums: GradientSums | None = None
) -> Iterator[tuple[slice, slice, list[torch.Tensor], torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """(columns, rows, the policy's operands, its logits and their slope, the teacher's logits), tile by tile. `sums`
    is begun and ended with the columns."""
    for columns in policy.column_tiles():
        operands = policy.operands(columns)
        others = [] if teacher is None else teacher.operands(columns)
        if sums is not None:
            sums.begin(columns)
        for rows in policy.row_tiles():
            logits, slope = policy.logits(rows, columns, operands)
            taught = None if teacher is None else teacher.logits(rows, columns, others)[0]
            yield columns, rows, operands, logits, slope, taught
        if sums is not None:
            sums.end()


def _blocks(rows: slice, tile: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of the tile that fit into the cache, and which these are of all."""
    for block in blocks(tile):
        yield block, slice(rows.start + block.start, rows.start + block.stop)


def _statistics(policy: Projection, teacher: Projection | None, kind: str) -> tuple[_Online, _Online, torch.Tensor]:
    """Of the policy, of the teacher, and the logits of the targets [N, K]."""
    count, device = len(policy.targets), policy.targets.device
    reverse = teacher is not None and kind == "reverse_kl"
    forward = teacher is not None and kind == "forward_kl"
    policy_sums, teacher_sums = _Online(count, policy.entropy + reverse, device), _Online(count, forward, device)
    chosen = torch.zeros(policy.targets.shape, device=device)
    for columns, rows, _, logits, _, taught in _tiles(policy, teacher):
        column, inside = policy.chosen(rows, columns)
        chosen[rows] += torch.where(inside, logits.gather(-1, column), 0.0)
        for block, of_all in _blocks(rows, logits):
            z, others = logits[block], []
            if policy.entropy:
                others.append(z)
            if taught is not None:
                weighted_by_teacher: list[torch.Tensor] = []
                if reverse:
                    others.append(taught[block] - z)
                if forward:
                    weighted_by_teacher.append(taught[block] - z)
                teacher_sums.add(of_all, taught[block], *weighted_by_teacher)
            policy_sums.add(of_all, z, *others)
    policy_sums.reduce_(policy.group)
    teacher_sums.reduce_(policy.group)
    if policy.group is not None:
        dist.all_reduce(chosen, group=policy.group)
    return policy_sums, teacher_sums, chosen


def _jensen_shannon(
    policy: Projection, teacher: Projection, beta: float, normalizer: torch.Tensor, teacher_normalizer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(JSD, KL(p ‖ m)) [N] in float64."""
    sums = torch.zeros(2, len(policy.targets), dtype=torch.float64, device=policy.targets.device)
    for _, rows, _, logits, _, taught in _tiles(policy, teacher):
        assert taught is not None
        for block, of_all in _blocks(rows, logits):
            p, q = logits[block].sub_(normalizer[of_all, None]), taught[block].sub_(teacher_normalizer[of_all, None])
            quotient = (q - p).clamp_(max=LARGEST_LOG_QUOTIENT)
            above = _above(quotient, beta)
            sums[0, of_all] += (q.exp_() * quotient.sub_(above)).sum(-1)
            sums[1, of_all] -= (p.exp_() * above).sum(-1)
    if policy.group is not None:
        dist.all_reduce(sums, group=policy.group)
    return beta * sums[0] + (1 - beta) * sums[1], sums[1]


class _TwoPass(torch.autograd.Function):
    """(policy, teacher or None, comparison, accumulate, *hidden, *weight, *teacher's hidden, *teacher's weight) ->
    (log-probs [N, K] of the targets [N, K], entropy [N], divergence [N])."""

    @staticmethod
    def forward(
        ctx: Any,
        policy: Projection,
        teacher: Projection | None,
        comparison: Comparison,
        accumulate: bool,
        *operands: torch.Tensor,
    ) -> Any:
        kind, beta = comparison.kind, comparison.beta
        policy_sums, teacher_sums, chosen = _statistics(policy, teacher, kind)
        log_z, teacher_log_z = policy_sums.normalizer, teacher_sums.normalizer
        entropy = log_z - policy_sums.mean(1) if policy.entropy else torch.zeros_like(log_z)
        # In the gradient each z_j's deviation is from this.
        centre = divergence = torch.zeros_like(log_z)
        if teacher is not None and kind == "reverse_kl":
            centre = divergence = teacher_log_z - log_z - policy_sums.mean(1 + policy.entropy)
        elif teacher is not None and kind == "forward_kl":
            divergence = log_z - teacher_log_z + teacher_sums.mean(1)
        elif teacher is not None:
            divergence, centre = _jensen_shannon(policy, teacher, beta, log_z.float(), teacher_log_z.float())
        for projection in (policy, teacher):
            if projection is not None:
                projection.release()
        log_probs = chosen - log_z[:, None]
        if policy.derive and any(ctx.needs_input_grad):
            ctx.policy, ctx.teacher, ctx.comparison, ctx.accumulate = policy, teacher, comparison, accumulate
            statistics = (log_z, teacher_log_z, entropy, centre)
            ctx.save_for_backward(*(statistic.float() for statistic in statistics), *operands)
            ctx.set_materialize_grads(False)
        return log_probs.float(), entropy.float(), divergence.float()

    @staticmethod
    def backward(
        ctx: Any, by_log_probs: torch.Tensor | None, by_entropy: torch.Tensor | None, by_divergence: torch.Tensor | None
    ) -> Any:
        log_z, teacher_log_z, entropy, centre, *operands = ctx.saved_tensors
        policy, teacher, kind, beta = ctx.policy, ctx.teacher, ctx.comparison.kind, ctx.comparison.beta
        pairs = len(policy.hidden)
        # FSDP frees and gathers weights between the passes; the saved operands are the current weights.
        policy.hidden, policy.weight = operands[:pairs], operands[pairs : 2 * pairs]
        if teacher is not None:
            rest = operands[2 * pairs :]
            teacher.hidden, teacher.weight = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        needed = ctx.needs_input_grad[4 : 4 + 2 * pairs]
        sums = GradientSums(
            policy, needed, places_of(policy.weight, needed[pairs:]) if ctx.accumulate else [None] * pairs
        )
        zero = torch.zeros_like(log_z)
        by_target = (
            zero[:, None].expand(policy.targets.shape) if by_log_probs is None else by_log_probs / policy.temperature
        )
        by_entropy = None if by_entropy is None or not policy.entropy else by_entropy / policy.temperature
        weight = zero if by_divergence is None else by_divergence / policy.temperature
        # What a row's p_j are multiplied with, apart from what depends on j.
        constant = -by_target.sum(-1) + (weight if teacher is not None and kind == "forward_kl" else zero)
        constant = constant if by_entropy is None else constant - by_entropy * entropy
        factor = weight * (1 - beta) if kind == "jsd" else weight
        for columns, rows, weights, logits, slope, taught in _tiles(policy, teacher, sums):
            for block, of_all in _blocks(rows, logits):
                p, q = logits[block].sub_(log_z[of_all, None]), None
                inner = constant[of_all, None]
                if by_entropy is not None:
                    inner = inner - by_entropy[of_all, None] * p
                if taught is not None:
                    q = taught[block].sub_(teacher_log_z[of_all, None])
                    if kind != "forward_kl":
                        apart = p - q if kind == "reverse_kl" else _above(q - p, beta).neg_()
                        inner = apart.sub_(centre[of_all, None]).mul_(factor[of_all, None]).add_(inner)
                p.exp_().mul_(inner)
                if q is not None and kind == "forward_kl":
                    p.addcmul_(q.exp_(), factor[of_all, None], value=-1)
            column, inside = policy.chosen(rows, columns)
            logits.scatter_add_(-1, column, torch.where(inside, by_target[rows], 0.0))
            sums.add(rows, logits if slope is None else logits.mul_(slope), weights)
        for projection in (policy, teacher):
            if projection is not None:
                projection.release()
        return (None, None, None, None, *sums.results(), *(None for _ in operands[2 * pairs :]))
