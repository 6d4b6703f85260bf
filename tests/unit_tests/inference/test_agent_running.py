"""What an agent asks of an engine that runs already, and when it takes one that it has started for ended."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.patience import PATIENCE_S
from torchtitan.errors import UserError
from torchtitan.inference.agent import server
from torchtitan.inference.agent.engine import AdminClient, EngineError, EngineFacts, EngineNotListening, EngineOptions
from torchtitan.inference.agent.server import AgentServer, RunningAgent, Watch
from torchtitan.inference.types import Capabilities
from torchtitan.utils.child_process import ChildProcess, child_environment

# Serves nothing, but writes the port that it is given, as an engine does.
PROGRAM = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); time.sleep(600)"


class Control:
    """Asks a server whether it lives."""

    def __init__(self, port: int):
        self._client = AdminClient(f"http://127.0.0.1:{port}", "")

    def check_health(self, timeout_s: float) -> None:
        self._client.call("GET", "/health", timeout_s)

    def weights_label(self) -> str | None:
        return None


class Server:
    """What the agent looks at."""

    def __init__(self, watch: Watch):
        self._watch = watch

    engine_closed_s = AgentServer.engine_closed_s


def test_an_engine_that_has_closed_its_port_and_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ENDING_S", 0.5)
    monkeypatch.setattr(server, "LOOK_S", 0.02)
    port_file = tmp_path / "port"
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    process = ChildProcess("the engine", tmp_path / "engine.log")
    idle: Any = SimpleNamespace(busy=False, undo_lost_pause=lambda: None, find_lost_weights=lambda: None)
    control: Any = Control(port)
    watch = Watch(control, idle, lambda reason: None, interval_s=0.01, probe_s=0.05)

    async def work() -> str:
        agent = RunningAgent(argparse.Namespace(url=""), None, None, "")  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        command = [sys.executable, "-c", PROGRAM, str(port_file), str(port)]
        await process.launch(command, child_environment(1))
        assert await process.read_port(port_file, loop.time() + 30) == port
        agent._process = process
        agent._server = Server(watch)  # type: ignore[assignment]
        watch.start()
        ended = asyncio.ensure_future(agent.engine_ended())
        # It is silent, as a frozen one is: that is not the end.
        while watch.age_s < 1.0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert not ended.done() and watch.closed_s == 0
        listening.close()
        said = await asyncio.wait_for(ended, 30)
        assert process.pid is not None and psutil.pid_exists(process.pid)
        await process.stop(2.0)
        return said

    try:
        assert "has closed its port and not ended within 0.5 s" in asyncio.run(work())
    finally:
        watch.close(5.0)


def test_a_closed_port_is_told_from_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        control = Control(listening.getsockname()[1])
        with pytest.raises(EngineError, match="gave no answer within") as caught:
            control.check_health(0.1)
        assert not isinstance(caught.value, EngineNotListening)
    with pytest.raises(EngineNotListening, match="nothing listens on"):
        control.check_health(5.0)


def test_an_engine_that_runs_already_says_how_many_workers_it_has() -> None:
    facts = EngineFacts(Capabilities("fake", "0"), world_size=4)
    control = SimpleNamespace(check_health=lambda timeout_s: None, describe=lambda: facts)

    def special_loader(_control: Any, options: EngineOptions) -> Any:
        raise UserError(f"{options.tensor_parallel_size} workers")

    engine: Any = SimpleNamespace(name="fake", control=lambda *_: control, special_loader=special_loader)
    arguments = argparse.Namespace(url="http://127.0.0.1:1", engine_token_env="", drain_timeout_s=0.0)
    options = EngineOptions("a", "m", "", "engine", Path(), "", 0)
    with pytest.raises(UserError, match="4 workers"):
        asyncio.run(RunningAgent(arguments, engine, options, "").start(time.monotonic() + PATIENCE_S))
