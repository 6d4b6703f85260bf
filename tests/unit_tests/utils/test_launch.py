"""What the launcher says of its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.launcher import api
from torch.distributed.run import parse_args

from tests.patience import until
from tests.processes import ROOT, free_ports
from torchtitan.errors import EXIT_RETRYABLE
from torchtitan.utils import elastic_launch, local_ranks
from torchtitan.utils.child_process import LAUNCH_VARIABLE
from torchtitan.utils.local_ranks import StoppedRanks


def test_a_rank_that_is_stopped_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = StoppedRanks()
    monkeypatch.setattr(local_ranks, "STOPPED_S", 0)
    ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    numbers = [rank.pid for rank in ranks]
    message = f"[launch] local rank 1 has been stopped for 0 s: kill -CONT {ranks[1].pid} continues it\n"
    try:
        for _ in range(2):
            os.kill(ranks[1].pid, signal.SIGSTOP)
            until(lambda: psutil.Process(ranks[1].pid).status() == psutil.STATUS_STOPPED)
            stopped.check(numbers)
            stopped.check(numbers)
            assert capfd.readouterr().err == message
            os.kill(ranks[1].pid, signal.SIGCONT)
            until(lambda: psutil.Process(ranks[1].pid).status() != psutil.STATUS_STOPPED)
            stopped.check(numbers)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        until(lambda: psutil.Process(ranks[1].pid).status() == psutil.STATUS_STOPPED)
        monkeypatch.setattr(local_ranks, "STOPPED_S", 600)
        stopped.check(numbers)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    stopped.check(numbers)  # they are gone
    assert capfd.readouterr().err == ""


NOWHERE = "no-such-host.invalid"
TWO = ["--nnodes", "2", "--node-rank", "1", "--rdzv-id", "1"]
RENDEZVOUS = [*TWO, "--rdzv-backend", "c10d", "--rdzv-endpoint"]


@pytest.mark.parametrize(
    ("arguments", "local_addr", "code", "named"),
    [
        (["--standalone"], "127.0.0.1", 0, ""),
        (["--nnodes", "1"], "127.0.0.1", 0, ""),
        ([], "127.0.0.1", 0, ""),
        (["--standalone", "--local-addr", "::1"], "::1", 0, ""),
        ([*TWO, "--master-addr", "127.0.0.1"], None, 0, ""),
        ([*TWO, "--master-addr", "::1"], None, 0, ""),
        ([*TWO, "--master-addr", NOWHERE], None, EXIT_RETRYABLE, f"--master-addr: {NOWHERE}"),
        ([*RENDEZVOUS, "127.0.0.1:29400"], None, 1, f"this machine's name {NOWHERE}"),
        ([*RENDEZVOUS, "127.0.0.1:29400", "--local-addr", "127.0.0.1"], "127.0.0.1", 0, ""),
        ([*RENDEZVOUS, "[::1]:29400", "--local-addr", "127.0.0.1"], "127.0.0.1", 0, ""),
        ([*RENDEZVOUS, f"{NOWHERE}:29400", "--local-addr", "127.0.0.1"], None, 75, f"--rdzv-endpoint: {NOWHERE}"),
        (["--nnodes", "1:2", *RENDEZVOUS[2:], "127.0.0.1"], None, 1, f"this machine's name {NOWHERE}"),
    ],
)
def test_names_are_looked_up_before_anything_waits_and_one_machine_needs_none(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    local_addr: str | None,
    code: int,
    named: str,
) -> None:
    def numbers_only(host: str, *_: object, **__: object) -> list[object]:
        """Like a machine off its network."""
        if host == NOWHERE:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    started = []
    monkeypatch.setattr(socket, "getaddrinfo", numbers_only)
    monkeypatch.setattr(socket, "getfqdn", lambda *_: NOWHERE)
    monkeypatch.setattr(elastic_launch, "NAME_TIMEOUT_S", 0.0)
    monkeypatch.setattr(elastic_launch, "NAME_INTERVAL_S", 0.0)
    monkeypatch.setattr(elastic_launch, "run", lambda parsed: started.append(parsed.local_addr))
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(LAUNCH_VARIABLE, "launch")
    monkeypatch.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(api, "LocalElasticAgent", None)
    monkeypatch.setattr(processes, "_terminate_process_handler", None)
    monkeypatch.setattr(torchrun, "config_from_args", None)
    assert elastic_launch.main([*arguments, "program.py"]) == code
    lines = capfd.readouterr().err.splitlines()
    assert started == ([] if code else [local_addr]) and named in "".join(lines[-1:])
    assert len(lines) <= 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*TWO, "--rdzv-endpoint", "host:abc"], "--rdzv-endpoint host:abc: "),
        ([*TWO, "--rdzv-endpoint", "host:70000"], "--rdzv-endpoint host:70000: "),
        ([*TWO, "--rdzv-endpoint", "a host:1"], "--rdzv-endpoint a host:1: "),
        (["--nnodes", "1", "--rdzv-endpoint", "host:abc"], "--rdzv-endpoint host:abc: "),
        (["--nnodes", "two"], "--nnodes two: "),
        (["--nnodes", "1:2:3"], "--nnodes 1:2:3: "),
        (["--nnodes", "1:"], "--nnodes 1:: "),
        (["--nnodes", "0"], "--nnodes 0: "),
        (["--nnodes", "2:1"], "--nnodes 2:1: "),
        (["--standalone", "--nproc-per-node", "many"], "Unsupported nproc_per_node value: many"),
        (["--standalone", "--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--standalone", "--rdzv-conf", "timeout"], "timeout"),
        (["--standalone", "--local-ranks-filter", "first"], "--local_ranks_filter must be"),
    ],
)
def test_malformed_arguments_are_refused_in_one_line(arguments: list[str], named: str) -> None:
    command = [sys.executable, "-m", "torchtitan.utils.launch", *arguments, "program.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("[launch] ")]
    assert named in line and "Traceback" not in ended.stderr
    assert ended.returncode == 2


def test_a_name_that_is_published_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    problems = iter(["Name or service not known"] * 2)
    monkeypatch.setattr(elastic_launch, "NAME_INTERVAL_S", 0.0)
    monkeypatch.setattr(elastic_launch, "_lookup_problem", lambda host: next(problems, ""))
    elastic_launch.find_names(parse_args([*TWO, "--master-addr", "rank0.example", "program.py"]))
    (line,) = capfd.readouterr().err.splitlines()
    assert "rank0.example does not resolve" in line and "trying 60 s" in line


# A rank: it writes how many ranks there are and why, and then works until its launcher stops it. Of two ranks, the
# survivor of a lost machine fails as one whose connection has broken; the last two end by themselves.
RANK = """
import os, pathlib, sys, time
from torchtitan.config.job_config import Comm
from torchtitan.distributed import device
folder, ranks = pathlib.Path(sys.argv[1]), os.environ["WORLD_SIZE"]
device.init_process_group(Comm())
names = ("RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHTITAN_LOST_RANK")
with open(folder / f"ranks-{sys.argv[2]}", "a") as file:
    file.write(" ".join([ranks, *(os.environ.get(name, "-") for name in names)]) + chr(10))
while not (folder / "end").exists():
    if ranks == "2" and (folder / "lost").exists() and not (folder / "again").exists():
        os._exit(75)
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.slow
def test_a_machine_that_is_lost_and_comes_back_costs_no_restart(tmp_path: Path) -> None:
    script, port = tmp_path / "rank.py", free_ports(1)
    script.write_text(RANK)
    range_of_two = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    timing = "last_call_timeout=5,join_timeout=200,keep_alive_interval=1,keep_alive_max_attempt=5"
    meeting = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1", "--rdzv-conf", timing]
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torchtitan.utils.launch", *range_of_two, *meeting, "--local-addr", name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHTITAN_DEVICE": "cpu"}
        log = (tmp_path / f"log-{name}").open("ab")
        started.append(subprocess.Popen(
            [*command, str(script), str(tmp_path), name], env=environment, stderr=log, start_new_session=True
        ))  # fmt: skip
        return started[-1]

    def rows(name: str) -> list[str]:
        path = tmp_path / f"ranks-{name}"
        return path.read_text().splitlines() if path.exists() else []

    def meets() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    first, second = "127.0.0.8", "127.0.0.9"
    try:
        survivor = start(first)
        # The launcher that comes first serves the meeting, and must not be the one that is lost.
        until(meets, process=survivor)
        lost = start(second)
        # Where the second one starts slowly, the first one has begun without it.
        until(lambda: bool(rows(first) and rows(second)) and rows(first)[-1].startswith("2 0 0 "))
        before = len(rows(first))
        os.killpg(lost.pid, signal.SIGKILL)
        for child in psutil.process_iter(["cmdline"]):  # its rank has a session of its own
            if (child.info["cmdline"] or [])[-3:] == [str(script), str(tmp_path), second]:
                child.kill()
        (tmp_path / "lost").touch()
        until(lambda: rows(first)[-1].startswith("1 "))
        (tmp_path / "again").touch()
        again = start(second)
        until(lambda: rows(first)[-1].startswith("2 ") and len(rows(first)) == before + 2)
        (tmp_path / "end").touch()
        assert [survivor.wait(200), again.wait(200)] == [0, 0]
    finally:
        for launcher in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        for child in psutil.process_iter(["cmdline"]):
            if str(tmp_path) in (child.info["cmdline"] or []):
                child.kill()
    # Ranks, rank, restarts that were used up, and why they were started again.
    assert rows(first)[before:] == [
        f"1 0 0 machine {second} was lost (1 train on, 2 did before)",
        f"2 0 0 machine {second} has joined (2 train on, 1 did before)",
    ]
