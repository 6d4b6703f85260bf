"""What the launcher says of its ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.launcher import api
from torch.distributed.run import parse_args

from tests.patience import until
from torchtitan.errors import EXIT_RETRYABLE
from torchtitan.utils import launch
from torchtitan.utils.child_process import LAUNCH_VARIABLE, LAUNCHER_VARIABLE
from torchtitan.utils.launch import Agent


def test_a_rank_that_is_stopped_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = Agent.__new__(Agent)
    agent._stopped = {}
    monkeypatch.setattr(launch, "STOPPED_S", 0)
    ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    monkeypatch.setattr(Agent, "ranks", tuple(rank.pid for rank in ranks))
    said = f"[launch] local rank 1 has been stopped for 0 s: kill -CONT {ranks[1].pid} continues it\n"
    try:
        for _ in range(2):
            os.kill(ranks[1].pid, signal.SIGSTOP)
            until(lambda: psutil.Process(ranks[1].pid).status() == psutil.STATUS_STOPPED)
            agent.name_stopped()
            agent.name_stopped()
            assert capfd.readouterr().err == said
            os.kill(ranks[1].pid, signal.SIGCONT)
            until(lambda: psutil.Process(ranks[1].pid).status() != psutil.STATUS_STOPPED)
            agent.name_stopped()
        os.kill(ranks[1].pid, signal.SIGSTOP)
        until(lambda: psutil.Process(ranks[1].pid).status() == psutil.STATUS_STOPPED)
        monkeypatch.setattr(launch, "STOPPED_S", 600)
        agent.name_stopped()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    agent.name_stopped()  # they are gone
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
    monkeypatch.setattr(launch, "NAME_TIMEOUT_S", 0.0)
    monkeypatch.setattr(launch, "NAME_INTERVAL_S", 0.0)
    monkeypatch.setattr(launch, "run", lambda parsed: started.append(parsed.local_addr))
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", LAUNCHER_VARIABLE):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(LAUNCH_VARIABLE, "launch")
    monkeypatch.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(api, "LocalElasticAgent", None)
    monkeypatch.setattr(processes, "_terminate_process_handler", None)
    assert launch.main([*arguments, "program.py"]) == code
    lines = capfd.readouterr().err.splitlines()
    assert started == ([] if code else [local_addr]) and named in "".join(lines[-1:])
    assert len(lines) <= 1


def test_a_name_that_is_published_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    problems = iter(["Name or service not known"] * 2)
    monkeypatch.setattr(launch, "NAME_INTERVAL_S", 0.0)
    monkeypatch.setattr(launch, "_lookup_problem", lambda host: next(problems, ""))
    launch.find_names(parse_args([*TWO, "--master-addr", "rank0.example", "program.py"]))
    (line,) = capfd.readouterr().err.splitlines()
    assert "rank0.example does not resolve" in line and "trying 60 s" in line
