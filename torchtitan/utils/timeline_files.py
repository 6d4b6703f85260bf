"""Where the parts of a run note what they did when, for report/timeline.py: JSON lines, the newest of them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan.utils.json_lines import JsonLines

logger = logging.getLogger(__name__)

FOLDER = "timeline"
MOST_BYTES = 4 * 2**20
Span = tuple[str, float, float]
# A step that waits for data for hours would note a span per order.
MOST_SPANS = 64
# Steps that lie closer together than this are one interval, which is written when it has lasted so long.
GAP_SECONDS = 0.02
LONGEST_SECONDS = 1.0
# An engine that falls idle writes what it has if that is worth a line.
WORTH_SECONDS = 0.1


def rank_file(run_dir: Path, rank: int) -> Path:
    """Steps of one trainer rank (StepRecorder)."""
    return run_dir / FOLDER / f"rank-{rank}.jsonl"


def actor_file(run_dir: Path, actor: str) -> Path:
    """What one engine did (ActivityLog)."""
    return run_dir / FOLDER / f"{actor}.jsonl"


class TimelineFile(JsonLines):
    """Holds at most `most_bytes`; a full file loses its older half in one rename.

    A file that cannot be written costs its notes, nothing else: the error is logged once and later rows are dropped.
    """

    def __init__(self, path: str | Path, most_bytes: int = MOST_BYTES):
        super().__init__(path, separators=(",", ":"))
        self.most_bytes = most_bytes
        self._failed = False

    def _append(self, line: bytes) -> None:
        if self._failed:
            return
        try:
            if self._file is not None and self._file.tell() + len(line) > self.most_bytes:
                self._drop_older_half()
            super()._append(line)
        except OSError as error:
            self._failed = True
            logger.warning("%s is not written any more: %s", self.path, error)

    def _drop_older_half(self) -> None:
        self.close()
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_bytes(self.path.read_bytes()[-(self.most_bytes // 2) :].partition(b"\n")[2])
        os.replace(temporary, self.path)


class StepRecorder:
    """What one trainer rank did when. Costs its thread a few calls of time.time() and one small write per step.

    Rows: {"step", "begin", "end", "spans": [[name, begin, end], …], "snapshots": [[version, begin, end], …]}, times in
    seconds since 1970. A snapshot is there when its fence was reached, which may be a step later.
    """

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


class ActivityLog:
    """When an engine worked, as merged intervals. Belongs to the engine's thread; without a path it notes nothing.

    Rows: {"what": "generate", "begin", "end", "version", "tokens"} and {"what": "drain" | "apply", "begin", "end",
    "version"}, times in seconds since 1970.
    """

    def __init__(self, path: Path | None = None):
        self._file = None if path is None else TimelineFile(path)
        self._begin = self._end = 0.0
        self._version = self._tokens = 0

    def stepped(self, begin: float, end: float, version: int, tokens: int) -> None:
        """A step of the engine (time.time()) made `tokens` tokens under `version`."""
        if self._file is None or not tokens:
            return
        follows = self._tokens and begin - self._end < GAP_SECONDS and version == self._version
        if not follows or end - self._begin > LONGEST_SECONDS:
            self.flush()
        if not self._tokens:
            self._begin, self._version = begin, version
        self._end = end
        self._tokens += tokens

    def updated(self, what: str, begin: float, end: float, version: int) -> None:
        """A weight update let requests finish ("drain") or held everything up ("apply")."""
        if self._file is not None:
            self.flush()
            self._file.write({"what": what, "begin": begin, "end": end, "version": version})

    def idle(self) -> None:
        """The engine has nothing to do."""
        if self._end - self._begin > WORTH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        if self._file is not None and self._tokens:
            row = {"what": "generate", "begin": self._begin, "end": self._end}
            self._file.write({**row, "version": self._version, "tokens": self._tokens})
        self._tokens = 0
        self._begin = self._end = 0.0

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
