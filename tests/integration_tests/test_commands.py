"""The shell commands and the launcher: environment checks, exit codes, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, until
from tests.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "VIRTUAL_ENV", "PYTHONPATH")
}
ENVIRONMENT["PYTHON"] = sys.executable


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=PATIENCE_S,
        check=False,
    )


def test_wrong_configurations_end_the_run_command_with_code_2_before_anything_starts(tmp_path: Path) -> None:
    done = run(ROOT / "run_grpo.sh", "--grpo.group_size", "1", "--training.stepz", "3", NGPU="2")
    assert done.returncode == 2
    assert "2 configuration problems" in done.stderr
    assert "Traceback" not in done.stderr
    assert "[run]" not in done.stderr
    for name, value in (("NGPU", "none"), ("LOG_RANK", "0,1"), ("LOG_RANK", "all"), ("MAX_RESTARTS", "-1")):
        done = run(ROOT / "run_grpo.sh", **{name: value})
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and f"{name}={value}" in done.stderr, done.stderr


def test_dry_run_plans_for_all_ranks_without_torchrun() -> None:
    done = run(ROOT / "run_grpo.sh", "--dry-run", NGPU="2")
    assert done.returncode == 0, done.stderr
    assert "# ranks: 2\n# mesh: 1 replicate × 2 shard × 1 tensor parallel\n" in done.stdout


def test_another_torchtitan_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    for command in ("run_grpo.sh", "scripts/run_tests.sh"):
        done = run(ROOT / command, PYTHONPATH=str(tmp_path))
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert f"`torchtitan` resolves to {tmp_path}/torchtitan, not to this checkout" in done.stderr


def test_environment_check_names_what_is_missing() -> None:
    # Without site-packages nothing is installed.
    done = run(sys.executable, "-S", ROOT / "scripts/check_environment.py", "--extras", "test")
    assert done.returncode == 1
    missing = {line.removesuffix(" is missing") for line in done.stdout.splitlines()}
    assert {"torch", "pydantic", "math-verify", "pytest"} <= missing
    assert "ruff" not in missing
    assert run(sys.executable, ROOT / "scripts/check_environment.py", "--only", "torch").returncode == 0


def launch(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torchtitan.utils.launch", "--standalone", "--nproc-per-node", *arguments]


@pytest.mark.parametrize(
    ("end", "starts", "code"),
    [("exit 75", 3, 75), ("kill -9 $BASHPID", 3, 137), ("exit 1", 1, 1), ("exit 0", 1, 0)],
)
def test_the_launcher_starts_ranks_again_unless_a_person_must_change_something_and_carries_their_exit_code(
    tmp_path: Path, end: str, starts: int, code: int
) -> None:
    temporary, program = tmp_path / "temporary", 'echo "$TORCHTITAN_LAUNCH ${TORCHTITAN_LOST_RANK:-nothing}"'
    temporary.mkdir()
    command = launch("1", "--max-restarts", "2", "--no-python", "bash", "-c", f"{program} >> {tmp_path}/starts; {end}")
    done = run(*command, PYTHONPATH=str(ROOT), TMPDIR=str(temporary))
    assert done.returncode == code and "Traceback" not in done.stderr and not list(temporary.iterdir())
    lines = (tmp_path / "starts").read_text().splitlines()
    assert len(lines) == starts and len({line.split()[0] for line in lines}) == 1
    assert all("rank 0" in line for line in lines[1:]) and "nothing" in lines[0]


def test_a_launcher_whose_first_machine_is_gone_says_so_without_a_traceback(tmp_path: Path) -> None:
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--master-addr", "127.0.0.1"]
    meeting += ["--master-port", str(free_ports(1)), "--role", "rank", "--tee", "3", "--no-python", "bash", "-c"]
    left = f"echo here >&2; until [[ -e {tmp_path}/gone ]]; do sleep 0.1; done; exit 75"
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torchtitan.utils.launch", "--node-rank", str(node), *meeting, program],
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        )
        for node, program in enumerate(["exit 2", left])
    ]
    try:
        nodes[0].communicate(timeout=PATIENCE_S)
        (tmp_path / "gone").touch()
        _, errors = nodes[1].communicate(timeout=PATIENCE_S)
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [2, 75]
    assert "[rank1]:here" in errors and "that of rank 0 has ended" in errors and "Traceback" not in errors


def test_the_launcher_passes_signals_on_and_waits_for_the_rank(tmp_path: Path) -> None:
    ready, saved, temporary = tmp_path / "ready", tmp_path / "saved", tmp_path / "temporary"
    temporary.mkdir()
    program = f"trap 'sleep 1; touch {saved}; exit 0' TERM; touch {ready}; while true; do sleep 0.1; done"
    process = subprocess.Popen(
        launch("1", "--no-python", "bash", "-c", program),
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
    )
    try:
        until(ready.exists, process=process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert saved.exists() and not list(temporary.iterdir())
    assert "Traceback" not in errors
