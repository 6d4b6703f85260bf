"""Real vLLM with our weight-transfer backend: what it serves after every version, and what it does when things break.

The order of the tests counts: the last ones kill the server that all share.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from tests import faults
from tests.engines.job import (
    APPLIED_SECONDS,
    CALL_SECONDS,
    PROMPT,
    TOKEN,
    Actor,
    Trainer,
    check_serves_newest,
    differences,
    start_actor,
    training,
)
from tests.engines.models import FP32_TOLERANCE
from tests.engines.two_ranks import check_two_ranks
from tests.patience import PATIENCE_S
from tests.processes import Processes, started_by
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.sidecar.foreign_engine import AdminClient
from torchtitan.inference.serving.joining import demands
from torchtitan.inference.serving.middleware import FOLDER_PREFIX
from torchtitan.inference.types import Completion
from torchtitan.weight_sync.registry.state import differing

# More than a block of the KV cache, so that its beginning may be found in the prefix cache.
LONG_PROMPT = [(7 * i + i * i // 5) % 60 + 2 for i in range(150)]
UPDATE_SECONDS = 8.0
BY_FILES = ("--route", "agent")
# What a shell may have, with any of which vLLM would be another engine.
SHELL = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_API_KEY": "another-token", "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_PLUGINS": "none", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1",
}  # fmt: skip


class Server:
    """The server that the tests share, and its successors."""

    def __init__(self, processes: Processes, python: Path, model: Path):
        self.model, self.hold = model, processes.folder / "hold"
        self._processes, self._python, self._starts = processes, python, 0
        self.actor = self.start()

    def start(self, *options: str) -> Actor:
        """A new one, after the old one has died."""
        self._starts += 1
        self.actor = start_actor(
            self._processes, "vllm", self._python, self.model,
            "--update-timeout", str(UPDATE_SECONDS), *options,
            "--", "--worker-extension-cls", "tests.engines.vllm_holding.WorkerExtension",
            name=f"agent-{self._starts}", TORCHTITAN_TEST_HOLD=str(self.hold), **SHELL,
        )  # fmt: skip
        return self.actor

    @property
    def load_begun(self) -> Path:
        """Exists while a load is held in its middle."""
        return self.hold.with_suffix(".begun")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The process that receives weights is stopped meanwhile."""
        (worker, *_) = self.actor.workers()
        worker.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            worker.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def server(vllm_python: Path, engine_model: Callable[..., Path], module_processes: Processes) -> Server:
    return Server(module_processes, vllm_python, engine_model(tied=True))


@pytest.fixture
def trainer(server: Server, tmp_path: Path) -> Iterator[Trainer]:
    with training(tmp_path, server.model, apply_timeout_s=2 * UPDATE_SECONDS) as running:
        server.actor.connect(running)
        yield running


def test_log_probs_and_greedy_tokens_are_those_of_transformers(server: Server, trainer: Trainer) -> None:
    for _ in range(3):
        trainer.bring()
        check_serves_newest(server.actor, trainer)
    figures = trainer.deliveries("applied", at_least=3)[-1]["figures"]
    assert figures["pause_s"] > 0 and figures["source"] == "trainer"


@pytest.mark.parametrize("transport", ["ipc", "nccl", "disk"])
def test_versions_come_by_other_transports(server: Server, transport: str, tmp_path: Path) -> None:
    """Memory of this machine, a communicator (gloo) and files, straight into vLLM's worker."""
    with training(tmp_path, server.model, transport=transport) as trainer:
        server.actor.connect(trainer)
        for _ in range(2):
            trainer.bring()
            check_serves_newest(server.actor, trainer)


def test_every_route_asks_for_the_token(server: Server) -> None:
    engine = server.actor.engine
    paths = engine.call("GET", "/openapi.json", CALL_SECONDS)["paths"]
    assert {"/health", "/pause", "/update_weights", "/v1/completions", "/collective_rpc"} <= paths.keys()
    for stranger in (AdminClient(engine.url, ""), AdminClient(engine.url, "x" + TOKEN)):
        answers = {
            (method, path): stranger.exchange(method.upper(), path, CALL_SECONDS)[0]
            for path, methods in {**paths, "/metrics": {"get": 0}, "/docs": {"get": 0}, "/nowhere": {"get": 0}}.items()
            for method in methods
        }
        assert set(answers.values()) == {401}, answers
    assert engine.exchange("GET", "/metrics", CALL_SECONDS)[0] == 200


def test_the_engine_unpickles_nothing_whatever_the_environment_says(server: Server) -> None:
    agent = psutil.Process(server.actor.health()["pid"])
    engine = started_by(agent, "torchtitan.inference.engines.vllm.serve")[0]
    assert [of.environ()["VLLM_ALLOW_INSECURE_SERIALIZATION"] for of in (agent, engine)] == ["1", "0"]


def test_the_engine_says_what_it_is_and_not_what_the_environment_says(server: Server) -> None:
    """All tests here run with the environment of SHELL."""
    config = JobConfig()
    config.model.hf_assets_path, config.inference.backend = str(server.model), "vllm"
    config.training.seq_len, config.inference.max_sequences = 256, 16
    path, seconds = "/offers?weights=0", CALL_SECONDS
    answer = server.actor.agent.call("GET", path, seconds)
    assert not differing(demands(config), answer["offers"]) and not answer["unverified"]
    assert answer["offers"]["version"].startswith("0.3")
    config.training.seq_len, config.inference.dtype = 300, "bfloat16"
    mismatches = differing(demands(config), answer["offers"])
    assert [sentence.split(",")[0] for sentence in mismatches] == ["its dtype is float32", "its max-length is 256"]
    # An agent beside the same server knows it from the server alone, whatever its own command line says.
    beside = start_actor(
        server._processes, "vllm", server._python, server.model, *BY_FILES,
        "--dtype", "bfloat16", "--max-length", "300", name="beside", beside=server.actor,
    )  # fmt: skip
    assert differing(demands(config), beside.agent.call("GET", path, seconds)["offers"]) == mismatches


def test_samples_are_seeded_and_have_their_own_log_probs(server: Server, trainer: Trainer) -> None:
    trainer.bring()
    sampling = {"n": 4, "temperature": 0.7, "seed": 11, "stop_token_ids": []}
    first = server.actor.generate(PROMPT, 10, **sampling)
    assert first == server.actor.generate(PROMPT, 10, **sampling)
    assert len({tuple(completion.token_ids) for completion in first}) > 1
    for completion in first:
        assert completion.finish_reason == "length" and len(completion.token_ids) == 10
        logits = trainer.logits([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert differences(completion.log_probs, expected.tolist()) < FP32_TOLERANCE
    (stopped,) = server.actor.generate(PROMPT, 10, stop_token_ids=[first[0].token_ids[0]], temperature=0.7, seed=11)
    assert stopped.finish_reason == "stop" and stopped.token_ids == first[0].token_ids[:1]


def long_request(actor: Actor) -> list[Completion]:
    """240 tokens of 4 samples, which take seconds."""
    return actor.generate(PROMPT, 240, n=4, temperature=1.0, seed=3, stop_token_ids=[])


def test_versions_change_in_flight(server: Server, trainer: Trainer) -> None:
    trainer.bring()
    answers: list[Completion] = []
    seen, failures = threading.Event(), []

    def ask() -> None:
        """One request after the other, as nobody knows how long a version takes beside a busy neighbour."""
        try:
            while not seen.is_set():
                answers.extend(long_request(server.actor))
        except Exception as exception:
            failures.append(exception)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + APPLIED_SECONDS
        while not any(len(completion.spans) > 1 for completion in tuple(answers)):
            assert thread.is_alive() and time.monotonic() < deadline, (failures, len(answers))
            trainer.bring()
    finally:
        seen.set()
        thread.join(APPLIED_SECONDS)
    assert not failures and len(answers) % 4 == 0
    crossed = [completion for completion in answers if len(completion.spans) > 1]
    for completion in crossed[:4]:
        versions = [span.version for span in completion.spans]
        assert versions == sorted(set(versions)) and completion.spans[-1].end == 240
        # Up to the first update everything is as transformers has it; then the KV cache is of several versions.
        first = completion.spans[0]
        expected = trainer.log_probs([*PROMPT, *completion.token_ids[: first.end]], first.version)
        assert differences(completion.log_probs[: first.end], expected[len(PROMPT) - 1 :]) < FP32_TOLERANCE


def test_sleep_waits_for_what_runs_and_a_version_comes_before_the_next_token(server: Server, trainer: Trainer) -> None:
    """vLLM's own routes and scheduler. On a CPU its workers pass sleep over, so that the memory itself stays."""
    trainer.bring()
    actor, order = server.actor, server.actor.agent.call
    assert not actor.health()["engine"]["capabilities"]["sleep"]
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(long_request, actor)
        state = order("POST", "/sleep", CALL_SECONDS, {"level": 2, "finish_s": 40.0})
        assert (state["state"], state["asleep"], state["version"]) == ("asleep", ["weights", "kv_cache"], None)
        late = threads.submit(actor.generate, PROMPT, 4)
        # It came before the sleep, which had to wait for it, or after it.
        first = long.result(CALL_SECONDS) if long.done() else None
        # Without a version the cache does not wake, whoever asks for it.
        assert order("POST", "/wake", CALL_SECONDS)["asleep"] == ["kv_cache"] and not late.done()
        trainer.bring()
        (completion,) = late.result(CALL_SECONDS)
        assert [span.version for span in completion.spans] == [trainer.version]
        for sample in first or long.result(CALL_SECONDS):
            assert len(sample.spans) == 1 and len(sample.token_ids) == 240
    assert actor.health()["serves"] and actor.health()["asleep"] == []
    check_serves_newest(actor, trainer)


def raw_log_prob(actor: Actor, prompt: list[int]) -> float:
    """Of the greedy token, asked for without a salt, as other clients would."""
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": sampling}
    answer = actor.engine.call("POST", "/inference/v1/generate", 60, body)
    return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])


def computed_tokens(actor: Actor) -> float:
    """Of prompts, since the start."""
    lines = [line.split() for line in actor.engine.call("GET", "/metrics", 60).splitlines()]
    count = {name.partition("{")[0]: float(value) for name, value in (line for line in lines if len(line) == 2)}
    return count["vllm:prefix_cache_queries_total"] - count["vllm:prefix_cache_hits_total"]


def test_no_prefix_outlives_its_weights(server: Server, trainer: Trainer) -> None:
    actor = server.actor
    trainer.bring()
    old = raw_log_prob(actor, LONG_PROMPT)
    trainer.bring()
    expected = trainer.log_probs([*LONG_PROMPT, *trainer.greedy(LONG_PROMPT, 1)])[-1]
    # Nothing runs: the cache is reset for everybody.
    assert abs(expected - old) > 0.01
    assert abs(raw_log_prob(actor, LONG_PROMPT) - expected) < FP32_TOLERANCE

    # A request runs: vLLM cannot reset it, but what comes later shares it with those of its own version alone.
    before = computed_tokens(actor)
    actor.generate(LONG_PROMPT, 1)
    actor.generate(LONG_PROMPT, 1)
    assert computed_tokens(actor) - before < 1.5 * len(LONG_PROMPT)
    thread = threading.Thread(target=long_request, args=[actor], daemon=True)
    thread.start()
    time.sleep(0.5)
    trainer.bring()
    expected = trainer.log_probs([*LONG_PROMPT, *trainer.greedy(LONG_PROMPT, 1)])[-1]
    unsalted = raw_log_prob(actor, LONG_PROMPT)
    (completion,) = actor.generate(LONG_PROMPT, 1)
    thread.join()
    assert abs(completion.log_probs[0] - expected) < FP32_TOLERANCE
    assert abs(unsalted - expected) < FP32_TOLERANCE


@pytest.fixture
def slow_second_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 takes seconds to send. (The shard servers read this when they start.)"""
    faults.inject(monkeypatch, "throttle:version=1-1,bytes_per_s=400000")


def wait_receiving(trainer: Trainer) -> None:
    trainer.wait_for(lambda: trainer.sync.actors()["actor-0"].state == "pulling")
    time.sleep(0.3)


@pytest.mark.usefixtures("slow_second_version")
def test_frozen_while_it_receives(server: Server, trainer: Trainer) -> None:
    trainer.bring()
    trainer.publish()
    wait_receiving(trainer)
    with server.frozen():
        trainer.wait_for(lambda: trainer.sync.actors()["actor-0"].state == "evicted")
        trainer.publish()
    trainer.wait_applied()
    check_serves_newest(server.actor, trainer)
    assert len(trainer.journal("evicted", at_least=1)) >= 1
    assert trainer.deliveries("applied", at_least=2)[-1]["figures"]["bytes_full"] > 0


def hold_a_load(server: Server, trainer: Trainer) -> None:
    """One version is applied, and the load of the next one stands in its middle."""
    trainer.bring()
    server.hold.touch()
    trainer.publish()
    trainer.wait_for(server.load_begun.exists)


def test_frozen_while_it_applies(server: Server, trainer: Trainer) -> None:
    hold_a_load(server, trainer)
    with server.frozen():
        server.hold.unlink()
        # It is not known what it holds: it must not serve, and says so.
        trainer.wait_for(lambda: server.actor.health()["state"] == "poisoned")
        trainer.wait_for(lambda: not trainer.sync.actors()["actor-0"].serves)
    trainer.bring()
    assert server.actor.health()["serves"]
    check_serves_newest(server.actor, trainer)


def test_connected_anew_while_it_applies(server: Server, trainer: Trainer) -> None:
    """The worker comes to hold the version whole, but the apply of the agent fails: it gets the version once more."""
    hold_a_load(server, trainer)
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(server.actor.connect, trainer)
        trainer.wait_for(lambda: trainer.sync.actors()["actor-0"].state == "evicted")
        server.hold.unlink()
        connected.result(CALL_SECONDS)
    trainer.wait_for(lambda: server.actor.health()["serves"])
    check_serves_newest(server.actor, trainer)


def test_two_ranks_publish_to_one_worker(server: Server, tmp_path: Path) -> None:
    check_two_ranks(server.actor, server.model, tmp_path, "float32", FP32_TOLERANCE)


def test_killed_while_it_applies(server: Server, trainer: Trainer) -> None:
    """The engine's worker dies; a new server takes its place under the same name, without our backend."""
    hold_a_load(server, trainer)
    agent = psutil.Process(server.actor.health()["pid"])
    places = [endpoint.laddr for child in agent.children(recursive=True) for endpoint in child.net_connections("unix")]
    sockets = {Path(place) for place in places if place.startswith("/")}
    assert sockets and all(path.is_socket() and path.parent.name.startswith(FOLDER_PREFIX) for path in sockets)
    server.actor.workers()[0].send_signal(signal.SIGKILL)
    assert agent.wait(PATIENCE_S) == 1, "without its engine the agent ends too"
    assert not [path for path in sockets if path.parent.exists()]
    trainer.wait_for(lambda: trainer.sync.actors()["actor-0"].state == "evicted")
    server.hold.unlink()
    server.load_begun.unlink()
    server.start(*BY_FILES)
    assert server.actor.health()["state"] == "joining"
    server.actor.connect(trainer)
    trainer.wait_applied()
    check_serves_newest(server.actor, trainer)
    assert trainer.deliveries("applied", at_least=2)[-1]["figures"]["bytes_full"] > 0


def test_versions_by_files(server: Server, tmp_path: Path) -> None:
    """Without our backend the agent stages. What computes the logits is a packed copy of the embedding here."""
    actor = server.actor
    if route_of(actor) != "agent":
        actor = server.start(*BY_FILES)
    with training(tmp_path, server.model, apply_timeout_s=30.0) as trainer:
        actor.connect(trainer)
        for _ in range(3):
            trainer.bring()
            check_serves_newest(actor, trainer)
        assert route_of(actor) == "agent"
    assert not list(Path("/dev/shm").glob("torchtitan-*/version"))


def route_of(actor: Actor) -> str:
    route: str = actor.health()["engine"]["capabilities"]["route"]
    return route
