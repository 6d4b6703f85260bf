"""The time line of a run: what is noted, what trace.json and the plot make of it."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.report.test_sync_metrics import Journal
from tests.unit_tests.report.trace_format import check_trace
from torchtitan.report.__main__ import main
from torchtitan.report.page_data import RunReader
from torchtitan.report.timeline import Moment, Span, Timeline, Track, chrome_trace, nested, read_timeline, write_trace
from torchtitan.report.timeline_view import STEPS
from torchtitan.utils import json_lines
from torchtitan.utils.json_lines import MAX_SPANS, ActivityLog, StepRecorder, TimelineFile, actor_file, rank_file

TIMES = st.floats(0, 1000, allow_nan=False)
SPANS = st.lists(st.tuples(TIMES, TIMES), max_size=30).map(
    lambda pairs: [Span(str(n), "kind", min(pair), max(pair)) for n, pair in enumerate(pairs)]
)


def make_run(run_dir: Path, ranks: int = 2, steps: int = 4, begin: float = 1000.0) -> Path:
    """A run of `steps` seconds: an actor that takes every version, and one that is evicted on its way to the first."""
    journal = Journal(run_dir)
    journal.clock = iter([begin + number / 10 for number in range(10_000)])  # type: ignore[assignment]
    for rank in range(ranks):
        file = TimelineFile(rank_file(run_dir, rank))
        for step in range(1, steps + 1):
            at = begin + step - 1
            spans = [["data wait", at, at + 0.2], ["train", at + 0.2, at + 0.9], ["commit", at + 0.9, at + 0.91]]
            row = {"step": step, "begin": at, "end": at + 1, "spans": spans}
            file.write(row | {"snapshots": [[step - 1, at, at + 0.05]]})
        file.close()
    log = ActivityLog(actor_file(run_dir, "actor-0"))
    journal.start("e1", "actor-0", "actor-10")
    for version in range(1, steps + 1):
        at = begin + version
        journal.clock = itertools.count(at, 0.1)  # type: ignore[assignment]
        journal.publish(version)
        journal.pull(version, "actor-0")
        journal.apply(version, "actor-0", drain_s=0.02, source="actor-3")
        log.stepped(at, at + 0.3, version, 7)
        log.updated("apply", at + 0.45, at + 0.46, version)
    log.close()
    journal.clock = itertools.count(begin + 1.5, 0.1)  # type: ignore[assignment]
    journal.pull(1, "actor-10")
    journal.end(1, "actor-10", reason="late")
    journal.evict("actor-10", "pulling")
    event = {"time": begin + 1, "kind": "actor_evicted", "actor": "actor-10"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    return run_dir


def kinds(events: list[dict[str, Any]], process: str, thread: str | None = None) -> set[str]:
    (pid,) = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process]
    tids = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == thread and e["pid"] == pid}
    return {e["cat"] for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] in tids}


def test_a_run_in_the_published_format(tmp_path: Path) -> None:
    path = write_trace(make_run(tmp_path))
    events = check_trace(path.read_text())
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["trainer", "weight sync", "actor-0", "actor-10"]
    assert kinds(events, "trainer", "rank 1") == {"step", "data wait", "train", "commit"}
    assert kinds(events, "trainer", "rank 1 snapshots") == {"snapshot"}
    assert kinds(events, "weight sync", "publish") == {"publish"}
    assert kinds(events, "actor-0", "weights") == {"delivery", "transfer", "apply", "drain"}
    assert kinds(events, "actor-0", "generation") == {"generate", "pause"}
    assert kinds(events, "actor-10", "weights") == {"aborted"}
    instants = {(e["name"], e["pid"]) for e in events if e["ph"] == "i"}
    assert instants == {("evicted", 4), ("actor_evicted", 4)}
    (transfer,) = [e for e in events if e.get("cat") == "transfer" and e["args"]["version"] == 2]
    assert transfer["args"]["source"] == "actor-3"
    # Of the versions' publications only those after their snapshot are drawn from it on.
    assert {e["args"]["version"] for e in events if e.get("cat") == "publish"} == {1, 2, 3, 4}
    assert not list(tmp_path.glob("*.tmp"))


def test_the_same_moment_on_one_clock(tmp_path: Path) -> None:
    events = check_trace(write_trace(make_run(tmp_path)).read_text())
    begins = {e["name"]: e["ts"] for e in events if e.get("cat") == "step" and e["tid"] == 1}
    assert begins == {"step 1": 0, "step 2": 1_000_000, "step 3": 2_000_000, "step 4": 3_000_000}
    (generated,) = [e for e in events if e.get("cat") == "generate" and e["args"]["version"] == 2]
    assert (generated["ts"], generated["dur"]) == (2_000_000, 300_000)


def test_a_window_of_the_end_and_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, steps=100)
    assert main([str(run_dir)]) == 2 and "no config.toml" in capsys.readouterr().err
    (run_dir / "config.toml").touch()
    timeline = read_timeline(run_dir)
    whole = chrome_trace(timeline)
    assert whole["otherData"]["spans_left_out"] == 0
    assert main([str(run_dir), "--trace-only", "--minutes", "0.5"]) == 0
    trace = json.loads((run_dir / "trace.json").read_text())
    steps = {e["args"]["step"] for e in check_trace(json.dumps(trace)) if e.get("cat") == "step"}
    assert max(steps) == 100 and 25 < len(steps) < 40
    assert trace["otherData"]["spans_left_out"] > 500 and trace["otherData"]["window_minutes"] == 0.5
    few = chrome_trace(timeline, most_events=50)
    shown = [e for e in check_trace(json.dumps(few)) if e["ph"] == "X"]
    assert 30 <= len(shown) <= 50 + 2 * len(timeline.tracks)
    assert main([str(tmp_path / "none")]) == 2 and "no run folder" in capsys.readouterr().err


def test_little_or_nothing(tmp_path: Path) -> None:
    assert check_trace(write_trace(tmp_path).read_text()) == []
    (tmp_path / "events.jsonl").write_text('{"time": 3.5, "kind": "actor_ready", "actor": "a"}\n{"ti')
    events = check_trace(write_trace(tmp_path).read_text())
    assert [e["name"] for e in events if e["ph"] == "i"] == ["actor_ready"]
    file = rank_file(tmp_path, 0)
    file.parent.mkdir()
    file.write_text('{"step": 1, "begin": 1.0, "end": 2.0, "spans": [], "snapshots": []}\n{"step": 2, "be')  # killed
    assert [e["name"] for e in check_trace(write_trace(tmp_path).read_text()) if e["ph"] == "X"] == ["step 1"]


@settings(max_examples=200)
@given(spans=SPANS)
def test_nesting_cuts_as_little_as_it_must(spans: list[Span]) -> None:
    result = nested(spans)
    assert sorted(span.name for span in result) == sorted(span.name for span in spans)
    before = {span.name: span for span in spans}
    for span in result:
        assert span.begin == before[span.name].begin and span.begin <= span.end <= before[span.name].end
    for number, inner in enumerate(result):
        around = [outer for outer in result[:number] if outer.end > inner.begin]
        assert all(inner.end <= outer.end for outer in around)
        # It lost only what lies outside of what is around it.
        assert inner.end == max(inner.begin, min([before[inner.name].end, *(outer.end for outer in around)]))
    assert nested(result) == result


@settings(max_examples=100)
@given(tracks=st.lists(SPANS, max_size=4), moments=st.lists(TIMES, max_size=5), minutes=st.floats(0.01, 30))
def test_every_time_line_is_well_formed(tracks: list[list[Span]], moments: list[float], minutes: float) -> None:
    made = [Track(f"p{n % 2}", f"t{n}", nested(spans)) for n, spans in enumerate(tracks) if spans]
    timeline = Timeline(made, [Moment(at, "fault", "p9", {"x": float("nan")}) for at in sorted(moments)])
    check_trace(json.dumps(chrome_trace(timeline, minutes, most_events=40), allow_nan=False))


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.floats(0, 0.05), st.floats(0.001, 0.5), st.integers(0, 3), st.integers(0, 9), st.booleans()),
        max_size=30,
    )
)
def test_activity_is_merged_without_loss(steps: list[tuple[float, float, int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "activity.jsonl"
        log = ActivityLog(path)
        now, version, tokens, worked = 100.0, 0, {0: 0}, 0.0
        for gap, length, newer, made, rests in steps:
            version += newer
            log.stepped(now + gap, now + gap + length, version, made)
            tokens[version] = tokens.get(version, 0) + made
            now += gap + length
            worked += length if made else 0.0
            if rests:
                log.idle()
        log.close()
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for version, count in tokens.items():
        assert sum(row["tokens"] for row in rows if row["version"] == version) == count
    for before, after in itertools.pairwise(rows):
        assert before["end"] <= after["begin"] + 1e-9
    spent = sum(row["end"] - row["begin"] for row in rows)
    assert spent >= worked - 1e-6
    assert all(row["end"] - row["begin"] <= json_lines.MAX_SECONDS + 0.5 for row in rows)
    ActivityLog().stepped(0.0, 1.0, 1, 5)


def test_a_recorder_notes_steps_cheaply(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path, 3)
    now = time.time()
    for number in range(5):  # orders that say "wait" follow each other closely
        recorder.add("data wait", now + number * 0.1, now + number * 0.1 + 0.095)
    recorder.add("train", now + 0.5, now + 0.9)
    recorder.end_step(1, [(0, now, now + 0.1)])
    for number in range(1000):
        recorder.add(f"span {number}", now)
    recorder.end_step(2, [])
    first, second = [json.loads(line) for line in rank_file(tmp_path, 3).read_text().splitlines()]
    assert first["spans"] == [["data wait", now, now + 0.4 + 0.095], ["train", now + 0.5, now + 0.9]]
    assert first["snapshots"] == [[0, now, now + 0.1]] and second["snapshots"] == []
    assert first["end"] == second["begin"] and len(second["spans"]) == MAX_SPANS
    recorder.close()


def test_bounded_files_keep_the_newest_whole_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "new" / "file.jsonl"
    file = TimelineFile(path, most_bytes=2000)
    for number in range(1000):
        file.write({"number": number})
        assert path.stat().st_size <= 2000
    file.close()
    rows = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert rows == list(range(rows[0], 1000)) and len(rows) > 50
    with path.open("a") as again:
        again.write('{"num')  # killed
    file = TimelineFile(path, most_bytes=2000)
    file.write({"number": 1000})
    file.close()
    assert json.loads(path.read_text().splitlines()[-1]) == {"number": 1000}
    hopeless = TimelineFile(path / "below_a_file")
    hopeless.write({"number": 1})
    hopeless.write({"number": 2})
    assert caplog.text.count("is not written any more") == 1


def test_the_page_has_the_last_steps(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, steps=30)
    data = RunReader(run_dir).read()
    drawn = data["timeline"]
    assert [step for _, step in drawn["steps"]] == list(range(30 - STEPS + 1, 31)) and drawn["left_out"] == 0
    spans = [span for lane in drawn["lanes"] for span in lane["spans"]]
    assert {"train", "transfer", "generate", "snapshot"} <= {kind for _, _, kind, _, _ in spans}
    assert all(0 <= begin <= end <= drawn["seconds"] for begin, end, *_ in spans)
    assert "actor-10" in [lane["name"] for lane in drawn["lanes"]]
    actors = {line[0]: line for line in data["actors"]["lines"]}
    assert "1 in pulling" in [line[-1] for line in actors.values()] and "actor-10" in actors
    (tmp_path / "short").mkdir()
    lanes = RunReader(make_run(tmp_path / "short")).read()["timeline"]["lanes"]
    assert "evicted" in [name for lane in lanes for _, name in lane["moments"]]
    os.remove(rank_file(run_dir, 0))
    os.remove(rank_file(run_dir, 1))
    assert RunReader(run_dir).read()["timeline"] is None
