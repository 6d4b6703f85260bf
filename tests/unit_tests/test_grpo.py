"""Advantages, objectives, corrections and packing against plain float64 loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.advantages import group_advantages
from torchtitan.grpo.loss import LossSettings, grpo_loss
from torchtitan.grpo.objectives import OBJECTIVES, ClipRange
from torchtitan.grpo.packing import MicroBatch, first_fit_decreasing, micro_batches, minibatches, split_for_ranks
from torchtitan.inference.types import VersionSpan
from torchtitan.rollout.types import Batch, Group, Sample

CPU = torch.device("cpu")
LONGEST = 16


def make_sample(rng: random.Random, prompt: int, completion: int, version: int = 3, **changes) -> Sample:
    fields = {
        "prompt_ids": [rng.randrange(50) for _ in range(prompt)],
        "completion_ids": [rng.randrange(50) for _ in range(completion)],
        "log_probs": [-rng.random() * 3 for _ in range(completion)],
        "spans": [VersionSpan("e", version, 0, completion)],
        "finish_reason": "stop",
        "reward": rng.random(),
        "advantage": rng.uniform(-2, 2),
    }
    return Sample(**{**fields, **changes})


def make_samples(seed: int, count: int) -> list[Sample]:
    rng = random.Random(seed)
    return [make_sample(rng, rng.randint(1, 6), rng.randint(1, LONGEST)) for _ in range(count)]


def policy_log_probs(sample: Sample, shift: float) -> list[float]:
    """Stand-in for a policy: a deterministic log-prob per token that differs from the behaviour's."""
    return [
        value + shift * math.sin(1.7 * i + token)
        for i, (value, token) in enumerate(zip(sample.log_probs, sample.completion_ids, strict=True))
    ]


def reference_loss(
    samples: list[Sample],
    name: str,
    clip: ClipRange,
    cap: float,
    mask: tuple[float, float],
    shift: float,
    old: float | None,
) -> float:
    """The loss as the papers write it: sequence by sequence, token by token, in Python floats."""
    total_tokens = sum(len(sample.completion_ids) for sample in samples)
    loss = 0.0
    for sample in samples:
        current = policy_log_probs(sample, shift)
        proximal = sample.log_probs if old is None else policy_log_probs(sample, old)
        measured = current if old is None else proximal
        drift = [a - b for a, b in zip(measured, sample.log_probs, strict=True)]
        geometric = math.exp(sum(drift) / len(drift))
        if (mask[0] and geometric < mask[0]) or (mask[1] and geometric > mask[1]):
            continue
        for now, before, behaviour in zip(current, proximal, sample.log_probs, strict=True):
            ratio = math.exp(now - before)
            clipped = min(max(ratio, 1 - clip.low), 1 + clip.high)
            bounded = min(ratio, clip.delta) if clip.delta else ratio
            token = -min(bounded * sample.advantage, clipped * sample.advantage)
            if old is not None:
                token *= min(math.exp(before - behaviour), cap)
            if name == "dapo":
                token /= total_tokens
            elif name == "grpo":
                token /= len(samples) * len(sample.completion_ids)
            else:
                token /= len(samples) * LONGEST
            loss += token
    return loss


def our_loss(
    samples: list[Sample],
    loss_settings: LossSettings,
    shift: float,
    old: float | None,
    budget: int = 64,
    ranks: int = 1,
) -> float:
    total = 0.0
    for rank in range(ranks):
        for micro_batch in micro_batches(
            samples,
            loss_settings.objective,
            version=3,
            budget=budget,
            max_completion_tokens=LONGEST,
            mask_truncated=False,
            rank=rank,
            ranks=ranks,
            device=CPU,
        ):
            tokens = micro_batch.targets.tolist()
            # Positions inside the completion restart with every sequence.
            place, previous = [], None
            for number in micro_batch.sequence.tolist():
                place.append(0 if number != previous else place[-1] + 1)
                previous = number

            def log_probs(by: float, tokens=tokens, place=place, micro_batch=micro_batch) -> torch.Tensor:
                values = [by * math.sin(1.7 * i + token) for i, token in zip(place, tokens, strict=True)]
                return micro_batch.behaviour_log_probs + torch.tensor(values)

            proximal = None if old is None else log_probs(old)
            result = grpo_loss(log_probs(shift), torch.zeros(len(tokens)), micro_batch, proximal, loss_settings)
            total += result.loss.item()
    return total


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("old", [None, 0.2])
@pytest.mark.parametrize(("delta", "mask"), [(0.0, (0.0, 0.0)), (1.1, (0.95, 1.02))])
def test_loss_equals_reference(name: str, old: float | None, delta: float, mask: tuple[float, float]) -> None:
    samples = make_samples(1, 12)
    clip = ClipRange(0.2, 0.28, delta)
    loss_settings = LossSettings(OBJECTIVES[name], clip, 1.05, *mask)
    expected = reference_loss(samples, name, clip, 1.05, mask, 0.5, old)
    assert expected != 0
    assert our_loss(samples, loss_settings, 0.5, old) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    budget=st.integers(22, 200),
    ranks=st.integers(1, 4),
    name=st.sampled_from(list(OBJECTIVES)),
)
def test_loss_is_independent_of_packing_and_ranks(seed: int, budget: int, ranks: int, name: str) -> None:
    samples = make_samples(seed, 9)
    loss_settings = LossSettings(OBJECTIVES[name], ClipRange(0.2, 0.28), 2.0, 0.9, 1.1)
    whole = our_loss(samples, loss_settings, 0.4, None, budget=10_000)
    assert our_loss(samples, loss_settings, 0.4, None, budget, ranks) == pytest.approx(whole, rel=1e-5, abs=1e-7)


def pack_all(samples: list[Sample], mask_truncated: bool = False) -> list[MicroBatch]:
    return micro_batches(
        samples,
        OBJECTIVES["dapo"],
        version=3,
        budget=500,
        max_completion_tokens=LONGEST,
        mask_truncated=mask_truncated,
        rank=0,
        ranks=1,
        device=CPU,
    )


def test_gradient_of_clipped_tokens_is_zero() -> None:
    samples = [make_sample(random.Random(0), 2, 4, advantage=1.0)]
    loss_settings = LossSettings(OBJECTIVES["dapo"], ClipRange(0.2, 0.28), 2.0, 0.0, 0.0)
    (micro_batch,) = pack_all(samples)
    shift = torch.tensor([0.5, -0.5, 0.0, 0.1])
    log_probs = (micro_batch.behaviour_log_probs + shift).requires_grad_()
    grpo_loss(log_probs, torch.zeros(4), micro_batch, None, loss_settings).loss.backward()
    ratio = shift.exp()
    expected = torch.where(ratio > 1.28, torch.zeros(()), -ratio / 4)
    torch.testing.assert_close(log_probs.grad, expected)


def test_ratio_that_overflows_stays_finite_where_masked() -> None:
    samples = [make_sample(random.Random(0), 2, 3, advantage=-1.0, log_probs=[-500.0] * 3)]
    loss_settings = LossSettings(OBJECTIVES["dapo"], ClipRange(0.2, 0.28), 2.0, 0.5, 2.0)
    (micro_batch,) = pack_all(samples)
    result = grpo_loss(torch.zeros(3), torch.zeros(3), micro_batch, None, loss_settings)
    assert result.loss.item() == 0
    assert result.sums["masked"].item() == 3


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages(scale: str) -> None:
    groups = [[1.0, 0.0, 0.5], [0.25, 0.75]]
    flat = [value for group in groups for value in group]
    mean = sum(flat) / len(flat)
    batch_std = math.sqrt(sum((value - mean) ** 2 for value in flat) / len(flat))
    for group, ours in zip(groups, group_advantages(groups, scale), strict=True):
        centre = sum(group) / len(group)
        group_std = math.sqrt(sum((value - centre) ** 2 for value in group) / len(group))
        divisor = {"none": 1.0, "group": group_std + 1e-4, "batch": batch_std + 1e-4}[scale]
        assert ours == pytest.approx([(value - centre) / divisor for value in group])


@given(lengths=st.lists(st.integers(1, 30), max_size=40), budget=st.integers(30, 90), ranks=st.integers(1, 5))
def test_packing_places_every_sample_once(lengths: list[int], budget: int, ranks: int) -> None:
    bins = first_fit_decreasing(lengths, budget)
    assert all(sum(lengths[i] for i in members) <= budget for members in bins)
    # First fit leaves at most one bin half empty.
    assert sum(2 * sum(lengths[i] for i in members) <= budget for members in bins) <= 1
    split = split_for_ranks(bins, ranks)
    assert len(split) % ranks == 0
    assert sorted(i for members in split for i in members) == list(range(len(lengths)))


def test_too_long_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="31 tokens does not fit into a micro-batch of 30"):
        first_fit_decreasing([31], 30)


def test_minibatches_hold_whole_groups() -> None:
    groups = [Group(i, make_samples(i, 2)) for i in range(5)]
    parts = minibatches(Batch(0, groups), 2)
    assert [len(part) for part in parts] == [6, 4]
    assert parts[0][2:4] == groups[2].samples


def test_packed_positions_point_at_completion_tokens() -> None:
    samples = make_samples(3, 4)
    samples[1].finish_reason = "length"
    samples[2].spans = [VersionSpan("e", 2, 0, 1), VersionSpan("e", 3, 1, len(samples[2].completion_ids))]
    (packed,) = pack_all(samples, mask_truncated=True)
    trained = [sample for i, sample in enumerate(samples) if i != 1]
    assert packed.targets.tolist() == [token for sample in trained for token in sample.completion_ids]
    inputs = [token for sample in samples for token in (sample.prompt_ids + sample.completion_ids)[:-1]]
    assert packed.token_ids.tolist() == inputs
    assert packed.weights.sum().item() == pytest.approx(1.0)
    assert (~packed.same_version).sum().item() == 1
