"""What rank 0 makes of actors that the weight synchronisation has given up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torchtitan.components.director import Director
from torchtitan.components.events import EventLog
from torchtitan.config.job_config import JobConfig
from torchtitan.weight_sync.facade import ActorStatus


def status(state: str, evictions: int) -> ActorStatus:
    return ActorStatus(state, "e1", 3, "d", state == "READY", False, "no byte within 5 s", evictions)


def test_evictions_are_told_once_and_what_was_under_way_is_redone(tmp_path: Path) -> None:
    director = Director(JobConfig(), tmp_path, "e1", "token", cast("Any", None))
    redone: list[tuple[str, str]] = []
    director.events = EventLog(tmp_path / "events.jsonl")
    director.rollout = cast("Any", SimpleNamespace(redo_elsewhere=lambda actor, reason: redone.append((actor, reason))))
    for actors in (
        {"a": status("READY", 0), "b": status("READY", 0)},
        {"a": status("EVICTED", 1), "b": status("READY", 0)},
        {"a": status("EVICTED", 1), "b": status("READY", 0)},
        {"a": status("READY", 1), "b": status("JOINING", 1)},  # b had only lost its connection
        {"a": status("EVICTED", 2), "b": status("READY", 1)},
    ):
        director._note_evictions(actors)
    assert redone == [("a", "no byte within 5 s")] * 2
    told = [(event["kind"], event["actor"]) for event in director.events.read()]
    assert told == [("actor_evicted_from_sync", actor) for actor in ("a", "b", "a")]
