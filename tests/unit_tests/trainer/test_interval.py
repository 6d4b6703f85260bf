"""The interval of pass@1 against simulated truths, sums of binomial probabilities, and mpmath."""

from __future__ import annotations

import math

import mpmath  # type: ignore[import-untyped]
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.trainer.interval import FEWEST_PROMPTS, TAIL, beta_quantile, interval, t_quantile

# What the pass rates of prompts may be distributed as: (name, mean, draw).
RATES = {
    "uniform": (0.5, lambda draw, shape: draw.random(shape)),
    "beta(.3, .3)": (0.5, lambda draw, shape: draw.beta(0.3, 0.3, shape)),
    "beta(.2, 1.8)": (0.1, lambda draw, shape: draw.beta(0.2, 1.8, shape)),
    "beta(.05, .95)": (0.05, lambda draw, shape: draw.beta(0.05, 0.95, shape)),
    "all .5": (0.5, lambda draw, shape: numpy.full(shape, 0.5)),
    "all .03": (0.03, lambda draw, shape: numpy.full(shape, 0.03)),
    "0 or 1, mean .3": (0.3, lambda draw, shape: 1.0 * (draw.random(shape) < 0.3)),
    "0 or 1, mean .03": (0.03, lambda draw, shape: 1.0 * (draw.random(shape) < 0.03)),
    "beta(9, 1)": (0.9, lambda draw, shape: draw.beta(9, 1, shape)),
    "beta(.9, .1)": (0.9, lambda draw, shape: draw.beta(0.9, 0.1, shape)),
}
REPEATS = 1500


@pytest.mark.parametrize(("prompts", "samples"), [(48, 8), (128, 4), (33, 16), (24, 4)])
@pytest.mark.parametrize("name", RATES)
def test_the_interval_covers_the_truth_as_often_as_it_says(name: str, prompts: int, samples: int) -> None:
    truth, rates = RATES[name]
    draw = numpy.random.default_rng(0)
    passed = draw.binomial(samples, rates(draw, (REPEATS, prompts)))
    # The interval follows from the mean and the scatter: draws that agree in both count several times.
    keys = numpy.stack([passed.sum(1), (passed**2).sum(1)], axis=1)
    _, places, counts = numpy.unique(keys, axis=0, return_index=True, return_counts=True)
    found = numpy.array([interval((passed[place] / samples).tolist(), prompts * samples) for place in places])
    covered = (found[:, 0] <= truth) & (truth <= found[:, 1])
    assert counts @ covered / REPEATS >= 0.93
    if prompts >= FEWEST_PROMPTS:
        # It is not bought by width: at most one and a half times that of as many independent samples of single prompts.
        width = counts @ (found[:, 1] - found[:, 0]) / REPEATS
        assert width <= 1.5 * 2 * 1.96 * math.sqrt(truth * (1 - truth) / prompts)


@given(st.integers(1, 200), st.integers(0, 200))
def test_the_interval_of_single_samples_is_clopper_and_pearsons(n: int, passed: int) -> None:
    """At its bounds, as many passes or more, or as few or fewer, have the probability TAIL."""
    passed = min(passed, n)

    def probability(counts: range, share: float) -> float:
        return math.fsum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in counts)

    low, high = interval([1.0] * passed + [0.0] * (n - passed), n)
    assert (low == 0) == (passed == 0) and (high == 1) == (passed == n)
    assert passed == 0 or probability(range(passed, n + 1), low) == pytest.approx(TAIL, rel=1e-6)
    assert passed == n or probability(range(passed + 1), high) == pytest.approx(TAIL, rel=1e-6)


@pytest.mark.parametrize("rates", [[0.0] * 64, [1.0] * 64, [0.0] * 8, [0.5] * 64, [0.25] * 8])
def test_samples_that_all_agree_count_as_prompts_and_others_at_most_as_samples(rates: list[float]) -> None:
    low, high = interval(rates, 16 * len(rates))
    (p, *_), n = rates, len(rates)
    assert low <= p <= high
    if p in (0, 1):
        assert high - low == pytest.approx(1 - TAIL ** (1 / n))  # the rule of three, for prompts
    else:
        assert high - low > 2 * 1.96 * math.sqrt(p * (1 - p) / (16 * n))


@given(st.floats(0.1, 500), st.floats(0.1, 500), st.sampled_from([0.025, 0.05, 0.5, 0.975]))
def test_quantiles_of_the_beta_distribution(a: float, b: float, share: float) -> None:
    x = beta_quantile(share, a, b)
    assert 0 <= x <= 1
    if 1e-9 < x < 1 - 1e-9:  # beyond, the rounding of x alone changes the probability
        assert float(mpmath.betainc(a, b, 0, x, regularized=True)) == pytest.approx(share, rel=1e-6)


def test_quantiles_of_students_distribution() -> None:
    # From any table of the distribution, two-sided 95 %.
    table = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980, 100_000: 1.960}
    assert {freedom: round(t_quantile(freedom), 3) for freedom in table} == table
