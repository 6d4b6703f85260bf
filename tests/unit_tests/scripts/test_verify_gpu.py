"""The flow of scripts/verify_gpu.sh, with a driver that is a script and checks that are stand-ins."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.verify_gpu import read_checks
from tests.patience import PATIENCE_S, until
from tests.processes import has_ended

ROOT = Path(__file__).resolve().parents[3]
CHECKS = """
[[check]]
name = "first"
shows = "that it runs"
command = "echo ran >> first; echo '3 passed in 1 s'"
must_say = "(\\\\d+ passed).*"
[[check]]
name = "bars"
shows = "a benchmark"
command = "printf 'gain   1.5   >= 2  MISSED\\\\nloss   0.1   <= 0.2  met\\\\n'"
must_say = "loss"
[[check]]
name = "hangs"
shows = "a deadline"
command = "sleep 600 & echo $! > sleeper; wait"
must_say = "never"
minutes = 0.02
[[check]]
name = "silent"
shows = "that silence is no success"
command = "true"
must_say = "done"
[[check]]
name = "breaks"
shows = "an exit code"
command = "echo done; exit 3"
must_say = "done"
[[check]]
name = "many"
shows = "eight GPUs"
command = "echo ran >> many"
must_say = ""
gpus = 8
"""


def verify(folder: Path, *words: str, gpus: int = 2) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / "nvidia-smi"
    rows = "\\n".join(["NVIDIA H100, 580.1, 81559 MiB"] * gpus)
    program.write_text(f"#!/bin/sh\nprintf '{rows}\\n'\n")
    program.chmod(0o755)
    (folder / "checks.toml").write_text(
        CHECKS.replace(">> ", f">> {folder}/").replace("> sleeper", f"> {folder}/sleeper")
    )
    options = ["--checks", folder / "checks.toml", "--folder", folder, *words]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/verify_gpu.py", *options],
        capture_output=True, text=True, timeout=PATIENCE_S * 4, check=False,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
    )  # fmt: skip
    return done, json.loads((folder / "results.json").read_text())


def test_checks_run_in_order_and_only_what_failed_runs_again(tmp_path: Path) -> None:
    done, written = verify(tmp_path)
    assert done.returncode == 1, done.stderr
    statuses = {one["name"]: one["status"] for one in written["results"]}
    assert list(statuses.items()) == [
        ("first", "passed"), ("bars", "failed"), ("hangs", "late"), ("silent", "failed"), ("breaks", "failed"),
        ("many", "left out"),
    ]  # fmt: skip
    measured = {one["name"]: one["measured"] for one in written["results"]}
    assert measured["first"] == "3 passed" and "exit code 3" in measured["breaks"]
    assert measured["silent"] == "not said: done" and measured["many"] == "needs 8 GPUs"
    (figures,) = [one["figures"] for one in written["results"] if one["name"] == "bars"]
    assert [(one["key"], one["measured"], one["met"]) for one in figures] == [("gain", 1.5, False), ("loss", 0.1, True)]
    assert written["machine"]["gpus"] == ["NVIDIA H100, 580.1, 81559 MiB"] * 2
    assert "gain" in done.stdout and "MISSED" in done.stdout and "late     hangs" in done.stdout
    # Nothing of a check that was late is left.
    sleeper = int((tmp_path / "sleeper").read_text())
    # Killed; who takes the place of its parent may not have asked for its exit code yet.
    until(lambda: has_ended(sleeper))

    verify(tmp_path, "--only", "first", "silent")
    assert (tmp_path / "first").read_text() == "ran\n"
    done, _ = verify(tmp_path, "--only", "first", "--again")
    assert done.returncode == 0 and (tmp_path / "first").read_text() == "ran\nran\n"
    # On another machine everything counts anew.
    _, written = verify(tmp_path, "--only", "first", "many", gpus=8)
    assert (tmp_path / "many").read_text() == "ran\n" and (tmp_path / "first").read_text().count("ran") == 3


def test_what_the_shipped_checks_run_is_there() -> None:
    checks = read_checks(ROOT / "scripts/verify_gpu.toml")
    assert len({check.name for check in checks}) == len(checks) > 5
    for check in checks:
        words = [
            word for word in shlex.split(check.command) if word.startswith(("benchmarks/", "scripts/", "./", "tests/"))
        ]
        assert all((ROOT / word).exists() for word in words), check.name


@pytest.mark.parametrize("driver", ["exit 9", "echo 'No devices were found'"])
def test_without_a_gpu_there_is_nothing_to_verify(tmp_path: Path, driver: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts/verify_gpu.sh"], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 2 and "lists no GPU" in done.stderr
