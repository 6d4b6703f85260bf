"""Processes that are forks of one that has loaded what they need: each is as if it had been started anew."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.processes import ROOT, has_ended
from torchtitan.inference.engines.embedded import forking
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.fork_server import ForkServer

# What a process knows of itself, as JSON in its log; then it does what its second argument says.
TELLS = """
import json, os, random, sys, threading, time
import numpy
print(json.dumps({
    "leads": os.getsid(0) == os.getpid() == os.getpgrp(), "arguments": sys.argv[1:], "name": __name__,
    "key": os.environ.get("TORCHTITAN_TEST_TOKEN"), "threads": os.environ["OMP_NUM_THREADS"],
    "shown": "sesame" in open("/proc/self/environ").read(), "command": open("/proc/self/cmdline").read(),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:4],
    "seeds": [random.random(), float(numpy.random.rand())], "loaded": "wave" in sys.modules,
}), flush=True)
exec(sys.argv[2])
"""
SLEEPS = "time.sleep(600)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tells.py").write_text(TELLS)
    return tmp_path


@pytest.fixture
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return child_environment(threads=1, TORCHTITAN_TEST_TOKEN="sesame")


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ForkServer]:
    started = ForkServer(["numpy", "wave"], environment)
    yield started
    started.close()


def command(word: str, does: str = "") -> list[str]:
    return [sys.executable, "-m", "tells", word, does]


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def reports_of(child: ChildProcess) -> list[dict[str, Any]]:
    assert child.log_file is not None
    until(lambda: child.log_file.read_text().endswith("}\n"))  # type: ignore[union-attr]
    return [json.loads(line) for line in child.log_file.read_text().splitlines()]


def test_a_fork_is_what_a_new_process_would_be(folder: Path, environment: dict[str, str], server: ForkServer) -> None:
    children = [ChildProcess(name, folder / f"{name}.log") for name in ("a", "b", "new")]

    async def work() -> None:
        for child in children:
            await child.launch(command(child._what), environment, starter=None if child._what == "new" else server)
        for child in children:
            await child.wait()
            assert child.describe_end() == f"{child._what} ended with exit code 0"

    run(work)
    (first,), (second,), (new,) = map(reports_of, children)
    assert first["loaded"] and not new["loaded"]
    assert new["shown"] and not first["shown"], "the key of a fork stands nowhere in /proc"
    assert len({*first["seeds"], *second["seeds"]}) == 4
    for facts, name in ((first, "a"), (second, "b")):
        assert facts["arguments"] == [name, ""] and facts["command"].split("\0")[0].split() == command(name)[:-1]
        for key in ("leads", "name", "key", "threads", "files"):
            assert facts[key] == new[key], key


@pytest.mark.parametrize(
    ("does", "end"),
    [
        ("sys.exit(3)", "it ended with exit code 3"),
        ("sys.exit('no')", "it ended with exit code 1"),
        ("raise OSError", "it ended with exit code 1"),
        ("os.kill(os.getpid(), 11)", "it was killed by SIGSEGV"),
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "it ended with exit code 0"),
    ],
)
def test_the_end_of_a_fork_is_told(
    folder: Path, environment: dict[str, str], server: ForkServer, does: str, end: str
) -> None:
    child = ChildProcess("it", folder / "log")

    async def work() -> None:
        await child.launch(command("-", does), environment, starter=server)
        await child.wait()

    run(work)
    assert child.describe_end() == end
    assert ("OSError" in child.log_tail()) == ("OSError" in does)


def test_a_fork_that_ignores_sigterm_is_stopped_with_what_it_has_started(
    folder: Path, environment: dict[str, str], server: ForkServer
) -> None:
    child = ChildProcess("it", folder / "log")
    does = "import signal; signal.signal(15, signal.SIG_IGN); os.fork(); open('up' + str(os.getpid()), 'w');" + SLEEPS

    async def work() -> None:
        await child.launch(command("-", f"os.chdir({str(folder)!r}); {does}"), environment, starter=server)
        await asyncio.to_thread(until, lambda: len(list(folder.glob("up*"))) == 2)
        await child.stop(grace_s=0.1)

    run(work)
    assert child.describe_end() == "it was killed by SIGKILL"
    assert all(until(lambda pid=int(file.name[2:]): has_ended(pid)) for file in folder.glob("up*"))


def test_forks_outlive_a_fork_server_that_is_killed_and_others_are_started_anew(
    folder: Path, environment: dict[str, str], server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    child, later = ChildProcess("it", folder / "log"), ChildProcess("the next", folder / "later")

    async def work() -> None:
        await child.launch(command("-", SLEEPS), environment, starter=server)
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: not server.alive)
        with caplog.at_level(logging.WARNING):
            await later.launch(command("-", SLEEPS), environment, starter=server)
        assert child.alive and later.alive and "does not come from the fork server" in caplog.text
        for process in (child, later):
            os.kill(process.pid or 0, signal.SIGKILL)
            await process.wait()

    run(work)
    assert "exit code is unknown" in child.describe_end() and later.describe_end() == "the next was killed by SIGKILL"


THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@pytest.mark.parametrize("modules", [["threaded"], ["no_such_module"]])
def test_a_fork_server_that_must_not_fork_or_cannot_load_forks_nothing(
    folder: Path, environment: dict[str, str], modules: Sequence[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "threaded.py").write_text(THREADED)
    server, child = ForkServer(modules, environment), ChildProcess("it", folder / "log")

    async def work() -> None:
        await child.launch(command("-"), environment, starter=server)
        await child.wait()

    run(work)
    server.close()
    assert not reports_of(child)[0]["loaded"] and child.describe_end() == "it ended with exit code 0"
    assert modules[0] in capfd.readouterr().err


# A user's script, which nobody may import; it tells the numbers of its fork server and of a fork, and is then killed.
SCRIPT = """
import asyncio, pathlib, sys
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.fork_server import ForkServer

open(sys.argv[1] + "/runs", "a").write("+")

async def work():
    environment = child_environment(1)
    server, child = ForkServer(["numpy"], environment), ChildProcess("it", pathlib.Path("log"))
    await child.launch([sys.executable, "-m", "tells", "-", "time.sleep(600)"], environment, starter=server)
    print(server.pid, child.pid, flush=True)
    await child.wait()

asyncio.run(work())
"""


def test_a_fork_server_imports_no_script_and_ends_with_its_parent(folder: Path, environment: dict[str, str]) -> None:
    (folder / "script.py").write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, "script.py", "."], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    server, fork = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        assert until(lambda: has_ended(server)) and not has_ended(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
    assert (folder / "runs").read_text() == "+"


# Whatever is computed while the modules are loaded would be done by threads that no fork has.
LOADS = """
import importlib, os, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Counts(TorchDispatchMode):
    operations = []
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        Counts.operations.append(str(operation))
        return operation(*args, **(kwargs or {}))

with Counts():
    for module in sys.argv[1:]:
        importlib.import_module(module)
print(Counts.operations, torch.cuda.is_initialized(), len(os.listdir("/proc/self/task")))
"""


def test_the_engine_is_loaded_without_tensors_devices_and_threads() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOADS, *forking.MODULES], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**child_environment(threads=2), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.stdout.split("\n")[-2] == "[] False 1"


def test_a_run_has_one_fork_server_whatever_libraries_add_to_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "MODULES", ("wave",))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    forking.close()
    try:
        forking.prepare(child_environment(threads=1))
        of_run = forking.starter(child_environment(threads=1))
        later = child_environment(threads=1, TORCHINDUCTOR_CACHE_DIR="/somewhere", CUDA_MODULE_LOADING="LAZY")
        assert of_run is not None and forking.starter(later) is of_run and of_run.alive
        forking.close()
        # Without a run, the environment of each actor decides.
        before = forking.starter(child_environment(threads=1))
        after = forking.starter(later)
        assert before is not None and after is not None and after is not before
        assert (before.alive, after.alive) == (False, True)
    finally:
        forking.close()
