"""Stop signals in a process of their own: flags, the second signal, the deadline."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, until
from tests.processes import free_ports
from torchtitan.trainer.signals import REPEAT_WINDOW_S, SignalFlags

CHILD = """
import sys, time
from torchtitan.trainer.signals import SignalFlags

with SignalFlags(save_deadline_s=float(sys.argv[1]), saves=sys.argv[3] == "True") as flags:
    print("ready", flush=True)
    while not flags.stop_requested:
        time.sleep(0.01)
    print("saving", flush=True)
    time.sleep(float(sys.argv[2]))
print("saved", flush=True)
sys.exit(flags.exit_code)
"""


def start(deadline_s: float, saving_s: float, saves: bool = True, *, by: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    arguments = [*by, sys.executable, "-c", CHILD, str(deadline_s), str(saving_s), str(saves)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    STARTED.append(process)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """What a test has started ends with it, also where the signal that was to end it does nothing."""
    yield
    while STARTED:
        STARTED.pop().kill()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    # What hangs in these tests does so for longer.
    output, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output, errors


@pytest.mark.parametrize(("saves", "message"), [(True, "saving and exiting"), (False, "without a checkpoint")])
def test_first_signal_saves_and_its_copies_do_no_harm(saves: bool, message: str) -> None:
    process = start(deadline_s=20, saving_s=0.3, saves=saves)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # the launcher's copy of the same Ctrl-C
    code, output, errors = finish(process)
    assert code == 128 + signal.SIGINT and "saved" in output
    assert errors.count("SIGINT") == 1 and message in errors and " within 20 s" in errors


@pytest.mark.parametrize(
    ("program", "imported"),
    [
        ("torchtitan.utils.launch", "psutil"),
        ("torchtitan.preflight", "pydantic"),
        ("torchtitan.grpo_train", "pydantic"),
    ],
)
def test_ctrl_c_while_a_program_is_imported_shows_no_traceback(program: str, imported: str, tmp_path: Path) -> None:
    interrupts = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(1)"
    (tmp_path / f"{imported}.py").write_text(interrupts)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


@pytest.mark.slow
def test_ctrl_c_ends_a_rank_that_waits_for_the_others() -> None:
    program = "from torchtitan.config.job_config import Comm\nfrom torchtitan.distributed import device\n"
    program += f"device.init_process_group(Comm(train_timeout_seconds={10 * PATIENCE_S:.0f}))"
    port = free_ports(1)
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **launched}, stderr=subprocess.PIPE, text=True
    )
    try:
        with contextlib.closing(socket.socket()) as other:
            until(lambda: other.connect_ex(("127.0.0.1", port)) == 0, process=process)
            process.send_signal(signal.SIGINT)
            code, _, errors = finish(process)
    finally:
        process.kill()
    assert code == -signal.SIGINT and "Traceback" not in errors


@pytest.mark.parametrize(("by", "ended_by"), [((), signal.SIGHUP), (("nohup",), signal.SIGTERM)])
def test_a_hangup_saves_unless_it_is_to_be_ignored(by: tuple[str, ...], ended_by: signal.Signals) -> None:
    process = start(deadline_s=PATIENCE_S, saving_s=0, by=by)
    process.send_signal(signal.SIGHUP)
    if by:
        process.send_signal(signal.SIGTERM)
    code, output, errors = finish(process)
    assert code == 128 + ended_by and "saved" in output
    assert ("SIGHUP" in errors) != bool(by)


def test_second_signal_leaves_at_once() -> None:
    process = start(deadline_s=10 * PATIENCE_S, saving_s=10 * PATIENCE_S)
    process.send_signal(signal.SIGTERM)
    time.sleep(REPEAT_WINDOW_S + 0.3)
    process.send_signal(signal.SIGTERM)
    code, output, errors = finish(process)
    assert code == 128 + signal.SIGTERM and "saved" not in output
    assert "exiting at once" in errors


def test_a_save_that_hangs_is_cut_off() -> None:
    process = start(deadline_s=0.5, saving_s=10 * PATIENCE_S)
    process.send_signal(signal.SIGTERM)
    code, output, errors = finish(process)
    assert code == 128 + signal.SIGTERM and "saved" not in output
    assert "checkpoint.save_deadline_s" in errors


def test_export_requests_are_taken_once_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalFlags(save_deadline_s=5) as flags:
        assert not flags.take_export_request()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert flags.take_export_request() and not flags.take_export_request()
        assert not flags.stop_requested and flags.exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_was_told_has_the_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    left: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr("torchtitan.trainer.signals.os._exit", left.put)
    with SignalFlags(save_deadline_s=0.1) as flags:
        flags.start_deadline()
        flags.start_deadline()
        assert left.get(timeout=PATIENCE_S) == 128 + signal.SIGTERM
        time.sleep(0.2)  # the second time is no second clock
    assert left.empty()


def test_another_rank_waits_for_the_leading_one() -> None:
    """Its own signal neither asks for a stop nor starts a clock that would tear the job down."""
    with SignalFlags(0.05, leads=False) as flags:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert not flags.stop_requested
        assert flags.exit_code == 0
