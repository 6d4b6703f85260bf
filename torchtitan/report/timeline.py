"""The timeline of a run: trainer ranks, registry and actors on one clock, from the files of the run folder.

This module writes it as trace.json; timeline_view.py has its last steps for the page. Times are in seconds since 1970
on each process's clock. The spans of one track nest, because a span is cut where its enclosing span ends.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.report.deliveries import Delivery, Entry, Incident, Publication
from torchtitan.report.metrics import run_folder
from torchtitan.report.sync_metrics import read_journal
from torchtitan.utils.json_lines import TIMELINE, JsonTail, write_whole

TRAINER, SYNC = "trainer", "weight sync"
# Suffix of a rank's second track, which is otherwise named like its first.
SNAPSHOTS = " snapshots"
# Only the newest are read: entries of the journal and events (each); bytes of the journal.
MAX_RECORDS = 50_000
JOURNAL_BYTES = 32 * 2**20
TRACE_FILE = "trace.json"
LAST_MINUTES = 15.0
# Trace viewers can open a few hundred megabytes; this many events are about fifty.
MAX_EVENTS = 200_000
Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """An interval of time."""

    name: str
    kind: str
    """The category, independent of the version or step"""
    begin: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """An instantaneous event in a process of the run."""

    time: float
    name: str
    process: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """A sequence of spans in order of their begin times; they nest and do not otherwise overlap."""

    process: str
    name: str
    spans: list[Span]


@dataclass
class Timeline:
    tracks: list[Track]
    moments: list[Moment]

    @property
    def begin(self) -> float:
        """The first begin of all spans; inf if there are none."""
        return min([span.begin for track in self.tracks for span in track.spans], default=math.inf)

    @property
    def end(self) -> float:
        return max([span.end for track in self.tracks for span in track.spans], default=-math.inf)

    def since(self, moment: float) -> Timeline:
        """Return the part of the timeline after `moment`; a span that is open at `moment` begins there."""
        tracks = []
        for track in self.tracks:
            spans = [replace(span, begin=max(span.begin, moment)) for span in track.spans if span.end > moment]
            tracks.append(Track(track.process, track.name, nested(spans)))
        return Timeline(tracks, [event for event in self.moments if event.time >= moment])


def nested(spans: Iterable[Span]) -> list[Span]:
    """Sort spans and cut each where its enclosing span ends; a span that becomes empty is kept with zero length."""
    result: list[Span] = []
    around: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while around and span.begin >= around[-1].end:
            around.pop()
        end = max(span.begin, min(span.end, around[-1].end) if around else span.end)
        result.append(span if end == span.end else replace(span, end=end))
        around.append(result[-1])
    return result


def read_timeline(run_dir: Path, last_bytes: int = 0, journal: Iterable[Entry] | None = None) -> Timeline:
    """Read the timeline from a run's files; the run may be active or killed.

    last_bytes: of each file but the journal, only the end is read; 0: all. journal: its entries, if they are known.
    """
    files = run_dir / TIMELINE
    notes = {path.stem: list(JsonTail(path, last_bytes).read()) for path in files.glob("*.jsonl")}
    ranks = {int(name.removeprefix("rank-")): notes.pop(name) for name in list(notes) if name.startswith("rank-")}
    entries = deque(read_journal(run_dir, JOURNAL_BYTES) if journal is None else journal, MAX_RECORDS)
    deliveries = [entry for entry in entries if isinstance(entry, Delivery)]
    publications = [entry for entry in entries if isinstance(entry, Publication)]
    incidents = [entry for entry in entries if isinstance(entry, Incident)]
    tracks = []
    for rank, rows in sorted(ranks.items()):
        tracks.append(Track(TRAINER, f"rank {rank}", nested(_steps(rows))))
        tracks.append(Track(TRAINER, f"rank {rank}{SNAPSHOTS}", nested(_snapshots(rows))))
    reached = {version: end for row in ranks.get(0, []) for version, _, end in row["snapshots"]}
    tracks.append(Track(SYNC, "publish", nested(_publishing(publications, reached))))
    pulls: dict[str, list[Span]] = {actor: [] for actor in notes}
    for delivery in deliveries:
        if delivery.begun_at is not None:
            pulls.setdefault(delivery.actor, []).extend(_pull(delivery, delivery.begun_at))
    for actor, spans in sorted(pulls.items()):
        tracks.append(Track(actor, "weights", nested(spans)))
        tracks.append(Track(actor, "generation", nested(_activity(notes.get(actor, [])))))
    moments = [*_incidents(incidents), *_events(run_dir, last_bytes)]
    return Timeline([track for track in tracks if track.spans], sorted(moments, key=lambda moment: moment.time))


def _steps(rows: list[dict[str, Any]]) -> Iterator[Span]:
    for row in rows:
        yield Span(f"step {row['step']}", "step", row["begin"], row["end"], {"step": row["step"]})
        for name, begin, end in row["spans"]:
            yield Span(name, name, begin, end, {"step": row["step"]})


def _snapshots(rows: list[dict[str, Any]]) -> Iterator[Span]:
    for row in rows:
        for version, begin, end in row["snapshots"]:
            yield Span(f"v{version}", "snapshot", begin, end, {"version": version})


def _publishing(publications: Iterable[Publication], reached: dict[int, float]) -> Iterator[Span]:
    """Yield spans from rank 0's snapshot to the publication (all ranks' fences and checksums), without overlap."""
    before = -math.inf
    for event in publications:
        begin = max(before, reached.get(event.version, event.time))
        name = f"v{event.version} dropped" if event.dropped else f"v{event.version}"
        about = {"version": event.version, "epoch": event.epoch} | ({"reason": event.dropped} if event.dropped else {})
        yield Span(name, "dropped" if event.dropped else "publish", min(begin, event.time), event.time, about)
        before = event.time


def _pull(delivery: Delivery, begun_at: float) -> Iterator[Span]:
    """Yield the span of a pull, and in it those of its transfer, apply and drain."""
    details: dict[str, Any] = {"version": delivery.version, "queue_wait_s": delivery.queue_wait_s}
    if delivery.outcome == "applied":
        yield Span(f"v{delivery.version}", "delivery", begun_at, delivery.ended_at, delivery.figures | details)
    else:
        details |= {"state": delivery.state, "reason": delivery.reason}
        name = f"v{delivery.version} {delivery.outcome}"
        yield Span(name, delivery.outcome, begun_at, delivery.ended_at, details)
    staged_at, figures = delivery.staged_at, delivery.figures
    if staged_at is None:
        return
    about = {"version": delivery.version}
    moved = {name: figures[name] for name in ("gigabytes_per_s", "source") if name in figures}
    yield Span("transfer", "transfer", begun_at, staged_at, about | moved)
    yield Span("apply", "apply", staged_at, delivery.ended_at, about)
    if drain_s := figures.get("drain_s"):
        yield Span("drain", "drain", staged_at, min(delivery.ended_at, staged_at + drain_s), about)


def _activity(rows: list[dict[str, Any]]) -> Iterator[Span]:
    for row in rows:
        if row["what"] == "generate":
            details = {"version": row["version"], "tokens": row["tokens"]}
            yield Span(f"generate v{row['version']}", "generate", row["begin"], row["end"], details)
        elif row["what"] == "apply":
            yield Span(f"pause for v{row['version']}", "pause", row["begin"], row["end"], {"version": row["version"]})


def _incidents(incidents: Iterable[Incident]) -> Iterator[Moment]:
    for incident in incidents:
        details = {"state": incident.state, "reason": incident.text} if incident.state else {"reason": incident.text}
        yield Moment(incident.time, incident.kind, incident.actor or SYNC, details)


def _events(run_dir: Path, last_bytes: int) -> Iterator[Moment]:
    for event in deque(JsonTail(run_dir / "events.jsonl", last_bytes).read(), MAX_RECORDS):
        details = {name: value for name, value in event.items() if name not in ("time", "kind")}
        yield Moment(event.get("time", 0.0), str(event.get("kind")), str(event.get("actor") or TRAINER), details)


def write_trace(run_dir: str | Path, minutes: float = LAST_MINUTES) -> Path:
    """Write the last `minutes` of the run to RUN_DIR/trace.json atomically and return its path.

    The run may be active or killed. `otherData` says what was left out.

    Raises:
        UserError: the folder does not exist.
    """
    path = run_folder(run_dir) / TRACE_FILE
    trace = chrome_trace(read_timeline(path.parent), minutes)
    write_whole(path, json.dumps(trace, allow_nan=False, separators=(",", ":")))
    return path


def chrome_trace(timeline: Timeline, minutes: float = LAST_MINUTES, most_events: int = MAX_EVENTS) -> dict[str, Any]:
    """Return the last `minutes` of a timeline in the trace event format, with at most `most_events` spans.

    Spans are complete events (ph X) on one thread per track. Evictions and restarts are instant events (ph i).
    Metadata events (ph M) name and order processes and threads. Times are in microseconds from the first event.
    https://ui.perfetto.dev and chrome://tracing open it.
    """
    all_spans = sum(len(track.spans) for track in timeline.tracks)
    if timeline.tracks:
        timeline = timeline.since(max(timeline.begin, timeline.end - 60 * minutes))
        begins = sorted((span.begin for track in timeline.tracks for span in track.spans), reverse=True)
        if len(begins) > most_events:
            timeline = timeline.since(begins[most_events])
    begin = timeline.begin
    names = {track.process for track in timeline.tracks} | {moment.process for moment in timeline.moments}
    events: list[Event] = []
    for pid, process in enumerate(sorted(names, key=_place), start=1):
        tracks = [track for track in timeline.tracks if track.process == process]
        events += _named(pid, 0, "process", process, pid - 1)
        for tid, track in enumerate(tracks, start=1):
            events += _named(pid, tid, "thread", track.name, tid)
        for tid, track in enumerate(tracks, start=1):
            events += [_complete(span, begin) | {"pid": pid, "tid": tid} for span in track.spans]
        moments = [moment for moment in timeline.moments[-most_events:] if moment.process == process]
        events += [_instant(moment, begin) | {"pid": pid, "tid": 0} for moment in moments]
    shown = sum(len(track.spans) for track in timeline.tracks)
    extent = {"begins_at": _clock(begin), "ends_at": _clock(timeline.end)}
    summary = {"spans_left_out": all_spans - shown, "window_minutes": minutes, **extent}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}


def _place(process: str) -> tuple[int, str, int]:
    """Sort key: the trainer, the weight synchronisation, then actors by number (actor-10 comes after actor-9)."""
    stem = process.rstrip("0123456789")
    return [TRAINER, SYNC, process].index(process), stem, int(process[len(stem) :] or 0)


def _named(pid: int, tid: int, what: str, name: str, place: int) -> list[Event]:
    """Return the metadata events for the name of a process or thread and its position."""
    event = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
    return [
        event | {"name": f"{what}_name", "args": {"name": name}},
        event | {"name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def _complete(span: Span, begin: float) -> Event:
    start, end = _microseconds(span.begin, begin), _microseconds(span.end, begin)
    event = {"name": span.name, "cat": span.kind, "ph": "X", "ts": start, "dur": end - start}
    return event | {"args": _plain(span.details)}


def _instant(moment: Moment, begin: float) -> Event:
    event = {"name": moment.name, "cat": "event", "ph": "i", "s": "p", "ts": _microseconds(moment.time, begin)}
    return event | {"args": _plain(moment.details)}


def _microseconds(moment: float, begin: float) -> int:
    # Both ends of a span are rounded rather than its length, so that spans stay nested.
    return max(0, round((moment - begin) * 1e6)) if math.isfinite(begin) else 0


def _plain(details: Mapping[str, Any]) -> Event:
    """Make details valid JSON: NaN and infinities become null, and missing values are left out."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in details.items()
        if value is not None
    }


def _clock(moment: float) -> str | None:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment)) if math.isfinite(moment) else None
