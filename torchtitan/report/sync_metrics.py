"""Metrics of the weight synchronisation: weight_sync/versions.jsonl, sums per step, and data for the report.

All of them are computed in one pass over the registry's journal and the trainer's own rows.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtitan.report.deliveries import REMEMBERED_VERSIONS, Delivery, Entry, Incident, JournalReader, Publication
from torchtitan.utils.json_lines import BoundedLines, JsonTail, rank_file, read_json_lines
from torchtitan.weight_sync.memory.transfer import ADDED_UP

Row = dict[str, Any]
Snapshot = tuple[int, float, float]
FOLDER = "weight_sync"
JOURNAL_FILE = "registry.jsonl"
VERSIONS_FILE = "versions.jsonl"
# A full file loses its older half; that is some 100,000 rows.
VERSIONS_BYTES = 1 << 26
# Metrics of one version that only the trainer knows: the duration of rank 0's snapshot, from queueing to fence, and
# the time that the trainer thread spent on weight synchronisation in the step that produced the version.
TRAINER_FIGURES = ("snapshot_s", "sync_stall_s")
_STALLS = ("time/snapshot_s", "time/sync_stall_s")
# Metrics of an applied version; null if the transport does not measure them.
SECONDS = ("transfer_s", "apply_s", "drain_s", "pause_s")
FIGURES = (*SECONDS, "gigabytes_per_s", *ADDED_UP, "source")
MEANS = ("queue_wait_s", *SECONDS, "gigabytes_per_s")
OUTCOMES = ("applied", "superseded", "aborted", "refused", "poisoned", "evicted")


class Sums:
    """Counts, bytes and means over deliveries, under their keys in metrics.jsonl (without weight_sync/)."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter(dict.fromkeys(("pulls", *OUTCOMES, *ADDED_UP), 0))
        self._values: dict[str, list[float]] = {}
        self._evicted_in: Counter[str] = Counter()

    def add(self, entry: Entry) -> None:
        """Count a delivery (with times and rates if it was applied) or an eviction by the state before."""
        if isinstance(entry, Incident) and entry.kind == "evicted":
            self._evicted_in[f"evicted_in/{entry.state}"] += 1
        if not isinstance(entry, Delivery):
            return
        if entry.begun_at is not None:
            self._totals["pulls"] += 1
        if entry.outcome in OUTCOMES:
            self._totals[entry.outcome] += 1
        for name in ADDED_UP:
            self._totals[name] += entry.figures.get(name, 0)
        if entry.outcome != "applied":
            return
        measured = {**entry.figures, "queue_wait_s": entry.queue_wait_s}
        for name in MEANS:
            if measured.get(name) is not None:
                self._values.setdefault(name, []).append(measured[name])

    def figures(self) -> dict[str, float]:
        """Return the metrics of everything added so far; a mean without values is left out."""
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        longest = {"pause_s/max": max(self._values["pause_s"])} if "pause_s" in self._values else {}
        return {**self._totals, **means, **longest, **dict(sorted(self._evicted_in.items()))}


NOTHING = {f"weight_sync/{name}": value for name, value in Sums().figures().items()}


class SyncMetrics:
    """Follows a run's journal: writes each delivery into versions.jsonl with the trainer's figures, and sums up each
    step.

    The records of earlier launches are read first, and their rows are rewritten. Without a weight_sync folder (in a
    replay), this class does nothing.
    """

    def __init__(self, run_dir: Path, earlier: Iterable[Row] = ()):
        """earlier: the rows of metrics.jsonl so far."""
        folder = run_dir / FOLDER
        self._journal = JournalReader()
        self._tail = JsonTail(folder / JOURNAL_FILE)
        self._trainer: dict[int, Row] = {}
        self._skipped = 0
        self._undecided: dict[int, None] = {}
        """Versions that the trainer has made, and of which the journal does not say yet what became"""
        self._sums = Sums()
        self._thread = ThreadPoolExecutor(1, "sync metrics")
        self._behind: Future[dict[str, float]] | None = None
        """The metrics that the thread computes"""
        self._asked: list[tuple[Mapping[str, Any], Sequence[Snapshot]]] = []
        """Steps that it has not heard of"""
        self._file: BoundedLines | None = None
        if not folder.is_dir():
            return
        path = folder / VERSIONS_FILE
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(b"")
        with BoundedLines(temporary, VERSIONS_BYTES) as self._file:
            for row in earlier:
                self._note_step(row)
            for row in read_json_lines(rank_file(run_dir, 0)):
                self._note_snapshots(row.get("snapshots", ()))
            self._read_journal()
        os.replace(temporary, path)
        self._file = BoundedLines(path, VERSIONS_BYTES)
        self._sums, self._skipped = Sums(), 0

    def step(self, row: Mapping[str, Any], snapshots: Sequence[Snapshot] = ()) -> dict[str, float]:
        """Return the metrics of everything that happened since the last call, for metrics.jsonl.

        row: the step's metrics so far; snapshots: (version, begin, end) of the snapshots whose fence was reached.
        """
        return {} if self._file is None else self._steps([(row, snapshots)])

    def step_behind(self, row: Mapping[str, Any], snapshots: Sequence[Snapshot] = ()) -> dict[str, float]:
        """As step(), which a thread does while the next step is trained: returns what it has found since the last call,
        which is about the time up to the step before this one."""
        if self._file is None:
            return {}
        self._asked.append((row, snapshots))
        found = NOTHING
        if self._behind is not None:
            if not self._behind.done():
                return found
            found = self._behind.result()
        asked, self._asked = self._asked, []
        self._behind = self._thread.submit(self._steps, asked)
        return found

    def _steps(self, asked: list[tuple[Mapping[str, Any], Sequence[Snapshot]]]) -> dict[str, float]:
        for row, _ in asked:
            self._note_step(row)
        snapshots = [snapshot for _, of_step in asked for snapshot in of_step]
        self._note_snapshots(snapshots)
        self._read_journal()
        figures, self._sums = self._sums.figures(), Sums()
        if snapshots:
            figures["snapshot_s"] = sum(end - begin for _, begin, end in snapshots) / len(snapshots)
        return {f"weight_sync/{name}": value for name, value in figures.items()}

    def close(self) -> None:
        """Read the journal to its end. May be called twice."""
        self._thread.shutdown()
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()
        if self._asked and self._file is not None:
            self._steps(self._asked)
            self._asked = []
        if self._file is None:
            return
        self._read_journal()
        self._file.close()
        self._file = None

    def _read_journal(self) -> None:
        self._note(self._journal.feed(self._tail.read()))
        for version in [version for version in self._undecided if version < self._journal.newest_version]:
            del self._undecided[version]
            # Of what is older, the journal may have told in a part that is lost.
            if version not in self._journal.settled and version >= (self._journal.known_from or 0):
                self._write_undelivered(version, "overtaken", "a newer version was published before it could be")

    def _note(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._sums.add(entry)
            if isinstance(entry, Publication):
                self._undecided.pop(entry.version, None)
            if isinstance(entry, Delivery):
                trainer = self._trainer.get(entry.version, dict.fromkeys(TRAINER_FIGURES))
                # By themselves, so that nothing an actor says takes the place of what is known here.
                figures = dict.fromkeys(FIGURES) | entry.figures
                self._write(vars(entry) | {"queue_wait_s": entry.queue_wait_s, "figures": figures} | trainer)
            elif isinstance(entry, Publication) and entry.dropped:
                self._write_undelivered(entry.version, "dropped", entry.dropped)

    def _note_step(self, row: Mapping[str, Any]) -> None:
        version = row.get("policy_version")
        if version is None or "eval/version" in row:
            return
        skipped = row.get("weight_sync/versions_skipped") or 0
        if skipped > self._skipped:
            self._write_undelivered(version, "skipped", "a rank had no free slot, or the step was not finite")
        else:
            self._undecided[version] = None
        self._skipped = skipped
        self._about(version)["sync_stall_s"] = sum(row.get(name) or 0.0 for name in _STALLS)

    def _note_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        for version, begin, end in snapshots:
            self._about(version)["snapshot_s"] = end - begin

    def _about(self, version: int) -> Row:
        if version not in self._trainer and len(self._trainer) >= REMEMBERED_VERSIONS:
            del self._trainer[next(iter(self._trainer))]
        return self._trainer.setdefault(version, dict.fromkeys(TRAINER_FIGURES))

    def _write_undelivered(self, version: int, outcome: str, reason: str) -> None:
        row = {"epoch": self._journal.epoch or None, "version": version, "actor": None, "outcome": outcome}
        self._write(row | {"reason": reason})

    def _write(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(row)


def sums_by_actor(entries: Iterable[Entry]) -> dict[str, dict[str, float]]:
    """Return the metrics of a journal's entries per actor (see Sums)."""
    sums: defaultdict[str, Sums] = defaultdict(Sums)
    for entry in entries:
        if not isinstance(entry, Publication) and entry.actor:
            sums[entry.actor].add(entry)
    return {actor: sums[actor].figures() for actor in sorted(sums)}


def read_journal(run_dir: Path, last_bytes: int = 0) -> Iterator[Entry]:
    """Yield the entries of a run's journal, or of its last `last_bytes` if not 0; nothing if there is no journal."""
    yield from JournalReader().feed(JsonTail(run_dir / FOLDER / JOURNAL_FILE, last_bytes).read())
