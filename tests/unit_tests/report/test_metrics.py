"""What a run writes about itself, read back as other tools would."""

from __future__ import annotations

import copy
import io
import itertools
import json
import logging
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from tests.patience import PATIENCE_S
from tests.trajectories import completion_of, single_turn
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.report import console
from torchtitan.report.metrics import (
    DETAILED_SAMPLES,
    DETAILED_TOKENS,
    REQUIRED_KEYS,
    MetricsLogger,
    check_rows,
    cut_after,
    token_texts,
)
from torchtitan.report.samples import read_samples
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.utils.json_lines import read_json_lines


class Words:
    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return " ".join(f"w{number}" for number in ids)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_config(**settings: object) -> JobConfig:
    config = JobConfig()
    config.training.steps = 10
    config.metrics.loggers = []
    vars(config.metrics).update(settings)
    return config


def make_batch() -> Batch:
    spans = [VersionSpan("e1-x", 3, 0, 1), VersionSpan("e1-x", 4, 1, 2)]
    rewards = [{"exact": float(i), "fails": None} for i in range(5)]
    samples = [single_turn([1, 2], [3, 4], [0, 0], spans, "stop", float(i), reward) for i, reward in enumerate(rewards)]
    samples[0].advantage = -0.5
    return Batch(version=5, groups=[Group(0, samples)])


def figures(step: int) -> dict[str, float | None]:
    return {"policy_version": step, "loss": 0.1 * step, "reward/mean": 0.5, "time/step_s": 0.25, "extra": 7.0}


def test_rows_have_all_keys_and_only_json_numbers(tmp_path: Path) -> None:
    began = round(time.time(), 3)
    logger = MetricsLogger(make_config(), tmp_path)
    logger.log_evaluation(0, {"eval/pass@1": 0.25})
    logger.log_step(1, figures(1) | {"loss": math.nan, "grad_norm": math.inf}, {"actor-0": "ready v0"})
    assert json.loads((tmp_path / "actors.json").read_text()) == {"step": 1, "actors": {"actor-0": "ready v0"}}
    # Every row is on the disk before the run goes on.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logger.close()
    logger.close()

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    first, second = (json.loads(line, parse_constant=no_constant) for line in lines)
    assert first == {"step": 0, "time": first["time"], "eval/pass@1": 0.25}
    assert set(REQUIRED_KEYS) | {"extra", "time"} == set(second) and next(iter(second)) == "step"
    assert began <= first["time"] <= second["time"] <= round(time.time(), 3)
    assert second["loss"] is None and second["grad_norm"] is None and second["reward/mean"] == 0.5


def test_resume_cuts_the_rows_after_its_step(tmp_path: Path) -> None:
    logger = MetricsLogger(make_config(), tmp_path)
    for step in range(1, 6):
        logger.log_step(step, figures(step))
        logger.log_evaluation(step, {"eval/pass@1": 0.1})
        logger.log_completions(step, make_batch(), Words())
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    resumed = MetricsLogger(make_config(), tmp_path, resumed_step=3)
    resumed.log_step(4, figures(4) | {"loss": 99.0})
    resumed.close()
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3, 3, 4] and rows[-1]["loss"] == 99.0
    assert {row["step"] for row in read_json_lines(tmp_path / "completions.jsonl")} == {1, 2, 3}


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_damaged_row_is_shown_before_anything_is_cut(tmp_path: Path, name: str) -> None:
    whole = b'{"step": 1}\n{"step": 2, "loss": 0.5}\n{"step": 3}\n{"step'
    for place in (len(b'{"step": 1}\n{"s'), len(b'{"step": 1}\n{"step": 2, "loss": 0.5')):
        (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        before = (tmp_path / name).read_bytes()
        with pytest.raises(UserError, match=rf"{name} is damaged: a line is no JSON object with 'step'. Delete that"):
            check_rows(tmp_path)
        assert (tmp_path / name).read_bytes() == before
    (tmp_path / name).write_bytes(whole)
    check_rows(tmp_path)


@pytest.mark.parametrize(("limit", "expected"), [(2, 2), (-1, 5), (0, 0)])
def test_completions_in_words(tmp_path: Path, limit: int, expected: int) -> None:
    logger = MetricsLogger(make_config(completions_per_step=limit), tmp_path)
    logger.log_completions(6, make_batch(), Words())
    logger.close()
    rows = read_json_lines(tmp_path / "completions.jsonl")
    assert len(rows) == expected
    if rows:
        assert rows[0] == {
            "step": 6,
            "trainer_version": 5,
            "prompt": "w1 w2",
            "completion": "w3 w4",
            "reward": 0.0,
            "rewards": {"exact": 0, "fails": None},
            "advantage": -0.5,
            "versions": [{"version": 3, "tokens": 1}, {"version": 4, "tokens": 1}],
            "finish_reason": "stop",
            "tokens": 2,
            "token_texts": ["w3", " w4"],
            "log_probs": [0, 0],
            "trainer_log_probs": [],
        }
    # Token by token only a few, so that the file does not grow with the batch.
    assert sum("token_texts" in row for row in rows) == min(expected, DETAILED_SAMPLES)


def test_completions_are_of_all_groups_with_answer_and_short_names(tmp_path: Path) -> None:
    config = make_config(completions_per_step=5)
    config.rewards.functions = ["own_9067cb83d8bb:verified"]
    groups = []
    for index in range(3):
        group = Group(index, [copy.deepcopy(make_batch().samples[0]) for _ in range(4)])
        for sample in group.samples:
            sample.rewards, sample.extra = {"own_9067cb83d8bb:verified": 1.0}, {"answer": f"a{index}"}
        groups.append(group)
    logger = MetricsLogger(config, tmp_path)
    logger.log_completions(1, Batch(0, groups), Words())
    logger.close()
    rows = read_json_lines(tmp_path / "completions.jsonl")
    assert [row["extra"]["answer"] for row in rows] == ["a0", "a1", "a2", "a0", "a1"]
    assert all(row["rewards"] == {"verified": 1.0} and row["prompt"] for row in rows)


def test_tokens_with_both_log_probs(tmp_path: Path) -> None:
    batch = make_batch()
    sample = batch.samples[0]
    completion = completion_of(sample)
    completion.token_ids, completion.log_probs = [5] * 1000, [-0.123456] * 1000
    sample.branches[0].trainer_log_probs = numpy.array([math.nan] + [-0.5] * 999)
    logger = MetricsLogger(make_config(), tmp_path)
    logger.log_completions(6, batch, Words())
    logger.close()
    row = read_json_lines(tmp_path / "completions.jsonl")[0]
    assert len(row["token_texts"]) == DETAILED_TOKENS and row["tokens"] == 1000
    assert row["log_probs"] == [-0.1235] * DETAILED_TOKENS
    assert row["trainer_log_probs"] == [None] + [-0.5] * (DETAILED_TOKENS - 1)


class Bytes:
    """A decoder whose tokens are bytes, and which drops the space that a text begins with."""

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["", "a b  c", "né 日本 🙂!", "🙂"])
def test_texts_of_tokens_make_the_whole_text(text: str) -> None:
    texts = token_texts(list(text.encode()), Bytes())
    assert "".join(texts) == text and len(texts) == len(text.encode())
    assert set(texts) <= {"", *text}
    broken = token_texts([0xF0, 0x9F, *b"ab", 0xFF, *b"cdef"], Bytes())
    assert "".join(broken).endswith("cdef") and len(broken) == 9


def test_plain_lines_fit_in_160_columns_and_say_what_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr("torchtitan.report.console.time.monotonic", lambda: next(clock))
    largest = {"loss": -0.00012345, "mismatch_kl": 0.00012345, "completion/length_mean": 12345.6, "time/step_s": 1234.5}
    with caplog.at_level(logging.INFO):
        logger = MetricsLogger(make_config(log_freq=2), tmp_path)
        for step in (1, 2, 3):
            logger.log_step(step, figures(step) | {"tokens_per_s": 12345.6})
        evaluation = {"eval/pass@1": 0.75, "eval/interval_low": 0.7, "eval/interval_high": 0.8, "eval/greedy": None}
        logger.log_evaluation(3, evaluation | {"eval/failed": 0, "eval/lost": 2, "eval/time_s": 1.5})
        logger.log_step(4, figures(4) | {"reward/mean": 0.12345, "tokens_per_s": 1234567.8} | largest)
        logger.log_step(6, figures(6) | {"reference_kl": 0.01})
        logger.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and lines[0].startswith("step 2/10  reward 0.5  loss 0.2  ")
    assert "tokens/s 12.3k" in lines[0] and "left" not in lines[0] and "pass@1" not in lines[0]
    assert lines[1] == "eval after step 3  pass@1 0.75 (0.7 to 0.8)  greedy –  lost 2"
    # 15 s for a step, and six more to come.
    assert lines[2].startswith("step 4/10  reward 0.123  pass@1 0.75  loss ") and lines[2].endswith("left 1:30")
    assert "  mismatch 0.00012  " in lines[2] and "  loss -0.00012  " in lines[2]
    assert "  kl 0.01" in lines[3] and "mismatch" not in lines[3]
    # Figures of a long run, which all have many characters.
    display = console.Console(20_000)
    display.evaluation(0, {"eval/pass@1": 0.015625})
    long = {"reward/mean": 0.012345, "tokens_per_s": 12345.6} | largest
    with caplog.at_level(logging.INFO):
        for step in (16_000, 16_010):
            display.step(step, figures(step) | long, {})
    line = f"16:23:41 I {caplog.records[-1].name}: {caplog.records[-1].getMessage()}"
    assert "step 16010/20000  " in line and " left " in line and len(line) <= 160, line


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7380, "2h03")])
def test_durations(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_live_display_lets_log_lines_through_and_ends_with_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    assert type(console.make_console(10)) is console.Console
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        display = console.make_console(10)
        for step in (1, 2):
            display.step(step, figures(step) | {"reward/mean": 0.25 * step}, {"actor-0": "ready v1"})
        logging.getLogger("other").warning("a line from elsewhere")
        display.evaluation(2, {"eval/pass@1": 0.88})
        display.close()
        assert handler.stream is stream and sys.stderr is stream
    finally:
        root.removeHandler(handler)
    text = stream.getvalue()
    for expected in ("a line from elsewhere", "2/10", "actor-0 ready v1", "▁█", "version 2"):
        assert expected in text
    last_panel = text[text.rindex("╭") :]
    assert "pass@1 0.88  (after step 2)" in last_panel and "reward" in last_panel


def test_rows_end_at_newlines_only_and_are_objects(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    rows = [{"step": 1, "completion": "a\u0085b\u2028c\u2029d\x1ce\r\nf"}, {"step": 2, "completion": ""}]
    whole = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(whole + '3\n["x"]\nnull\n{"st')
    assert read_json_lines(path) == rows
    path.write_text(whole + '{"st')
    cut_after(path, 1)
    assert read_json_lines(path) == rows[:1]


@pytest.mark.slow
def test_reading_rows_needs_no_torch() -> None:
    code = "import sys, torchtitan.report.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


def test_a_conversation_is_written_and_shown(tmp_path: Path) -> None:
    """Given and sampled texts in their order, a branch after the other; the page tells them apart."""
    turns = [Completion([3, 4], [0.0, 0.0], "stop", [VersionSpan("e", version, 0, 2)]) for version in (5, 6, 6)]
    branches = [Branch([Given([1]), turns[0], Given([7]), turns[1]]), Branch([Given([1, 3]), turns[2]])]
    logger = MetricsLogger(make_config(), tmp_path)
    logger.log_completions(6, Batch(6, [Group(0, [Sample(branches, "stop", 1.0)])]), Words())
    logger.close()
    (row,) = read_json_lines(tmp_path / "completions.jsonl")
    assert [(entry["branch"], entry["text"], entry.get("versions")) for entry in row["segments"]] == [
        (0, "w3 w4", [5]), (0, "w7", None), (0, "w3 w4", [6]), (1, "w1 w3", None), (1, "w3 w4", [6]),
    ]  # fmt: skip
    assert row["tokens"] == 6 and row["versions"] == [{"version": 5, "tokens": 2}, {"version": 6, "tokens": 4}]
    (step,) = read_samples(tmp_path)
    segments = [(segment["text"], segment["sampled"]) for segment in step["rows"][0]["segments"]]
    assert segments == [("w3 w4", True), ("w7", False), ("w3 w4", True), ("w1 w3", False), ("w3 w4", True)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_on_a_full_disk_is_said_once_and_the_console_has_every_line(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    program = "import logging, pathlib, sys\nfrom torchtitan.report.metrics import set_up_logging\n"
    program += "set_up_logging(pathlib.Path(sys.argv[1]), 0)\n"
    program += "for number in range(3): logging.getLogger('torchtitan').info('line %d', number)\n"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "Traceback" not in done.stderr and done.stderr.count("rank-0.log cannot be written") == 1, done.stderr
    assert [f"line {number}" in done.stderr for number in range(3)] == [True] * 3
    (tmp_path / "logs" / "rank-0.log").unlink()
    subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
    lines = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert len(lines) == 3 and all(re.match(r"20\d\d-\d\d-\d\d \d\d:", line) for line in lines), "with the date"
