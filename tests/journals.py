"""The registry's journal, as tests read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.patience import until
from torchtitan.utils.json_lines import read_json_lines


def journal_of(run_dir: Path, event: str, at_least: int = 0) -> list[dict[str, Any]]:
    """The lines about that event. A thread of its own writes them: wait for `at_least` so many, they may come late."""
    path = run_dir / "weight_sync" / "registry.jsonl"

    def found() -> list[dict[str, Any]]:
        return [record for record in read_json_lines(path) if record["event"] == event]

    until(lambda: len(found()) >= at_least, why=lambda: f"{at_least} lines about {event!r} in {path}: {found()}")
    return found()
