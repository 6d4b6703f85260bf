"""Notable events of a run (an actor was evicted, an evaluation is missing, …) as JSON lines in the run folder."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from torchtitan.utils.json_lines import JsonLines, read_json_lines

logger = logging.getLogger("torchtitan.events")


class EventLog:
    """Appends one JSON object per event to a file and says it on the console. Safe to call from any thread.

    Every object has `time` (seconds since 1970) and `kind`; the rest is the event's own fields (JSON-able).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = threading.Lock()

    def write(self, kind: str, *, level: int = logging.INFO, **fields: Any) -> None:
        """Log one event. level is that of the console line only."""
        with self._lock, JsonLines(self.path, durable=True, default=str) as file:
            file.write({"time": round(time.time(), 3), "kind": kind, **fields})
        logger.log(level, "%s %s", kind, " ".join(f"{name}={value}" for name, value in fields.items()))

    def read(self) -> list[dict[str, Any]]:
        """All events so far, oldest first; a line cut off by a kill is left out."""
        return read_json_lines(self.path)
