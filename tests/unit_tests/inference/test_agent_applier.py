"""The order in which an agent has an engine stand still, load and go on, what each failure leaves behind, and the
folders in which agents write versions for their engines; what an agent asks of an engine that runs already."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.patience import PATIENCE_S, until
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.engines.sidecar import server
from torchtitan.inference.engines.sidecar.applier import Applier, FileLoader, remove_abandoned
from torchtitan.inference.engines.sidecar.foreign_engine import (
    AdminClient,
    EngineError,
    EngineFacts,
    EngineNotListening,
    EngineOptions,
)
from torchtitan.inference.engines.sidecar.server import AgentServer, EngineWatch, RunningAgent
from torchtitan.inference.pool.actor import Actor
from torchtitan.inference.serving.actor_server import _with_weights
from torchtitan.inference.types import TAGS, Capabilities, Tag
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "INTERVAL_S", 0.01)


class Engine:
    """Control and loader in one; keeps a list of what was asked. `fails` names what raises."""

    workers = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.label: str | None = None
        self.standing = False
        self.drained = True
        self.forgets_label = False
        self.asleep: set[Tag] = set()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def pause(self, mode: str, timeout_s: float) -> bool:
        self._called(f"pause {mode}")
        self.standing = mode != "wait" or self.drained
        return self.standing

    def resume(self) -> None:
        assert not self.asleep
        self._called("resume")
        self.standing = False

    def reset_prefix_cache(self) -> None:
        self._called("reset")

    def weights_label(self) -> str | None:
        return self.label

    def check_health(self, timeout_s: float) -> None:
        self._called("health")

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        self._called(f"sleep {level} {' '.join(tags)}")
        self.standing = True
        if self.drained:
            self.asleep |= set(tags)
        return self.drained

    def drops_weights(self, level: int) -> bool:
        return level == 2

    def wake(self, tag: Tag) -> None:
        self._called(f"wake {tag}")
        self.asleep.discard(tag)

    def prepare(self, staged: StagedVersion, label: str) -> None:
        self._called("prepare")

    def load(self, staged: StagedVersion, label: str) -> None:
        assert self.standing and "weights" not in self.asleep
        self._called("load")
        if not self.forgets_label:
            self.label = label


def staged(version: int) -> StagedVersion:
    return StagedVersion("epoch", version, "digest", {"w": torch.zeros(1)})


def made(**options: Any) -> tuple[Engine, Applier]:
    engine = Engine()
    applier = Applier(engine, engine, 5.0, **options)  # type: ignore[arg-type]
    applier.new_connection()
    return engine, applier


def test_a_version_is_loaded_while_the_engine_stands() -> None:
    engine, applier = made()
    cost = applier.apply(1, staged(3))
    assert engine.calls == ["prepare", "pause keep", "load", "reset", "resume"]
    assert applier.holds == ("epoch", 3) and engine.label == "epoch/3" and not engine.standing
    assert cost["drain_s"] == 0 and cost["pause_s"] >= 0


def test_an_older_receiver_is_refused_and_touches_nothing() -> None:
    engine, applier = made()
    assert applier.new_connection() == 2
    with pytest.raises(WeightsRefused, match="another connection"):
        applier.apply(1, staged(3))
    assert engine.calls == [] and applier.holds is None
    applier.apply(2, staged(4))
    assert applier.holds == ("epoch", 4)


def test_drain_lets_requests_finish_up_to_its_deadline() -> None:
    engine, applier = made(drain_timeout_s=2.0)
    applier.apply(1, staged(0))
    assert engine.calls[1:3] == ["pause wait", "load"]
    engine.calls.clear()
    engine.drained = False
    applier.apply(1, staged(1))
    assert engine.calls[1:4] == ["pause wait", "pause keep", "load"]
    assert applier.holds == ("epoch", 1)


@pytest.mark.parametrize("drained", [True, False])
def test_who_asks_hears_that_it_drains(drained: bool) -> None:
    engine, applier = made(drain_timeout_s=2.0)
    place = {"url": "http://127.0.0.1:1", "capabilities": {"engine": "vllm"}}
    server = AgentServer(place, engine, engine, applier, "", "127.0.0.1", 5.0)  # type: ignore[arg-type]
    applier.apply(1, staged(0))
    engine.drained = drained
    called, states = engine._called, {}

    def note(name: str) -> None:
        called(name)
        states[name] = server.engine_state()

    engine._called = note  # type: ignore[method-assign]
    applier.apply(1, staged(1))
    assert states["prepare"] == ("ready", None)
    assert states["pause wait"] == ("paused", "running requests finish before new weights come")
    # One that did not drain in time has new requests wait, as without a drain.
    assert states["load"][0] == ("paused" if drained else "ready")
    engine.fails["load"] = WeightsRefused("no")
    with pytest.raises(WeightsRefused):
        applier.apply(1, staged(2))
    assert server.engine_state() == ("ready", None)


@pytest.mark.parametrize(
    ("engine", "weights", "expected"),
    [
        ("joining", "pulling", "pulling"), ("ready", "pulling", "pulling"), ("paused", "pulling", "paused"),
        ("joining", "applying", "applying"), ("ready", "applying", "applying"), ("paused", "applying", "applying"),
        ("asleep", "applying", "asleep"), ("poisoned", "pulling", "poisoned"), ("ready", "joining", "ready"),
    ],
)  # fmt: skip
def test_health_says_what_keeps_an_actor_from_serving_and_else_what_it_does_with_versions(
    engine: str, weights: str, expected: str
) -> None:
    assert _with_weights(ActorState(engine), ActorState(weights)) is ActorState(expected)


@pytest.mark.parametrize("failing", ["prepare", "load"])
def test_what_certainly_changed_nothing_is_refused_and_the_engine_goes_on(failing: str) -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    engine.fails[failing] = WeightsRefused("no")
    with pytest.raises(WeightsRefused, match="no"):
        applier.apply(1, staged(1))
    assert applier.holds == ("epoch", 0) and not engine.standing and applier.poisoned is None
    engine.fails.clear()
    applier.apply(1, staged(2))
    assert applier.holds == ("epoch", 2)


@pytest.mark.parametrize("failing", ["load", "reset", "resume"])
def test_half_a_version_is_never_served(failing: str) -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    engine.fails[failing] = EngineError("broken")
    with pytest.raises(EngineError):
        applier.apply(1, staged(1))
    assert "broken" in str(applier.poisoned) and applier.holds is None
    # What ran was begun with weights that are gone.
    assert engine.calls[-1] == "pause abort" and engine.standing
    engine.fails.clear()
    applier.resume()
    applier.undo_lost_pause()
    assert engine.standing
    engine.calls.clear()
    applier.apply(1, staged(2))
    assert applier.poisoned is None and applier.holds == ("epoch", 2) and not engine.standing


def test_an_engine_that_says_another_version_is_poisoned() -> None:
    engine, applier = made()
    engine.forgets_label = True
    with pytest.raises(EngineError, match="holds None, not 'epoch/0'"):
        applier.apply(1, staged(0))
    assert applier.poisoned is not None and engine.standing


def test_a_pause_that_was_asked_for_outlasts_versions() -> None:
    engine, applier = made()
    applier.pause(abort=False)
    applier.apply(1, staged(0))
    assert engine.standing and applier.paused and applier.holds == ("epoch", 0)
    applier.resume()
    assert not engine.standing


def test_an_order_to_stand_still_that_was_given_up_is_taken_back() -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    engine.fails["pause keep"] = EngineError("no answer")
    with pytest.raises(WeightsRefused, match="did not pause"):
        applier.apply(1, staged(1))
    # A frozen engine finds the order when it wakes up.
    engine.standing = True
    assert applier.lost_pause is not None and applier.holds == ("epoch", 0)
    applier.undo_lost_pause()
    assert not engine.standing and applier.lost_pause is None


def test_a_version_comes_between_the_two_parts_of_waking() -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    engine.calls.clear()
    assert applier.sleep(1, 2.0) and applier.sleep(1, 2.0)
    assert engine.calls == ["sleep 1 weights kv_cache"] and applier.holds == ("epoch", 0)
    with pytest.raises(WeightsRefused, match="asleep"):
        applier.apply(1, staged(1))
    applier.wake(["weights"])
    applier.apply(1, staged(1))
    applier.undo_lost_pause()
    applier.resume()
    assert engine.standing, "without its KV cache nobody has it go on"
    applier.wake(["kv_cache"])
    assert engine.calls[1:] == ["wake weights", "prepare", "pause keep", "load", "reset", "wake kv_cache", "resume"]
    assert applier.holds == ("epoch", 1) and not engine.standing and not applier.asleep


def test_dropped_weights_keep_the_cache_away_until_a_version_has_come() -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    assert applier.sleep(2, 2.0) and applier.holds is None
    engine.calls.clear()
    applier.wake(TAGS)
    assert engine.calls == ["wake weights"] and applier.asleep == {"kv_cache"} and engine.standing
    engine.fails["load"] = WeightsRefused("no")
    with pytest.raises(WeightsRefused):
        applier.apply(1, staged(1))
    assert applier.asleep == {"kv_cache"} and engine.standing
    engine.fails.clear()
    applier.apply(1, staged(1))
    assert engine.calls[-4:] == ["load", "reset", "wake kv_cache", "resume"]
    assert not applier.asleep and not engine.standing and applier.holds == ("epoch", 1)


def test_an_engine_with_work_goes_on_instead_of_sleeping() -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    engine.drained = False
    assert not applier.sleep(1, 0.0) and not applier.asleep and not engine.standing
    applier.pause(abort=False)
    assert not applier.sleep(1, 0.0) and engine.standing, "somebody has asked for a pause"


def test_after_an_order_to_sleep_that_failed_nothing_is_loaded_before_it_is_woken() -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    engine.fails["sleep 1 weights kv_cache"] = EngineError("no answer")
    with pytest.raises(EngineError):
        applier.sleep(1, 2.0)
    with pytest.raises(WeightsRefused, match="asleep"):
        applier.apply(1, staged(1))
    applier.wake(TAGS)
    assert engine.calls[-3:] == ["wake weights", "wake kv_cache", "resume"] and not engine.standing


def test_a_pause_outlasts_sleep() -> None:
    engine, applier = made()
    applier.apply(1, staged(0))
    applier.sleep(1, 2.0)
    applier.pause(abort=False)
    applier.wake(TAGS)
    assert engine.standing and not applier.asleep
    applier.resume()
    assert not engine.standing


def test_the_watch_notices_silence_and_foreign_weights() -> None:
    engine, applier = made()
    lost: list[str] = []
    noticed = threading.Event()

    def note(reason: str) -> None:
        lost.append(reason)
        noticed.set()

    watch = EngineWatch(engine, applier, note)  # type: ignore[arg-type]
    applier.apply(1, staged(0))
    engine.fails["health"] = EngineError("no answer")
    watch.start()
    try:
        silent = threading.Event()
        while watch.trouble is None:
            assert not silent.wait(0.01)
        assert watch.age_s > 0
        engine.fails.clear()
        while watch.trouble is not None:
            assert not silent.wait(0.01)
        assert watch.age_s == 0 and not lost
        engine.label = "another/7"
        assert noticed.wait(PATIENCE_S)
        assert "another/7" in lost[0] and applier.holds is None
    finally:
        watch.close(5.0)


def test_an_apply_excuses_silence_unless_the_engine_did_not_stand_still() -> None:
    engine, applier = made()
    watch = EngineWatch(engine, applier, lambda reason: None)  # type: ignore[arg-type]
    engine.fails["health"] = EngineError("no answer")
    applier.busy = True
    watch.start()
    try:
        assert not threading.Event().wait(0.2) and watch.age_s == 0
        applier.lost_pause = "no answer"
        until(lambda: watch.age_s > 0)
    finally:
        watch.close(5.0)


@pytest.fixture(scope="module")
def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def loader(folder: Path) -> FileLoader:
    options = EngineOptions("actor-0", "model", "", "agent", Path(), "", 0, disk_path=str(folder))
    return FileLoader(options, lambda folder, label: None)


def test_only_what_a_dead_agent_of_this_machine_left_is_removed(tmp_path: Path, dead_process: int) -> None:
    own_host = socket.gethostname()
    for name, owner in {
        "abandoned": f"{dead_process} {own_host}",
        "of-another-machine": f"{dead_process} not-{own_host}",
        "alive": f"{os.getpid()} {own_host}",
        # An agent that starts right now, and one of an earlier version.
        "unfinished": "",
        "earlier": str(dead_process),
    }.items():
        (tmp_path / f"torchtitan-{name}-x").mkdir()
        (tmp_path / f"torchtitan-{name}-x" / "owner").write_text(owner)
    (tmp_path / "torchtitan-without-owner").mkdir()
    remove_abandoned(tmp_path)
    left = sorted(folder.name.removeprefix("torchtitan-").removesuffix("-x") for folder in tmp_path.iterdir())
    assert left == ["alive", "earlier", "of-another-machine", "unfinished", "without-owner"]


def test_an_agent_keeps_others_folders_and_removes_its_own(tmp_path: Path, dead_process: int) -> None:
    first = loader(tmp_path)
    (folder,) = tmp_path.iterdir()
    second = loader(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    (folder / "owner").write_text(f"{dead_process} {socket.gethostname()}")
    third = loader(tmp_path)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 2
    for agent in (first, second, third):
        agent.close()
    assert not list(tmp_path.iterdir())


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


def test_an_engine_that_closes_its_port_and_stays_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ENDING_S", 0.5)
    monkeypatch.setattr(server, "LOOK_S", 0.02)
    monkeypatch.setattr(server, "PROBE_S", 0.05)
    port_file = tmp_path / "port"
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    process = ChildProcess("the engine", tmp_path / "engine.log")
    idle: Any = SimpleNamespace(busy=False, undo_lost_pause=lambda: None, find_lost_weights=lambda: None)
    control: Any = Control(port)
    watch = EngineWatch(control, idle, lambda reason: None)

    async def work() -> str:
        agent = RunningAgent(argparse.Namespace(url=""), None, None, "")  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        command = [sys.executable, "-c", PROGRAM, str(port_file), str(port)]
        await process.launch(command, child_environment(1))
        assert await process.read_port(port_file, loop.time() + 30) == port
        agent._process = process
        agent._server = SimpleNamespace(watch=watch)  # type: ignore[assignment]
        watch.start()
        ended = asyncio.ensure_future(agent.engine_ended())
        # It is silent, as a frozen one is: that is not the end.
        while watch.age_s < 1.0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert not ended.done() and watch.closed_s == 0
        listening.close()
        cause = await asyncio.wait_for(ended, 30)
        assert process.pid is not None and psutil.pid_exists(process.pid)
        await process.stop(2.0)
        return cause

    try:
        assert "has closed its port but did not end within 0.5 s" in asyncio.run(work())
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


def test_an_engine_that_starts_has_all_of_the_time_for_it_to_describe_itself() -> None:
    """On a busy machine it answers its first questions later than an order of a step may take."""
    asked: list[float] = []

    def describe() -> EngineFacts:
        asked.append(control.timeout_s)
        return EngineFacts(Capabilities("fake", "0"), can_wait=False)

    control: Any = SimpleNamespace(check_health=lambda timeout_s: None, describe=describe)
    engine: Any = SimpleNamespace(name="fake", control=lambda *_: control)
    arguments = argparse.Namespace(url="http://127.0.0.1:1", engine_token_env="", drain_timeout_s=1.0)
    options = EngineOptions("a", "m", "", "engine", Path(), "", 0, update_timeout_s=8.0)
    with pytest.raises(UserError, match="cannot let running requests finish"):
        asyncio.run(RunningAgent(arguments, engine, options, "").start(time.monotonic() + 500))
    assert 400 < asked[0] <= 500 and control.timeout_s == 8.0


def test_an_engine_that_has_not_served_yet_may_be_silent_while_it_starts() -> None:
    config = JobConfig()
    config.inference.health_timeout_s, config.inference.startup_timeout_s = 10.0, 120.0
    actor = Actor.__new__(Actor)
    actor._config = config.inference
    limits = []
    for process, ready_at in ((object(), 0.0), (object(), 1.0), (None, 0.0)):
        actor._process, actor._ready_at = process, ready_at  # type: ignore[assignment]
        limits.append(actor._silence_limit_s)
    # A server that somebody else has started is not waited for.
    assert limits == [120.0, 10.0, 10.0]


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
