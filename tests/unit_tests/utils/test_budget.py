"""Budgets by name: names that anybody may make up have one together."""

from __future__ import annotations

import pytest

from torchtitan.utils import budget
from torchtitan.utils.budget import Budgets


def handled(budgets: Budgets, names: list[str], now: float) -> int:
    """How much these names get through at once."""
    count = 0
    for name in names:
        while not budgets.of(name).wait_s(now):
            budgets.of(name).spend(1.0)
            count += 1
    return count


def test_another_name_is_no_way_to_a_fresh_budget() -> None:
    budgets = Budgets(10.0, 5.0, "actor-")
    assert handled(budgets, ["spot"], 1.0) == 11, "the last one may exceed it"
    assert budgets.of("spot").wait_s(1.0) > 0.0 and not budgets.of("other").wait_s(1.0)
    made_up = [f"spot-{number}" for number in range(1000)]
    assert handled(budgets, made_up, 1.0) <= (budget.TOGETHER + 1) * 10
    assert budgets.of("late").wait_s(1.0) > 0.0
    assert handled(budgets, ["actor-0", "actor-1"], 1.0) == 22, "those of the run have theirs"
    assert handled(budgets, made_up, 3.0) <= (budget.TOGETHER + 1) * 10


def test_number_of_budgets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_NAMES", 3)
    budgets = Budgets(10.0, 5.0, "actor-")
    for number in range(100):
        budgets.of(f"spot-{number}")
    assert len(budgets._budgets) == 3 and budgets.of("spot-99") is budgets.of("spot-99")
