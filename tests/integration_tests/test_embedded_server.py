"""The engine as a process of its own: `python -m torchtitan.inference.engines.embedded`, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.patience import PATIENCE_S, asynchronous
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.inference.engines.embedded.engine import Engine, Finished
from torchtitan.inference.engines.embedded.server import EngineServer
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.actor.puller import Served
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

TOKEN = "a-token-for-tests"
# What the process prints if its interpreter is torn down.
TEARDOWN = "the interpreter is torn down"
MAX_LENGTH = 4000


def body(max_tokens: int = 6, name: str = "a", **sampling: Any) -> dict[str, Any]:
    return GenerateRequest(name, [5, 9, 3], SamplingParameters(max_tokens, **sampling)).to_json()


def endless(name: str = "a") -> dict[str, Any]:
    """Eight sequences that run for seconds: from this prompt the most likely token is never the end."""
    return GenerateRequest(name, [4, 9, 3], SamplingParameters(MAX_LENGTH - 3, 8, 0.0)).to_json()


class Trainer:
    """Publishes versions of a checkpoint's weights: all of them times 1 + version / 100."""

    def __init__(self, checkpoint: Path, folder: Path, epoch: str = "e", bucket_bytes: int = 1 << 16):
        self.base = {name: parameter.detach().clone() for name, parameter in load_policy(checkpoint).named_parameters()}
        self.live = {name: tensor.clone() for name, tensor in self.base.items()}
        config = WeightSyncConfig()
        config.bucket_bytes = bucket_bytes
        self.publication = WeightSync(config, self.live, epoch=epoch, token=TOKEN, run_dir=folder)
        key, registry = role_key(TOKEN, ACTOR, "actor-0"), self.publication.registry_address
        self.connect = {"registry": registry, "actor": "actor-0", "epoch": epoch, "key": key}
        """Body of /weights/connect"""

    def publish(self, version: int) -> None:
        while not self.publication.boundary.reserve():
            time.sleep(0.01)
        for name, tensor in self.live.items():
            tensor.copy_(self.base[name] * (1 + version / 100))
        assert self.publication.boundary.commit(version, 0)
        self.publication.publisher.fence()

    def actor(self) -> dict[str, Any]:
        """What the trainer is told of it."""
        assert self.publication.watcher is not None
        return dict(self.publication.watcher.status()["actors"].get("actor-0", {}))


class Client:
    """Calls one server; every call has a deadline."""

    def __init__(self, url: str, token: str | None = TOKEN):
        self.url, self.headers = url, {} if token is None else {"Authorization": f"Bearer {token}"}

    async def __aenter__(self) -> Client:
        self.session = aiohttp.ClientSession(headers=self.headers, timeout=aiohttp.ClientTimeout(PATIENCE_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def call(self, method: str, path: str, **arguments: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **arguments) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            _, health = await self.call("GET", "/health")
            if condition(health):
                return health
            await asyncio.sleep(0.02)
        raise AssertionError(f"still {health}")


def start(directory: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torchtitan.inference.engines.embedded",
        "--model",
        str(directory),
        "--threads",
        "1",
    ]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def process(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    folder = tmp_path_factory.mktemp("server")
    port_file = folder / "port"
    (folder / "sitecustomize.py").write_text(f"import atexit\natexit.register(print, {TEARDOWN!r}, flush=True)\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ("--token-env", "ENGINE_TOKEN", "--port-file", str(port_file), "--max-sequences", "8")
    server = start(tiny_checkpoint(), *arguments, "--max-length", str(MAX_LENGTH), ENGINE_TOKEN=TOKEN, PYTHONPATH=path)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("embedded engine listening on http://127.0.0.1:"), line + server.stdout.read()
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        assert url in line and TOKEN not in line
        hint = server.stdout.readline()
        assert f"--inference.backend embedded --inference.servers {url}," in hint and TOKEN not in hint
        assert hint.strip().endswith('export TORCHTITAN_ACTOR_TOKEN="$ENGINE_TOKEN"')
        yield server, url
    finally:
        server.kill()
        server.wait(PATIENCE_S)


@asynchronous
async def test_generates_what_the_engine_generates(
    process: tuple[subprocess.Popen[str], str], tiny_checkpoint: Callable[..., Path]
) -> None:
    async with Client(process[1]) as client:
        asked = [body(12, f"r{i}", n=3, seed=i) for i in range(4)]
        answers = await asyncio.gather(*(client.call("POST", "/v1/generate", json=payload) for payload in asked))
        engine = Engine(load_policy(tiny_checkpoint()), 8, 400)
        expected = engine.generate([GenerateRequest.from_json(payload) for payload in asked])
        for (status, answer), completions in zip(answers, expected, strict=True):
            got = [Completion.from_json(completion) for completion in answer["completions"]]
            assert status == 200 and [reply.token_ids for reply in got] == [reply.token_ids for reply in completions]
            assert got[0].spans[-1].end == len(got[0].token_ids) == len(got[0].log_probs)
        truncated = {**asked[0], "sampling": {**asked[0]["sampling"], "top_k": 3}}
        status, answer = await client.call("POST", "/v1/generate", json=truncated)
        (first, *_) = answer["completions"]
        kept = zip(first["token_ids"], first["kept_token_ids"], strict=True)
        assert all(len(ids) == 3 and token in ids for token, ids in kept)
        status, metrics = await client.call("GET", "/metrics")
        assert status == 200 and "engine_finished_requests_total 5" in metrics


@asynchronous
async def test_refuses_strangers_and_nonsense(process: tuple[subprocess.Popen[str], str]) -> None:
    for token in (None, "wrong", TOKEN + "x"):
        async with Client(process[1], token) as stranger:
            for method, path in (
                ("GET", "/health"),
                ("POST", "/v1/generate"),
                ("POST", "/weights/connect"),
                ("GET", "/no"),
            ):
                status, answer = await stranger.call(method, path)
                assert status == 401 and "token" in answer["error"]
    async with Client(process[1]) as client:
        for content, message in (
            (b"{", "not JSON"),
            (b"[1]", "object"),
            (b"{}", "required"),
            (json.dumps({**body(), "extra": 1}).encode(), "extra"),
            (json.dumps({**body(), "sampling": {"max_tokens": 3, "top_q": 1}}).encode(), "top_q"),
            (json.dumps({**body(), "prompt_ids": [1000]}).encode(), "0..127"),
            (json.dumps(body(n=0)).encode(), "n: it must be"),
        ):
            status, answer = await client.call("POST", "/v1/generate", data=content)
            assert status == 400 and message in answer["error"]
        status, answer = await client.call("POST", "/v1/generate", json=body(MAX_LENGTH - 2))
        assert status == 413 and f"max_length {MAX_LENGTH}" in answer["error"]
        status, answer = await client.call("POST", "/weights/connect", json={"registry": "x"})
        assert status == 400 and "epoch" in answer["error"]
        assert (await client.call("GET", "/health"))[1]["weights"] is None
        nonsense = {"registry": "nonsense", "actor": "actor-0", "epoch": "e", "key": "its key"}
        status, answer = await client.call("POST", "/weights/connect", json=nonsense)
        assert status == 400 and "nonsense" in answer["error"]
        status, answer = await client.call("GET", "/nowhere")
        assert status == 404 and "/nowhere" in answer["error"]


@asynchronous
async def test_pause_disconnect_and_queue(process: tuple[subprocess.Popen[str], str]) -> None:
    async with Client(process[1]) as client:
        long = asyncio.create_task(client.call("POST", "/v1/generate", json=endless("long")))
        await client.until(lambda health: health["running"] == 8)
        queued = asyncio.create_task(client.call("POST", "/v1/generate", json=body(4, "queued", n=2)))
        await client.until(lambda health: health["waiting"] == 2)
        status, health = await client.call("POST", "/pause")
        assert status == 200 and health["state"] == "paused"
        status, answer = await client.call("POST", "/v1/generate", json=body())
        assert status == 503 and "paused" in answer["error"]
        await asyncio.sleep(0.1)
        assert not queued.done() and not long.done()
        # Who hangs up no longer holds rows, even in a pause.
        long.cancel()
        await client.until(lambda health: health["running"] == 0)
        assert (await client.call("POST", "/resume"))[1]["serves"]
        status, answer = await queued
        assert status == 200 and len(answer["completions"]) == 2
        hopeless = asyncio.create_task(client.call("POST", "/v1/generate", json=endless()))
        await client.until(lambda health: health["running"] == 8)
        await client.call("POST", "/pause", json={"mode": "abort"})
        status, answer = await hopeless
        assert status == 503 and "aborted" in answer["error"]
        await client.call("POST", "/resume")


@asynchronous
async def test_sigterm_ends_it_with_requests_running_and_without_the_teardown_of_torch(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    server, url = process
    async with Client(url) as client:
        running = asyncio.create_task(client.call("POST", "/v1/generate", json=endless()))
        await client.until(lambda health: health["running"] == 8)
        server.send_signal(signal.SIGTERM)
        status, answer = await running
        assert status == 503 and "shutting down" in answer["error"]
    assert server.wait(PATIENCE_S) == 0
    # It takes half a second of processor time: more than a busy machine has within the grace that a run gives.
    assert server.stdout is not None and TEARDOWN not in server.stdout.read()


def test_ends_with_its_parent_and_asks_for_sense(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    parent = subprocess.Popen(["sleep", "60"])
    server = start(tiny_checkpoint(), "--parent-pid", str(parent.pid), "--require-version")
    try:
        assert server.stdout is not None
        *_, url, _, token = server.stdout.readline().split()

        async def scenario() -> None:
            async with Client(url, token.rstrip(")")) as client:
                assert (await client.call("GET", "/health"))[1]["state"] == "joining"
                status, answer = await client.call("POST", "/v1/generate", json=body())
                assert status == 503 and "no weights version" in answer["error"]

        asyncio.run(scenario())
        parent.kill()
        parent.wait(PATIENCE_S)
        assert server.wait(PATIENCE_S) == 0
    finally:
        parent.kill()
        server.kill()
        server.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-env", "NOT_SET_ANYWHERE"], "not set"),
        (["--max-sequences", "0"], "at least 1"),
        (["--dtype", "int4"], "invalid choice"),
    ],
)
def test_bad_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from torchtitan.inference.engines.embedded.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["--model", "x", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def in_process(directory: Path, scenario: Callable[[EngineServer, Client], Awaitable[None]], **options: Any) -> None:
    """Run a scenario against a server in this process, whose engine can be reached into."""

    async def run() -> None:
        server = EngineServer(Engine(load_policy(directory), 8, MAX_LENGTH, ()), TOKEN, threads=1, **options)
        port = await server.start("127.0.0.1", 0)
        try:
            async with Client(f"http://127.0.0.1:{port}") as client:
                await scenario(server, client)
        finally:
            await server.close()

    asyncio.run(run())


def test_a_second_job_is_refused_while_the_first_ones_registry_is_in_reach(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    async def scenario(server: EngineServer, client: Client) -> None:
        trainers = [await asyncio.to_thread(Trainer, tiny_checkpoint(), tmp_path / epoch, epoch) for epoch in "ab"]
        try:
            first, second = (trainer.connect for trainer in trainers)
            assert (await client.call("POST", "/weights/connect", json=first))[0] == 200
            await client.until(lambda health: health["weights"]["connected"])
            status, answer = await client.call("POST", "/weights/connect", json=second)
            assert status == 409 and f"job a, whose registry is at {first['registry']}" in answer["error"]
            # The same job may connect anew.
            assert (await client.call("POST", "/weights/connect", json=first))[0] == 200
            await client.until(lambda health: health["weights"]["connected"])
            await asyncio.to_thread(trainers.pop(0).publication.close)
            await client.until(lambda health: not health["weights"]["connected"])
            assert (await client.call("POST", "/weights/connect", json=second))[0] == 200
            await asyncio.to_thread(trainers[0].publish, 0)
            health = await client.until(lambda health: health["version"] == 0)
            assert health["epoch"] == "b"
        finally:
            for trainer in trainers:
                await asyncio.to_thread(trainer.publication.close)

    in_process(tiny_checkpoint(), scenario)


def test_what_a_replaced_connection_brings_no_longer_changes_the_weights(tiny_checkpoint: Callable[..., Path]) -> None:
    weights = {name: tensor.detach().clone() for name, tensor in load_policy(tiny_checkpoint()).named_parameters()}

    async def scenario(server: EngineServer, client: Client) -> None:
        async def connect(epoch: str) -> SyncActor:
            body = {"registry": "127.0.0.1:1", "actor": "actor-0", "epoch": epoch, "key": "its key"}
            assert (await client.call("POST", "/weights/connect", json=body))[0] == 200
            assert server._weights is not None
            return server._weights

        old = await connect("e")
        await asyncio.to_thread(server.apply, 1, StagedVersion("e", 1, "d1", weights))
        old.puller.serving = Served("e", 1, "d1")
        middle = await connect("e")
        assert middle.served == Served("e", 1, "d1")
        with pytest.raises(WeightsRefused, match="another connection"):
            await asyncio.to_thread(server.apply, 1, StagedVersion("e", 2, "d2", weights))
        assert server.engine.version == 1 and not server.engine.poisoned
        # An apply whose end the closed connection did not see: the next one must not claim the version before.
        await asyncio.to_thread(server.apply, 2, StagedVersion("e", 2, "d2", weights))
        assert (await connect("e")).served is None
        assert (await client.call("GET", "/health"))[1]["version"] == 2

    in_process(tiny_checkpoint(), scenario)


def test_an_engine_that_hangs_says_for_how_long(tiny_checkpoint: Callable[..., Path]) -> None:
    async def scenario(server: EngineServer, client: Client) -> None:
        assert (await client.call("GET", "/health"))[1]["engine_age_s"] == 0
        go_on = threading.Event()
        step = server.engine.step

        def hang() -> Finished:
            go_on.wait(PATIENCE_S)
            return step()

        server.engine.step = hang  # type: ignore[method-assign]
        answer = asyncio.create_task(client.call("POST", "/v1/generate", json=body()))
        health = await client.until(lambda health: health["engine_age_s"] > 0.3)
        assert health["serves"]
        moved = time.monotonic()
        server.engine._progress()  # a slow step is not a hang: every layer counts
        # The age counts from there, however long this question takes; it is told in whole milliseconds.
        assert (await client.call("GET", "/health"))[1]["engine_age_s"] <= time.monotonic() - moved + 0.001
        go_on.set()
        assert (await answer)[0] == 200
        await client.until(lambda health: health["engine_age_s"] == 0)

    in_process(tiny_checkpoint(), scenario)


def test_a_failed_engine_says_so_and_stops_the_server(tiny_checkpoint: Callable[..., Path]) -> None:
    async def scenario(server: EngineServer, client: Client) -> None:
        def fail() -> None:
            raise RuntimeError("out of luck")

        server.engine.step = fail  # type: ignore[method-assign, assignment]
        status, answer = await client.call("POST", "/v1/generate", json=body())
        assert status == 503 and "out of luck" in answer["error"]
        await asyncio.wait_for(server.stopped.wait(), PATIENCE_S)
        assert (await client.call("POST", "/v1/generate", json=body()))[0] == 503

    in_process(tiny_checkpoint(), scenario)
