"""How vLLM's and SGLang's servers are told to sleep and to wake, by servers that hold us to what their source says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.unit_tests.inference.json_server import Answer, serving
from torchtitan.inference.engines.sglang.engine import ENGINE as SGLANG
from torchtitan.inference.engines.sglang.engine import SGLangControl
from torchtitan.inference.engines.sidecar.foreign_engine import EngineError, EngineOptions
from torchtitan.inference.engines.vllm.engine import ENGINE as VLLM
from torchtitan.inference.engines.vllm.engine import VLLMControl
from torchtitan.inference.serving.actor_server import SleepBody, WakeBody
from torchtitan.inference.types import TAGS

OPTIONS = EngineOptions("a", "m", "", "agent", Path("p"), "T", 1, update_timeout_s=5.0)


class Server:
    """Notes what it is asked. `busy`: so many questions whether it is idle are answered with no."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.busy = 0
        self.dead = False
        self.paused = False
        self.asleep: set[str] = set()
        self.says: dict[str, Any] = {}

    def finishes(self) -> bool:
        self.busy -= 1
        return self.busy < 0

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        raise NotImplementedError


class VLLM032(Server):
    """entrypoints/serve/dev/sleep/api_router.py and EngineCore.sleep, wake_up of 0.32."""

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        if path == "/pause":
            # mode=wait answers when all has finished; whoever does not wait so long gets no answer.
            if query["mode"] == ["wait"] and not self.finishes():
                return 500, "as if it had timed out"
            self.paused = True
            return 200, {"status": "paused"}
        if path == "/resume":
            assert not self.asleep, "it would compute without its memory"
            self.paused = False
            return 200, {"status": "resumed"}
        if path == "/sleep":
            assert set(query) == {"level", "mode"} and query["mode"] == ["keep"]
            assert int(query["level"][0]) in (0, 1, 2) and self.paused
            if "weights" not in self.asleep:
                self.asleep = set(TAGS)
            return 200, {"status": "sleeping", "level": int(query["level"][0])}
        assert path == "/wake_up"
        (tag,) = query["tags"]
        self.asleep.discard(tag)
        self.paused = bool(self.asleep)
        return 200, {"status": "sleeping" if self.asleep else "awake", "tags": [tag]}


class SGLang0520(Server):
    """entrypoints/http_server.py and managers/scheduler_components/weight_updater.py of 0.5.20: what those assert, or
    take out of a set where it is not, ends the scheduler."""

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        if path == "/flush_cache":
            return (200, "Cache flushed.\n") if self.finishes() else (400, "Flush cache failed.\n")
        if path == "/pause_generation":
            assert body == {"mode": "retract"}
            self.paused = True
            return 200, {"status": "ok"}
        if path == "/continue_generation":
            self.dead |= bool(self.asleep)
            self.paused = False
            return 200, {"status": "ok"}
        tags = set(body.pop("tags"))
        assert body == {} and tags and tags <= set(TAGS)
        if path == "/release_memory_occupation":
            # Requests that come are held back by the server in front of the scheduler while it is paused only.
            self.dead |= self.busy > 0 or not self.paused or bool(self.asleep & tags)
            self.asleep |= tags
            return 200, None
        assert path == "/resume_memory_occupation"
        self.dead |= not tags <= self.asleep
        self.asleep -= tags
        return 200, None


@pytest.fixture
def serve() -> Iterator[Callable[[Server], str]]:
    """Starts a server; returns its URL."""
    with contextlib.ExitStack() as running:

        def start(server: Server) -> str:
            def post(path: str, data: bytes) -> Answer:
                parts = urlsplit(path)
                server.asked.append(f"{path} {data.decode()}".strip())
                return server.answer(parts.path, parse_qs(parts.query), json.loads(data) if data else None)

            return running.enter_context(serving(post, lambda _path: (200, server.says)))

        yield start


def test_vllm_is_drained_before_it_sleeps_and_woken_part_by_part(serve: Callable[[Server], str]) -> None:
    server = VLLM032()
    control = VLLMControl(serve(server), "", OPTIONS)
    assert control.sleep(2, TAGS, 3.0)
    control.wake("weights")
    assert server.paused
    control.wake("kv_cache")
    assert server.asked == [
        "/pause?mode=wait&clear_cache=true",
        "/sleep?level=2&mode=keep",
        "/wake_up?tags=weights",
        "/wake_up?tags=kv_cache",
    ]
    server.asked.clear()
    server.busy = 1
    assert not control.sleep(1, TAGS, 0.0)
    control.resume()
    assert server.asked == ["/pause?mode=wait&clear_cache=true", "/resume"] and not server.asleep


def test_sglang_gives_memory_back_only_idle_and_paused(serve: Callable[[Server], str]) -> None:
    server = SGLang0520()
    control = SGLangControl(serve(server), "", OPTIONS)
    # One request is there at first, another comes before the pause.
    server.busy = 1
    assert control.sleep(1, TAGS, 3.0) and not server.dead
    pause, look = '/pause_generation {"mode": "retract"}', "/flush_cache?timeout=0.000"
    assert server.asked[-3:] == [pause, look, '/release_memory_occupation {"tags": ["weights", "kv_cache"]}']
    assert server.paused and server.asleep == set(TAGS)
    control.wake("weights")
    # What sleeps already is not given back twice.
    assert control.sleep(1, ["weights"], 3.0)
    control.wake("weights")
    control.wake("kv_cache")
    control.resume()
    wakes = [path for path in server.asked if path.startswith("/resume_")]
    assert wakes == [f'/resume_memory_occupation {{"tags": ["{tag}"]}}' for tag in ("weights", "weights", "kv_cache")]
    assert not server.dead and not server.asleep and not server.paused


def test_sglang_that_does_not_become_idle_goes_on(serve: Callable[[Server], str]) -> None:
    server = SGLang0520()
    control = SGLangControl(serve(server), "", OPTIONS)
    server.busy = 1000
    assert not control.sleep(1, TAGS, 0.0)
    assert not server.asleep and not server.paused and not server.dead
    server.busy = 0
    assert control.sleep(1, TAGS, 0.0)
    control.wake("weights")
    server.busy = 1000
    assert not control.sleep(1, ["weights"], 0.0) and not server.dead, "it would go on without its KV cache"


def test_what_becomes_of_sglangs_weights_its_server_was_told_at_start(serve: Callable[[Server], str]) -> None:
    server = SGLang0520()
    control = SGLangControl(serve(server), "", OPTIONS)
    for saver, backup, sleeps, lost in ((0, 0, False, False), (1, 0, True, True), (1, 1, True, False)):
        server.says = {"disable_radix_cache": True, "version": "0.5.20", "tp_size": 1}
        server.says |= {"enable_memory_saver": bool(saver), "enable_weights_cpu_backup": bool(backup)}
        assert control.describe().capabilities.sleep is sleeps
        assert control.drops_weights(1) is lost and control.drops_weights(2)


def test_a_refusal_is_an_error(serve: Callable[[Server], str]) -> None:
    class Refuses(SGLang0520):
        def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
            refused = path in ("/release_memory_occupation", "/flush_cache?timeout=0.000")
            return (500, {"error": "no"}) if refused else super().answer(path, query, body)

    control = SGLangControl(serve(Refuses()), "", OPTIONS)
    with pytest.raises(EngineError, match="/release_memory_occupation answered 500"):
        control.sleep(1, TAGS, 1.0)


def test_bodies_of_orders_are_checked() -> None:
    assert SleepBody.read({"level": 2, "finish_s": 3}, ValueError) == SleepBody(level=2, finish_s=3.0)
    assert WakeBody.read({}, ValueError).tags == list(TAGS)
    assert WakeBody.read({"tags": ["kv_cache"]}, ValueError).tags == ["kv_cache"]
    for level, finish_s in ((0, 1), (3, 1), (True, 1), ("1", 1), (1, -1), (1, float("nan")), (1, "5"), (1, None)):
        with pytest.raises(ValueError, match="must be"):
            SleepBody.read({"level": level, "finish_s": finish_s}, ValueError)
    for tags in ("weights", ["cuda_graph"], None, [["weights"]]):
        with pytest.raises(ValueError, match="tags.*must be"):
            WakeBody.read({"tags": tags}, ValueError)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_servers_that_are_to_sleep_are_started_so(level: int) -> None:
    options = EngineOptions("a", "m", "python", "agent", Path("p"), "T", 1, sleep_level=level, device_share=0.4 * level)
    vllm, sglang = VLLM.command(options)[0], SGLANG.command(options)[0]
    assert ("--enable-sleep-mode" in vllm) is (level > 0)
    assert ("--enable-memory-saver" in sglang) is (level > 0)
    # Else weights that sleep are gone.
    assert ("--enable-weights-cpu-backup" in sglang) is (level == 1)
    for command, option in ((vllm, "--gpu-memory-utilization"), (sglang, "--mem-fraction-static")):
        shares = [command[place + 1] for place, word in enumerate(command) if word == option]
        assert (f"{0.4 * level:.3f}" in shares) is (level > 0)
