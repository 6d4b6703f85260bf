"""The loss head in the ways that benchmarks/logprob_head.py compares; runs in the environment of setup.sh.

Every variant is a function of one Case that leaves gradients in case.hidden.grad and case.weight.grad and returns the
loss: DAPO with the clip range 0.2 / 0.28, tokens divided by their number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan.models.head.logprob_head import fused_log_probs, fused_objective

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
SMALL_BUDGET_BYTES = 2 << 20


@dataclass
class Case:
    """hidden [N, H], weight [V, H], targets [N]; N is sequences × length. Advantages are per sequence."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    old_log_probs: torch.Tensor
    sequences: int

    @property
    def token_advantages(self) -> torch.Tensor:
        return self.advantages.repeat_interleave(len(self.targets) // self.sequences)


def make_case(
    vocabulary: int,
    hidden: int,
    tokens: int,
    sequences: int,
    dtype: torch.dtype,
    logit_scale: float = 1.0,
    sampled: bool = False,
    where: str = "cpu",
) -> Case:
    """Random operands, and old log-probs that differ a little from the current ones.

    logit_scale: standard deviation of the logits. sampled: targets are drawn from the distribution that the operands
    describe, as a policy's own completions are, instead of evenly.
    """
    generator = torch.Generator(where).manual_seed(0)
    states = logit_scale * torch.randn(tokens, hidden, generator=generator, device=where)
    weight = torch.empty(vocabulary, hidden, device=where).normal_(0.0, hidden**-0.5, generator=generator)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator, device=where)
    if sampled:
        rows = (torch.softmax(part @ weight.t(), -1) for part in states.split(64))
        targets = torch.cat([torch.multinomial(row, 1, generator=generator).squeeze(-1) for row in rows])
    with torch.no_grad():
        current, _ = fused_log_probs(states, weight, targets, entropy=False)
    old = current + 0.1 * torch.randn(tokens, generator=generator, device=where)
    return Case(
        states.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        targets,
        torch.randn(sequences, generator=generator, device=where),
        old,
        sequences,
    )


def token_loss(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """-min(ρ A, clip(ρ) A) of each token."""
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)


def full(case: Case) -> torch.Tensor:
    """Plain logits of all tokens."""
    logits = (case.hidden @ case.weight.t()).float()
    log_probs = torch.log_softmax(logits, -1).gather(-1, case.targets[:, None]).squeeze(-1)
    loss = token_loss(log_probs, case.old_log_probs.to(log_probs.dtype), case.token_advantages).sum() / len(
        case.targets
    )
    loss.backward()
    return loss.detach()


def one_pass(case: Case, *, entropy: bool, budget: int | None = None, accumulate: bool = False) -> torch.Tensor:
    """Ours, gradients formed in the forward."""
    count, advantages = len(case.targets), case.token_advantages
    options = {} if budget is None else {"budget_bytes": budget}

    def objective(log_probs: torch.Tensor, _entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        return token_loss(log_probs, case.old_log_probs[rows], advantages[rows]) / count

    loss, _, _ = fused_objective(
        case.hidden, case.weight, case.targets, objective, entropy=entropy, accumulate=accumulate, **options
    )
    loss.backward()
    return loss.detach()


def two_pass(case: Case, *, budget: int | None = None) -> torch.Tensor:
    """Ours, logits computed again in the backward."""
    options = {} if budget is None else {"budget_bytes": budget}
    log_probs, _ = fused_log_probs(case.hidden, case.weight, case.targets, entropy=False, accumulate=True, **options)
    loss = token_loss(log_probs, case.old_log_probs, case.token_advantages).sum() / len(case.targets)
    loss.backward()
    return loss.detach()


@functools.cache
def _liger_loss(compiled: bool) -> torch.nn.Module:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    return LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=compiled,
        use_ref_model=False,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="dapo",
    )


def liger(case: Case, *, compiled: bool = False) -> torch.Tensor:
    """Liger's chunked loss, its default chunk of one sequence.

    Not compiled: torch.compile fails on its chunks ("sources must not be empty for symbol", torch 2.13 on CPU).
    """
    shape = (case.sequences, -1)
    result = _liger_loss(compiled)(
        case.hidden.view(case.sequences, -1, case.hidden.shape[-1]),
        case.weight,
        case.targets.view(shape),
        torch.ones(case.sequences, len(case.targets) // case.sequences, device=case.targets.device),
        case.advantages,
        old_per_token_logps=case.old_log_probs.view(shape),
    )
    loss: torch.Tensor = result[0]
    loss.backward()
    return loss.detach()


VARIANTS: dict[str, Callable[[Case], torch.Tensor]] = {
    "full": full,
    "liger": liger,
    "one_pass": functools.partial(one_pass, entropy=False),
    "one_pass_entropy": functools.partial(one_pass, entropy=True),
    "one_pass_small": functools.partial(one_pass, entropy=False, budget=SMALL_BUDGET_BYTES),
    "one_pass_accumulate": functools.partial(one_pass, entropy=False, accumulate=True),
    "two_pass": two_pass,
}
