"""kill -9 of the launcher, of rank 0 and of each kind of child, at several moments, and signals to the process that a
user knows: nothing of a run stays, or it goes on, and the next start needs no hand."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import until
from tests.processes import ROOT, Processes, has_ended, started_by
from tests.runs import BRIEF, RUN_SECONDS, Run
from torchtitan.trainer.run_dir import whole_steps

pytestmark = pytest.mark.timeout(2 * RUN_SECONDS)

ENDLESS = "100000"
RANK, ACTOR, WORKER = (
    "torchtitan.grpo_train",
    "torchtitan.inference.engines.embedded",
    "torchtitan.rollout.rewards.reward_worker",
)
FORK_SERVER = "torchtitan.utils.fork_server"
REGISTRY, SERVER = '"part": "registry"', '"part": "shard server"'


def start(processes: Processes, checkpoint: Path, dump: Path, *options: str, **launch: Any) -> Run:
    """The default configuration, small, under the launcher, which may start its rank twice again."""
    return Run(
        processes, "debug_cpu", checkpoint, dump, *BRIEF, "--training.steps", ENDLESS, "--checkpoint.enable", "true",
        "--checkpoint.interval", "2", "--checkpoint.last_save_in_hf", "false", *options,
        **{"ranks": 1, "restarts": 2, **launch},
    )  # fmt: skip


def only(run: Run, words: str) -> psutil.Process:
    """The process of this kind."""
    return until(lambda: [job for job in started_by(run.process, words) if not has_ended(job.pid)], RUN_SECONDS)[0]


def kill(run: Run, words: str) -> None:
    """Kill the process of this kind, and wait until there is another one."""
    killed = only(run, words)
    killed.kill()
    run.wait(lambda: only(run, words).pid != killed.pid)


def trains_on(run: Run, steps: int = 2) -> None:
    """So many more steps are trained."""
    steps_before = len(run.steps())
    run.wait(lambda: len(run.steps()) >= steps_before + steps)


def test_what_is_killed_is_replaced_and_nothing_outlives_the_launcher(
    debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    run = start(processes, debug_checkpoint, tmp_path)
    # Each as soon as it is there, and once more while batches are trained.
    for kind in (REGISTRY, SERVER, ACTOR, WORKER):
        kill(run, kind)
    trains_on(run)
    fork_server = only(run, FORK_SERVER)
    for kind in (REGISTRY, SERVER, ACTOR, WORKER):
        kill(run, kind)
        trains_on(run)
    # Libraries have changed the rank's environment meanwhile, and all actors still come from one process.
    assert only(run, FORK_SERVER).pid == only(run, ACTOR).ppid() == fork_server.pid
    run.wait(lambda: bool(whole_steps(run.folder / "checkpoint")))
    kill(run, RANK)
    trains_on(run)
    assert len(run.events("ranks_started_again")) == 1
    children = run.process.children(recursive=True)
    assert {RANK, ACTOR, WORKER} <= {word for child in children for word in child.cmdline()}
    run.process.kill()
    until(lambda: all(has_ended(child.pid) for child in children))
    # Nobody holds the folder any more.
    steps = whole_steps(run.folder / "checkpoint")[-1]
    again = Run(
        processes, "debug_cpu", debug_checkpoint, tmp_path, *BRIEF, "--training.steps", str(steps + 1),
        "--checkpoint.enable", "true", "--checkpoint.resume", "latest", ranks=1,
    )  # fmt: skip
    again.end(0)
    assert whole_steps(again.folder / "checkpoint")[-1] == steps + 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "moment",
    [lambda run: only(run, RANK), lambda run: only(run, ACTOR)],
    ids=["import", "actors"],
)
def test_a_launcher_that_is_killed_early_leaves_nothing(
    debug_checkpoint: Path, processes: Processes, tmp_path: Path, moment: Callable[[Run], object]
) -> None:
    run = start(processes, debug_checkpoint, tmp_path)
    moment(run)
    children = run.process.children(recursive=True)
    run.process.kill()
    until(lambda: all(has_ended(child.pid) for child in children))
    # What was started in between has ended as well.
    words = str(tmp_path)
    until(lambda: not [job for job in psutil.process_iter(["cmdline"]) if words in " ".join(job.info["cmdline"] or [])])


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_early_is_started_again(
    debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    """While it imports, and the next one as soon as it has actors."""
    run = start(processes, debug_checkpoint, tmp_path)
    kill(run, RANK)
    only(run, ACTOR)
    kill(run, RANK)
    trains_on(run)


@pytest.mark.exhaustive
def test_signals_to_the_launcher_reach_the_run(debug_checkpoint: Path, processes: Processes, tmp_path: Path) -> None:
    run = start(processes, debug_checkpoint, tmp_path)
    # Before there is a run it waits for one, from when the launcher has blocked it.
    status = Path(f"/proc/{run.process.pid}/status")
    blocked = re.compile(r"SigBlk:\s*(\w+)")
    until(lambda: int(blocked.findall(status.read_text())[0], 16) & 1 << signal.SIGUSR1 - 1)
    run.process.send_signal(signal.SIGUSR1)
    run.wait(lambda: any(tmp_path.glob("*/hf/step-*/config.json")))
    trains_on(run)
    run.end(128 + signal.SIGHUP, by=signal.SIGHUP)
    assert whole_steps(run.folder / "checkpoint")[-1] == run.steps()[-1]["step"]
    assert "Traceback" not in run.log()


@pytest.mark.exhaustive
def test_a_terminal_that_closes_ends_the_run_with_a_checkpoint(debug_checkpoint: Path, tmp_path: Path) -> None:
    words = [
        str(ROOT / "run_grpo.sh"), "--job.dump_folder", str(tmp_path / "runs"),
        "--model.hf_assets_path", str(debug_checkpoint), *BRIEF, "--training.steps", ENDLESS,
        "--checkpoint.enable", "true", "--checkpoint.interval", ENDLESS, "--checkpoint.last_save_in_hf", "false",
    ]  # fmt: skip
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(PYTHON=sys.executable, TORCHTITAN_DEVICE="cpu", OMP_NUM_THREADS="1")
        os.execv("/bin/bash", ["bash", *words])
    try:
        metrics = tmp_path / "runs" / "latest" / "metrics.jsonl"

        def trained() -> bool:
            with contextlib.suppress(OSError):
                os.set_blocking(terminal, False)
                os.read(terminal, 1 << 16)  # or the run would wait for a reader
            return metrics.exists() and metrics.read_text().count('"loss"') >= 2

        until(trained, RUN_SECONDS)
        children = psutil.Process(pid).children(recursive=True)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
        until(lambda: all(has_ended(child.pid) for child in children))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    (step,) = whole_steps(metrics.parent / "checkpoint")
    assert f'"step": {step},' in metrics.read_text().splitlines()[-1]
