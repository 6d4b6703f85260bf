"""The ranks of one machine: they meet, start again, are shown, and end as the launcher says, which needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, until
from tests.processes import ROOT
from torchtitan.utils.launch import read_launch

LAUNCHER = """
import sys
from torchtitan.utils import launch
code = launch.main(sys.argv[1:])
assert not {"torch", "numpy"} & set(sys.modules)
sys.exit(code)
"""
# Two ranks add up their numbers, which they can only where they meet; the first time one of them is then killed.
MEET = """
import os, sys, torch
import torch.distributed as dist
from torchtitan.config.job_config import Comm
from torchtitan.distributed import device
device.init_process_group(Comm())
number = torch.tensor([float(device.rank() + 1)])
dist.all_reduce(number)
print("sum", number.item(), os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ.get("TORCHTITAN_LOST_RANK"))
print("errors", file=sys.stderr, end="", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    dist.barrier()
    if device.rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
dist.destroy_process_group()
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "--standalone", "--role", "rank", *arguments], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHTITAN_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def shell(ranks: int, program: str, *options: str) -> subprocess.Popen[str]:
    return start("--nproc-per-node", str(ranks), *options, "--no-python", "bash", "-c", program)


@pytest.mark.slow
def test_ranks_meet_start_again_after_a_loss_and_are_shown_by_name(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    launched = start(
        "--nproc-per-node", "2", "--max-restarts", "1", "--tee", "3", "--local-ranks-filter", "1",
        str(tmp_path / "meet.py"),
    )  # fmt: skip
    output, errors = launched.communicate(timeout=PATIENCE_S)
    assert launched.returncode == 0, errors
    first, again = output.splitlines()
    assert first == "[rank1]:sum 3.0 0 None" and again == "[rank1]:sum 3.0 1 rank 1 was killed by SIGKILL"
    assert "[launch] rank 1 was killed by SIGKILL: all ranks start again (1 restarts left)\n" in errors
    assert errors.count("[rank1]:errors") == 2 and "[rank0]" not in errors


def test_a_rank_that_says_what_to_change_ends_all_also_where_another_fails_first() -> None:
    launched = shell(2, "if [[ $RANK = 0 ]]; then exit 75; fi; sleep 0.05; exit 2", "--max-restarts", "3")
    _, errors = launched.communicate(timeout=PATIENCE_S)
    assert launched.returncode in (75, 2) and "failed first" in errors and "again" not in errors


def test_ranks_that_have_ended_well_are_not_missed(tmp_path: Path) -> None:
    program = f"if [[ $RANK = 0 ]]; then touch {tmp_path}/0; else until [[ -e {tmp_path}/0 ]]; do sleep .1; done; fi"
    launched = shell(2, program)
    assert launched.wait(PATIENCE_S) == 0


def test_ranks_left_of_a_failed_launch_are_ended_and_get_a_second_signal(tmp_path: Path) -> None:
    ready, signaled = tmp_path / "ready", tmp_path / "told"
    waits = f"trap 'touch {signaled}' TERM; trap 'exit 0' INT; touch {ready}; while true; do sleep 0.05; done"
    launched = shell(2, f"if [[ $RANK = 1 ]]; then until [[ -e {ready} ]]; do sleep .1; done; exit 3; fi; {waits}")
    try:
        until(signaled.exists, process=launched)
        assert launched.poll() is None
        launched.send_signal(signal.SIGINT)
        _, errors = launched.communicate(timeout=PATIENCE_S)
    finally:
        launched.kill()
    assert launched.returncode == 128 + signal.SIGINT and "stopped by SIGINT" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nnodes", "2", "program.py"],
        ["--nnodes", "1:2", "program.py"],
        ["--nproc-per-node", "gpu", "program.py"],
        ["--max-restarts", "-1", "program.py"],
        ["--tee", "0:1", "program.py"],
        ["--rdzv-id", "1", "program.py"],
        ["--log-dir", "logs", "program.py"],
        [],
    ],
)
def test_options_that_only_torchrun_has_are_left_to_torchrun(arguments: list[str]) -> None:
    assert read_launch(arguments) is None


def test_the_arguments_of_the_program_are_its_own() -> None:
    launch = read_launch(["--nproc_per_node=3", "-m", "json.tool", "--nnodes", "2", "-m"])
    assert launch is not None and launch.ranks == 3 and not launch.tee and list(launch.shown) == [0, 1, 2]
    assert launch.command == [sys.executable, "-u", "-m", "json.tool", "--nnodes", "2", "-m"]
