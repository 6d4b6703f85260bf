"""Notable events of a run (an actor was evicted, an evaluation is missing, …) as JSON lines in the run folder."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

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
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}, default=str)
        with self._lock:
            append_line(self.path, line)
        logger.log(level, "%s %s", kind, " ".join(f"{name}={value}" for name, value in fields.items()))

    def read(self) -> list[dict[str, Any]]:
        """All events so far, oldest first; a line cut off by a kill is left out."""
        return read_json_lines(self.path)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, on a line of its own also after one that a kill cut off. On the disk at return."""
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none where there is no file. A last line cut off by a kill is left out."""
    if not Path(path).is_file():
        return []
    # Not splitlines(): text in JSON may hold U+0085 or U+2028 as they are, and those end no line here.
    *lines, cut_off = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate([*lines, cut_off], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number <= len(lines):
            logger.warning("%s: line %d is no JSON object, left out", path, number)
    return rows
