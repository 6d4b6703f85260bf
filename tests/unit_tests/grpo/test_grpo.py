"""Advantages, objectives, corrections and packing against plain float64 loops."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trajectories import completion_of, single_turn
from torchtitan.config.job_config import GRPO
from torchtitan.grpo.advantages import group_advantages
from torchtitan.grpo.loss import FixedLogProbs, LossSettings, MicroBatchLoss, loss_settings
from torchtitan.grpo.objectives import OBJECTIVES, ClipRange, ObjectiveOptions, TokenLoss
from torchtitan.grpo.off_policy import CorrectionOptions
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.credit import assign_by_turn
from torchtitan.trainer.packing import (
    MicroBatch,
    balanced_bins,
    balanced_clusters,
    micro_batches,
    minibatches,
    trained_tokens,
)
from torchtitan.trainer.prefixes import clusters, merge

CPU = torch.device("cpu")
LONGEST = 16


def make_sample(rng: random.Random, prompt: int, completion: int, version: int = 3, **changes: Any) -> Sample:
    fields = {
        "prompt_ids": [rng.randrange(50) for _ in range(prompt)],
        "completion_ids": [rng.randrange(50) for _ in range(completion)],
        "log_probs": [-rng.random() * 3 for _ in range(completion)],
        "spans": [VersionSpan("e", version, 0, completion)],
        "finish_reason": "stop",
        "reward": rng.random(),
        "advantage": rng.uniform(-2, 2),
    }
    return single_turn(**{**fields, **changes})


def make_samples(seed: int, count: int) -> list[Sample]:
    rng = random.Random(seed)
    return [make_sample(rng, rng.randint(1, 6), rng.randint(1, LONGEST)) for _ in range(count)]


def settings_of(band: tuple[float, float] | None = None) -> LossSettings:
    bounds = CorrectionOptions(geometric_band=band)
    return LossSettings(OBJECTIVES["dapo"], ObjectiveOptions(ClipRange(0.2, 0.28)), bounds=bounds)


def pack_all(samples: list[Sample], mask_truncated: bool = False, objective: str = "dapo") -> list[MicroBatch]:
    return micro_batches(
        samples,
        OBJECTIVES[objective],
        version=3,
        budget=500,
        max_completion_tokens=LONGEST,
        mask_truncated=mask_truncated,
        rank=0,
        ranks=1,
        device=CPU,
    )


def test_ratio_that_overflows_stays_finite_where_masked() -> None:
    samples = [make_sample(random.Random(0), 2, 3, advantage=-1.0, log_probs=[-500.0] * 3)]
    (micro_batch,) = pack_all(samples)
    loss_of = MicroBatchLoss(micro_batch, FixedLogProbs(), settings_of((0.5, 2.0)))
    assert loss_of(torch.zeros(3), torch.zeros(3), slice(0, 3)).abs().sum().item() == 0
    assert loss_of.sums["masked"].item() == 3


def test_a_group_of_one_has_no_deviation() -> None:
    assert group_advantages([[0.7]], "group") == [[0.0]]
    assert group_advantages([[0.7]], "batch") == [[0.0]]


def test_reinforce_pp_whitens_over_tokens() -> None:
    """Review: a sample counts once for each of its trained tokens, so a truncated one that is masked does not."""
    ours = group_advantages([[1.0, 0.0], [0.5, 0.0]], "none", "reinforce_pp", [[1, 3], [2, 0]])
    centred = [0.5, -0.5, 0.25, -0.25]
    tokens = [0.5, -0.5, -0.5, -0.5, 0.25, 0.25]
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    assert [value for group in ours for value in group] == pytest.approx([(c - mean) / (std + 1e-4) for c in centred])


def test_truncated_samples_have_no_tokens() -> None:
    samples = [make_sample(random.Random(0), 2, 4), make_sample(random.Random(0), 2, 4, finish_reason="length")]
    assert [trained_tokens(sample, True) for sample in samples] == [4, 0]
    assert [trained_tokens(sample, False) for sample in samples] == [4, 4]


def test_a_negative_advantage_does_not_unbound_the_gradient() -> None:
    """Review: with A < 0 the clip has no upper bound, the gradient at a log-ratio of 8 was 2,981."""
    (micro_batch,) = pack_all([make_sample(random.Random(0), 2, 4, advantage=-1.0)])
    log_probs = (micro_batch.behaviour_log_probs + torch.tensor([0.0, 1.0, 1.2, 8.0])).requires_grad_()
    loss_of = MicroBatchLoss(micro_batch, FixedLogProbs(), loss_settings(GRPO()))
    loss_of(log_probs, torch.zeros(4), slice(0, 4)).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([1.0, math.e, 0.0, 0.0]) / 4)


def test_the_weight_of_the_divergence_is_capped() -> None:
    """Review: it was e^20 at most."""
    (micro_batch,) = pack_all([make_sample(random.Random(0), 2, 2)])
    behaviour = micro_batch.behaviour_log_probs
    for old in (None, behaviour + 0.3):
        log_probs = (behaviour + torch.tensor([8.0, 100.0])).requires_grad_()
        fixed = FixedLogProbs(old=old, reference=log_probs.detach() - 1)
        settings = loss_settings(GRPO(kl_coefficient=1.0, off_policy_correction="none"))
        silent = replace(settings, objective=replace(settings.objective, token_loss=no_loss))
        loss = MicroBatchLoss(micro_batch, fixed, silent)(log_probs, torch.zeros(2), slice(0, 2))
        (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
        torch.testing.assert_close(gradient, torch.tensor([2.0, 2.0]) / 2)


def no_loss(log_probs: torch.Tensor, *_: object) -> TokenLoss:
    never = torch.zeros_like(log_probs, dtype=torch.bool)
    return TokenLoss(torch.zeros_like(log_probs), never, never)


@pytest.mark.parametrize("decoupled", [False, True])
def test_one_pass_runs_by_default(decoupled: bool) -> None:
    """Review: sequence masks were on by default, so that the head never formed gradients in the forward."""
    (micro_batch,) = pack_all([make_sample(random.Random(0), 2, 4)])
    fixed = FixedLogProbs(old=micro_batch.behaviour_log_probs if decoupled else None)
    assert MicroBatchLoss(micro_batch, fixed, loss_settings(GRPO())).separable


@given(lengths=st.lists(st.integers(1, 30), max_size=40), budget=st.integers(30, 90), ranks=st.integers(1, 5))
def test_packing_places_every_sample_once_and_evenly(lengths: list[int], budget: int, ranks: int) -> None:
    bins = balanced_bins(lengths, budget, ranks)
    tokens, largest = [sum(lengths[i] for i in members) for members in bins], max(lengths, default=0)
    assert len(bins) % ranks == 0 and max(tokens) <= budget
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    # What was put last into the fullest bin went to the emptiest one.
    assert tokens == sorted(tokens, reverse=True) and tokens[0] - tokens[-1] <= largest
    # Graham's bound: no bin holds more than the mean and an item, so so many bins are enough.
    enough = -(-sum(lengths) // (budget - largest + 1)) if lengths else 1
    assert len(bins) <= max(1, -(-enough // ranks)) * ranks


@given(
    prefixes=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(1, 30), min_size=1, max_size=8)), max_size=6),
    budget=st.integers(70, 200),
    ranks=st.integers(1, 5),
)
def test_groups_are_cut_where_ranks_would_wait(prefixes: list[tuple[int, list[int]]], budget: int, ranks: int) -> None:
    """Every sequence once, within the budget, and never more on the fullest ranks than with whole groups."""
    numbers = itertools.count()
    sequences = []
    for prefix, completions in prefixes:
        begin = [next(numbers) for _ in range(prefix)]
        sequences += [np.array(begin + [next(numbers) for _ in range(length)], np.uint64) for length in completions]
    trained = [len(sequence) // 2 for sequence in sequences]
    bins = balanced_clusters(sequences, trained, budget, ranks)
    tokens = [sum(merge([sequences[i] for i in members]).lengths) for members in bins]
    assert len(bins) % ranks == 0 and max(tokens) <= budget
    assert sorted(i for members in bins for i in members) == list(range(len(sequences)))
    _, sizes = clusters(sequences, trained, budget)
    whole = [sum(sizes[cluster] for cluster in pack) for pack in balanced_bins(sizes, budget, ranks)]
    assert sum(tokens[::ranks]) <= sum(whole[::ranks])


def test_too_long_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="31 tokens does not fit into a micro-batch of 30"):
        balanced_bins([31], 30, 1)


def test_minibatches_hold_whole_groups() -> None:
    groups = [Group(i, make_samples(i, 2)) for i in range(5)]
    parts = minibatches(Batch(0, groups), 2)
    assert parts == [groups[::2], groups[1::2]]


def test_packed_positions_point_at_completion_tokens() -> None:
    samples = make_samples(3, 4)
    samples[1].finish_reason = "length"
    mixed = completion_of(samples[2])
    mixed.spans = [VersionSpan("e", 2, 0, 1), VersionSpan("e", 3, 1, len(mixed.token_ids))]
    (packed,) = pack_all(samples, mask_truncated=True)
    trained = [sample for i, sample in enumerate(samples) if i != 1]
    assert packed.targets.tolist() == [token for sample in trained for token in sample.completion_ids]
    inputs = [token for sample in samples for token in (sample.prompt_ids + sample.completion_ids)[:-1]]
    assert packed.token_ids.tolist() == inputs
    assert packed.weights.sum().item() == pytest.approx(1.0)
    assert (~packed.same_version).sum().item() == len(samples[2].completion_ids)


def test_a_branched_trajectory_trains_what_was_sampled_and_nothing_else() -> None:
    """Two branches and a plain sample: only sampled tokens are targets, each of them weighs what those of any other
    sample do, and all carry the advantage of their trajectory."""
    spans = [VersionSpan("e", 3, 0, 2)]
    turns = [Completion([token, token + 1], [-token / 8, -token / 4], "stop", spans) for token in (10, 20, 30)]
    branches = [
        Branch([Given([1, 2]), turns[0], Given([3]), turns[1]]),
        Branch([Given([1, 2, 10]), turns[2]]),
    ]
    agent = Sample(branches, "stop", 1.0, advantage=2.0)
    plain = make_sample(random.Random(0), 2, 3, advantage=-1.0)
    for name, weight in (("dapo", 1 / 9), ("grpo", 1 / 12), ("dr_grpo", 1 / (2 * LONGEST))):
        whole, *rest = pack_all([agent, plain], objective=name)
        assert not rest and whole.num_sequences == 3
        columns = (whole.targets, whole.behaviour_log_probs, whole.advantages, whole.weights)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        pairs = [pair for turn in turns for pair in zip(turn.token_ids, turn.log_probs, strict=True)]
        assert sorted(row[:2] for row in rows if row[2] == 2.0) == sorted(pairs)
        assert [row[3] for row in rows if row[2] == 2.0] == [pytest.approx(weight)] * 6
        # What predicts a token is the one in front of it, in its own branch.
        for branch, begin in zip((*branches, plain.branches[0]), (0, 6, 10), strict=True):
            ids = branch.token_ids
            assert whole.token_ids.tolist()[begin : begin + len(ids) - 1] == ids[:-1]
            active = [place - begin for place in whole.active.tolist() if begin <= place < begin + len(ids) - 1]
            assert active == [place - 1 for place in branch.sampled_at]
    agent.finish_reason = "length"
    (masked,) = pack_all([agent, plain], mask_truncated=True)
    assert masked.targets.tolist() == plain.completion_ids


def test_every_turn_has_its_own_advantage() -> None:
    """Two trajectories whose rewards come in other turns: equal in the end, and not at all in between."""
    spans = [VersionSpan("e", 3, 0, 1)]
    turns = [[Completion([number * 10 + turn], [-1.0], "stop", spans) for turn in range(3)] for number in range(2)]
    early = Sample([Branch([Given([1]), *turns[0]])], "stop", 1.5, turn_rewards=[1.0, 0.0, 0.0])
    late = Sample([Branch([Given([1]), turns[1][0]]), Branch([Given([2]), *turns[1][1:]])], "stop", 1.5)
    late.turn_rewards = [0.0, 0.5, 1.0]
    assert early.returns == [1.5, 0.5, 0.5] and late.returns == [1.5, 1.5, 1.0]
    assign_by_turn(Batch(3, [Group(0, [early, late])]), "none", "group")
    (packed,) = pack_all([early, late])
    found = dict(zip(packed.targets.tolist(), packed.advantages.tolist(), strict=True))
    assert found == {0: 0.0, 1: -0.5, 2: -0.25, 10: 0.0, 11: 0.5, 12: 0.25}
