"""Files of JSON lines: one object a line, appended whole, and never to the remains of a line that a kill cut off."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)
events_logger = logging.getLogger("torchtitan.events")

BLOCK_BYTES = 65536
CHUNK_BYTES = 1 << 20


class JsonLines:
    """Appends rows to a file. The first row opens it, makes its folder, and cuts off a last line that is not whole.

    A row is with the operating system when `write` returns, so it outlives the process, and other processes can read
    it; durable: it is on the disk. `options` go to json.JSONEncoder. For one thread at a time.
    """

    def __init__(self, path: str | Path, *, durable: bool = False, **options: Any):
        self.path = Path(path)
        self._durable = durable
        self._encode = json.JSONEncoder(**options).encode
        self._file: BinaryIO | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Raises OSError where the file cannot be written; a later row may then still go in whole."""
        # Half of a character, which a reward function may have read from JSON, is a question mark.
        self._append(self._encode(row).encode(errors="replace") + b"\n")

    def close(self) -> None:
        """May be called twice; the next row opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            cut_torn_line(self.path)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
            if self._durable:
                os.fsync(self._file.fileno())
        except OSError:
            self.close()
            raise


def cut_torn_line(path: Path) -> None:
    """Shorten a file to its last newline."""
    size = end = path.stat().st_size
    whole = 0
    with path.open("rb") as file:
        while end > 0 and not whole:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            position = file.read(end - start).rfind(b"\n")
            whole = start + position + 1 if position >= 0 else 0
            end = start
    if whole < size:
        os.truncate(path, whole)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none where there is no file. A last line cut off by a kill is left out."""
    if not Path(path).is_file():
        return []
    # Not splitlines(): text in JSON may hold U+0085 or U+2028 as they are, and those end no line here.
    *lines, cut_off = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    last = _object(cut_off)
    return [*_objects(path, lines), *([] if last is None else [last])]


class JsonTail:
    """Reads a file of JSON lines as it grows, whole lines only and never much at a time.

    last_bytes: of what is there already, only so much (0: all).
    """

    def __init__(self, path: Path, last_bytes: int = 0):
        self._path, self._place = path, 0
        if last_bytes and path.is_file():
            self._place = line_start(path, path.stat().st_size - last_bytes)

    def read(self) -> Iterator[dict[str, Any]]:
        """What has been written since the last call; nothing where there is no file yet."""
        while self._path.is_file():
            lines, self._place = read_lines(self._path, self._place)
            if not lines:
                return
            yield from _objects(self._path, lines)


def read_lines(path: Path, place: int, most_bytes: int = CHUNK_BYTES) -> tuple[list[str], int]:
    """The whole lines from a place on, about `most_bytes` of them or one long one, and the place behind them."""
    with path.open("rb") as file:
        file.seek(place)
        data = file.read(most_bytes)
        while b"\n" not in data and (more := file.read(most_bytes)):
            data += more
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").split("\n")[:-1], place + len(whole)


def line_start(path: Path, place: int) -> int:
    """Where the first line begins that begins at `place` or behind it."""
    if place <= 0:
        return 0
    with path.open("rb") as file:
        file.seek(place - 1)
        file.readline()
        return file.tell()


def _objects(path: str | Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        row = _object(line)
        if row is not None:
            yield row
        else:
            logger.warning("%s: a line is no JSON object, left out: %.40s", path, line)


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


class EventLog:
    """Notable events of a run: an actor was evicted, an evaluation is missing, …

    Appends one JSON object per event to a file and says it on the console. Safe to call from any thread. Every
    object has `time` (seconds since 1970) and `kind`; the rest is the event's own fields (JSON-able).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = threading.Lock()

    def write(self, kind: str, *, level: int = logging.INFO, **fields: Any) -> None:
        """Log one event. level is that of the console line only."""
        with self._lock, JsonLines(self.path, durable=True, default=str) as file:
            file.write({"time": round(time.time(), 3), "kind": kind, **fields})
        events_logger.log(level, "%s %s", kind, " ".join(f"{name}={value}" for name, value in fields.items()))

    def read(self) -> list[dict[str, Any]]:
        """All events so far, oldest first; a line cut off by a kill is left out."""
        return read_json_lines(self.path)
