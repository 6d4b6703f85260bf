"""Figures of the weight synchronisation: weight_sync/versions.jsonl, sums per step, and what the report shows.

All of them come from one reading of the coordinator's journal (report/deliveries.py) and the trainer's own rows.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from torchtitan.report.deliveries import (
    BYTES,
    SECONDS,
    Delivery,
    DeliveryBook,
    Incident,
    JournalTail,
    Listener,
    Outcome,
    Publication,
)
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.utils.timeline_files import rank_file

Row = dict[str, Any]
Snapshot = tuple[int, float, float]

FOLDER = "weight_sync"
JOURNAL_FILE = "coordinator.jsonl"
VERSIONS_FILE = "versions.jsonl"
# Figures of one version that only the trainer knows: rank 0's snapshot, from its order to its fence, and the time that
# the trainer thread spent on the synchronisation in the step that made the version.
TRAINER_FIGURES = ("snapshot_s", "sync_stall_s")
_STALLS = ("time/snapshot_s", "time/sync_stall_s")
MEANS = ("queue_wait_s", *SECONDS, "gigabytes_per_s")
_COUNTED = (Outcome.APPLIED, Outcome.SUPERSEDED, Outcome.ABORTED, Outcome.REFUSED, Outcome.POISONED, Outcome.EVICTED)
# A delivery ends long before so many newer versions are trained.
_REMEMBERED_VERSIONS = 1024


class Sums:
    """Counts, bytes and means over deliveries, under their names in metrics.jsonl (without weight_sync/)."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._values: Counter[str] = Counter()
        self._longest_pause: float | None = None
        self._evicted_in: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        """Count a finished delivery's row; times and rates of those that were applied."""
        self._counts["offered"] += row["attempts"]
        self._counts[row["outcome"]] += 1
        for name in BYTES:
            self._sums[name] += row[name] or 0
        if row["outcome"] != Outcome.APPLIED.value:
            return
        for name in MEANS:
            if row[name] is not None:
                self._sums[name] += row[name]
                self._values[name] += 1
        if row["pause_s"] is not None:
            self._longest_pause = max(row["pause_s"], self._longest_pause or 0.0)

    def happened(self, incident: Incident) -> None:
        """Count an eviction by its phase."""
        if incident.kind == "evicted":
            self._evicted_in[incident.phase] += 1

    def figures(self) -> dict[str, float]:
        """Of everything so far; no mean of nothing."""
        figures: dict[str, float] = {name: self._counts[name] for name in ("offered", *(one.value for one in _COUNTED))}
        figures |= {name: self._sums[name] for name in BYTES}
        figures |= {name: self._sums[name] / self._values[name] for name in MEANS if self._values[name]}
        if self._longest_pause is not None:
            figures["pause_s/max"] = self._longest_pause
        return figures | {f"evicted_in/{phase}": count for phase, count in sorted(self._evicted_in.items())}


class SyncMetrics(Listener):
    """Follows a run's journal: writes a row per version and actor when it is final, and sums up each step.

    What an earlier launch left in the run folder is read first, and its rows are written anew. Without a weight_sync
    folder (a replay) there is nothing to follow.
    """

    def __init__(self, run_dir: Path, earlier: Iterable[Row] = ()):
        """earlier: the rows of metrics.jsonl so far."""
        folder = run_dir / FOLDER
        self._book = DeliveryBook(self)
        self._tail = JournalTail(folder / JOURNAL_FILE)
        self._trainer: dict[int, Row] = {}
        self._skipped = 0
        self._sums = Sums()
        self._file: TextIO | None = None
        if not folder.is_dir():
            return
        path = folder / VERSIONS_FILE
        temporary = path.with_name(path.name + ".tmp")
        self._file = temporary.open("w", encoding="utf-8")
        for row in earlier:
            self._note_step(row)
        for row in read_json_lines(rank_file(run_dir, 0)):
            self._note_snapshots(row["snapshots"])
        self._book.feed(self._tail.read())
        os.replace(temporary, path)
        self._sums, self._skipped = Sums(), 0

    def step(self, row: Mapping[str, Any], snapshots: Sequence[Snapshot] = ()) -> dict[str, float]:
        """Keys for metrics.jsonl about what happened since the last call.

        row: the step's own so far; snapshots: (version, begin, end) of those whose fence was reached.
        """
        if self._file is None:
            return {}
        self._note_step(row)
        self._note_snapshots(snapshots)
        self._book.feed(self._tail.read())
        self._file.flush()
        sums, self._sums = self._sums, Sums()
        figures = sums.figures()
        if snapshots:
            figures["snapshot_s"] = sum(end - begin for _, begin, end in snapshots) / len(snapshots)
        return {f"weight_sync/{name}": value for name, value in figures.items()}

    def close(self) -> None:
        """Write what is still open as it stands. May be called twice."""
        if self._file is None:
            return
        self._book.feed(self._tail.read())
        self._book.close()
        self._file.close()
        self._tail.close()
        self._file = None

    def finished(self, delivery: Delivery) -> None:
        row = delivery.row()
        self._sums.add(row)
        self._write(row | self._trainer.get(delivery.version, dict.fromkeys(TRAINER_FIGURES)))

    def published(self, publication: Publication) -> None:
        if publication.dropped:
            self._write_nobody(publication.version, "dropped", publication.dropped)

    def happened(self, incident: Incident) -> None:
        self._sums.happened(incident)

    def _note_step(self, row: Mapping[str, Any]) -> None:
        version = row.get("policy_version")
        if version is None or "eval/version" in row:
            return
        skipped = row.get("weight_sync/versions_skipped") or 0
        if skipped > self._skipped:
            self._write_nobody(version, "skipped", "a rank had no free slot, or the step was not finite")
        self._skipped = skipped
        self._about(version)["sync_stall_s"] = sum(row.get(name) or 0.0 for name in _STALLS)

    def _note_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        for version, begin, end in snapshots:
            self._about(version)["snapshot_s"] = end - begin

    def _about(self, version: int) -> Row:
        if version not in self._trainer and len(self._trainer) >= _REMEMBERED_VERSIONS:
            del self._trainer[next(iter(self._trainer))]
        return self._trainer.setdefault(version, dict.fromkeys(TRAINER_FIGURES))

    def _write_nobody(self, version: int, outcome: str, reason: str) -> None:
        row = {"epoch": self._book.epoch or None, "version": version, "actor": None, "outcome": outcome}
        self._write(row | {"reason": reason})

    def _write(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")


class _ByActor(Listener):
    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}

    def finished(self, delivery: Delivery) -> None:
        self.sums.setdefault(delivery.actor, Sums()).add(delivery.row())

    def happened(self, incident: Incident) -> None:
        if incident.actor:
            self.sums.setdefault(incident.actor, Sums()).happened(incident)


def sums_by_actor(run_dir: Path) -> dict[str, dict[str, float]]:
    """Figures of the whole run, per actor (see Sums)."""
    by_actor = _ByActor()
    read_journal(run_dir, by_actor)
    return {actor: sums.figures() for actor, sums in sorted(by_actor.sums.items())}


def read_journal(run_dir: Path, listener: Listener, last_bytes: int = 0) -> None:
    """Tell a listener everything that a run's journal says, or its last bytes; nothing where there is none."""
    book, tail = DeliveryBook(listener), JournalTail(run_dir / FOLDER / JOURNAL_FILE, last_bytes)
    try:
        book.feed(tail.read())
        book.close()
    finally:
        tail.close()
