"""How the threads of a run's processes wait for each other, as their own OpenMP says it (OMP_DISPLAY_ENV)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.processes import ROOT, Processes
from tests.runs import BRIEF, RUN_SECONDS, Run

pytestmark = pytest.mark.skipif(
    not list((Path(torch.__file__).parent / "lib").glob("libgomp*")), reason="torch's OpenMP is another one here"
)
# Its policy is called PASSIVE also where none is set; how often it looks before it sleeps tells.
SAYS = "GOMP_SPINCOUNT = '{}'"


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS + 60)
def test_threads_of_a_run_sleep_while_they_wait(
    debug_checkpoint: Path, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    options = ("--training.steps", "2", "--checkpoint.enable", "false")
    run = Run(processes, "debug_cpu", debug_checkpoint, tmp_path, *BRIEF, *options, OMP_DISPLAY_ENV="VERBOSE")
    run.wait(lambda: bool(run.steps()))
    children = run.process.children(recursive=True)
    inherited = [child.environ().get("OMP_WAIT_POLICY") for child in children]
    run.end()
    assert len(inherited) >= 3 and set(inherited) == {"PASSIVE"}, "an actor, a worker of rewards, a weight server"
    for said in (run.log(), *(path.read_text() for path in run.folder.glob("logs/actor-*.log"))):
        assert SAYS.format(0) in said


@pytest.mark.parametrize(
    ("given", "found"), [({}, "0"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")], ids=["ours", "the user's"]
)
def test_what_the_user_has_set_stays(given: dict[str, str], found: str) -> None:
    program = "from torchtitan.utils.machine import sleep_between_regions as s; s(); import torch"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        env={**environment, "TORCHTITAN_DEVICE": "cpu", "OMP_DISPLAY_ENV": "VERBOSE", **given},
    )  # fmt: skip
    assert SAYS.format(found) in done.stderr
