"""The registry's journal, as tests read it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S


def journal_of(run_dir: Path, event: str, at_least: int = 0) -> list[dict[str, Any]]:
    """The lines about that event. A thread of its own writes them: wait for `at_least` so many, they may come late."""
    path = run_dir / "weight_sync" / "registry.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        found = [record for record in records if record["event"] == event]
        if len(found) >= at_least:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{len(found)} line(s) about {event!r} in {path}, at least {at_least} are expected")
        time.sleep(0.02)
