"""What Google's "Trace Event Format" document asks for, as far as a run's trace.json uses it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


def check_trace(text: str) -> list[dict[str, Any]]:
    """Raises AssertionError where the text is not a well-formed trace; returns its events."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    trace = json.loads(text, parse_constant=no_constant)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert type(event["ts"]) is int and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        place = (event["pid"], event["tid"])
        if event["ph"] == "M":
            ((_, value),) = event["args"].items()
            assert isinstance(value, METADATA[event["name"]])
            assert place not in named[event["name"]], "named twice"
            named[event["name"]].add(place)
        elif event["ph"] == "X":
            assert type(event["dur"]) is int and event["dur"] >= 0 and isinstance(event["cat"], str)
            threads[place].append(event)
        else:
            assert event["ph"] == "i" and event["s"] in ("g", "p", "t") and isinstance(event["cat"], str)
            assert (event["pid"], 0) in named["process_name"]
    for place, events in threads.items():
        assert place in named["thread_name"] and (place[0], 0) in named["process_name"]
        check_nesting(events)
    return list(trace["traceEvents"])


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Complete events of one thread begin in order, and each ends before the one around it does."""
    around: list[int] = []
    before = 0
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        assert begin >= before, "not in order"
        before = begin
        while around and begin >= around[-1]:
            around.pop()
        assert not around or end <= around[-1], f"{event} overlaps what it does not lie in"
        around.append(end)
