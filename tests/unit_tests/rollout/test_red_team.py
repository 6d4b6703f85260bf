"""The red team (tests/red_team.py) in isolated workers: what it attempts is refused or bounded, and calls go on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import torchtitan
from tests import red_team
from tests.patience import PATIENCE_S, until
from tests.trajectories import answer
from torchtitan.config.job_config import JobConfig
from torchtitan.rollout.environments.environment_pool import AgentPool, EnvironmentPool
from torchtitan.rollout.gateway.gateway_process import SessionAccess
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt
from torchtitan.rollout.workers import isolation
from torchtitan.rollout.workers import worker_process as process
from torchtitan.rollout.workers.worker_process import LOGGED_BYTES, CallFailed
from torchtitan.utils.json_lines import EventLog

MARK = "the-key-of-the-run"
# A system call of x86-64.
ADD_KEY = 248


@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the red team looks for: a run with a key, a home, and sockets that listen."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # /tmp would be hidden as a whole
    run, home = folder / "run", folder / "home"
    run.mkdir()
    for file in (run / "journal.jsonl", *(home / name for name in (".ssh/id", ".pgpass", ".agent/login", "notes"))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(MARK)
    keyring = f"red-team-{os.getpid()}"
    if os.uname().machine == "x86_64":
        red_team.LIBC.syscall(red_team.KEYCTL, 1, None)  # a session keyring of our own
        red_team.LIBC.syscall(ADD_KEY, b"user", keyring.encode(), MARK.encode(), len(MARK), red_team.SESSION_KEYRING)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SOME_API_KEY", MARK)
    monkeypatch.setenv("PROXY", f"http://me:{MARK}@proxy")
    abstract, path = f"\0{tmp_path}", str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract_socket,
        socket.socket(socket.AF_UNIX) as two,
    ):
        for listener, address in ((abstract_socket, abstract), (two, path)):
            listener.bind(address)
            listener.listen()
        yield {
            "pid": os.getpid(), "mark": MARK, "run": str(run), "home": str(home), "keyring": keyring,
            "abstract": abstract, "socket": path, "command": Path("/proc/self/cmdline").read_text(),
            "code": str(Path(torchtitan.__file__).parent), "port": server.getsockname()[1],
        }  # fmt: skip
    shutil.rmtree(folder)


def config_with(tool: str, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    if problem := isolation.problem_of(tool):
        pytest.skip(problem)
    monkeypatch.setattr(isolation, "NAMES", {tool: tool})
    config = JobConfig()
    config.rewards.functions, config.environment.num_workers = ["tests.red_team:reward"], 1
    return config


async def said_by_reward(config: JobConfig, run: Path, *texts: str) -> list[Any]:
    """What each text's attempts reached, or why they have no reward."""
    pool = RewardPool(config, run.parent / "rewards.log", run)
    results: list[Any] = []
    try:
        await pool.start()
        for text in texts:
            completion = answer([1, 7], text)
            ((total, _),) = await pool.score(Prompt(0, "", [1], {}), [completion])
            results.append(pool.last_failure if total is None else completion.extra["said"])
    finally:
        await pool.close()
    return results


async def said_by(kind: str, config: JobConfig, run: Path, *texts: str) -> list[Any]:
    events, log_file = EventLog(run.parent / "events.jsonl"), run.parent / "environments.log"
    config.environment.tools = ["tests.red_team:tool"] if kind == "tool" else []
    config.environment.factory = "tests.red_team:Environment" if kind == "environment" else ""
    agents = {"agent": "tests.red_team:agent", "command": f"{sys.executable} -m tests.red_team"}
    config.environment.agent = agents.get(kind, "")
    pool = (AgentPool if kind in agents else EnvironmentPool)(config, events, log_file, run_dir=run)
    results: list[Any] = []
    try:
        await pool.start()
        for text in texts:
            async with await pool.episode() as episode:
                try:
                    if kind in agents:
                        row = json.loads(text)
                        access = SessionAccess("", "http://outside/v1", "key", ("127.0.0.1", row["port"]))
                        results.append(await episode.run(row, 0, access, PATIENCE_S))
                        continue
                    await episode.reset({})
                    call = {"name": "tool", "arguments": {"about": text}}
                    turn = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if kind == "tool" else text
                    results.append((await episode.act(turn)).messages[0]["content"])
                except CallFailed as failure:
                    results.append(str(failure))
    finally:
        await pool.close()
    return results


@pytest.mark.parametrize("tool", isolation.NAMES)
@pytest.mark.parametrize("kind", ["reward", "tool", "environment", "agent", "command"])
def test_isolated_code_reaches_nothing_outside(
    kind: str, tool: str, about: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run, text = config_with(tool, monkeypatch), Path(about["run"]), json.dumps(about)
    working = said_by_reward(config, run, text) if kind == "reward" else said_by(kind, config, run, text)
    assert asyncio.run(asyncio.wait_for(working, PATIENCE_S)) in (["[]"], [0.0])


def test_code_without_isolation_reaches_what_is_outside(about: dict[str, Any]) -> None:
    """The attempts are real: without isolation most of them succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.red_team"], input=json.dumps(about), capture_output=True, text=True, check=True,
        env={**os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:{about['port']}"},
    )  # fmt: skip
    assert float(done.stdout) > 12 and "signal the trainer" in done.stderr, done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attempt", "word"),
    [
        ("fill /tmp", "No space left"), ("fill /dev/shm", "No space left"), ("print 1 GB", "done"),
        ("return 80 MB", "what it returned has"), ("forge a message of 4 GiB", "it sent 4294967295 bytes at once"),
        ("fork for ever", "more than 100 processes"), ("eat all memory, with its limit lifted", "MiB of memory"),
        ("fill a file in memory", "MiB of memory"), ("fill shared memory", "refused"),
        ("leave a process behind", "done"), ("kill all it can", ""), ("hang", "no answer within"),
    ],
)  # fmt: skip
def test_isolated_code_has_bounded_costs(
    attempt: str, word: str, about: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = next((name for name in isolation.NAMES if not isolation.problem_of(name)), "bwrap")
    monkeypatch.setattr(isolation, "SCRATCH_BYTES", 1 << 24)
    monkeypatch.setattr(process, "MAX_PROCESSES", 100)
    monkeypatch.setattr(process, "MEMORY_SHARE", 0.02)
    config, run = config_with(tool, monkeypatch), Path(about["run"])
    config.rewards.timeout_s = 2.0 if attempt == "hang" else PATIENCE_S
    results = asyncio.run(asyncio.wait_for(said_by_reward(config, run, attempt, json.dumps(about)), PATIENCE_S))
    assert word in results[0] and results[1] == "[]", results
    log_file = run.parent / "rewards.log"
    assert not log_file.exists() or log_file.stat().st_size <= LOGGED_BYTES
    mark = red_team.left_behind(about["home"])
    until(lambda: not any(mark in (running.info["cmdline"] or ()) for running in psutil.process_iter(["cmdline"])))
