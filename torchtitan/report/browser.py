"""The completions of a run, selected, sorted and searched without holding them in memory.

completions.jsonl is read once, as it grows. What is kept of a row is its place in the file and what readers select by,
some 200 bytes; texts are read from the file when they are shown or searched.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SNIPPET = 160
MAX_ROWS = 200
SORTS = ("newest", "oldest", "reward", "reward_down", "tokens", "tokens_down", "advantage", "advantage_down")


class Entry(NamedTuple):
    """Where a row lies in the file, and what it is selected by."""

    begin: int
    end: int
    step: int
    reward: float | None
    advantage: float | None
    tokens: int
    versions: tuple[int, ...]
    source: str


class Selection(NamedTuple):
    """Which completions are shown. Bounds are inclusive; None and an empty text select all."""

    sort: str = "newest"
    text: str = ""
    source: str = ""
    step_from: float | None = None
    step_to: float | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: float | None = None
    tokens_to: float | None = None
    version: float | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Selection:
        """Read a request's parameters; unknown ones and empty ones are ignored.

        Raises:
            ValueError: a bound is no number, or there is no such order.
        """
        given: dict[str, Any] = {name: query[name] for name in cls._fields if query.get(name)}
        for name in cls._fields[3:]:
            if name in given:
                given[name] = float(given[name])
        if given.get("sort", "newest") not in SORTS:
            raise ValueError(f"sort is one of {', '.join(SORTS)}")
        return cls(**given)

    def takes(self, entry: Entry) -> bool:
        """Return whether a row is selected, by all but its text."""
        return (
            _within(entry.step, self.step_from, self.step_to)
            and _within(entry.reward, self.reward_from, self.reward_to)
            and _within(entry.tokens, self.tokens_from, self.tokens_to)
            and (self.version is None or self.version in entry.versions)
            and (not self.source or entry.source == self.source)
        )

    def ordered(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries, which are in the file's order, in that of the selection; rows without a value last."""
        if self.sort == "oldest":
            return entries
        if self.sort == "newest":  # step by step: only the first rows of a step have their tokens one by one
            return sorted(entries, key=lambda entry: (-entry.step, entry.begin))
        field, _, down = self.sort.partition("_")
        sign = -1 if down else 1

        def key(entry: Entry) -> tuple[bool, float]:
            value = getattr(entry, field)
            return value is None, 0.0 if value is None else sign * value

        return sorted(entries, key=key)


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or low <= value) and (high is None or value <= high)


class CompletionIndex:
    """An index of one completions.jsonl, which may grow, and be replaced when a run is resumed. For one thread at a
    time."""

    def __init__(self, path: Path):
        self._path, self._file, self._place = path, 0, 0
        self.entries: list[Entry] = []

    def update(self, seconds: float = float("inf")) -> float:
        """Read on for that long, and return which share of the file is known then. Damaged lines are left out."""
        if not self._path.is_file():
            self._file, self._place, self.entries = 0, 0, []
            return 1.0
        end = time.monotonic() + seconds
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())  # not the path's: a resume may just be replacing the file
            if status.st_ino != self._file or status.st_size < self._place:
                self._file, self._place, self.entries = status.st_ino, 0, []
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return 1.0  # it is still being written
                self._add(line)
                self._place += len(line)
                if time.monotonic() > end:
                    return self._place / status.st_size
        return 1.0

    def _add(self, line: bytes) -> None:
        row = _parsed(line)
        if row is None or not isinstance(row.get("step"), int):
            return
        versions = tuple({int(span["version"]): None for span in row.get("versions") or ()})
        self.entries.append(
            Entry(
                self._place, self._place + len(line), row["step"], row.get("reward"), row.get("advantage"),
                row.get("tokens") or 0, versions, str(row.get("source") or ""),
            )
        )  # fmt: skip

    @property
    def sources(self) -> list[str]:
        """The names of all sources so far."""
        return sorted({entry.source for entry in self.entries} - {""})

    def page(self, selection: Selection, offset: int, limit: int) -> dict[str, Any]:
        """Return `limit` (at most MAX_ROWS) selected rows from `offset` on, in short form, and whether there are more.

        `selected` counts all selected rows; where a text is searched it is None, as the search ends with the page.
        """
        chosen = selection.ordered([entry for entry in self.entries if selection.takes(entry)])
        limit = max(1, min(limit, MAX_ROWS))
        rows: list[dict[str, Any]] = []
        searched = bool(selection.text)
        if not chosen:  # there may be no file
            return self._answer([], False, 0)
        found = self._search(chosen, selection) if searched else self._read(chosen[offset : offset + limit + 1])
        for number, (entry, row) in enumerate(found):
            if searched and number < offset:
                continue
            if len(rows) == limit:
                return self._answer(rows, True, None if searched else len(chosen))
            rows.append(_short(entry, row, selection.text))
        return self._answer(rows, False, None if searched else len(chosen))

    def row(self, begin: str) -> dict[str, Any] | None:
        """Return the whole row that begins at this place of the file; None if there is none (any more)."""
        known = next((entry for entry in self.entries if str(entry.begin) == begin), None)
        return None if known is None else next((row for _, row in self._read([known])), None)

    def _answer(self, rows: list[dict[str, Any]], more: bool, selected: int | None) -> dict[str, Any]:
        return {"rows": rows, "more": more, "selected": selected, "all": len(self.entries), "sources": self.sources}

    def _read(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, dict[str, Any]]]:
        with self._path.open("rb") as file:
            for entry in entries:
                file.seek(entry.begin)
                row = _parsed(file.read(entry.end - entry.begin))
                if row is not None:
                    yield entry, row

    def _search(self, entries: Iterable[Entry], selection: Selection) -> Iterator[tuple[Entry, dict[str, Any]]]:
        # The text as it is in the file, escaped. A row with it is parsed, since keys and numbers match as well.
        # Bytes, whose lower() changes ASCII letters alone, so a text with others is searched as it is written.
        needle = json.dumps(selection.text, ensure_ascii=False)[1:-1].encode().lower()
        text = selection.text.lower()
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for entry in entries:
                if needle in data[entry.begin : entry.end].lower():
                    row = _parsed(data[entry.begin : entry.end])
                    if row is not None and any(text in part.lower() for part in _texts(row)):
                        yield entry, row


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    """What a search looks into: the conversation, and what rewards and data sets said about it."""
    yield from (str(row.get("prompt", "")), str(row.get("completion", "")))
    yield from (str(segment.get("text", "")) for segment in row.get("segments") or ())
    yield from map(str, (row.get("extra") or {}).values())


def _short(entry: Entry, row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return what a line of the list shows; of the completion, that is where the searched text is."""
    completion = str(row.get("completion", ""))
    place = max(0, completion.lower().find(text.lower()) - SNIPPET // 4) if text else 0
    return {
        **entry._asdict(),
        "prompt": str(row.get("prompt", ""))[-SNIPPET:],
        "completion": completion[place : place + SNIPPET],
    }
