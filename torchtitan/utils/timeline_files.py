"""Where the parts of a run note what they did when, for report/timeline.py: JSON lines, the newest of them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torchtitan.utils.json_lines import JsonLines

logger = logging.getLogger(__name__)

FOLDER = "timeline"
MOST_BYTES = 4 * 2**20


def rank_file(run_dir: Path, rank: int) -> Path:
    """Steps of one trainer rank (report/step_recorder.py)."""
    return run_dir / FOLDER / f"rank-{rank}.jsonl"


def actor_file(run_dir: Path, actor: str) -> Path:
    """What one embedded engine did (inference/activity.py)."""
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
