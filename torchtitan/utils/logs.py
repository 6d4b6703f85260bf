"""Text of others in logs: it cannot forge a line, move the cursor or fill a disk."""

from __future__ import annotations

import logging
import time

# The most characters of one text of a stranger.
LONGEST = 500


def escaped(text: str, limit: int = LONGEST) -> str:
    """Return `text` on one line: what does not print as a backslash sequence, and at most `limit` characters of it."""
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)
    return shown if len(text) <= limit else f"{shown}… ({len(text)} characters)"


class SafeFormatter(logging.Formatter):
    """Escapes what does not print, except for line breaks and tabs: our own messages and tracebacks have several
    lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    return char if char in "\n\t" or char.isprintable() else repr(char)[1:-1]


class RateLimit(logging.Filter):
    """Lets `most` records pass per `seconds`, and says how many it has left out. One instance per kind of message."""

    def __init__(self, most: int, seconds: float):
        super().__init__()
        self._most, self._seconds = most, seconds
        self._begun, self._count = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._begun > self._seconds:
            left_out, self._begun, self._count = self._count - self._most, now, 0
            if left_out > 0:
                record.msg = f"{record.getMessage()} ({left_out} messages like this one were left out)"
                record.args = ()
        self._count += 1
        return self._count <= self._most
