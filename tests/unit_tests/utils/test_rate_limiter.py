"""Rate limits by name: names that anybody may make up have one together."""

from __future__ import annotations

import pytest

from torchtitan.utils import rate_limiter
from torchtitan.utils.rate_limiter import RateLimiters


def handled(limiters: RateLimiters, names: list[str], now: float) -> int:
    """How much these names get through at once."""
    count = 0
    for name in names:
        while not limiters.of(name).wait_s(now):
            limiters.of(name).spend(1.0)
            count += 1
    return count


def test_another_name_is_no_way_to_a_fresh_budget() -> None:
    limiters = RateLimiters(10.0, 5.0, "actor-")
    assert handled(limiters, ["spot"], 1.0) == 11, "the last one may exceed it"
    assert limiters.of("spot").wait_s(1.0) > 0.0 and not limiters.of("other").wait_s(1.0)
    made_up = [f"spot-{number}" for number in range(1000)]
    assert handled(limiters, made_up, 1.0) <= (rate_limiter.SHARES_OF_UNTRUSTED_NAMES + 1) * 10
    assert limiters.of("late").wait_s(1.0) > 0.0
    assert handled(limiters, ["actor-0", "actor-1"], 1.0) == 22, "those of the run have theirs"
    assert handled(limiters, made_up, 3.0) <= (rate_limiter.SHARES_OF_UNTRUSTED_NAMES + 1) * 10


def test_number_of_budgets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limiter, "MAX_NAMES", 3)
    limiters = RateLimiters(10.0, 5.0, "actor-")
    for number in range(100):
        limiters.of(f"spot-{number}")
    assert len(limiters._limiters) == 3 and limiters.of("spot-99") is limiters.of("spot-99")
