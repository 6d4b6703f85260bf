"""How processes log, and what keeps text of others (peers, environments, completions) from forging lines there."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable

# The most characters of one text of a peer.
LONGEST = 500
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def print_page(text: str) -> None:
    """Print a long text. That its reader closes the pipe before the end (`| head`) is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def escaped(text: str, limit: int = LONGEST) -> str:
    """Return `text` on one line: what does not print as a backslash sequence, and at most `limit` characters of it."""
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(map(_shown, shown))
    return shown if len(text) <= limit else f"{shown}… ({len(text)} characters)"


def _shown(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]


class SafeFormatter(logging.Formatter):
    """Escapes what does not print, and indents further lines: only a record begins at a line's first column."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if text.isprintable():
            return text
        return "".join(map(self._escaped, text))

    @staticmethod
    def _escaped(char: str) -> str:
        if char == "\t":
            return char
        if char == "\n":
            return "\n  "
        return _shown(char)


class RateLimit(logging.Filter):
    """Lets `most` records of a logger pass per `seconds`, and says how many it has left out."""

    def __init__(self, most: int, seconds: float):
        super().__init__()
        self._most, self._seconds = most, seconds
        self._period_start, self._count = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record passes."""
        now = time.monotonic()
        if now - self._period_start > self._seconds:
            left_out = self._count - self._most
            self._period_start, self._count = now, 0
            if left_out > 0:
                record.msg, record.args = f"{record.getMessage()} ({left_out} lines like this were left out)", ()
        self._count += 1
        return self._count <= self._most


def log_to(
    handlers: Iterable[logging.Handler] | None = None,
    level: int = logging.INFO,
    line: str = LINE,
    times: str | None = None,
) -> None:
    """Set this process's handlers (None: stderr), which all escape what they write. times: the format of times."""
    found = [logging.StreamHandler()] if handlers is None else list(handlers)
    for handler in found:
        handler.setFormatter(SafeFormatter(line, times))
    logging.basicConfig(level=level, handlers=found, force=handlers is not None)
