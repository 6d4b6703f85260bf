"""The registry's journal, as tests read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.patience import until
from torchtitan.utils.json_lines import read_json_lines

Record = dict[str, Any]


def journal_of(run_dir: Path, event: str, at_least: int = 0) -> list[Record]:
    """The lines about that event. A thread of its own writes them: wait for `at_least` so many, they may come late."""
    return _matching(run_dir, lambda record: record["event"] == event, event, at_least)


def deliveries_of(run_dir: Path, outcome: str, at_least: int = 0) -> list[Record]:
    """The lines about deliveries that ended so, once there are `at_least` so many. Where an actor only repeated to
    another registry what it had applied before, there is no line of it here."""

    def matches(record: Record) -> bool:
        if outcome == "applied":
            return is_applied(record["event"], record)
        return bool(record["event"] == "delivery" and record["outcome"] == outcome)

    return _matching(run_dir, matches, f"delivery, {outcome}", at_least)


def is_applied(event: str, fields: Mapping[str, Any]) -> bool:
    """Whether a line tells that an actor has applied a version, and not only that it still serves it."""
    return event == "delivery" and fields["outcome"] == "applied" and bool(fields["figures"])


def _matching(run_dir: Path, matches: Callable[[Record], bool], what: str, at_least: int) -> list[Record]:
    path = run_dir / "weight_sync" / "registry.jsonl"

    def found() -> list[Record]:
        return [record for record in read_json_lines(path) if matches(record)]

    until(lambda: len(found()) >= at_least, why=lambda: f"{at_least} lines about {what!r} in {path}: {found()}")
    return found()
