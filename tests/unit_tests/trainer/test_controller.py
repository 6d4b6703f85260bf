"""What rank 0 makes of actors that the weight synchronisation has given up, and of those that sleep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchtitan.config.job_config import JobConfig
from torchtitan.rollout.types import Batch
from torchtitan.trainer.commands import Kind
from torchtitan.trainer.controller import Controller
from torchtitan.trainer.job import Job
from torchtitan.utils.events import EventLog
from torchtitan.weight_sync.facade import ActorStatus, SyncOutcome


def status(state: str, evictions: int) -> ActorStatus:
    return ActorStatus(state, "e1", 3, "d", state == "READY", False, "no byte within 5 s", evictions)


def test_evictions_are_told_once_and_what_was_under_way_is_redone(tmp_path: Path) -> None:
    controller = Controller(JobConfig(), tmp_path, "e1", "token", cast("Any", None))
    redone: list[tuple[str, str]] = []
    controller.events = EventLog(tmp_path / "events.jsonl")
    controller.rollout = cast(
        "Any", SimpleNamespace(redo_elsewhere=lambda actor, reason: redone.append((actor, reason)))
    )
    for actors in (
        {"a": status("READY", 0), "b": status("READY", 0)},
        {"a": status("EVICTED", 1), "b": status("READY", 0)},
        {"a": status("EVICTED", 1), "b": status("READY", 0)},
        {"a": status("READY", 1), "b": status("JOINING", 1)},  # b had only lost its connection
        {"a": status("EVICTED", 2), "b": status("READY", 1)},
    ):
        controller._note_evictions(actors)
    assert redone == [("a", "no byte within 5 s")] * 2
    told = [(event["kind"], event["actor"]) for event in controller.events.read()]
    assert told == [("actor_evicted_from_sync", actor) for actor in ("a", "b", "a")]


class Actors:
    """The rollouts, the weight path and the trainer's recorder in one; keeps a list of what was asked."""

    rounds, has_actors, owed, coordinator_address = None, False, None, ""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batch: Batch | None = None

    def next_batch(self, version: int, timeout: float) -> Batch | None:
        self.calls.append("next_batch")
        return self.batch

    def commit(self, version: int, noes: int) -> str:
        self.calls.append(f"commit {version}")
        return "skipped" if noes else "published"

    def wait_until_applied(self, version: int, timeout: float) -> SyncOutcome:
        self.calls.append(f"applied {version}")
        return SyncOutcome(frozenset(), {})

    def add(self, name: str, begin: float, end: float | None = None) -> None:
        """A span of the step."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(" ".join([name, *map(str, arguments)]))


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("sleep_level", [0, 1])
def test_actors_sleep_before_a_batch_and_wake_around_its_version(
    tmp_path: Path, sleep_level: int, skipped: bool
) -> None:
    config = JobConfig()
    config.grpo.async_weight_update, config.inference.sleep_level = False, sleep_level
    actors = Actors()
    controller = Controller(config, tmp_path, "e1", "token", cast("Any", SimpleNamespace(stop_requested=False)))
    controller.signals.take_export_request = lambda: False  # type: ignore[method-assign]
    controller.journal = controller.rollout = controller.weights = cast("Any", actors)
    actors.batch = Batch(0, [])
    command = controller.decide(0)
    if sleep_level:
        # The other ranks hear from rank 0 before the actors have their time, and get the batch whatever happens then.
        assert command.kind is Kind.WAIT and actors.calls == ["next_batch"]
        controller.signals = cast("Any", SimpleNamespace(stop_requested=True))
        command = controller.decide(0)
    assert command.kind is Kind.BATCH and command.batch is actors.batch
    assert actors.calls == ["next_batch", "sleep"][: 1 + sleep_level]

    job = Job(config)
    job.controller, job.version, job._probe = controller, 1, []
    job.weights = job._recorder = cast("Any", actors)
    job._commanded_at = 0.0
    actors.calls.clear()
    job.publish(cast("Any", SimpleNamespace(votes_against=int(skipped), last_step_applied=True)))
    weights = ["wake weights"] if sleep_level else []
    applied = [] if skipped else ["applied 1"]
    rest = [f"append_decision 1 {not skipped}", *applied, "wake kv_cache", "set_version 1"]
    assert actors.calls == [*weights, "commit 1", *rest]
    times = controller.take_rest_times()
    assert times.keys() == ({"time/sleep_s", "time/wake_s"} if sleep_level else set())
    assert set(controller.take_rest_times().values()) <= {0.0}
