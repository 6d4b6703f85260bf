"""The report: one whole page that needs nothing from outside, however little a run has logged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from torchtitan.config.job_config import JobConfig, config_to_toml
from torchtitan.report import page
from torchtitan.report.__main__ import main
from torchtitan.report.metrics import REQUIRED_KEYS
from torchtitan.report.page import write_report
from torchtitan.report.plots import run_plots

VOID = {"meta", "br", "hr", "img", "input", "link"}
TITLES = (
    "Reward",
    "Evaluation on",
    "Loss",
    "Entropy",
    "Mismatch KL",
    "Staleness",
    "Seconds per step",
    "Tokens per second",
)


class Page(HTMLParser):
    """Checks that tags close in order and collects what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def write_run(run_dir: Path, steps: int, offset: float = 0.0) -> Path:
    run_dir.mkdir()
    config = JobConfig()
    config.job.description = 'adds <two> & "more"'
    (run_dir / "config.toml").write_text(config_to_toml(config))
    rows: list[dict] = [{"step": 0, "eval/pass@1": 0.2, "eval/pass@4": 0.5, "eval/greedy": 0.3, "eval/version": 0}]
    rows += [
        dict.fromkeys(REQUIRED_KEYS, offset + 0.1 + step / 1000) | {"step": step, "time/step_s": 1.0}
        for step in range(1, steps + 1)
    ]
    rows.append({"step": steps, "eval/pass@1": 0.9, "eval/pass@4": 1.0, "eval/greedy": None, "eval/version": steps})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "cut')
    (run_dir / "events.jsonl").write_text(
        '{"time": 1, "kind": "actor_evicted", "actor": "<script>alert(1)</script>"}\n'
    )
    sample = {"step": steps, "prompt": "<b>1+1=", "completion": "2", "reward": 1.0, "advantage": None, "versions": []}
    (run_dir / "completions.jsonl").write_text(json.dumps(sample) + "\n")
    return run_dir


def check(path: Path) -> tuple[str, Page]:
    text = path.read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)  # within the page
    assert not re.search(r"@import|url\((?!#)", text)
    return text, page


@pytest.mark.slow
def test_the_page_says_how_the_run_ended(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    started = {"time": 1e9, "kind": "run_started", "program": "torchtitan-grpo 0.1.0", "commit": "c0ffee" * 7,
               "torch": "2.13.0", "host": "node-7"}  # fmt: skip
    ended = {"time": 1e9 + 90, "kind": "run_ended", "code": 1, "reason": "no <b>data</b> came", "version": 3}
    for events, said in (
        ([], None),
        ([started], ("open", "No end is recorded: the run goes on, or it was killed. It was started 2001-09-09")),
        ([started, ended], ("bad", "after version 3 with exit code 1: no &lt;b&gt;data&lt;/b&gt; came. It was")),
        ([started, ended, started, ended | {"code": 0, "reason": "all is done"}], ("good", "exit code 0: all is")),
        ([started, ended, started], ("open", "No end is recorded")),
        ([{"kind": "run_ended"}, {"kind": "run_started"}], ("open", "No end is recorded")),
    ):
        (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        text, _ = check(write_report(run_dir))
        banner = re.search(r'<p class="ending (\w+)">(.*)</p>', text)
        assert (banner is None) == (said is None)
        if banner is not None and said is not None:
            assert banner[1] == said[0] and said[1] in banner[2]
            made = "node-7 (torchtitan-grpo 0.1.0, c0ffeec0ffee, torch 2.13.0)"
            assert made in banner[2] or "host" not in events[0]


@pytest.mark.slow
def test_of_long_completions_only_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    monkeypatch.setattr(page, "LAST_BYTES", 1000)
    row = {"prompt": "3+4=", "reward": 1.0, "advantage": None, "versions": []}
    texts = [(2, "of the step before"), (3, "first of the last"), (3, "last of the last")]
    rows = [json.dumps({"step": step, "completion": text, **row}) + "\n" for step, text in texts]
    (run_dir / "completions.jsonl").write_text("no JSON\n" * 1000 + "".join(rows))
    text, _ = check(write_report(run_dir))
    assert "first of the last" in text and "last of the last" in text and "of the step before" not in text
    assert 0 < caplog.text.count("left out: no JSON") < 100


@pytest.mark.slow
def test_page_of_a_long_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=2000)
    path = write_report(run_dir)
    text, parsed = check(path)
    assert parsed.tags.count("svg") == 10
    for expected in (
        *TITLES,
        "data wait",
        "sync stall",
        "actor_evicted",
        "&lt;script&gt;",
        "&lt;b&gt;1+1=",
        "0.2 → 0.9",
    ):
        assert expected in text
    assert "max_staleness = 2" in text  # the configuration
    assert len(text) < 3_000_000
    identifiers = re.findall(r' id="([^"]+)"', text)
    shared = {name for name in identifiers if identifiers.count(name) > 1 and f"#{name}" in text}
    assert not shared  # a plot must not borrow another one's clip path


@pytest.mark.parametrize("rows", [[], [{"step": 0, "eval/pass@1": None}], [dict.fromkeys(REQUIRED_KEYS) | {"step": 1}]])
def test_little_or_nothing_logged(tmp_path: Path, rows: list[dict]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(write_report(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    text, _ = check(write_report(tmp_path))
    assert "No step has been logged yet" in text


@pytest.mark.slow
def test_sources_have_curves_of_their_own() -> None:
    one = {"reward/mean": 0.4, "reward/right/mean": 0.3, "groups/trained": 4.0}
    of_sources = {f"groups/{name}/trained": 2.0 for name in ("sums", "game")}
    of_sources |= {"reward/sums/mean": 0.3, "reward/game/mean": 0.5, "completion/game/length_mean": 7.0}
    alone, both = ("".join(run_plots([{"step": step} | row for step in (1, 2)])) for row in (one, one | of_sources))
    texts = set(ElementTree.fromstring(f"<all>{both}</all>").itertext())
    assert {"Reward by source", "Completion length by source (tokens)", "sums", "game"} <= texts
    assert "right" not in texts and "by source" not in alone


@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        str(write_run(tmp_path / name, steps=150, offset=offset)) for name, offset in (("async", 0.0), ("sync", 0.1))
    ]
    command = [sys.executable, "-m", "torchtitan.report", runs[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == [f"{runs[0]}/report.html", f"{runs[0]}/trace.json"]
    svg = tmp_path / "figures" / "both.svg"
    assert main(["--compare", *runs, "--labels", "asynchronous", "blocking", "--output", str(svg)]) == 0
    texts = "".join(ElementTree.parse(svg).getroot().itertext())
    assert "asynchronous" in texts and "blocking" in texts and "Held-out pass@1" in texts
    assert main(["--compare", *runs, "--output", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for arguments, message in (
        (["no/such/run"], "there is no run folder"),
        (["--compare", str(tmp_path)], "has no rows"),
        (["--compare", *runs, "--labels", "one"], "--labels names 1 runs"),
        (["--compare", *runs, "--output", "figure.gif"], "must be a .svg or a .png"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
