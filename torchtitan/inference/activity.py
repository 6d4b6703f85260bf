"""When the engine worked: merged intervals in a bounded file, for the time line of a run (report/timeline.py).

Rows: {"what": "generate", "begin", "end", "version", "tokens"} and {"what": "drain" | "apply", "begin", "end",
"version"}, times in seconds since 1970.
"""

from __future__ import annotations

from pathlib import Path

from torchtitan.utils.timeline_files import TimelineFile

# Steps that lie closer together than this are one interval, which is written when it has lasted so long.
GAP_SECONDS = 0.02
LONGEST_SECONDS = 1.0
# An engine that falls idle writes what it has if that is worth a line.
WORTH_SECONDS = 0.1


class ActivityLog:
    """Belongs to the engine's thread. Without a path it notes nothing."""

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
