"""What the launcher says of its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.patience import until
from torchtitan.utils import launch
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
