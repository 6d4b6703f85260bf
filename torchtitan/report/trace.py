"""trace.json: a run's time line in the trace event format, which https://ui.perfetto.dev and chrome://tracing open.

Complete events (ph X) on one thread per track, instant events (ph i) for evictions, restarts and injected faults, and
metadata events (ph M) that name and order processes and threads. Times are microseconds from the first event on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.report.metrics import run_folder, write_whole
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
    path = run_folder(run_dir) / TRACE_FILE
    trace = chrome_trace(read_timeline(path.parent), minutes)
    write_whole(path, json.dumps(trace, allow_nan=False, separators=(",", ":")))
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
    names = {track.process for track in timeline.tracks} | {one.process for one in timeline.moments}
    events: list[Event] = []
    for pid, process in enumerate(sorted(names, key=_place), start=1):
        tracks = [track for track in timeline.tracks if track.process == process]
        events += _named(pid, 0, "process", process, pid - 1)
        for tid, track in enumerate(tracks, start=1):
            events += _named(pid, tid, "thread", track.name, tid)
        for tid, track in enumerate(tracks, start=1):
            events += [_complete(span, begin) | {"pid": pid, "tid": tid} for span in track.spans]
        moments = [one for one in timeline.moments[-most_events:] if one.process == process]
        events += [_instant(one, begin) | {"pid": pid, "tid": 0} for one in moments]
    shown = sum(len(track.spans) for track in timeline.tracks)
    extent = {"begins_at": _clock(begin), "ends_at": _clock(timeline.end)}
    summary = {"spans_left_out": whole - shown, "window_minutes": minutes, **extent}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}


def _place(process: str) -> tuple[int, str, int]:
    """The trainer, the synchronisation, then actors by name: actor-10 comes after actor-9."""
    stem = process.rstrip("0123456789")
    return [TRAINER, SYNC, process].index(process), stem, int(process[len(stem) :] or 0)


def _named(pid: int, tid: int, what: str, name: str, place: int) -> list[Event]:
    """Metadata: the name of a process or thread, and its place among them."""
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
