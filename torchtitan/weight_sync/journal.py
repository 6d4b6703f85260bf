"""The registry's journal: lines of JSON, written by a thread of its own, because a disk may hang. No torch."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# So many lines wait for a disk that hangs; those that come then are lost, and counted.
MAXIMUM_WAITING = 10_000


class Journal:
    """Appends to `path`; write() never waits. A full disk costs lines, not the synchronisation."""

    def __init__(self, path: Path, term: int, maximum_waiting: int = MAXIMUM_WAITING):
        self._term = term
        self._file = path.open("a", buffering=1)
        self._lines: queue.Queue[str | None] = queue.Queue(maximum_waiting)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Queue one line. For one thread."""
        if self._lost and not self._lines.full():
            lost, self._lost = self._lost, 0
            self._queue("lost_lines", {"count": lost})
        self._queue(event, fields)

    def close(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` seconds."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _queue(self, event: str, fields: dict[str, Any]) -> None:
        line = {"time": time.time(), "term": self._term, "event": event, **fields}
        try:
            self._lines.put_nowait(json.dumps(line) + "\n")
        except queue.Full:
            self._lost += int(fields["count"]) if event == "lost_lines" else 1
            logger.error("the disk does not take the journal's lines; one about %s is lost", event)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line)
            except OSError as error:
                logger.error("the journal lacks a line: %s: %s", error, line.rstrip())
        self._file.close()
