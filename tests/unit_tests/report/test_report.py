"""The page of a run: bounded data with the right figures, in one file, and no foreign text as markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from torchtitan.config.job_config import JobConfig, config_to_toml
from torchtitan.report import samples
from torchtitan.report.__main__ import main
from torchtitan.report.curves import MAX_EVALUATIONS, MAX_METRICS, POINTS, Curve, Curves
from torchtitan.report.metrics import REQUIRED_KEYS, cut_after
from torchtitan.report.page import NO_DATA, page, write_report
from torchtitan.report.page_data import MAX_EVENTS, RunReader

VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\u2028"


class Page(HTMLParser):
    """Checks that tags close in order, and collects tags, what they refer to, and what scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.policy = ""
        self.held: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attributes)
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "data")]
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named.get("content") or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.held:
            self.held[self.open[-1]].append(data)


def write_run(run_dir: Path, steps: int) -> Path:
    run_dir.mkdir()
    config = JobConfig()
    config.training.steps = 4000
    (run_dir / "config.toml").write_text(config_to_toml(config))
    first = {"step": 0, "eval/pass@1": 0.2, "eval/pass@4": 0.5, "eval/greedy": 0.3, "eval/version": 0}
    rows: list[dict[str, Any]] = [first]
    for step in range(1, steps + 1):
        row = dict.fromkeys(REQUIRED_KEYS, 0.1 + step / 1000) | {"step": step, "time": 1e9 + 2 * step}
        row |= {"time/step_s": 1.0, "time/train_s": 0.5, "time/data_wait_s": 0.2}
        row |= {"time/snapshot_s": None, "time/sync_stall_s": 0.1}
        rows.append(row | {"reward/mean": step % 2, "reward/std": 0.5, "reward/min": 0.0, "reward/max": 1.0})
    last = {"step": steps, "eval/pass@1": 0.9, "eval/interval_low": 0.8, "eval/interval_high": 0.95, "eval/version": 1}
    rows.append(last | {"eval/greedy": None})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "cut')
    (run_dir / "events.jsonl").write_text(
        '{"time": 1, "kind": "actor_evicted", "actor": "<script>alert(1)</script>"}\n'
    )
    sample = {"step": steps, "prompt": "<b>1+1=", "completion": "2", "reward": 1.0, "advantage": None, "versions": []}
    (run_dir / "completions.jsonl").write_text(json.dumps(sample) + "\n")
    return run_dir


def data_in(path: Path) -> Any:
    """The data of a report, as a browser finds them."""
    return json.loads(Page(path.read_text()).held["script"][0])


def plot(data: Any, title: str) -> Any:
    (found,) = [drawn for drawn in data["plots"] if drawn["title"] == title]
    return found


def test_live_page_and_report_are_byte_equal_but_for_the_data(tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path / "run", 3)).read_text()
    begin = '<script type="application/json" id="data">'
    before, _, rest = report.partition(begin)
    _, _, after = rest.partition("</script>")
    live = page(NO_DATA)
    assert live == f"{before}{begin}{NO_DATA}</script>{after}"


def test_page_needs_no_network_and_its_policy_allows_its_own_script_and_style_only() -> None:
    parsed = Page(page(NO_DATA))
    data, script = parsed.held["script"]
    assert data == NO_DATA and parsed.references == ["data:,"]
    assert not {"img", "iframe", "object", "base", "form"} & set(parsed.tags)
    style = parsed.held["style"][0]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|@import|url\(", script + style)
    addresses = set(re.findall(r"https?://[\w./]+", script + style))
    assert addresses == {"http://www.w3.org/2000/svg", "https://ui.perfetto.dev"}  # a name, and a text
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (script, style)]
    assert f"script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'" in parsed.policy
    assert parsed.policy.startswith("default-src 'none'") and "unsafe" not in parsed.policy


def test_foreign_text_is_data_and_no_markup(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    row = {"step": 3, "prompt": EVIL, "completion": EVIL, "reward": 1.0, "advantage": 0.0, "versions": []}
    row |= {"rewards": {EVIL: 1.0}, "extra": {EVIL: EVIL}, "segments": [{"text": EVIL, "tokens": 1}]}
    (run_dir / "completions.jsonl").write_text(json.dumps(row) + "\n")
    (run_dir / "actors.json").write_text(json.dumps({"step": 3, "actors": {EVIL: EVIL}}))
    (run_dir / "events.jsonl").write_text(json.dumps({"time": 1, "kind": EVIL, EVIL: EVIL}) + "\n")
    path = write_report(run_dir)
    parsed, harmless = Page(path.read_text()), Page(page(NO_DATA))
    assert parsed.tags == harmless.tags and parsed.held["script"][1:] == harmless.held["script"][1:]
    data = data_in(path)
    (shown,) = data["samples"][0]["rows"]
    assert shown["prompt"] == shown["completion"] == shown["segments"][0]["text"] == EVIL
    assert shown["reference"] == [[EVIL, EVIL]] and data["actors"]["lines"][0][:2] == [EVIL, EVIL]


def test_figures_at_the_top_are_those_of_the_run(tmp_path: Path) -> None:
    data = data_in(write_report(write_run(tmp_path / "run", 100)))
    assert "max_staleness = 2" in data["configuration"]
    assert data["progress"] == {"step": 100, "steps": 4000, "time": 1e9 + 200, "seconds_per_step": 2.0}
    assert data["evaluation"] == {"first": 0.2, "last": 0.9, "low": 0.8, "high": 0.95, "greedy": None, "step": 100}
    assert data["reward"] == {"first": 0.5, "last": 0.5, "steps": 20}
    assert (
        data["evaluations"]["head"][:3] == ["after step", "pass@1", "pass@4"] and data["evaluations"]["left_out"] == 0
    )
    assert [line[1] for line in data["evaluations"]["lines"]] == [0.2, 0.9]
    losses = [0.1 + step / 1000 for step in range(1, 101)]
    (loss,) = [line[1:] for line in data["metrics"] if line[0] == "loss"]
    assert loss == pytest.approx([losses[0], losses[-1], fmean(losses), losses[0], losses[-1]])


def test_time_that_passed_before_a_run_went_on_is_no_part_of_its_pace(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 100)
    night = 1e9 + 40_000
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": night, "kind": "run_started"}) + "\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('": 1}\n')  # the line that was cut off
        for step in (101, 102, 103):
            file.write(json.dumps({"step": step, "time": night + 3 * step, "loss": 0.1}) + "\n")
    assert data_in(write_report(run_dir))["progress"]["seconds_per_step"] == 3.0


def test_band_stays_within_the_range_of_rewards_and_the_parts_of_a_step_make_it_whole(tmp_path: Path) -> None:
    data = data_in(write_report(write_run(tmp_path / "run", 4)))
    # Means 1, 0, 1, 0 with a standard deviation of .5, of rewards from 0 to 1.
    assert plot(data, "Reward")["points"] == [[[1, 1, 0.5, 1], [2, 0, 0, 0.5], [3, 1, 0.5, 1], [4, 0, 0, 0.5]]]
    times = plot(data, "Seconds per step")
    assert times["labels"] == ["train", "wait for data", "snapshot", "stall of weight sync", "other"]
    assert times["points"][0][0] == [1, 0.5, 0.2, 0.0, 0.1, pytest.approx(0.2)]
    drawn = plot(data, "Evaluation on held-out prompts")
    assert drawn["labels"] == ["pass@1", "pass@4", "greedy"] and drawn["points"][0] == [[0, 0.2], [4, 0.9]]


@pytest.mark.parametrize("count", [1, 2 * POINTS, 2 * POINTS + 1, 5000, 12345])
def test_long_curves_are_means_of_neighbours(count: int) -> None:
    curve = Curve()
    for step in range(count):
        curve.add(step, [float(step), 1.0])
    points = curve.points()
    assert min(count, POINTS) <= len(points) <= 2 * POINTS and points[-1][0] == count - 1
    begin = 0
    for step, mean, other in points:  # every row is in one point, and each is the mean of its rows
        assert mean == pytest.approx(fmean(range(begin, int(step) + 1)), rel=1e-4) and other == 1.0
        begin = int(step) + 1
    assert begin == count


def test_data_are_bounded_however_long_a_run_is(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 20_000)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('": 1}\n')  # the line that was cut off
        for step in range(2000):
            file.write(json.dumps({"step": step, "eval/pass@1": 0.5, f"eval/set{step}/pass@1": 0.5}) + "\n")
    text = "x" * 300_000
    row = {"completion": text, "prompt": text, "reward": 0.0, "extra": {f"a{i}": text for i in range(3)}}
    row |= {"segments": [{"text": text}] * 2}
    with (run_dir / "completions.jsonl").open("w") as file:
        file.writelines(json.dumps(row | {"step": step // 8}) + "\n" for step in range(24))
    with (run_dir / "events.jsonl").open("w") as file:
        file.writelines(json.dumps({"time": 1, "kind": "k", "text": text[:2000]}) + "\n" for _ in range(2000))
    data = data_in(path := write_report(run_dir))
    assert path.stat().st_size < 1_500_000
    assert len(data["metrics"]) == MAX_METRICS and 0 < len(data["events"]) <= MAX_EVENTS
    lines = data["evaluations"]["lines"]
    assert len(lines) == 2 * MAX_EVALUATIONS - 1 and data["evaluations"]["left_out"] == 2002 - MAX_EVALUATIONS
    assert plot(data, "Evaluation on held-out prompts")["left_out"] > 0


def test_samples_are_of_the_first_a_middle_and_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "completions.jsonl"
    rows = [
        {"step": step, "prompt": f"{step}/{index}", "completion": "", "reward": index, "extra": {"answer": "gold"}}
        for step in range(1, 101)
        for index in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 101, "pro')
    monkeypatch.setattr(samples, "PART_BYTES", 5000)  # far less than the file has
    found = samples.read_samples(tmp_path)
    first, middle, last = [part["step"] for part in found]
    assert first == 1 and 45 <= middle <= 56 and last == 100
    for part in found[:2]:
        assert [row["prompt"] for row in part["rows"]] == [f"{part['step']}/{n}" for n in range(samples.SAMPLES)]
        assert part["rows"][0]["reference"] == [["answer", "gold"]]
    assert len(found[2]["rows"]) == samples.SAMPLES
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[20]) + "\n")
    assert [part["step"] for part in samples.read_samples(tmp_path)] == [1, 2]
    path.unlink()
    assert samples.read_samples(tmp_path) == []


def test_page_says_how_answers_of_a_built_in_task_are_read(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    assert "14+88= is answered by 201, which reads 102" in data_in(write_report(run_dir))["reading"]
    config = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").write_text(config.replace('dataset = "arithmetic"', 'dataset = "guess"'))
    assert data_in(write_report(run_dir))["reading"] == ""
    (run_dir / "config.toml").write_text('[[source]]\nname = "sums"\nshare = 1\nrollout.dataset = "arithmetic"\n')
    assert "right to left" in data_in(write_report(run_dir))["reading"]


def test_page_says_how_the_run_ended(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    started = {"time": 1e9, "kind": "run_started", "program": "torchtitan-grpo 0.1.0", "commit": "c0ffee" * 7,
               "torch": "2.13.0", "host": "node-7"}  # fmt: skip
    ended = {"time": 1e9 + 90, "kind": "run_ended", "code": 1, "reason": "no data came.", "version": 3}
    for events, kind, ending in (
        ([], "open", ""),
        ([started], "open", ""),
        ([started, ended], "bad", "after version 3 with exit code 1: no data came."),
        ([started, ended, started, ended | {"code": 0, "reason": "all is done"}], "good", "exit code 0: all is done."),
        ([started, ended, started], "open", ""),
        ([{"kind": "run_ended"}, {"kind": "run_started"}], "open", ""),
    ):
        (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        outcome = data_in(write_report(run_dir))["outcome"]
        assert outcome["kind"] == kind and outcome["text"].endswith(ending) and bool(outcome["text"]) == bool(ending)
        if any("host" in event for event in events):
            assert "on node-7 (torchtitan-grpo 0.1.0, c0ffeec0ffee, torch 2.13.0)" in outcome["made"]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "eval/pass@1": None}], [dict.fromkeys(REQUIRED_KEYS) | {"step": 1}]])
def test_little_or_nothing_logged(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data_in(write_report(tmp_path))["plots"] == []
    (tmp_path / "metrics.jsonl").unlink()
    data = data_in(write_report(tmp_path))
    assert data["plots"] == data["samples"] == [] and data["timeline"] is data["evaluation"] is data["reward"] is None


def test_reader_follows_the_file_and_starts_anew_when_a_resume_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RunReader(tmp_path)
    assert reader.read()["progress"]["step"] == 0
    for step in range(1, 6):
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": step, "reward/mean": step}) + "\n")
        data = reader.read()
        assert data["progress"]["step"] == step and plot(data, "Loss")["points"][0][-1] == [step, step]
    cut_after(path, 2)
    data = reader.read()
    assert data["progress"]["step"] == 2 and plot(data, "Loss")["points"] == [[[1, 1], [2, 2]]]


def test_sources_have_curves_of_their_own() -> None:
    row = {"loss": 0.1, "reward/mean": 0.4, "reward/right/mean": 0.3, "groups/trained": 4.0}
    of_sources = {f"groups/{name}/trained": 2.0 for name in ("sums", "game")}
    of_sources |= {"reward/sums/mean": 0.3, "reward/game/mean": 0.5, "completion/game/length_mean": 7.0}
    drawn = []
    for fields in (row, row | of_sources):
        curves = Curves()
        curves.feed({"step": step} | fields for step in (1, 2))
        drawn.append({plot["title"]: plot["labels"] for plot in curves.plots()})
    assert drawn[1]["Reward by source"] == ["sums", "game"] and drawn[1]["Completion length by source"] == ["game"]
    assert "Reward by source" not in drawn[0]


@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(write_run(tmp_path / "run", steps=150))
    command = [sys.executable, "-X", "importtime", "-m", "torchtitan.report", run_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == [f"{run_dir}/report.html", f"{run_dir}/trace.json"]
    assert not re.search(r"\| +(torch|matplotlib|jinja2)$", done.stderr, re.MULTILINE)
    assert main(["no/such/run"]) == 2
    assert "there is no run folder" in capsys.readouterr().err
