"""The orders by which an agent has a vLLM with our backend load what its actor has staged."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from torchtitan.inference.engines.sidecar.foreign_engine import EngineError, EngineOptions
from torchtitan.inference.engines.vllm.direct import DirectLoader
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused

START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


class Control:
    """A server; `open`: it has an update under way, and begins no other. `refuses`: orders that fail."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.open = False
        self.refuses: set[str] = set()

    def order(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> None:
        self.orders.append(path)
        if path in self.refuses or (path == START and self.open):
            raise EngineError(f"{path} answered 500")
        self.open = path != FINISH


@pytest.fixture
def control() -> Control:
    return Control()


def load(control: Control) -> int:
    """How often workers were ordered to apply."""
    offers = Mock()
    staged = StagedVersion("e1", 3, "digest", {}, apply_on_workers=offers)
    options = EngineOptions("a", "m", "", "direct", Path(), "", 0, update_timeout_s=5.0)
    loader = DirectLoader(control, options)  # type: ignore[arg-type]
    loader.prepare(staged, "label")
    assert not control.orders  # each would wait for a step of the engine, which generates still
    try:
        loader.load(staged, "label")
    except WeightsRefused:
        offers.assert_not_called()
        raise
    return offers.call_count


def test_a_version_is_loaded_in_one_update(control: Control) -> None:
    assert load(control) == 1
    assert control.orders == [START, UPDATE, FINISH]


def test_an_update_that_was_left_open_is_ended_first(control: Control) -> None:
    control.open = True
    assert load(control) == 1
    assert control.orders == [START, FINISH, START, UPDATE, FINISH]


def test_an_engine_that_begins_no_update_is_as_it_was(control: Control) -> None:
    control.refuses = {START}
    with pytest.raises(WeightsRefused, match="did not begin the update: /start_weight_update answered 500"):
        load(control)
    assert UPDATE not in control.orders


def test_an_engine_that_fails_in_an_update_may_hold_a_half(control: Control) -> None:
    control.refuses = {UPDATE}
    with pytest.raises(EngineError, match="/update_weights answered 500"):
        load(control)
