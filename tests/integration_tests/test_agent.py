"""Agents beside engines that are killed, frozen or fail half-way, with the real pool and the real weight path.

The engines are fakes with SGLang's routes (unit_tests/inference/fake_engine.py); tests/engines has the real ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration_tests.test_actors import TOKEN, Run, make_config, running
from tests.patience import PATIENCE_S, until
from tests.unit_tests.inference.fake_engine import fake_python
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.engines.sidecar.__main__ import MADE_UP_TOKEN, main
from torchtitan.inference.engines.sidecar.sidecar_process import find_python
from torchtitan.models.decoder import Decoder
from torchtitan.utils.child_process import child_environment
from torchtitan.weight_sync.wire.handshake import HTTP, role_key

HALF_LOADED = "was only partly loaded into the engine"


@contextlib.contextmanager
def foreign(tmp_path: Path, change: Callable[[JobConfig], None] = lambda config: None) -> Iterator[Run]:
    """A run with one agent and its fake engine."""
    config, policy = foreign_config(tmp_path)
    change(config)
    with running(config, policy, tmp_path / "run") as run:
        yield run


def foreign_config(tmp_path: Path) -> tuple[JobConfig, Decoder]:
    config, policy = make_config(tmp_path / "checkpoint")
    config.inference.backend, config.inference.num_actors = "sglang", 1
    config.inference.engine.python = str(fake_python(tmp_path))
    config.weight_sync.verify = "off"
    return config, policy


def engine_of(tmp_path: Path) -> psutil.Process:
    return psutil.Process(int((tmp_path / "pid").read_text()))


def socket_of(tmp_path: Path) -> Path:
    """Which the engine has made and never removes."""
    return Path((tmp_path / "socket").read_text())


def ready(run: Run, times: int) -> Callable[[], bool]:
    return lambda: len(run.events("actor_ready", "actor-0")) >= times


def check(run: Run) -> None:
    """Every token came from the version that it is tagged with: the fake's log-probs tell."""
    assert run.batches
    for sample in (sample for batch in run.batches for sample in batch.samples):
        for span in sample.spans:
            for log_prob in sample.log_probs[span.start : span.end]:
                assert log_prob == pytest.approx(-(1.001**span.version), rel=1e-4)


def test_tokens_carry_the_version_that_the_agent_handed_over_and_never_half_a_one(tmp_path: Path) -> None:
    with foreign(tmp_path) as run:
        run.steps_until(ready(run, 1))
        run.steps_until(lambda: run.version >= 10)
        versions = {span.version for sample in run.batches[-1].samples for span in sample.spans}
        assert max(versions) >= run.version - 2
        assert not run.events("actor_evicted", "actor-0")
        # A later one heals what came only in part.
        (tmp_path / "half_load").touch()
        run.steps_until(lambda: not (tmp_path / "half_load").exists())
        last = run.version + 4
        run.steps_until(lambda: run.version >= last)
        assert HALF_LOADED in (run.run_dir / "logs" / "actor-0.log").read_text()
        assert not run.events("actor_restarting", "actor-0")
        engine = engine_of(tmp_path)
    check(run)
    assert not engine.is_running()
    log = (run.run_dir / "logs" / "actor-0.engine.log").read_text()
    # The fake ends by an assertion where it is asked for tokens of half a version.
    assert "fake engine: listening" in log and "AssertionError" not in log
    notes = [json.loads(line) for line in (run.run_dir / "timeline" / "actor-0.jsonl").read_text().splitlines()]
    assert {"apply"} == {note["what"] for note in notes}
    assert not list(Path("/dev/shm").glob("torchtitan-actor-0-*"))


@pytest.mark.exhaustive
def test_a_killed_engine_takes_its_agent_along_and_both_come_back(tmp_path: Path) -> None:
    with foreign(tmp_path) as run:
        run.steps_until(ready(run, 1))
        agent, engine = run.process_of("actor-0"), engine_of(tmp_path)
        killed = socket_of(tmp_path)
        assert killed.is_socket() and killed.parent != Path(tempfile.gettempdir())
        engine.kill()
        run.steps_until(ready(run, 2))
        assert not agent.is_running() and not killed.parent.exists()
        (evicted,) = run.events("actor_evicted", "actor-0")
        assert evicted["noticed_by"] in ("exit", "generate", "health") or "sync" in evicted["noticed_by"]
        assert "the engine was killed by SIGKILL" in (run.run_dir / "logs" / "actor-0.log").read_text()
        run.step()

        # The other way round: nothing of an engine outlives its agent.
        agent, engine, orphan = run.process_of("actor-0"), engine_of(tmp_path), socket_of(tmp_path)
        assert orphan.is_socket()
        agent.kill()
        run.steps_until(ready(run, 3))
        psutil.wait_procs([engine], timeout=PATIENCE_S)
        assert not engine.is_running() and not orphan.parent.exists()
        run.step()
        last = socket_of(tmp_path)
        assert last.is_socket()
    check(run)
    assert not last.parent.exists()


@pytest.mark.exhaustive
def test_an_engine_that_freezes_and_one_that_never_ends_loading_come_back(tmp_path: Path) -> None:
    def change(config: JobConfig) -> None:
        config.weight_sync.apply_timeout_s = 2.0
        config.inference.startup_timeout_s = PATIENCE_S

    with foreign(tmp_path, change) as run:
        run.steps_until(ready(run, 1))
        run.step()
        engine = engine_of(tmp_path)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            until(lambda: run.events("actor_evicted", "actor-0"))
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        run.steps_until(ready(run, 2))
        assert engine_of(tmp_path).pid == engine.pid
        run.step()
        log = run.run_dir / "logs" / "actor-0.log"
        before = log.read_text().count(HALF_LOADED)

        def given_up_with_another_version() -> bool:
            run.version += 1
            run.publish()
            run.call(run.flow.set_version, run.version)
            time.sleep(0.1)
            return log.read_text().count(HALF_LOADED) > before

        (tmp_path / "hang_load").touch()
        try:
            until(given_up_with_another_version)
        finally:
            (tmp_path / "hang_load").unlink()
        # Versions without a trained batch have made samples too old; what counts is that the engine is back.
        until(lambda: health(run)["serves"])
    check(run)


def health(run: Run) -> dict[str, Any]:
    port = re.findall(r"listening on port (\d+)", (run.run_dir / "logs" / "actor-0.log").read_text())[-1]
    return get(f"http://127.0.0.1:{port}/health", role_key(TOKEN, HTTP, "actor-0"))


def get(url: str, token: str) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=5) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def start_agent(*more: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchtitan.inference.engines.sidecar", "--engine", "sglang", *more]
    return subprocess.Popen(
        command, env={**child_environment(threads=1), **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[Any]) -> str:
    until(path.exists, process=process)
    return path.read_text().strip()


def test_an_agent_beside_an_engine_that_runs_already(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    line = [fake_python(tmp_path / "own"), "-m", "x", "--host", "127.0.0.1", "--port-file", tmp_path / "engine"]
    line += ["--token-env", "ENGINE_TOKEN", "--parent-pid", str(os.getpid()), "--"]
    environment = {"ENGINE_TOKEN": "of-the-engine", "AGENT_TOKEN": "of-the-agent"}
    everything = {**child_environment(threads=1), **environment}
    with subprocess.Popen(list(map(str, line)), env=everything) as engine:
        try:
            url = f"http://127.0.0.1:{wait_for(tmp_path / 'engine', engine)}"
            options = ["--url", url, "--engine-token-env", "ENGINE_TOKEN", "--token-env", "AGENT_TOKEN"]
            options += ["--model", str(tmp_path), "--port-file", str(tmp_path / "agent")]
            with start_agent(*options, environment=environment) as agent:
                port = wait_for(tmp_path / "agent", agent)
                status = get(f"http://127.0.0.1:{port}/health", "of-the-agent")
                assert status["state"] == "joining"
                assert status["engine"]["url"] == url and status["engine"]["token_env"] == "ENGINE_TOKEN"
                with pytest.raises(OSError, match="401"):
                    get(f"http://127.0.0.1:{port}/health", "of-the-engine")
                agent.terminate()
                assert agent.wait(PATIENCE_S) == 0
            assert engine.poll() is None
        finally:
            engine.kill()


def test_mistakes_are_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(MADE_UP_TOKEN, "")
    common = ["--engine", "sglang", "--model", str(tmp_path), "--log-file", str(tmp_path / "log"), "--python"]
    python = str(fake_python(tmp_path))
    for wrong, problem in (
        (["/nowhere/python"], "inference.sglang.python = '/nowhere/python' is not a program"),
        ([python, "--update-mode", "drain"], "sglang cannot let running requests finish"),
        ([python, "--route", "direct"], "route = 'direct': sglang takes weights by agent"),
    ):
        assert main([*common, *wrong]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {problem}")


def test_the_engine_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_ENGINES", str(tmp_path))
    with pytest.raises(UserError, match="run scripts/install_engine.sh sglang"):
        find_python("sglang", "")
    (tmp_path / "sglang-cpu").mkdir()
    (tmp_path / "sglang-cpu" / ".complete").touch()
    assert find_python("sglang", "") == str(tmp_path / "sglang-cpu" / "bin" / "python")
