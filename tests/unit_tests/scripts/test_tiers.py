"""Which tests an option chooses, what the end says that did not run, and what `.ci/run` makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
MARKS = ("slow", "engine", "exhaustive", "benchmark")
TESTS = (
    "import pytest\ndef test_unmarked():\n    sum(range(1000))\n"
    + "".join(f"@pytest.mark.{mark}\ndef test_{mark}():\n    pass\n" for mark in MARKS)
    + "@pytest.mark.engine\n@pytest.mark.exhaustive\ndef test_both():\n    pass\n"
    + "def test_skipped():\n    pytest.skip('needs a whale')\n"
)


def run_pytest(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_marks.py").write_text(TESTS)
    options = ["-p", "tests.tiers", "-p", "tests.processor_seconds", "-p", "no:cacheprovider", "-v"]
    options += [f"--override-ini=markers={chr(10).join(MARKS)}", "--strict-markers", "--rootdir", str(folder)]
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments], cwd=folder, capture_output=True, text=True,
        env=variables, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        ([], {"unmarked", "slow"}),
        (["--engines"], {"engine"}),
        (["--all"], {"unmarked", "slow", "engine", "exhaustive", "both"}),
        (["--all", "--benchmarks"], {"unmarked", "slow", "engine", "exhaustive", "both", "benchmark"}),
        (["test_marks.py"], {"unmarked", "slow", "engine", "exhaustive", "both"}),
        (["test_marks.py::test_benchmark"], {"benchmark"}),
        (["--fast", "test_marks.py::test_slow"], set()),
    ],
    ids=["no option", "engines", "all", "all and benchmarks", "a file", "a test", "fast and a test"],
)
def test_an_option_chooses_its_tiers_and_a_name_chooses_the_rest(
    tmp_path: Path, arguments: list[str], ran: set[str]
) -> None:
    done = run_pytest(tmp_path, *arguments)
    passed = {line.split()[0].partition("::test_")[2] for line in done.stdout.splitlines() if "PASSED" in line}
    assert passed == ran, done.stdout


def test_two_options_that_choose_different_tests_are_refused(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--fast", "--all")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "--fast and --all choose different tests" in done.stderr


@pytest.mark.parametrize(("option", "count"), [("--fast", 3), ("--engines", 3)])
def test_tests_that_an_option_leaves_out_run_without_it(tmp_path: Path, option: str, count: int) -> None:
    done = run_pytest(tmp_path, option)
    assert f"{count} tests, which run without {option}\n" in done.stdout, done.stdout


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n", "2"]], ids=["one process", "two workers"])
def test_what_did_not_run_is_in_the_end_and_in_the_summary_of_ci(tmp_path: Path, workers: list[str]) -> None:
    done = run_pytest(tmp_path, *workers, "--summary", "default.json")
    assert "1 tests, which run with --engines\n" in done.stdout and "1 skipped: needs a whale\n" in done.stdout
    summary = json.loads((tmp_path / "default.json").read_text())
    assert summary["outcomes"] == {"passed": 2, "skipped": 1} and summary["exit_code"] == 0
    assert summary["not_run"] == {"--all": 2, "--engines": 1, "--benchmarks": 1}
    assert summary["folders"]["."]["count"] == 3 and summary["processor_s"] > 0
    command = [sys.executable, str(ROOT / ".ci" / "summary.py"), str(tmp_path), "default=0=7", "engines=1=9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    *lines, last = done.stdout.splitlines()
    assert done.returncode == 1 and "2 not run (--all)" in lines[0] and "FAILED with 1 in 9 s" in lines[1]
    assert not json.loads(last)["passed"] and json.loads(last)["parts"][0]["outcomes"] == summary["outcomes"]


LONG = """
import os, subprocess, sys, pytest
from tests import processor_seconds
@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr("tests.processor_seconds.tier_of", lambda item: processor_seconds.FAST)
    yield
def test_long():
    spin = "import time\\nwhile time.process_time() < 0.6: pass"
    assert subprocess.run([sys.executable, "-c", spin]).returncode == 0
"""


@pytest.mark.parametrize(("environment", "code"), [({"CI": "1"}, 1), ({}, 0)], ids=["in CI", "elsewhere"])
def test_a_test_without_a_mark_that_takes_too_long_is_named_and_fails_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], code: int
) -> None:
    """Its seconds are mostly those of a process that it starts."""
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "test_long.py").write_text(LONG)
    (tmp_path / "limits.py").write_text(
        "from tests import processor_seconds\nprocessor_seconds.WARNING_S, processor_seconds.LIMIT_S = 0.25, 0.5\n"
    )
    done = run_pytest(tmp_path, "-p", "limits", "test_long.py", PYTHONPATH=f"{ROOT}:{tmp_path}", **environment)
    assert done.returncode == code and "test_long.py::test_long took 0." in done.stdout, done.stdout
