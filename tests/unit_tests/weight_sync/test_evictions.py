"""An actor that the weight coordinator evicts during a training step is left alone at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.trainer.controller import Controller
from torchtitan.utils.events import EventLog
from torchtitan.weight_sync.facade import ActorStatus


def director_of(folder: Path, actors: dict[str, ActorStatus], redo: Callable[[str, str], None]) -> Controller:
    controller = Controller(JobConfig(), folder, "e1", "token", cast("Any", None))
    controller.events = EventLog(folder / "events.jsonl")
    controller.rollout = cast("Any", SimpleNamespace(redo_elsewhere=redo))
    controller.weights = cast("Any", SimpleNamespace(actors=lambda: dict(actors)))
    return controller


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status(state: str, evictions: int) -> ActorStatus:
    return ActorStatus(state, "e1", 3, "d", state == "READY", False, "no byte within 5 s", evictions)


def test_an_eviction_is_acted_on_while_nobody_asks_for_orders(tmp_path: Path) -> None:
    redone: list[str] = []
    actors = {"a": status("READY", 0), "b": status("READY", 0)}
    controller = director_of(tmp_path, actors, lambda actor, _reason: redone.append(actor))
    controller._start_watch()
    actors["b"] = status("EVICTED", 1)
    wait_for(lambda: bool(redone))
    controller._closing.close()
    assert redone == ["b"] and controller._watch is not None and controller._watch.done()
    actors["a"] = status("EVICTED", 1)
    time.sleep(0.3)
    assert redone == ["b"], "it goes on after the end"


def test_rollouts_that_do_not_answer_end_the_run(tmp_path: Path) -> None:
    def fail(_actor: str, _reason: str) -> None:
        raise UserError("the rollouts gave no answer")

    controller = director_of(tmp_path, {"a": status("EVICTED", 1)}, fail)
    controller._start_watch()
    wait_for(lambda: controller._watch is not None and controller._watch.done())
    with pytest.raises(UserError, match="gave no answer"):
        controller.decide(0)
    controller._closing.close()
