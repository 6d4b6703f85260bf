"""Gradients of a whole policy do not depend on how a batch is cut: packing, micro-batches, tiles of the head, ranks.

Ranks are counted here one after the other, and their gradients summed; test_training_layouts.py has real ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.roundings import forward_rounding
from tests.trajectories import single_turn
from torchtitan.config.job_config import JobConfig
from torchtitan.config.training_tables import LOSS_TYPES
from torchtitan.distributed.placement import ParallelDims
from torchtitan.inference.types import VersionSpan
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.rollout.types import Batch, Group
from torchtitan.trainer.policy_trainer import PolicyTrainer

LONGEST = 12
# Of the log-probs that the tiny policies give random tokens.
LARGEST_LOG_PROB = 12
EVERYTHING = 10_000


@dataclass(frozen=True)
class Cut:
    """One way to work through a batch. The default: one rank, one micro-batch, all logits."""

    tokens: int = EVERYTHING
    ranks: int = 1
    head: Literal["one_pass", "two_pass", "full"] = "full"
    budget: int = 1 << 30
    shuffle: int = 0
    merged: bool = False


def make_batch(seed: int) -> Batch:
    """Groups of completions of many lengths; one in five hit the length limit."""
    rng = random.Random(seed)
    groups = []
    for index in range(4):
        prompt, samples = [rng.randrange(128) for _ in range(rng.randint(1, 5))], []
        for _ in range(3):
            length = rng.randint(1, LONGEST)
            samples.append(
                single_turn(
                    prompt_ids=prompt,
                    completion_ids=[rng.randrange(128) for _ in range(length)],
                    log_probs=[rng.uniform(-7.0, -3.0) for _ in range(length)],
                    spans=[VersionSpan("e", 0, 0, length)],
                    finish_reason="length" if rng.random() < 0.2 else "stop",
                    reward=rng.random(),
                )
            )
        groups.append(Group(index, samples))
    return Batch(0, groups)


def gradients(policy: Decoder, config: JobConfig, batch: Batch, cut: Cut) -> tuple[float, torch.Tensor]:
    """Loss, and the gradient of every parameter in one vector, summed over the ranks."""
    config.training.tokens_per_micro_batch = cut.tokens
    policy.lm_head.mode, policy.lm_head.budget_bytes = cut.head, cut.budget
    groups = list(batch.groups)
    random.Random(cut.shuffle).shuffle(groups)
    loss, total = 0.0, torch.zeros(0)
    for rank in range(cut.ranks):
        dims = ParallelDims(1, cut.ranks, 1, world_size=cut.ranks, rank=rank)
        trainer = PolicyTrainer(config, dims, policy, merges_prefixes=cut.merged)
        seen: list[torch.Tensor] = []

        def look(*_: Any, seen: list[torch.Tensor] = seen) -> None:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
            seen.append(torch.cat([gradient.flatten() for gradient in gradients]))

        trainer.optimizer.register_step_pre_hook(look)
        result = trainer.train_batch(Batch(0, groups))
        loss += result.metrics["loss"] or 0.0
        total = seen[0] if rank == 0 else total + seen[0]
    return loss, total


@torch.no_grad()
def distance_from_a_bound(policy: Decoder, config: JobConfig, batch: Batch) -> float:
    """Least |log ratio − log bound| of the tokens and of the means over sequences that a clip, cap or mask looks at."""
    grpo = config.grpo
    low, high = grpo.clip_range
    bounds = [1 - low, 1 + high, grpo.delta, grpo.importance_cap, high]
    bounds += grpo.geometric_mask
    ratios = []
    for sample in batch.samples:
        tokens = torch.tensor([*sample.prompt_ids, *sample.completion_ids])
        log_probs, _ = policy(tokens[:-1], PackedLayout([len(tokens) - 1]), tokens[1:])
        ratio = log_probs[-len(sample.completion_ids) :] - torch.tensor(sample.log_probs)
        ratios += [ratio, ratio.mean()[None]]
    found = torch.cat(ratios)
    return min((found - math.log(bound)).abs().min().item() for bound in bounds)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 50),
    name=st.sampled_from([name for name in LOSS_TYPES if name != "bnpo"]),
    decoupled=st.booleans(),
    masks=st.booleans(),
    cut=st.builds(
        Cut,
        tokens=st.integers(18, 120),
        ranks=st.integers(1, 3),
        head=st.sampled_from(["one_pass", "two_pass"]),
        # Part of the vocabulary, a few rows of it, everything.
        budget=st.sampled_from([1, 4 * 128 * 16, 1 << 20]),
        shuffle=st.integers(0, 9),
        merged=st.booleans(),
    ),
)
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_do_not_depend_on_the_cut(
    tiny_checkpoint: Callable[..., Path], tied: bool, seed: int, name: str, decoupled: bool, masks: bool, cut: Cut
) -> None:
    config = JobConfig()
    config.grpo.loss_type, config.grpo.recompute_old_log_probs = name, decoupled
    config.grpo.mask_truncated = masks
    config.grpo.geometric_mask = [0.5, 2.0] if masks else []
    config.grpo.num_minibatches = 1
    config.grpo.entropy_coefficient = 0.1
    config.rollout.max_completion_tokens, config.training.max_norm, config.optimizer.lr = LONGEST, 0.0, 0.0
    policy, batch = load_policy(tiny_checkpoint("qwen3", tied)), make_batch(seed)
    rounding = forward_rounding(policy.args, LARGEST_LOG_PROB)
    # Nearer to a bound, rounding decides on which side a token or a sequence falls, and with it on a whole gradient.
    assume(distance_from_a_bound(policy, config, batch) > rounding)
    expected_loss, expected = gradients(policy, config, batch, Cut())
    loss, found = gradients(policy, config, batch, cut)
    assert expected.norm() > 1e-3
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    # What rounding adds to a logit changes its gradient by that share.
    assert ((found - expected).norm() / expected.norm()).item() < rounding
