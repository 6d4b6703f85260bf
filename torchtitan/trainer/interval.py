"""The 95 % interval of a pass rate, from several samples each of a number of prompts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

# The probability that the truth lies above the interval, and as much that it lies below.
TAIL = 0.025
# With fewer prompts the scatter of their rates says too little about them, so prompts are counted and not samples.
FEWEST_PROMPTS = 32
ALIKE = 3
NORMAL = NormalDist()
MAX_STEPS = 200
PRECISION = 1e-12


def interval(rates: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the 95 % interval of pass@1, the mean of the prompts' pass rates, from this many samples of all prompts.

    It is Korn and Graubard's interval (1998, Survey Methodology 24: 193-201), which covers the truth also for rare
    outcomes and for samples that come in clusters, here prompts: Clopper and Pearson's interval (1934) with the
    effective number of samples. That is the number of independent ones which would leave the mean as uncertain as the
    scatter of the rates does (Kish's design effect, 1965), from one per prompt up to all of them, times the square of
    the ratio of Student's quantiles for samples and for prompts. With fewer than FEWEST_PROMPTS prompts it is their
    number.

    The scatter counts ALIKE prompts more whose samples all pass or all fail. Where few prompts pass at all it is often
    too small otherwise: with pass rates from Beta(.05, .95) and 16 samples each of 33 prompts, the interval would cover
    the truth in 91 % of all cases, and it does in 94 %.
    """
    prompts, mean = len(rates), sum(rates) / len(rates)
    effective = float(prompts)
    if prompts >= FEWEST_PROMPTS and 0 < mean < 1:
        scatter = sum((rate - mean) ** 2 for rate in rates) / (prompts - 1)
        scatter = (prompts * scatter + ALIKE * mean * (1 - mean)) / (prompts + ALIKE)
        effective = min(max(prompts * mean * (1 - mean) / scatter, prompts), samples)
        effective *= (t_quantile(samples - 1) / t_quantile(prompts - 1)) ** 2
    return clopper_pearson(mean * effective, effective)


def clopper_pearson(passed: float, samples: float) -> tuple[float, float]:
    """Return the exact 95 % interval of a probability (1934); neither number need be whole."""
    failed = samples - passed
    # What differs from 0 only by rounding.
    low = beta_quantile(TAIL, passed, failed + 1) if passed > PRECISION * samples else 0.0
    high = beta_quantile(1 - TAIL, passed + 1, failed) if failed > PRECISION * samples else 1.0
    return low, high


@functools.cache
def t_quantile(freedom: int) -> float:
    """Return the quantile 1 - TAIL of Student's distribution with this many degrees of freedom, at least 1."""
    # For a t of that distribution, freedom / (freedom + t²) has the distribution Beta(freedom / 2, 1 / 2).
    share = beta_quantile(2 * TAIL, freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - share) / share)


def beta_quantile(share: float, a: float, b: float) -> float:
    """Return the x below which Beta(a, b) lies with probability `share`; Newton's steps inside of a bracket."""
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    low, high, mean = 0.0, 1.0, a / (a + b)
    # Begin where a normal distribution of the same mean and deviation has its quantile.
    x = mean + NORMAL.inv_cdf(share) * math.sqrt(mean * (1 - mean) / (a + b + 1))
    if a < 1:  # the quantile may be tiny: the first term of the function's series
        x = min(mean, math.exp((math.log(share * a) + log_beta) / a))
    x = x if 0 < x < 1 else mean
    for _ in range(MAX_STEPS):
        logarithm = a * math.log(x) + b * math.log1p(-x) - log_beta
        error = _incomplete_beta(a, b, x, logarithm) - share
        low, high = (low, x) if error > 0 else (x, high)
        density = math.exp(logarithm) / (x * (1 - x))
        following = x - error / density if density else low
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - x) <= PRECISION * x or following in (low, high):
            return following
        x = following
    return x


def _incomplete_beta(a: float, b: float, x: float, logarithm: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b); logarithm: of x^a (1-x)^b / B(a, b)."""
    if x > (a + 1) / (a + b + 2):  # where the fraction of the other side converges faster
        return 1 - math.exp(logarithm) / b / _continued_fraction(b, a, 1 - x)
    return math.exp(logarithm) / a / _continued_fraction(a, b, x)


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Return 1 + d1 / (1 + d2 / (1 + …)) of NIST's DLMF 8.17.22, by the modified Lentz method (DLMF 3.10(iii))."""
    value = upper = 1.0
    lower = 0.0
    for number in range(1, 10_000):
        half = number // 2
        if number % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1 / (1 + term * lower or 1e-300)
        upper = 1 + term / upper or 1e-300
        value *= lower * upper
        if abs(lower * upper - 1) < PRECISION:
            break
    return value
