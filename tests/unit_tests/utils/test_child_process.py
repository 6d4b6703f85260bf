"""A process that we start: how its end is told, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tests.processes import has_ended
from torchtitan.errors import UserError
from torchtitan.utils import child_process
from torchtitan.utils.child_process import ChildProcess, child_environment, end_process, start_beside

# Ignores SIGTERM and has two children, one of them in a session of its own; writes their numbers to a file.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
partial = pathlib.Path(sys.argv[1] + ".tmp")
partial.write_text(" ".join(str(child.pid) for child in children))
partial.rename(sys.argv[1])
if len(sys.argv) > 2:
    os._exit(3)
time.sleep(600)
"""


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", program, *map(str, arguments)]


def wait_for_numbers(path: Path) -> list[int]:
    until(path.exists)
    return [int(number) for number in path.read_text().split()]


def ended(pid: int) -> bool:
    return bool(until(lambda: has_ended(pid)))


def test_a_stubborn_process_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    child = ChildProcess("the engine", tmp_path / "logs" / "engine.log")

    async def work() -> list[int]:
        await child.launch(python(STUBBORN, tmp_path / "pids"), child_environment(threads=1))
        numbers = await asyncio.to_thread(wait_for_numbers, tmp_path / "pids")
        assert child.alive and child.pid is not None
        await child.stop(grace_s=0.2)
        assert not child.alive and child.describe_end() == "the engine was killed by SIGKILL"
        return [child.pid, *numbers]

    assert all(map(ended, asyncio.run(work())))


def test_processes_in_the_group_of_a_dead_child_are_killed(tmp_path: Path) -> None:
    child = ChildProcess("the engine", tmp_path / "engine.log")

    async def work() -> list[int]:
        await child.launch(python(STUBBORN, tmp_path / "pids", "ends"), child_environment(threads=1))
        await asyncio.wait_for(child.wait(), PATIENCE_S)
        return wait_for_numbers(tmp_path / "pids")

    in_group, in_own_session = asyncio.run(work())
    try:
        assert child.describe_end() == "the engine ended with exit code 3"
        assert ended(in_group)
    finally:
        os.kill(in_own_session, 9)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('no such model'); raise SystemExit(2)", "the engine ended with exit code 2; .*no such model"),
        ("import time; print('loading', flush=True); time.sleep(600)", "was not listening after 1 s; .*loading"),
    ],
)
def test_a_process_without_a_port_is_reported_with_its_log(tmp_path: Path, program: str, words: str) -> None:
    child = ChildProcess("the engine", tmp_path / "engine.log")

    async def work() -> None:
        await child.launch(python(program), child_environment(threads=1))
        try:
            await child.read_port(tmp_path / "port", time.monotonic() + 1, "after 1 s")
        finally:
            await child.stop()

    with pytest.raises(UserError, match=words):
        asyncio.run(work())


def test_a_process_is_launched_again(tmp_path: Path) -> None:
    child = ChildProcess("the worker")

    async def ask() -> bytes:
        await child.launch(python("print(input() + '!')"), child_environment(threads=1), pipes=True)
        to_child, from_child = child.streams
        to_child.write(b"hello\n")
        return await asyncio.wait_for(from_child.readline(), PATIENCE_S)

    async def work() -> None:
        assert await ask() == b"hello!\n"
        assert await ask() == b"hello!\n"
        await child.stop()
        assert child.describe_end() in ("the worker ended with exit code 0", "the worker was killed by SIGTERM")

    asyncio.run(work())


@pytest.mark.parametrize("turns", range(6))
def test_a_start_that_is_broken_off_leaves_a_process_that_can_be_stopped(turns: int) -> None:
    """In the midst of it, Python 3.12 waits for ever for the process."""
    child = ChildProcess("the worker")

    async def work() -> None:
        start = asyncio.create_task(child.launch(python("input()"), child_environment(threads=1), pipes=True))
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait([start], timeout=PATIENCE_S)
        assert start.cancelled() and child.alive and child.streams
        await child.stop()
        assert not child.alive

    asyncio.run(asyncio.wait_for(work(), 2 * PATIENCE_S))


def test_children_do_not_see_torchruns_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    environment = child_environment(2, TOKEN="secret")
    assert environment["OMP_NUM_THREADS"] == "2" and environment["TOKEN"] == "secret"
    assert "MASTER_ADDR" not in environment and "TORCHELASTIC_RUN_ID" not in environment


def test_the_keys_of_the_run_stand_in_no_environment_that_others_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of a process that belongs to a loop nor of one that does not; and what they start gets none."""
    program = tmp_path / "torchtitan_program.py"
    program.write_text(
        "import os, time, torchtitan\n"
        "shown = open('/proc/self/environ').read()\n"
        "print(os.environ['TORCHTITAN_TEST_TOKEN'], 'sesame' in shown, 'TORCHTITAN_KEYS' in os.environ, flush=True)\n"
    )
    environment = child_environment(1, TORCHTITAN_TEST_TOKEN="sesame")
    environment["PYTHONPATH"] += f":{tmp_path}"
    # A program of ours by its name, for the time of this test.
    command = [sys.executable, "-m", "torchtitan_program"]
    monkeypatch.setattr(child_process, "OURS", "torchtitan_")
    child = ChildProcess("it", tmp_path / "log")

    async def work() -> None:
        await child.launch(command, environment)
        await asyncio.wait_for(child.wait(), PATIENCE_S)

    asyncio.run(work())
    beside = start_beside(command, environment, tmp_path / "log", [])
    assert beside.wait(PATIENCE_S) == 0
    assert (tmp_path / "log").read_text() == "sesame False False\n" * 2


def test_children_get_the_keys_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "MYSQL_PWD", "MY_AUTH", "PROXY", "INDEX"}
    keys.add("TORCHTITAN_ACTOR_TOKEN")
    addresses = {"PROXY": "http://me:word@host", "INDEX": "https://word@host/simple"}
    for name in keys:
        monkeypatch.setenv(name, addresses.get(name, "x"))
    for name, value in {"TOKENIZERS_PARALLELISM": "false", "OLDPWD": "/", "PLAIN": "https://host/a"}.items():
        monkeypatch.setenv(name, value)

    def given(**options: Any) -> set[str]:
        return keys & set(child_environment(1, **options))

    assert given() == set() and {"TOKENIZERS_PARALLELISM", "OLDPWD", "PLAIN"} <= set(child_environment(1))
    assert given(secrets=["HF_TOKEN"]) == {"HF_TOKEN"}
    assert given(secrets=True) == keys - {"TORCHTITAN_ACTOR_TOKEN", "HF_TOKEN"}
    assert given(TORCHTITAN_ACTOR_TOKEN="y") == {"TORCHTITAN_ACTOR_TOKEN"}


def test_process_that_outlives_sigkill_is_said_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A call to a disk that hangs: what else its parent has to end comes after it."""
    done = list[str]()

    class Stuck:
        pid = 7

        def terminate(self) -> None:
            done.append("terminate")

        def kill(self) -> None:
            done.append("kill")

        def wait(self, seconds: float) -> None:
            raise subprocess.TimeoutExpired("it", seconds)

    end_process(cast("subprocess.Popen[bytes]", Stuck()), 0.1)
    assert done == ["terminate", "kill"] and "process 7 outlived SIGKILL" in caplog.text
