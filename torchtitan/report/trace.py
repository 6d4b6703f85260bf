"""trace.json: a run's time line in the trace event format, which https://ui.perfetto.dev and chrome://tracing open.

Complete events (ph X) on one thread per track, instant events (ph i) for evictions, restarts and injected faults, and
metadata events (ph M) that name and order processes and threads. Times are microseconds from the first event on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.report.timeline import SYNC, TRAINER, Moment, Span, Timeline, read_timeline

TRACE_FILE = "trace.json"
LAST_MINUTES = 15.0
# Viewers take some hundred megabytes; this is about fifty.
MOST_EVENTS = 200_000

Event = dict[str, Any]


def write_trace(run_dir: str | Path, minutes: float = LAST_MINUTES) -> Path:
    """Write RUN_DIR/trace.json, in one rename, about the last `minutes` of the run; returns its path.

    Also for a run that goes on or was killed. `otherData` says what was left out.

    Raises:
        UserError: there is no such folder.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"there is no run folder {run_dir}")
    path = run_dir / TRACE_FILE
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(chrome_trace(read_timeline(run_dir), minutes), file, allow_nan=False, separators=(",", ":"))
    os.replace(temporary, path)
    return path


def chrome_trace(timeline: Timeline, minutes: float = LAST_MINUTES, most_events: int = MOST_EVENTS) -> dict[str, Any]:
    """The last `minutes` of a time line as an object of the trace event format, of at most `most_events` events."""
    whole = sum(len(track.spans) for track in timeline.tracks)
    if timeline.tracks:
        timeline = timeline.since(max(timeline.begin, timeline.end - 60 * minutes))
        begins = sorted((span.begin for track in timeline.tracks for span in track.spans), reverse=True)
        if len(begins) > most_events:
            timeline = timeline.since(begins[most_events])
    begin = timeline.begin
    processes = _processes(timeline)
    events: list[Event] = []
    for index, process in enumerate(processes):
        events += _named(index, process, [track.name for track in timeline.tracks if track.process == process])
    for track in timeline.tracks:
        thread = _thread_names(timeline, track.process).index(track.name) + 1
        events += [_complete(span, begin, processes.index(track.process), thread) for span in track.spans]
    events += [_instant(one, begin, processes.index(one.process)) for one in timeline.moments[-most_events:]]
    shown = sum(len(track.spans) for track in timeline.tracks)
    said = {
        "spans_left_out": whole - shown,
        "window_minutes": minutes,
        "begins_at": _clock(begin),
        "ends_at": _clock(timeline.end),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": said}


def _processes(timeline: Timeline) -> list[str]:
    """The trainer, the synchronisation, then actors by name; those that only moments speak of too."""
    names = {track.process for track in timeline.tracks} | {one.process for one in timeline.moments}
    first = [name for name in (TRAINER, SYNC) if name in names]
    return first + sorted(names - set(first), key=_natural)


def _natural(name: str) -> tuple[str, int]:
    """actor-10 comes after actor-9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _thread_names(timeline: Timeline, process: str) -> list[str]:
    return [track.name for track in timeline.tracks if track.process == process]


def _named(index: int, process: str, threads: list[str]) -> Iterable[Event]:
    pid = index + 1
    yield _metadata("process_name", pid, 0, {"name": process})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": index})
    for number, name in enumerate(threads, start=1):
        yield _metadata("thread_name", pid, number, {"name": name})
        yield _metadata("thread_sort_index", pid, number, {"sort_index": number})


def _metadata(name: str, pid: int, tid: int, arguments: Mapping[str, Any]) -> Event:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": arguments}


def _complete(span: Span, begin: float, index: int, thread: int) -> Event:
    start, end = _microseconds(span.begin, begin), _microseconds(span.end, begin)
    event = {"name": span.name, "cat": span.kind, "ph": "X", "ts": start, "dur": end - start}
    return event | {"pid": index + 1, "tid": thread, "args": _plain(span.details)}


def _instant(moment: Moment, begin: float, index: int) -> Event:
    event = {"name": moment.name, "cat": "event", "ph": "i", "s": "p", "ts": _microseconds(moment.time, begin)}
    return event | {"pid": index + 1, "tid": 0, "args": _plain(moment.details)}


def _microseconds(moment: float, begin: float) -> int:
    # Both ends of a span are rounded, not its length: so rounding keeps spans nested.
    return max(0, round((moment - begin) * 1e6)) if math.isfinite(begin) else 0


def _plain(details: Mapping[str, Any]) -> Event:
    """What JSON can hold; NaN and infinities become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in details.items()
        if value is not None
    }


def _clock(moment: float) -> str | None:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment)) if math.isfinite(moment) else None
