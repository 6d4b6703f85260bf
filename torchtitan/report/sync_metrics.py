"""Figures of the weight synchronisation: weight_sync/versions.jsonl, sums per step, and what the report shows.

All of them come from one reading of the registry's journal (report/deliveries.py) and the trainer's own rows.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.report.deliveries import BYTES, SECONDS, Delivery, DeliveryBook, Entry, Incident, Outcome, Publication
from torchtitan.utils.json_lines import JsonLines, JsonTail, read_json_lines
from torchtitan.utils.timeline_files import rank_file

Row = dict[str, Any]
Snapshot = tuple[int, float, float]

FOLDER = "weight_sync"
JOURNAL_FILE = "registry.jsonl"
VERSIONS_FILE = "versions.jsonl"
# Figures of one version that only the trainer knows: rank 0's snapshot, from its order to its fence, and the time that
# the trainer thread spent on the synchronisation in the step that made the version.
TRAINER_FIGURES = ("snapshot_s", "sync_stall_s")
_STALLS = ("time/snapshot_s", "time/sync_stall_s")
MEANS = ("queue_wait_s", *SECONDS, "gigabytes_per_s")
_COUNTS = ("pulls", "applied", "superseded", "aborted", "refused", "poisoned", "evicted")
# A delivery ends long before so many newer versions are trained.
_REMEMBERED_VERSIONS = 1024


class Sums:
    """Counts, bytes and means over deliveries, under their names in metrics.jsonl (without weight_sync/)."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter(dict.fromkeys((*_COUNTS, *BYTES), 0))
        self._values: dict[str, list[float]] = {}
        self._evicted_in: Counter[str] = Counter()

    def add(self, entry: Entry) -> None:
        """Count a delivery, with times and rates if it was applied, or an eviction by its phase."""
        if isinstance(entry, Incident) and entry.kind == "evicted":
            self._evicted_in[f"evicted_in/{entry.phase}"] += 1
        if not isinstance(entry, Delivery):
            return
        row = entry.row()
        self._totals["pulls"] += row["attempts"]
        if row["outcome"] in _COUNTS:
            self._totals[row["outcome"]] += 1
        for name in BYTES:
            self._totals[name] += row[name] or 0
        for name in MEANS if entry.outcome is Outcome.APPLIED else ():
            if row[name] is not None:
                self._values.setdefault(name, []).append(row[name])

    def figures(self) -> dict[str, float]:
        """Of everything so far; no mean of nothing."""
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        longest = {"pause_s/max": max(self._values["pause_s"])} if "pause_s" in self._values else {}
        return {**self._totals, **means, **longest, **dict(sorted(self._evicted_in.items()))}


class SyncMetrics:
    """Follows a run's journal: writes a row per version and actor when it is final, and sums up each step.

    What an earlier launch left in the run folder is read first, and its rows are written anew. Without a weight_sync
    folder (a replay) there is nothing to follow.
    """

    def __init__(self, run_dir: Path, earlier: Iterable[Row] = ()):
        """earlier: the rows of metrics.jsonl so far."""
        folder = run_dir / FOLDER
        self._book = DeliveryBook()
        self._tail = JsonTail(folder / JOURNAL_FILE)
        self._trainer: dict[int, Row] = {}
        self._skipped = 0
        self._sums = Sums()
        self._file: JsonLines | None = None
        if not folder.is_dir():
            return
        path = folder / VERSIONS_FILE
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(b"")
        with JsonLines(temporary) as self._file:
            for row in earlier:
                self._note_step(row)
            for row in read_json_lines(rank_file(run_dir, 0)):
                self._note_snapshots(row["snapshots"])
            self._note(self._book.feed(self._tail.read()))
        os.replace(temporary, path)
        self._file = JsonLines(path)
        self._sums, self._skipped = Sums(), 0

    def step(self, row: Mapping[str, Any], snapshots: Sequence[Snapshot] = ()) -> dict[str, float]:
        """Keys for metrics.jsonl about what happened since the last call.

        row: the step's own so far; snapshots: (version, begin, end) of those whose fence was reached.
        """
        if self._file is None:
            return {}
        self._note_step(row)
        self._note_snapshots(snapshots)
        self._note(self._book.feed(self._tail.read()))
        sums, self._sums = self._sums, Sums()
        figures = sums.figures()
        if snapshots:
            figures["snapshot_s"] = sum(end - begin for _, begin, end in snapshots) / len(snapshots)
        return {f"weight_sync/{name}": value for name, value in figures.items()}

    def close(self) -> None:
        """Write what is still open as it stands. May be called twice."""
        if self._file is None:
            return
        self._note(self._book.feed(self._tail.read()))
        self._note(self._book.close())
        self._file.close()
        self._file = None

    def _note(self, entries: Iterable[Entry]) -> None:
        for one in entries:
            self._sums.add(one)
            if isinstance(one, Delivery):
                self._write(one.row() | self._trainer.get(one.version, dict.fromkeys(TRAINER_FIGURES)))
            elif isinstance(one, Publication) and one.dropped:
                self._write_undelivered(one.version, "dropped", one.dropped)

    def _note_step(self, row: Mapping[str, Any]) -> None:
        version = row.get("policy_version")
        if version is None or "eval/version" in row:
            return
        skipped = row.get("weight_sync/versions_skipped") or 0
        if skipped > self._skipped:
            self._write_undelivered(version, "skipped", "a rank had no free slot, or the step was not finite")
        self._skipped = skipped
        self._about(version)["sync_stall_s"] = sum(row.get(name) or 0.0 for name in _STALLS)

    def _note_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        for version, begin, end in snapshots:
            self._about(version)["snapshot_s"] = end - begin

    def _about(self, version: int) -> Row:
        if version not in self._trainer and len(self._trainer) >= _REMEMBERED_VERSIONS:
            del self._trainer[next(iter(self._trainer))]
        return self._trainer.setdefault(version, dict.fromkeys(TRAINER_FIGURES))

    def _write_undelivered(self, version: int, outcome: str, reason: str) -> None:
        row = {"epoch": self._book.epoch or None, "version": version, "actor": None, "outcome": outcome}
        self._write(row | {"reason": reason})

    def _write(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(row)


def sums_by_actor(run_dir: Path) -> dict[str, dict[str, float]]:
    """Figures of the whole run, per actor (see Sums)."""
    sums: defaultdict[str, Sums] = defaultdict(Sums)
    for entry in read_journal(run_dir):
        if not isinstance(entry, Publication) and entry.actor:
            sums[entry.actor].add(entry)
    return {actor: sums[actor].figures() for actor in sorted(sums)}


def read_journal(run_dir: Path, last_bytes: int = 0) -> Iterator[Entry]:
    """Everything that a run's journal tells, or its last bytes; nothing where there is none."""
    book = DeliveryBook()
    yield from book.feed(JsonTail(run_dir / FOLDER / JOURNAL_FILE, last_bytes).read())
    yield from book.close()
