"""How long an engine has been silent: inside one kernel over a long prompt, processor time shows that it gets on."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.inference.engines.embedded.loop import EngineLoop


@pytest.mark.parametrize(("computes_whole", "used", "age"), [(True, 30.0, 0.0), (True, 0.0, 60.0), (False, 30.0, 60.0)])
def test_an_engine_in_a_long_kernel_is_silent_only_without_processor_time(
    monkeypatch: pytest.MonkeyPatch, computes_whole: bool, used: float, age: float
) -> None:
    engine: Any = SimpleNamespace(computes_whole=computes_whole, progressed_at=0.0)
    loop = EngineLoop(engine, 0, False, lambda: None)
    loop._thread = threading.current_thread()
    clock = {"now": 100.0, "used": 5.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(time, "clock_gettime", lambda _: clock["used"])
    loop._turning_since = 100.0
    assert loop.turn_age == 0.0
    clock["now"] += 60.0
    clock["used"] += used
    assert loop.turn_age == age
