"""Objectives over packed samples: however they are cut, and those that a user writes; formulas are in another file."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectories import single_turn
from torchtitan.config.training_tables import LOSS_TYPES
from torchtitan.errors import UserError
from torchtitan.grpo.advantages import group_advantages
from torchtitan.grpo.loss import FixedLogProbs, LossSettings, MicroBatchLoss
from torchtitan.grpo.objectives import (
    NORMALIZERS,
    OBJECTIVES,
    ClipRange,
    ObjectiveOptions,
    Sequences,
    TokenLoss,
    load_objective,
)
from torchtitan.grpo.off_policy import CorrectionOptions
from torchtitan.inference.types import VersionSpan
from torchtitan.rollout.types import Sample
from torchtitan.trainer.packing import MicroBatch, micro_batches

LONGEST = 12
OPTIONS = ObjectiveOptions(ClipRange(0.2, 0.28), reinforce_cap=1.1)


@dataclass
class Policies:
    """Log-probs of every token under each policy, per sequence, and the policy's entropies."""

    now: list[list[float]]
    old: list[list[float]]
    reference: list[list[float]]
    entropy: list[list[float]]


def make_samples(seed: int, count: int = 7) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        length = rng.randint(1, LONGEST)
        samples.append(
            single_turn(
                prompt_ids=[1] * rng.randint(1, 4),
                completion_ids=[rng.randrange(30) for _ in range(length)],
                log_probs=[-3 * rng.random() for _ in range(length)],
                spans=[VersionSpan("e", 3, 0, length)],
                finish_reason="stop",
                reward=rng.random(),
                advantage=rng.uniform(-2, 2),
            )
        )
    return samples


def make_policies(samples: list[Sample], seed: int) -> Policies:
    rng = random.Random(seed)

    def near(spread: float) -> list[list[float]]:
        return [[value + rng.gauss(0, spread) for value in sample.log_probs] for sample in samples]

    return Policies(near(0.3), near(0.15), near(0.5), [[rng.random() for _ in s.log_probs] for s in samples])


def pack(samples: list[Sample], setting: LossSettings, budget: int = 10_000, ranks: int = 1) -> list[MicroBatch]:
    return [
        micro_batch
        for rank in range(ranks)
        for micro_batch in micro_batches(
            samples,
            setting.objective,
            version=3,
            budget=budget,
            max_completion_tokens=LONGEST,
            mask_truncated=False,
            rank=rank,
            ranks=ranks,
            device=torch.device("cpu"),
        )
    ]


def rows_of(micro_batch: MicroBatch, samples: list[Sample], values: list[list[float]]) -> torch.Tensor:
    """The tokens' values in the order of a micro-batch; samples are told apart by their behaviour log-probs."""
    table = {
        log_prob: value
        for sample, row in zip(samples, values, strict=True)
        for log_prob, value in zip(torch.tensor(sample.log_probs).tolist(), row, strict=True)
    }
    return torch.tensor([table[key] for key in micro_batch.behaviour_log_probs.tolist()])


def ours(
    samples: list[Sample],
    policies: Policies,
    setting: LossSettings,
    decoupled: bool,
    budget: int = 10_000,
    ranks: int = 1,
    chunk: int = 10_000,
) -> tuple[float, dict[float, tuple[float, float]]]:
    """Loss, and by behaviour log-prob the gradients of every token's log-prob and entropy."""
    total, gradients = 0.0, {}
    for micro_batch in pack(samples, setting, budget, ranks):
        log_probs = rows_of(micro_batch, samples, policies.now).requires_grad_()
        entropy = rows_of(micro_batch, samples, policies.entropy).requires_grad_()
        fixed = FixedLogProbs()
        if decoupled:
            fixed.old = rows_of(micro_batch, samples, policies.old)
        if setting.kl_coefficient:
            fixed.reference = rows_of(micro_batch, samples, policies.reference)
        loss_of, count = MicroBatchLoss(micro_batch, fixed, setting), len(log_probs)
        step = chunk if loss_of.separable else max(count, 1)
        for low in range(0, count, step):
            rows = slice(low, min(low + step, count))
            loss = loss_of(log_probs[rows], entropy[rows], rows).sum()
            loss.backward()
            total += loss.item()
        assert loss_of.sums["tokens"].item() == count
        by_entropy = torch.zeros(count) if entropy.grad is None else entropy.grad
        if count:
            pairs = zip(log_probs.grad.tolist(), by_entropy.tolist(), strict=True)
            gradients |= dict(zip(micro_batch.behaviour_log_probs.tolist(), pairs, strict=True))
    return total, gradients


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    budget=st.integers(18, 120),
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 9),
    name=st.sampled_from([name for name in LOSS_TYPES if name != "bnpo"]),
    decoupled=st.booleans(),
    masks=st.booleans(),
)
def test_independent_of_packing_ranks_and_chunks(
    seed: int, budget: int, ranks: int, chunk: int, name: str, decoupled: bool, masks: bool
) -> None:
    samples = make_samples(seed, 9)
    policies = make_policies(samples, seed)
    bounds = CorrectionOptions(cap=1.1, geometric_band=(0.9, 4.0) if masks else None)
    options = replace(OPTIONS, clip=ClipRange(0.0, 1.15)) if name == "cispo" else OPTIONS
    setting = LossSettings(OBJECTIVES[name], options, bounds=bounds, kl_coefficient=0.1, entropy_coefficient=0.1)
    whole, gradients = ours(samples, policies, setting, decoupled)
    cut, cut_gradients = ours(samples, policies, setting, decoupled, budget, ranks, chunk)
    assert cut == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert cut_gradients.keys() == gradients.keys()
    for key, slopes in gradients.items():
        assert cut_gradients[key] == pytest.approx(slopes, rel=1e-4, abs=1e-7)


def test_bnpo_divides_by_each_micro_batch() -> None:
    samples = make_samples(4, 9)
    setting = LossSettings(OBJECTIVES["bnpo"], OPTIONS)
    parts = pack(samples, setting, budget=30, ranks=2)
    assert len(parts) > 2
    for part in parts:
        assert part.weights.sum().item() == pytest.approx(1 / len(parts) if len(part.targets) else 0.0)


def test_only_separable_losses_may_be_cut() -> None:
    samples = make_samples(0, 2)
    (micro_batch,) = pack(samples, LossSettings(OBJECTIVES["dapo"]))
    masks = CorrectionOptions(geometric_band=(0.5, 2.0))
    old = FixedLogProbs(old=micro_batch.behaviour_log_probs)
    for fixed, setting, expected in (
        (FixedLogProbs(), LossSettings(OBJECTIVES["dapo"]), True),
        (FixedLogProbs(), LossSettings(OBJECTIVES["dapo"], bounds=masks), False),
        (old, LossSettings(OBJECTIVES["dapo"], bounds=masks), True),
        (old, LossSettings(OBJECTIVES["gspo"]), False),
    ):
        assert MicroBatchLoss(micro_batch, fixed, setting).separable is expected


def test_low_entropy_tokens_are_left_out_of_the_policy_loss() -> None:
    samples = make_samples(2, 3)
    setting = LossSettings(OBJECTIVES["dapo"], OPTIONS, kl_coefficient=0.5)
    (micro_batch,) = pack(samples, setting)
    count = len(micro_batch.targets)
    trained = (torch.arange(count) % 2).float()
    log_probs = micro_batch.behaviour_log_probs.clone().requires_grad_()
    fixed = FixedLogProbs(reference=micro_batch.behaviour_log_probs, trained=trained)
    MicroBatchLoss(micro_batch, fixed, setting)(log_probs, torch.zeros(count), slice(0, count)).sum().backward()
    assert (log_probs.grad[trained == 0] == 0).all() and (log_probs.grad[trained == 1] != 0).all()


def own_loss(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, options: ObjectiveOptions
) -> torch.Tensor:
    """What a user may write."""
    return -advantages * log_probs


def own_loss_of_sequences(
    log_probs: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    options: ObjectiveOptions,
    sequences: Sequences,
) -> torch.Tensor:
    """gspo as a user may write it."""
    ratio = sequences.spread(sequences.means(log_ratio)).exp()
    clipped = ratio.clamp(1 - options.clip.low, 1 + options.clip.high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def own_correction(ratio: torch.Tensor, options: CorrectionOptions, sequences: Sequences) -> torch.Tensor:
    """Tokens of the first sequence are left out, and short sequences count twice."""
    lengths = sequences.spread(sequences.sums(torch.ones_like(ratio)))
    return torch.where(sequences.of_token == 0, 0.0, torch.where(lengths < 4, 2.0, 1.0))


def wrong_shape(*_: object) -> TokenLoss:
    never = torch.zeros(1, dtype=torch.bool)
    return TokenLoss(torch.zeros(1), never, never)


def test_own_objective_by_name() -> None:
    samples = make_samples(5)
    setting = LossSettings(load_objective(f"{__name__}:own_loss"), OPTIONS)
    policies = make_policies(samples, 5)
    tokens = sum(len(sample.completion_ids) for sample in samples)
    expected = -sum(s.advantage * value for s, row in zip(samples, policies.now, strict=True) for value in row) / tokens
    assert ours(samples, policies, setting, False)[0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match="no_such_module"):
        load_objective("no_such_module:loss")
    objective = replace(load_objective(f"{__name__}:own_loss_of_sequences"), token_weights=NORMALIZERS["sequence"])
    for budget in (10_000, 30):
        reference = ours(samples, policies, LossSettings(OBJECTIVES["gspo"], OPTIONS), False, budget, chunk=2)
        assert ours(samples, policies, LossSettings(objective, OPTIONS), False, budget, chunk=2) == reference
    with pytest.raises(UserError, match="must return a loss per token"):
        ours(samples, policies, LossSettings(load_objective(f"{__name__}:wrong_shape")), False)


@pytest.mark.parametrize("decoupled", [False, True])
def test_own_correction_by_name(decoupled: bool) -> None:
    samples = make_samples(6)
    policies = make_policies(samples, 6)
    plain = LossSettings(OBJECTIVES["reinforce"], OPTIONS, "none")
    corrected = replace(plain, correction=f"{__name__}:own_correction")
    (_, expected), (_, found) = (ours(samples, policies, setting, decoupled) for setting in (plain, corrected))
    (micro_batch,) = pack(samples, corrected)
    lengths = torch.bincount(micro_batch.sequence)
    for number, key in zip(micro_batch.sequence.tolist(), micro_batch.behaviour_log_probs.tolist(), strict=True):
        weight = 0 if number == 0 else 2 if decoupled and lengths[number] < 4 else 1
        assert found[key] == pytest.approx([weight * slope for slope in expected[key]], rel=1e-6)
    with pytest.raises(UserError, match="a weight per token"):
        ours(samples, policies, replace(plain, correction=f"{__name__}:wrong_weights"), decoupled)


def wrong_weights(ratio: torch.Tensor, options: CorrectionOptions) -> torch.Tensor:
    return ratio[:1].sum()


def own_advantage(rewards: list[torch.Tensor], tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    return [2 * reward - reward.max() - lengths for reward, lengths in zip(rewards, tokens, strict=True)]


def wrong_advantage(rewards: list[torch.Tensor], tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    return [reward[:1] for reward in rewards]


def test_own_advantage_by_name() -> None:
    found = group_advantages([[1.0, 0.0], [3.0]], "none", f"{__name__}:own_advantage", [[1, 2], [5]])
    assert found == [[0.0, -3.0], [-2.0]]
    with pytest.raises(UserError, match="one tensor for each group"):
        group_advantages([[1.0, 0.0]], "none", f"{__name__}:wrong_advantage")
    with pytest.raises(UserError, match="one is negative"):
        group_advantages([[1.0, -1.0]], "mean")
