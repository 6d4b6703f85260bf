"""The expected loss that the code computes, and its gradient, without sampling, against what the objectives mean.

The policy is a table: three symbols, of which 0 ends, and at most two tokens, so there are seven sequences. A batch is
two groups of two; all 7⁴ batches are enumerated with their probability under the policy μ that samples, with the
advantages and token weights that the code gives each. The definitions on the other side are written with probabilities
and cases as the papers have them, in float64, and share nothing with the code.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from torchtitan.config.training_tables import ADVANTAGES, CORRECTIONS, LOSS_TYPES
from torchtitan.grpo.advantages import group_advantages, normalized_each
from torchtitan.grpo.loss import FixedLogProbs, LossSettings, MicroBatchLoss
from torchtitan.grpo.objectives import NORMALIZERS, OBJECTIVES, ClipRange, ObjectiveOptions, load_objective
from torchtitan.grpo.off_policy import CorrectionOptions

LARGEST_ERROR = 1e-9
LONGEST = 5
# (state, symbol) of every token; state 0 is the empty prefix, states 1 and 2 the prefixes of one symbol.
SEQUENCES = [[(0, 0)], *([(0, first), (first, second)] for first in (1, 2) for second in range(3))]
REWARDS = [0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 1.0]
SECOND_REWARDS = [1.0, None, 0.0, 0.5, 1.0, 0.5, None]
"""Of a second reward function, for normalize_each; it has no opinion on two sequences"""
BATCHES = list(itertools.product(range(len(SEQUENCES)), repeat=4))
KL_COEFFICIENT, ENTROPY_COEFFICIENT = 0.3, 0.07
OPTIONS = ObjectiveOptions(ClipRange(0.1, 0.15, delta=1.6), reinforce_cap=1.3, sapo_temperatures=(1.1, 2.3))
CISPO_OPTIONS = replace(OPTIONS, clip=ClipRange(0.0, 1.4))
BOUNDS = CorrectionOptions(cap=1.3, icepop_band=(0.7, 1.2))
MASKS = {
    "geometric": {"geometric_band": (0.8, 1.3)},
    "negative": {"negative_threshold": 0.1},
}
SEVERAL = {"geometric_band": (0.8, 1.3), "negative_threshold": 0.1}


@dataclass(frozen=True)
class Situation:
    """Logits [3 states, 3 symbols] of the policies. `old` is None in direct mode."""

    now: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    old: torch.Tensor | None


def make_situations() -> dict[str, Situation]:
    generator = torch.Generator().manual_seed(3)
    now, first, second, third = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(4))
    behaviour, old, reference = now + 0.6 * first, now + 0.4 * second, now + third
    return {
        "on policy": Situation(now, now, reference, None),
        "off policy": Situation(now, behaviour, reference, None),
        "off policy, decoupled": Situation(now, behaviour, reference, old),
    }


SITUATIONS = make_situations()


# Advantages: the code's and the definition's, per batch of sequences (a, b | c, d).


def code_advantages(kind: str, members: tuple[int, ...]) -> list[float]:
    estimator, _, scale = kind.partition("/")
    groups = [members[:2], members[2:]]
    tokens = [[len(SEQUENCES[i]) for i in group] for group in groups]
    if scale == "each":
        rewards = [[{"a": REWARDS[i], "b": SECOND_REWARDS[i]} for i in group] for group in groups]
        found = normalized_each(rewards, {"a": 1.0, "b": 0.5}, "group", estimator, tokens)
    else:
        found = group_advantages([[REWARDS[i] for i in group] for group in groups], scale, estimator, tokens)
    return [value for group in found for value in group]


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: list[float]) -> float:
    mean = mean_of(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def defined_advantages(kind: str, members: tuple[int, ...]) -> list[float]:
    estimator, _, scale = kind.partition("/")
    if scale != "each":
        return defined(estimator, scale, members, [REWARDS[i] for i in members])
    first = defined(estimator, "group", members, [REWARDS[i] for i in members])
    second = defined(estimator, "group", members, [SECOND_REWARDS[i] for i in members])
    total = [a + 0.5 * b for a, b in zip(first, second, strict=True)]
    return [(value - mean_of(total)) / (deviation(total) + 1e-4) for value in total]


def baseline_of(
    estimator: str, i: int, members: tuple[int, ...], rewards: list, group: list[int], all_rewards: list[float]
) -> float:
    if estimator == "rloo":
        return mean_of([rewards[j] for j in group if j != i]) if len(group) > 1 else rewards[i]
    if estimator == "opo":
        return mean_of([rewards[j] for j in group for _ in SEQUENCES[members[j]]])
    if estimator == "reinforce_pp_no_baseline":
        return 0.0
    return mean_of(all_rewards if estimator == "batch" else [rewards[j] for j in group])


def defined(estimator: str, scale: str, members: tuple[int, ...], rewards: list[float | None]) -> list[float]:
    """Of the samples that have a reward; 0 of others."""
    scored = [i for i in range(4) if rewards[i] is not None]
    group_of = {i: [j for j in scored if j // 2 == i // 2] for i in scored}
    all_rewards = [rewards[i] for i in scored]
    centred = {}
    for i in scored:
        centred[i] = rewards[i] - baseline_of(estimator, i, members, rewards, group_of[i], all_rewards)
    if estimator.startswith("reinforce_pp"):
        of_tokens = [centred[i] for i in scored for _ in SEQUENCES[members[i]]]
        mean, spread = mean_of(of_tokens or [0.0]), deviation(of_tokens or [0.0])
        centred = {i: (value - mean) / (spread + 1e-4) for i, value in centred.items()}
    spread_of = {
        "none": lambda i: 1.0,
        "group": lambda i: deviation([rewards[j] for j in group_of[i]]) + 1e-4,
        "batch": lambda i: deviation(all_rewards) + 1e-4,
        "mean": lambda i: mean_of([rewards[j] for j in group_of[i]]) or math.inf,
    }[scale]
    return [centred[i] / spread_of(i) if i in centred else 0.0 for i in range(4)]


EVERY_ADVANTAGE = [f"{name}/{scale}" for name in ADVANTAGES for scale in ("none", "group", "batch", "mean", "each")]
# Scales come after the baselines, so that not every pair has to meet every loss; all pairs are compared by themselves.
SOME_ADVANTAGES = [*(f"{name}/none" for name in ADVANTAGES), "group/group", "group/batch", "group/mean", "group/each"]


# The batches as weighted terms: (sequence, advantage) -> expected weight of one of its tokens.


def normalizer_of(lengths: list[int], kind: str) -> list[float]:
    return {
        "token": [1 / sum(lengths)] * 4,
        "sequence": [1 / (4 * length) for length in lengths],
        "constant": [1 / (4 * LONGEST)] * 4,
    }[kind]


@functools.cache
def by_kind(advantages_of: Callable[[str, tuple[int, ...]], list[float]], kind: str) -> list[list[float]]:
    return [advantages_of(kind, members) for members in BATCHES]


@dataclass
class Terms:
    """Sequences [E] with an advantage each, and the expected weight of each of their tokens."""

    sequences: list[int]
    advantages: torch.Tensor
    masses: torch.Tensor


def terms_of(
    advantages: list[list[float]], weights_of: Callable[[list[int]], list[float]], behaviour: torch.Tensor
) -> Terms:
    log_probs = behaviour.log_softmax(-1).tolist()
    chances = [math.exp(sum(log_probs[state][symbol] for state, symbol in sequence)) for sequence in SEQUENCES]
    known: dict[tuple[int, ...], list[float]] = {}
    total: dict[tuple[int, float], float] = defaultdict(float)
    for members, values in zip(BATCHES, advantages, strict=True):
        lengths = tuple(len(SEQUENCES[i]) for i in members)
        if lengths not in known:
            known[lengths] = weights_of(list(lengths))
        chance = math.prod(chances[i] for i in members)
        for i, value, weight in zip(members, values, known[lengths], strict=True):
            total[i, value] += chance * weight
    return Terms(
        [i for i, _ in total],
        torch.tensor([value for _, value in total], dtype=torch.float64),
        torch.tensor(list(total.values()), dtype=torch.float64),
    )


@functools.cache
def code_terms(name: str, kind: str, where: str) -> Terms:
    weights = OBJECTIVES[name].token_weights
    behaviour = SITUATIONS[where].behaviour
    return terms_of(by_kind(code_advantages, kind), lambda lengths: weights(lengths, LONGEST), behaviour)


@functools.cache
def defined_terms(normalizer: str, kind: str, where: str) -> Terms:
    behaviour = SITUATIONS[where].behaviour
    return terms_of(by_kind(defined_advantages, kind), lambda lengths: normalizer_of(lengths, normalizer), behaviour)


# What the code computes.


@dataclass
class MicroBatch:
    num_sequences: int
    sequence: torch.Tensor
    advantages: torch.Tensor
    behaviour_log_probs: torch.Tensor
    weights: torch.Tensor


def with_gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[1 + 9] the loss, and its gradient behind it."""
    return torch.cat([loss.detach().view(1), torch.autograd.grad(loss, logits)[0].flatten()])


def code_loss(terms: Terms, situation: Situation, settings: LossSettings) -> torch.Tensor:
    owner = torch.tensor([e for e, i in enumerate(terms.sequences) for _ in SEQUENCES[i]])
    states = torch.tensor([state for i in terms.sequences for state, _ in SEQUENCES[i]])
    symbols = torch.tensor([symbol for i in terms.sequences for _, symbol in SEQUENCES[i]])

    def tokens(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[states, symbols]

    behaviour = tokens(situation.behaviour)
    batch = MicroBatch(len(terms.sequences), owner, terms.advantages[owner], behaviour, terms.masses[owner])
    logits = situation.now.clone().requires_grad_()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[states]
    fixed = FixedLogProbs(
        old=None if situation.old is None else tokens(situation.old),
        reference=tokens(situation.reference) if settings.kl_coefficient else None,
    )
    loss = MicroBatchLoss(batch, fixed, settings)(tokens(logits), entropy, slice(0, len(owner))).sum()
    return with_gradient(loss, logits)


# What it means.


def padded(terms: Terms, table: torch.Tensor) -> torch.Tensor:
    """[E, 2] of a table [states, symbols]; 1 where a sequence has only one token."""
    rows = [[table[place] for place in sequence] for sequence in SEQUENCES]
    unit = torch.ones((), dtype=table.dtype)
    return torch.stack([torch.stack([*row, unit][:2]) for row in rows])[terms.sequences]


def objective_loss(
    name: str, ratio: torch.Tensor, chance: torch.Tensor, advantage: torch.Tensor, exists: torch.Tensor
) -> torch.Tensor:
    """The loss of every token [E, 2] by cases; the ratio of a token that does not exist is 1."""
    clip, positive = OPTIONS.clip, advantage > 0
    if name in ("cispo", "reinforce"):
        cap = 1.4 if name == "cispo" else OPTIONS.reinforce_cap
        return -torch.where(ratio < cap, ratio, cap).detach() * advantage * chance.log()
    if name == "sapo":
        high, low = OPTIONS.sapo_temperatures
        tau = positive.double() * high + (~positive).double() * low
        return -4 / tau / (1 + torch.exp(tau * (1 - ratio))) * advantage
    if name == "dppo":
        before = chance / ratio
        goes_on = (positive & (chance - before <= clip.high)) | (~positive & (before - chance <= clip.low))
        return -goes_on.double() * ratio * advantage
    if name == "gmpo":
        kept = torch.where(positive, ratio.clamp(max=1 + clip.high), ratio.clamp(min=1 - clip.low))
        return -(kept.prod(-1) ** (1 / exists.sum(-1)))[:, None] * advantage
    gain = torch.where(ratio > 1 + clip.high, 1 + clip.high, ratio)
    cost = torch.where(ratio < 1 - clip.low, 1 - clip.low, torch.where(ratio > clip.delta, clip.delta, ratio))
    return -torch.where(positive, gain, cost) * advantage


def token_factor(correction: str, ratio: torch.Tensor, decoupled: bool) -> torch.Tensor:
    """What a correction makes of w; in direct mode it only leaves tokens out."""
    ones = torch.ones_like(ratio)
    weight = ratio if decoupled else ones
    if correction == "truncate":
        return torch.where(ratio > BOUNDS.cap, BOUNDS.cap, ratio) if decoupled else ones
    if correction == "mask":
        return torch.where(ratio > BOUNDS.cap, 0.0, weight)
    if correction == "icepop":
        return torch.where((ratio < 0.7) | (ratio > 1.2), 0.0, weight)
    return ones


def sequence_factor(mask: str, product: torch.Tensor, length: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    mean = product ** (1 / length)
    if mask == "geometric":
        return ((mean >= 0.8) & (mean <= 1.3)).double()
    if mask == "negative":
        return (~((advantage < 0) & (mean < math.exp(-0.1)))).double()
    if mask == "several":
        return sequence_factor("negative", product, length, advantage) * ((mean >= 0.8) & (mean <= 1.3))
    return torch.ones_like(product)


@functools.cache
def policy_loss(name: str, normalizer: str, correction: str, mask: str, kind: str, where: str) -> torch.Tensor:
    situation, terms = SITUATIONS[where], defined_terms(normalizer, kind, where)
    logits = situation.now.clone().requires_grad_()
    lengths = torch.tensor([len(SEQUENCES[i]) for i in terms.sequences], dtype=torch.float64)
    exists = torch.arange(2) < lengths[:, None]
    chance = padded(terms, logits.softmax(-1))
    behaviour = padded(terms, situation.behaviour.softmax(-1))
    old = behaviour if situation.old is None else padded(terms, situation.old.softmax(-1))
    ratio = chance / old
    if name in ("gspo", "gspo_token"):
        whole = (ratio.prod(-1) ** (1 / lengths))[:, None].expand(-1, 2)
        ratio = whole if name == "gspo" else whole.detach() * chance / chance.detach()
    drift = (chance.detach() if situation.old is None else old) / behaviour
    advantage = terms.advantages[:, None]
    factor = token_factor(correction, drift, situation.old is not None)
    factor = factor * sequence_factor(mask, drift.prod(-1), lengths, terms.advantages)[:, None]
    loss = objective_loss(name, ratio, chance, advantage, exists) * factor * exists * terms.masses[:, None]
    return with_gradient(loss.sum(), logits)


def visits_of(terms: Terms) -> torch.Tensor:
    """[states, symbols] expected weight of each token."""
    visits = torch.zeros(3, 3, dtype=torch.float64)
    for i, mass in zip(terms.sequences, terms.masses, strict=True):
        for place in SEQUENCES[i]:
            visits[place] += mass
    return visits


@functools.cache
def shaping_loss(normalizer: str, has_reference: bool, where: str) -> torch.Tensor:
    """KL and entropy terms: the mean of k3 under μ, weighted with π/μ up to the cap, with the gradient of Σ over
    symbols of π log(π/π_ref) - π + π_ref, which is the KL, but for what the cap takes."""
    situation = SITUATIONS[where]
    visits = visits_of(defined_terms(normalizer, "group/none", where))
    logits = situation.now.clone().requires_grad_()
    pi, behaviour, reference = logits.softmax(-1), situation.behaviour.softmax(-1), situation.reference.softmax(-1)
    loss = ENTROPY_COEFFICIENT * (visits.sum(-1, keepdim=True) * pi * pi.log()).sum()
    if has_reference:
        ratio, weight = reference / pi, (pi / behaviour).clamp(max=BOUNDS.cap).detach()
        estimate = ratio - 1 - ratio.log()
        slope = (visits * weight / pi.detach() * (pi * (pi / reference).log() - pi + reference)).sum()
        divergence = slope + ((visits * weight * estimate).sum() - slope).detach()
        loss = loss + KL_COEFFICIENT * divergence
    return with_gradient(loss, logits)


NORMALIZER_OF = {**dict.fromkeys(("grpo", "gspo", "gspo_token", "gmpo", "sapo"), "sequence"), "dr_grpo": "constant"}
ALL_CORRECTIONS = [*((name, "") for name in CORRECTIONS), *(("truncate", mask) for mask in MASKS)]


def combinations(name: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """One objective's combinations, and the relative error of the code's loss and gradient there.

    The divergence is added to the policy's loss and knows no advantage, so that it need not meet every advantage.
    """
    normalizer = NORMALIZER_OF.get(name, "token")
    choices = itertools.product(*map(enumerate, (SITUATIONS, SOME_ADVANTAGES, ALL_CORRECTIONS)))
    for (i, where), (j, kind), (k, (correction, mask)) in choices:
        has_reference = (i + j + k) % 2 == 0
        settings = LossSettings(
            OBJECTIVES[name],
            CISPO_OPTIONS if name == "cispo" else OPTIONS,
            correction,
            replace(BOUNDS, **MASKS.get(mask, {})),
            KL_COEFFICIENT if has_reference else 0.0,
            ENTROPY_COEFFICIENT,
        )
        found = code_loss(code_terms(name, kind, where), SITUATIONS[where], settings)
        expected = policy_loss(name, normalizer, correction, mask, kind, where)
        expected = expected + shaping_loss(normalizer, has_reference, where)
        yield (where, correction, mask, f"{has_reference=}", kind), relative_error(found, expected)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_expected_loss_and_gradient_are_those_of_the_definition(name: str) -> None:
    errors = dict(combinations(name))
    assert len(errors) == 3 * len(SOME_ADVANTAGES) * 6 and len({case[:-1] for case in errors}) == 3 * 6 * 2
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < LARGEST_ERROR, worst


@pytest.mark.parametrize("where", SITUATIONS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_sequence_ratios_with_each_normalizer_under_several_masks(normalizer: str, where: str) -> None:
    objective, behaviour = load_objective("gspo", normalizer), SITUATIONS[where].behaviour
    advantages = by_kind(code_advantages, "group/none")
    terms = terms_of(advantages, lambda lengths: objective.token_weights(lengths, LONGEST), behaviour)
    found = code_loss(terms, SITUATIONS[where], LossSettings(objective, OPTIONS, bounds=replace(BOUNDS, **SEVERAL)))
    expected = policy_loss("gspo", normalizer, "truncate", "several", "group/none", where)
    assert objective.sees_sequences and relative_error(found, expected) < LARGEST_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY_ADVANTAGE)
def test_advantages_of_every_batch(kind: str) -> None:
    pairs = zip(by_kind(code_advantages, kind), by_kind(defined_advantages, kind), strict=True)
    assert max(abs(a - b) for ours, reference in pairs for a, b in zip(ours, reference, strict=True)) < LARGEST_ERROR


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_on_policy_it_is_the_gradient_of_the_expected_reward(name: str) -> None:
    """rloo has no bias, and with constant weights the expected loss is the expected reward, for every objective."""
    objective = load_objective(name, "constant")
    situation = SITUATIONS["on policy"]
    advantages = by_kind(code_advantages, "rloo/none")
    terms = terms_of(advantages, lambda lengths: objective.token_weights(lengths, LONGEST), situation.behaviour)
    options = CISPO_OPTIONS if name == "cispo" else OPTIONS
    found = code_loss(terms, situation, LossSettings(objective, options, bounds=BOUNDS))[1:]
    logits = situation.now.clone().requires_grad_()
    pi = logits.softmax(-1)
    reward = sum(REWARDS[i] * math.prod(pi[place] for place in sequence) for i, sequence in enumerate(SEQUENCES))
    (expected,) = torch.autograd.grad(-reward / LONGEST, logits)
    assert relative_error(found, expected.flatten()) < LARGEST_ERROR


def divergence_gradient(where: str) -> torch.Tensor:
    """The code's, of the KL term alone, with constant weights and no cap in reach."""
    situation = SITUATIONS[where]
    no_advantages = [[0.0] * 4 for _ in BATCHES]
    terms = terms_of(no_advantages, lambda lengths: normalizer_of(lengths, "constant"), situation.behaviour)
    bounds = CorrectionOptions(cap=1e6)
    settings = LossSettings(OBJECTIVES["dr_grpo"], OPTIONS, "truncate", bounds, 1.0)
    return code_loss(terms, situation, settings)[1:] * LONGEST


def true_gradient(where: str) -> torch.Tensor:
    """Of the sum over the visited prefixes of KL(π ‖ π_ref)."""
    situation = SITUATIONS[where]
    first = situation.behaviour.softmax(-1)[0].tolist()
    logits = situation.now.clone().requires_grad_()
    pi, reference = logits.softmax(-1), situation.reference.softmax(-1)
    divergences = (pi * (pi / reference).log()).sum(-1)
    visits = torch.tensor([1.0, first[1], first[2]], dtype=torch.float64)
    return with_gradient((visits * divergences).sum(), logits)[1:]


@pytest.mark.parametrize("where", SITUATIONS)
def test_the_reference_term_has_the_gradient_of_the_kl(where: str) -> None:
    assert relative_error(divergence_gradient(where), true_gradient(where)) < LARGEST_ERROR
