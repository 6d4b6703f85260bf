"""Files of JSON lines: one object a line, appended whole, and never to the remains of a line that a kill cut off. The
events of a run are such a file; so are the notes of its parts of what they did when, for report/timeline.py."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from torchtitan.errors import UserError

logger = logging.getLogger(__name__)
events_logger = logging.getLogger("torchtitan.events")

BLOCK_BYTES = 65536
CHUNK_BYTES = 1 << 20
TIMELINE = "timeline"
# Of a file there; the newest are kept.
MAX_BYTES = 4 * 2**20
# A step that waits for data for hours would note a span per order.
MAX_SPANS = 64
# Steps that lie closer together than this are one interval, which is written when it has lasted so long.
GAP_SECONDS = 0.02
MAX_SECONDS = 1.0
# An engine that falls idle writes what it has if that is worth a line.
WORTH_SECONDS = 0.1


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
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
        except OSError as error:
            self.close()
            error.filename = str(self.path)  # which write() does not know
            raise


def cut_torn_line(path: Path) -> None:
    """Shorten a file to its last newline."""
    size = end = path.stat().st_size
    complete_bytes = 0
    with path.open("rb") as file:
        while end > 0 and not complete_bytes:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            position = file.read(end - start).rfind(b"\n")
            complete_bytes = start + position + 1 if position >= 0 else 0
            end = start
    if complete_bytes < size:
        os.truncate(path, complete_bytes)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one rename: a reader finds what it held before, or all of this."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none where there is no file. A last line cut off by a kill is left out."""
    if not Path(path).is_file():
        return []
    # Not splitlines(): text in JSON may hold U+0085 or U+2028 as they are, and those end no line here.
    *lines, cut_off = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    last = _object(cut_off)
    return [*rows_in(path, lines), *([] if last is None else [last])]


def older_file(path: Path) -> Path:
    """Return where a file goes when it is full and its writer begins another one; what was there before is lost."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


class JsonTail:
    """Reads a file of JSON lines as it grows, whole lines only and never much at a time; before it, what there is of
    its older_file().

    last_bytes: of what is there already, only so much (0: all). needs: a key without which a row is damaged; `read`
    then raises UserError for a damaged line, which is otherwise left out.
    """

    def __init__(self, path: Path, last_bytes: int = 0, needs: str = ""):
        self._path, self._place, self._needs = path, 0, needs
        self._number: int | None = None
        """The inode of the file that is being read, by which it is known after it was renamed"""
        if last_bytes:
            with suppress(FileNotFoundError):
                found = path.stat()
                self._place = line_start(path, found.st_size - last_bytes)
                self._number = found.st_ino

    def read(self) -> Iterator[dict[str, Any]]:
        """What has been written since the last call; nothing where there is no file yet."""
        files: dict[int, Path] = {}
        for path in (older_file(self._path), self._path):
            number = _inode(path)
            if number is not None:
                files[number] = path
        is_unread = self._number not in files  # all of them are new
        for number, path in files.items():
            if is_unread and number != self._number:
                self._number, self._place = number, 0
            is_unread = is_unread or number == self._number
            while is_unread:
                try:
                    lines, place = read_lines(path, self._place)
                except FileNotFoundError:
                    return  # its writer is about to begin another one
                if not lines:
                    break
                if _inode(path) != number:
                    return  # it has just been renamed: the next call finds it
                self._place = place
                yield from rows_in(self._path, lines, self._needs)


def _inode(path: Path) -> int | None:
    """Return the number of the file at this path; None if there is none, also while its writer begins another one."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def read_lines(path: Path, place: int, most_bytes: int = CHUNK_BYTES) -> tuple[list[str], int]:
    """The whole lines from a place on, about `most_bytes` of them or one long one, and the place behind them."""
    with path.open("rb") as file:
        file.seek(place)
        data = file.read(most_bytes)
        while b"\n" not in data and (more := file.read(most_bytes)):
            data += more
    complete_lines = data[: data.rfind(b"\n") + 1]
    return complete_lines.decode(errors="replace").split("\n")[:-1], place + len(complete_lines)


def line_start(path: Path, place: int) -> int:
    """Where the first line begins that begins at `place` or behind it."""
    if place <= 0:
        return 0
    with path.open("rb") as file:
        file.seek(place - 1)
        file.readline()
        return file.tell()


def rows_in(path: str | Path, lines: Iterable[str], needs: str = "") -> Iterator[dict[str, Any]]:
    for line in lines:
        row = _object(line)
        if needs and (row is None or needs not in row):
            raise UserError(
                f"{path} is damaged: a line is no JSON object with {needs!r}. Delete that line to go on without it: "
                f"{line:.60}…"
            )
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

    Says each event on the console and appends a JSON object to a file. Safe to call from any thread. Every object has
    `time` (seconds since 1970) and `kind`; the rest is the event's own fields (JSON-able). The first event opens the
    file, which stays open: a process that may open no more files still says so there.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._file = JsonLines(self.path, durable=True, default=str)

    def write(self, kind: str, *, level: int = logging.INFO, **fields: Any) -> None:
        """Log one event. level is that of the console line only. Raises OSError if the file cannot be written, after
        the line on the console."""
        description = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        events_logger.log(level, "%s %s", kind, description)
        with self._lock:
            self._file.write({"time": round(time.time(), 3), "kind": kind, **fields})

    def close(self) -> None:
        """May be called twice; a later event opens the file again."""
        with self._lock:
            self._file.close()


Span = tuple[str, float, float]


def rank_file(run_dir: Path, rank: int) -> Path:
    """Steps of one trainer rank (StepRecorder)."""
    return run_dir / TIMELINE / f"rank-{rank}.jsonl"


def actor_file(run_dir: Path, actor: str) -> Path:
    """What one engine did (ActivityLog)."""
    return run_dir / TIMELINE / f"{actor}.jsonl"


class BoundedLines(JsonLines):
    """Holds at most `most_bytes`; a full file loses its older half in one rename."""

    def __init__(self, path: str | Path, most_bytes: int, **options: Any):
        super().__init__(path, **options)
        self.most_bytes = most_bytes

    def _append(self, line: bytes) -> None:
        if self._file is not None and self._file.tell() + len(line) > self.most_bytes:
            self.close()
            write_whole(self.path, self.path.read_bytes()[-(self.most_bytes // 2) :].partition(b"\n")[2])
        super()._append(line)


class TimelineFile(BoundedLines):
    """A file that cannot be written costs its notes, nothing else: the error is logged once and later rows are
    dropped."""

    def __init__(self, path: str | Path, most_bytes: int = MAX_BYTES):
        super().__init__(path, most_bytes, separators=(",", ":"))
        self._failed = False

    def _append(self, line: bytes) -> None:
        if self._failed:
            return
        try:
            super()._append(line)
        except OSError as error:
            self._failed = True
            logger.warning("%s is not written any more: %s", self.path, error)


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
        elif len(self._spans) < MAX_SPANS:
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
        if not follows or end - self._begin > MAX_SECONDS:
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
