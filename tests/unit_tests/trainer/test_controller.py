"""What rank 0 does about actors that weight synchronisation has given up, about those that sleep, and about rounds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import until
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.engines.replicas.replica_pool import Round
from torchtitan.rollout.flow.rollouts import BackgroundLoop
from torchtitan.rollout.types import Batch
from torchtitan.trainer.commands import Kind
from torchtitan.trainer.controller import Controller, DataPath
from torchtitan.trainer.job import TrainingJob
from torchtitan.utils.json_lines import EventLog, read_json_lines
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.facade import ActorStatus, SyncOutcome


class Everything:
    """The flow, the pool, the weight path, the journal and the recorder in one; keeps a list of what was asked."""

    pending_version = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batch: Batch | None = None

    def next_batch(self, version: int, timeout: float) -> Batch | None:
        self.calls.append("next_batch")
        return self.batch

    def commit(self, version: int, votes_against: int) -> str:
        self.calls.append(f"commit {version}")
        return "skipped" if votes_against else "published"

    def wait_until_applied(self, version: int, timeout: float) -> SyncOutcome:
        self.calls.append(f"applied {version}")
        return SyncOutcome(frozenset(), {})

    def add(self, name: str, begin: float, end: float | None = None) -> None:
        """A span of the step."""

    def take_overtaken(self) -> list[int]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(" ".join([name, *map(str, arguments)]))


class Signals:
    exit_code = 0

    def __init__(self) -> None:
        self.stop_requested = False

    def take_export_request(self) -> bool:
        return False


def make(folder: Path, parts: Any, config: JobConfig | None = None) -> Controller:
    """A controller whose rollouts, actors and weights are `parts`, called in this very thread."""
    config = JobConfig() if config is None else config
    config.metrics.loggers = []
    controller = Controller(
        config,
        folder,
        "e1",
        cast("Any", Signals()),
        DataPath(cast("Any", None), EventLog(folder / "events.jsonl"), journal=parts),
        parts,
    )
    controller.rollouts = cast("Any", SimpleNamespace(flow=parts))
    controller.actors = controller.sync = parts
    controller._call = lambda function, *arguments, timeout_s=60.0: function(*arguments)  # type: ignore[assignment]
    return controller


def status(state: str, evictions: int) -> ActorStatus:
    # The registry keeps the reason of a state only until the actor is back.
    reason = "no byte within 5 s"
    return ActorStatus(ActorState(state), 3, state == "ready", reason if state == "evicted" else "", evictions, reason)


class Evicted:
    """A pool whose actors are asked to be redone elsewhere, and the weight path that evicts them."""

    def __init__(self, error: Exception | None = None):
        self.states = {"a": status("ready", 0), "b": status("ready", 0)}
        self.redone: list[tuple[str, str]] = []
        self.error = error

    def actors(self) -> dict[str, ActorStatus]:
        return dict(self.states)

    async def redo_elsewhere(self, actor: str, reason: str) -> None:
        if self.error is not None:
            raise self.error
        self.redone.append((actor, reason))


def test_evictions_are_told_once_and_what_was_under_way_is_redone(tmp_path: Path) -> None:
    parts = Evicted()
    controller = make(tmp_path, parts)
    for actors in (
        {"a": status("ready", 0), "b": status("ready", 0)},
        {"a": status("evicted", 1), "b": status("ready", 0)},
        {"a": status("evicted", 1), "b": status("ready", 0)},
        {"a": status("ready", 1), "b": status("joining", 1)},  # b had only lost its connection
        {"a": status("evicted", 2), "b": status("ready", 1)},
    ):
        asyncio.run(controller._note_evictions(actors))
    assert parts.redone == [("a", "no byte within 5 s")] * 2
    events = [(event["kind"], event["actor"], event["reason"]) for event in read_json_lines(controller.events.path)]
    assert events == [("actor_evicted_from_sync", actor, "no byte within 5 s") for actor in ("a", "b", "a")]


def test_a_late_actor_is_told_once_until_it_is_late_again(tmp_path: Path) -> None:
    controller = make(tmp_path, Evicted())
    late = ActorStatus(ActorState.LATE, 3, True, "took no version within 70 s", 0)
    for actor in (late, late, status("ready", 0), late):
        asyncio.run(controller._note_evictions({"a": actor}))
    events = [(event["kind"], event["actor"], event["reason"]) for event in read_json_lines(controller.events.path)]
    assert events == [("actor_late", "a", "took no version within 70 s")] * 2


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


def test_an_eviction_is_acted_on_while_no_command_is_asked_for(tmp_path: Path, loop: BackgroundLoop) -> None:
    parts = Evicted()
    controller = make(tmp_path, parts)
    controller._watch = loop.submit(controller._watch_actors)
    parts.states["b"] = status("evicted", 1)
    until(lambda: bool(parts.redone))
    controller.close()
    assert [actor for actor, _ in parts.redone] == ["b"] and controller._watch.done()
    parts.states["a"] = status("evicted", 1)
    time.sleep(0.3)
    assert [actor for actor, _ in parts.redone] == ["b"], "it goes on after the end"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_report_that_cannot_be_written_does_not_hide_how_the_run_ended(tmp_path: Path, damaged: bool) -> None:
    controller = make(tmp_path, Everything())
    if damaged:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "reward/mean": "x"}\n')
    else:
        (tmp_path / "report.html.tmp").mkdir()  # a full disk gives OSError, too
    with pytest.raises(UserError, match="the checkpoint could not be written"), contextlib.ExitStack() as closing:
        closing.callback(controller.close)
        raise UserError("the checkpoint could not be written")
    assert (tmp_path / "trace.json").is_file() and not (tmp_path / "report.html").exists()


def test_a_pool_that_fails_ends_the_run(tmp_path: Path, loop: BackgroundLoop) -> None:
    parts = Evicted(UserError("no inference actor is left"))
    parts.states["a"] = status("evicted", 1)
    controller = make(tmp_path, parts)
    controller._watch = loop.submit(controller._watch_actors)
    until(controller._watch.done)
    with pytest.raises(UserError, match="no inference actor is left"):
        controller.decide(0)


def test_a_batch_goes_before_generation_and_generation_before_waiting(tmp_path: Path) -> None:
    ready: list[Any] = []
    waited: list[float] = []

    def next_batch(version: int, timeout: float) -> Any:
        waited.append(timeout)
        return ready.pop() if ready else None

    config = JobConfig()
    config.comm.train_timeout_seconds = 1
    controller = make(tmp_path, SimpleNamespace(next_batch=next_batch), config)
    engines = SimpleNamespace(wanted=lambda version: True, begin_round=lambda version: Round(f"e/{version}", 1))
    controller.actors = controller.sync = None
    controller.colocated = cast("Any", engines)
    controller._newest = 5
    command = controller.decide(5)
    assert (command.kind, command.generation) == (Kind.GENERATE, Round("e/5", 1))
    ready.append("batch")
    assert controller.decide(5).kind is Kind.BATCH
    engines.wanted = lambda version: False
    assert controller.decide(5).kind is Kind.WAIT
    assert waited[:2] == [0, 0]
    assert waited[2] > 0


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("sleep_level", [0, 1])
def test_actors_sleep_before_a_batch_and_wake_around_its_version(
    tmp_path: Path, sleep_level: int, skipped: bool
) -> None:
    config = JobConfig()
    config.grpo.async_weight_update, config.inference.sleep_level = False, sleep_level
    parts = Everything()
    controller = make(tmp_path, parts, config)
    parts.batch = Batch(0, [])
    command = controller.decide(0)
    if sleep_level:
        # The other ranks hear from rank 0 before the actors have their time, and get the batch whatever happens then.
        assert command.kind is Kind.WAIT and parts.calls == ["next_batch"]
        controller.signals.stop_requested = True  # type: ignore[misc]
        command = controller.decide(0)
    assert command.kind is Kind.BATCH and command.batch is parts.batch
    assert parts.calls == ["next_batch", "sleep"][: 1 + sleep_level]

    job = TrainingJob(config)
    job.controller, job.version, job._probe = controller, 1, []
    job.weights = job._recorder = cast("Any", parts)
    job._commanded_at = 0.0
    parts.calls.clear()
    job.publish(cast("Any", SimpleNamespace(votes_against=int(skipped), asked_to_leave=0, last_step_applied=True)))
    weights, cache = (["wake weights"], ["wake kv_cache"]) if sleep_level else ([], [])
    applied = [] if skipped else ["applied 1"]
    decided = [f"append_decision 1 {not skipped}", *applied, *cache, "set_version 1"]
    assert parts.calls == [*weights, "commit 1", *decided]
    times = controller.take_sleep_times()
    assert times.keys() == ({"time/sleep_s", "time/wake_s"} if sleep_level else set())
    assert set(controller.take_sleep_times().values()) <= {0.0}
