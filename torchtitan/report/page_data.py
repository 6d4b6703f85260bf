"""What the page of a run shows, as one JSON object of bounded size, read from the files of the run's folder."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli

from torchtitan.report.curves import Curves, evaluation_table
from torchtitan.report.metrics import ACTORS_FILE, COMPLETIONS_FILE, METRICS_FILE
from torchtitan.report.samples import read_samples
from torchtitan.report.sync_metrics import FOLDER, OUTCOMES, VERSIONS_FILE, read_journal, sums_by_actor
from torchtitan.report.timeline import read_timeline
from torchtitan.report.timeline_view import last_steps
from torchtitan.utils.json_lines import JsonTail

Row = dict[str, Any]
Table = dict[str, Any]
"""{"head": […], "lines": [[…], …]}; cells are numbers, texts or null"""

CONFIG_FILE, EVENTS_FILE = "config.toml", "events.jsonl"
MAX_EVENTS, MAX_VERSIONS, MAX_ACTORS = 200, 60, 200
MAX_TEXT = 600
MAX_CONFIGURATION = 100_000
# So much is read of the end of each of the files that grow without bound, but for metrics.jsonl, which is followed.
JOURNAL_BYTES = 256 * 1024
TIMELINE_BYTES = 256 * 1024
VERSIONS_BYTES = 64 * 1024
EVENT_BYTES = 256 * 1024
# Of an actor's weight synchronisation: heading, metric, factor that converts it to the unit in the heading.
SYNC_COLUMNS = (
    *((name, name, 1) for name in ("pulls", *OUTCOMES)),
    ("queue ms", "queue_wait_s", 1e3), ("transfer ms", "transfer_s", 1e3), ("GB/s", "gigabytes_per_s", 1),
    ("apply ms", "apply_s", 1e3), ("drain ms", "drain_s", 1e3),
    ("pause ms", "pause_s", 1e3), ("longest pause ms", "pause_s/max", 1e3),
    *((f"MB {kind}", f"bytes_{kind}", 1e-6) for kind in ("full", "delta", "relayed")),
    ("corrupt buckets", "corrupt_buckets", 1),
)  # fmt: skip
VERSION_TIMES = ("transfer_s", "apply_s", "pause_s")
# How answers of a built-in data set are to be read, where that surprises.
READING = {
    "arithmetic": "Sums are written from right to left, so that each carry comes before it is needed: "
    "14+88= is answered by 201, which reads 102.",
}


class RunReader:
    """Reads a run's folder again and again; of metrics.jsonl it reads only what is new. For one thread at a time."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._file = 0
        """The inode of metrics.jsonl; a resumed run replaces the file"""
        self._metrics = JsonTail(run_dir / METRICS_FILE)
        self._curves = Curves()

    def read(self) -> Row:
        """Return what the page shows, as page.js draws it. Works with few rows or none."""
        self._read_metrics()
        configuration, text = self._configuration()
        events, started, ended = self._events()
        journal = list(read_journal(self._run_dir, JOURNAL_BYTES))
        drawn = last_steps(read_timeline(self._run_dir, TIMELINE_BYTES, journal))
        listed = self._curves.listed_evaluations()
        head, lines = evaluation_table(listed)
        completions = self._run_dir / COMPLETIONS_FILE
        return {
            "name": self._run_dir.resolve().name,
            "outcome": _outcome(started, ended),
            "progress": self._progress(configuration, started),
            "evaluation": self._evaluation(),
            "reward": self._reward(),
            "plots": self._curves.plots(),
            "samples": read_samples(self._run_dir),
            "reading": _reading(configuration),
            "completion_bytes": completions.stat().st_size if completions.is_file() else 0,
            "actors": self._actors(sums_by_actor(journal)),
            "versions": self._versions(),
            "timeline": drawn,
            "evaluations": {
                "head": head,
                "lines": lines,
                "left_out": self._curves.evaluation_count - len(listed),
            },
            "metrics": [summary.line(name) for name, summary in self._curves.summaries.items()],
            "events": events,
            "configuration": text,
        }

    def _read_metrics(self) -> None:
        path = self._run_dir / METRICS_FILE
        file = path.stat().st_ino if path.is_file() else 0
        if file != self._file:
            self._file, self._metrics, self._curves = file, JsonTail(path), Curves()
        self._curves.feed(self._metrics.read())

    def _configuration(self) -> tuple[Row, str]:
        path = self._run_dir / CONFIG_FILE
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        try:
            return tomli.loads(text), text[:MAX_CONFIGURATION]
        except tomli.TOMLDecodeError:
            return {}, text[:MAX_CONFIGURATION]  # a person's edit; the text shows it

    def _events(self) -> tuple[list[list[Any]], Row | None, Row | None]:
        """Return the last events as [time, kind, details], and the newest start and end of the run."""
        rows = deque(JsonTail(self._run_dir / EVENTS_FILE, EVENT_BYTES).read(), MAX_EVENTS)
        started = ended = None
        for row in rows:
            if row.get("kind") == "run_started":
                started, ended = row, None
            elif row.get("kind") == "run_ended":
                ended = row
        return [_event(row) for row in rows], started, ended

    def _progress(self, configuration: Row, started: Row | None) -> Row:
        """Return step, steps, time of the last step, and seconds per step (wall clock) over the last ones."""
        moments = self._curves.moments
        # A run that goes on after a night would otherwise count that night.
        launched = float((started or {}).get("time") or 0.0)
        paced = [(step, moment) for step, moment in moments if moment >= launched]
        pace = None
        if len(paced) > 1 and paced[-1][0] > paced[0][0]:
            pace = max(0.0, paced[-1][1] - paced[0][1]) / (paced[-1][0] - paced[0][0])
        steps = configuration.get("training", {}).get("steps")
        return {
            "step": moments[-1][0] if moments else 0,
            "steps": steps if isinstance(steps, int) else None,
            "time": moments[-1][1] if moments else None,
            "seconds_per_step": pace,
        }

    def _evaluation(self) -> Row | None:
        """Return pass@1 of the first and the last evaluation that has one, with the interval of the last."""
        scored = [row for row in self._curves.listed_evaluations() if row.get("eval/pass@1") is not None]
        if not scored:
            return None
        last = scored[-1]
        names = ("eval/interval_low", "eval/interval_high", "eval/greedy")
        low, high, greedy = (last.get(name) for name in names)
        first = scored[0]["eval/pass@1"] if len(scored) > 1 else None
        return {
            "first": first,
            "last": last["eval/pass@1"],
            "low": low,
            "high": high,
            "greedy": greedy,
            "step": last["step"],
        }

    def _reward(self) -> Row | None:
        """Return the mean reward of the first and of the last steps, and how many these are."""
        rewards, first = self._curves.rewards, self._curves.first_rewards
        if not rewards:
            return None
        count = max(1, min(len(rewards), self._curves.steps // 2))
        return {"first": sum(first[:count]) / count, "last": sum(list(rewards)[-count:]) / count, "steps": count}

    def _actors(self, sums: dict[str, dict[str, float]]) -> Table:
        """Return the actors' states after the last step, and what their weight synchronisation was lately."""
        path = self._run_dir / ACTORS_FILE
        states = json.loads(path.read_text(encoding="utf-8"))["actors"] if path.is_file() else {}
        # What is zero for all actors takes no column.
        columns = [column for column in SYNC_COLUMNS if any(figures.get(column[1]) for figures in sums.values())]
        lines = []
        for actor in sorted({*states, *sums})[:MAX_ACTORS]:
            figures = sums.get(actor, {})
            values = [figures[name] * unit if name in figures else None for _, name, unit in columns]
            evicted = [
                (name.removeprefix("evicted_in/"), count) for name, count in figures.items() if "evicted_in/" in name
            ]
            evictions = ", ".join(f"{count:g} in {state}" for state, count in evicted)
            lines.append([_text(actor), _text(states.get(actor, "")), *values, evictions])
        return _table(["actor", "state", *(heading for heading, _, _ in columns), "evictions"], lines)

    def _versions(self) -> Table:
        """Return what became of the last versions, the newest first."""
        rows = deque(JsonTail(self._run_dir / FOLDER / VERSIONS_FILE, VERSIONS_BYTES).read(), MAX_VERSIONS)
        lines = []
        for row in reversed(rows):
            figures = row.get("figures") or {}
            times = [
                _times(row.get("queue_wait_s")),
                *(_times(figures.get(name)) for name in VERSION_TIMES),
            ]
            why = _text(": ".join(str(row[name]) for name in ("state", "reason") if row.get(name)))
            lines.append(
                [row.get("version"), _text(row.get("actor") or ""), _text(row.get("outcome", "")), *times, why]
            )
        head = ["version", "actor", "outcome", "queue ms", "transfer ms", "apply ms", "pause ms", "reason"]
        return _table(head, lines)


def _table(head: list[str], lines: list[list[Any]]) -> Table:
    """Return the table without columns that are empty in all lines."""
    used = [place for place in range(len(head)) if any(line[place] not in (None, "") for line in lines)]
    return {"head": [head[place] for place in used], "lines": [[line[place] for place in used] for line in lines]}


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def _times(seconds: Any) -> float | None:
    return 1e3 * seconds if isinstance(seconds, (int, float)) else None


def _event(row: Row) -> list[Any]:
    details = "  ".join(f"{name}={value}" for name, value in row.items() if name not in ("time", "kind"))
    return [row.get("time"), _text(row.get("kind")), _text(details)]


def _outcome(started: Row | None, ended: Row | None) -> Row:
    """Return how the newest launch ended, and what it was made with. kind: good, bad, or open where no end is
    recorded: the run goes on, or it was killed."""
    outcome: Row = {"kind": "open", "text": "", "made": ""}
    if started is not None:
        program, commit = str(started.get("program", "")), str(started.get("commit", ""))[:12]
        made = ", ".join(filter(None, [program, commit, f"torch {started.get('torch')}"]))
        outcome["made"] = _text(f"started {_moment(started)} on {started.get('host')} ({made})")
    if ended is not None:
        reason = str(ended.get("reason")).rstrip(".")
        outcome["kind"] = "bad" if ended.get("code") else "good"
        outcome["text"] = _text(
            f"Ended {_moment(ended)} after version {ended.get('version')} with exit code {ended.get('code')}: {reason}."
        )
    return outcome


def _moment(event: Row) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0)))


def _reading(configuration: Row) -> str:
    """Return how the answers of the run's built-in data sets are to be read; empty where that needs no word."""
    tables: Iterable[Row] = [configuration, *configuration.get("source", [])]
    names = {str(table.get("rollout", {}).get("dataset")) for table in tables}
    return " ".join(text for name, text in READING.items() if name in names)
