"""What one trainer rank did when: a line per step in a bounded file, for the time line of a run.

Rows: {"step", "begin", "end", "spans": [[name, begin, end], …], "snapshots": [[version, begin, end], …]}, times in
seconds since 1970. A snapshot is there when its fence was reached, which may be a step later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan.utils.timeline_files import TimelineFile, rank_file

Span = tuple[str, float, float]

# A step that waits for data for hours would note a span per order.
MOST_SPANS = 64


class StepRecorder:
    """Costs the trainer thread a few calls of time.time() and one small write per step."""

    def __init__(self, run_dir: Path, rank: int):
        self._file = TimelineFile(rank_file(run_dir, rank))
        self._spans: list[Span] = []
        self._begin = time.time()

    def add(self, name: str, begin: float, end: float | None = None) -> None:
        """Something that began at `begin` (time.time()) is over. The same thing again at once goes on with it."""
        end = time.time() if end is None else end
        last = self._spans[-1] if self._spans else None
        if last is not None and last[0] == name and begin - last[2] < 0.01:
            self._spans[-1] = (name, last[1], end)
        elif len(self._spans) < MOST_SPANS:
            self._spans.append((name, begin, end))

    def end_step(self, step: int, snapshots: Sequence[tuple[int, float, float]]) -> None:
        """Write the step down, and the snapshots that became complete in it; the next one begins now."""
        end = time.time()
        row = {"step": step, "begin": self._begin, "end": end, "spans": self._spans}
        self._file.write(row | {"snapshots": snapshots})
        self._begin, self._spans = end, []

    def close(self) -> None:
        self._file.close()
