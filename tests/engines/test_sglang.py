"""The real SGLang behind an agent: weights by files and by its weight group, checked against transformers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch

from tests.engines import adapter_trainer, sglang_holding
from tests.engines.models import END, greedy, log_probs
from tests.engines.processes import ROOT, Processes
from tests.patience import PATIENCE_S
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.inference.actor_client import ActorClient
from torchtitan.inference.client import TOKEN_VARIABLE, ActorHealth, RequestRefused
from torchtitan.inference.engines import make_client
from torchtitan.inference.sglang.broadcast import known_features
from torchtitan.inference.types import TAGS, Completion, GenerateRequest, SamplingParameters
from torchtitan.models import load_policy
from torchtitan.weight_sync.facade import WeightSync

TOKEN = "of-this-test"
EPOCHS = itertools.count()
PROMPT = [5, 6, 7, 8]
START_S = 400.0
MAX_LENGTH = 400

Result = TypeVar("Result")
Model = Callable[..., Path]


@dataclass
class Agent:
    """One running agent; its engine may be another's."""

    port: int
    processes: Processes
    name: str

    def ask(self, question: Callable[[ActorClient], Awaitable[Result]]) -> Result:
        """Run `question(handler)` with a handler that knows where the engine is."""

        async def run() -> Result:
            handler = make_client("sglang", f"http://127.0.0.1:{self.port}", TOKEN, TOKEN)
            try:
                await handler.health(20.0)
                return await question(handler)
            finally:
                await handler.close()

        return asyncio.run(run())

    def health(self) -> ActorHealth:
        return self.ask(lambda handler: handler.health(20.0))

    def generate(self, **sampling: Any) -> list[Completion]:
        request = GenerateRequest("r", PROMPT, SamplingParameters(**{"stop_token_ids": [END], **sampling}))
        return self.ask(lambda handler: handler.generate(request, 60.0))

    def wait_for_version(self, version: int, epoch: str, seconds: float = PATIENCE_S) -> None:
        end = time.monotonic() + seconds
        while ((health := self.health()).epoch, health.version) != (epoch, version) or not health.serves:
            assert time.monotonic() < end, f"{health}\n{self.processes.tail(self.name)}"
            time.sleep(0.05)


class Trainer:
    """Publishes the weights of models, whole, as versions 0, 1, … to the actors that connect."""

    def __init__(self, model: Model, run_dir: Path):
        self._model = model
        self._policy = load_policy(model(seed=1), torch.float32)
        self.epoch = f"{next(EPOCHS)}-engines"
        parameters = dict(self._policy.named_parameters())
        config = WeightSyncConfig(verify="off")
        self.sync = WeightSync(config, parameters, epoch=self.epoch, token=TOKEN, run_dir=run_dir)
        self.version = -1
        self.folder = Path()

    def publish(self, seed: int) -> int:
        """The weights of the model with this seed; returns their version."""
        self.folder = self._model(seed=seed)
        with torch.no_grad():
            for (_, mine), (_, new) in zip(
                self._policy.named_parameters(),
                load_policy(self.folder, torch.float32).named_parameters(),
                strict=True,
            ):
                mine.copy_(new)
        self.version += 1
        end = time.monotonic() + PATIENCE_S
        while not self.sync.reserve():
            assert time.monotonic() < end
            time.sleep(0.05)
        self.sync.commit(self.version, 0)
        return self.version

    def connect(self, agent: Agent) -> None:
        address = self.sync.coordinator_address
        agent.ask(lambda handler: handler.connect_weights(address, agent.name, self.epoch, 20.0))


@contextlib.contextmanager
def training(model: Model, run_dir: Path, agent: Agent) -> Iterator[Trainer]:
    run_dir.mkdir()
    trainer = Trainer(model, run_dir)
    try:
        trainer.publish(seed=1)
        trainer.connect(agent)
        agent.wait_for_version(0, trainer.epoch)
        yield trainer
    finally:
        trainer.sync.close()


def start_agent(
    processes: Processes, name: str, model: Path, *more: str | Path, path: Path = ROOT, **environment: str
) -> Agent:
    command = [sys.executable, "-m", "torchtitan.inference.agent", "--engine", "sglang", "--name", name]
    command += ["--model", str(model), "--token-env", TOKEN_VARIABLE, "--max-sequences", "16"]
    command += ["--max-length", str(MAX_LENGTH), "--log-file", str(processes.folder / f"{name}.engine.log")]
    command += ["--startup-timeout", str(START_S), "--update-timeout", "20"]
    environment |= {TOKEN_VARIABLE: TOKEN, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"}
    port = processes.start_server(name, [*command, *more], START_S, **environment)
    return Agent(port, processes, name)


@pytest.fixture(autouse=True)
def token_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a trainer looks for it that meets another agent's engine."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.fixture(scope="module")
def agent(sglang_python: Path, engine_model: Model, module_processes: Processes) -> Agent:
    """Beside the one engine of this module, which starts with weights that no version has."""
    return start_agent(module_processes, "by-files", engine_model(seed=0), "--python", sglang_python)


@pytest.fixture(scope="module")
def two_workers(sglang_python: Path, engine_model: Model, module_processes: Processes) -> Agent:
    """Beside an engine with two tensor-parallel workers, of which the second waits with files while `hold` exists."""
    plugins = module_processes.folder / "plugins"
    plugins.mkdir()
    sglang_holding.install(plugins)
    options: list[str | Path] = ["--python", sglang_python, "--tensor-parallel-size", "2"]
    hold = {sglang_holding.VARIABLE: str(module_processes.folder / "hold")}
    return start_agent(module_processes, "two-workers", engine_model(seed=0), *options, path=plugins, **hold)


def beside(processes: Processes, agent: Agent, name: str, model: Path, *more: str) -> Agent:
    """Another agent for the same engine: what the first one put there is not its own any more."""

    async def place(handler: Any) -> str:
        return str((await handler.state(20.0))["engine"]["url"])

    url = agent.ask(place)
    return start_agent(processes, name, model, "--url", url, "--engine-token-env", TOKEN_VARIABLE, *more)


def check_against_transformers(agent: Agent, trainer: Trainer) -> None:
    """Tokens, their log-probs and those of given tokens are the published model's."""
    (completion,) = agent.generate(max_tokens=24, temperature=0.0)
    assert completion.token_ids == greedy(trainer.folder, PROMPT, 24)
    assert [(span.epoch, span.version) for span in completion.spans] == [(trainer.epoch, trainer.version)]
    whole = PROMPT + completion.token_ids
    expected = log_probs(trainer.folder, whole)
    assert completion.log_probs == pytest.approx(expected[len(PROMPT) - 1 :], abs=1e-4)
    scored = agent.ask(lambda handler: handler.score(whole, 60.0))
    assert scored.log_probs == pytest.approx(expected, abs=1e-4)
    assert (scored.epoch, scored.version) == (trainer.epoch, trainer.version)


@pytest.mark.timeout(600)
def test_versions_by_files(agent: Agent, engine_model: Model, tmp_path: Path) -> None:
    assert agent.health().status == "not_ready"
    with training(engine_model, tmp_path / "run", agent) as trainer:
        check_against_transformers(agent, trainer)
        agent.wait_for_version(trainer.publish(seed=2), trainer.epoch)
        check_against_transformers(agent, trainer)
    capabilities = agent.ask(lambda handler: handler.capabilities(20.0))
    assert (capabilities.engine, capabilities.route, capabilities.score) == ("sglang", "agent", True)
    assert capabilities.version.startswith("0.5")
    assert not list(Path("/dev/shm").glob("torchtitan-by-files-*/version"))
    log = (agent.processes.folder / "by-files.engine.log").read_text()
    assert TOKEN not in log and "Load weight" in log


def test_samples_have_the_log_probs_that_they_were_drawn_with(
    agent: Agent, engine_model: Model, tmp_path: Path
) -> None:
    with training(engine_model, tmp_path / "run", agent) as trainer:
        samples = agent.generate(max_tokens=8, n=8, temperature=0.7)
        assert len({tuple(one.token_ids) for one in samples}) > 4
        for one in samples:
            assert one.finish_reason == ("stop" if one.token_ids[-1] == END else "length")
            logits = transformers_logits(trainer.folder, PROMPT + one.token_ids)[len(PROMPT) - 1 : -1] / 0.7
            every = logits.log_softmax(-1)
            expected = every[range(len(one.token_ids)), one.token_ids].tolist()
            assert one.log_probs == pytest.approx(expected, abs=1e-4)
        truncated = agent.generate(max_tokens=8, n=4, temperature=0.9, top_p=0.8)
        for one in truncated:
            logits = transformers_logits(trainer.folder, PROMPT + one.token_ids)[len(PROMPT) - 1 : -1] / 0.9
            assert one.kept_token_ids is not None
            for token, log_prob, kept, row in zip(
                one.token_ids, one.log_probs, one.kept_token_ids, logits, strict=True
            ):
                assert token in kept and len(kept) < len(row)
                among = row[kept].log_softmax(-1)[kept.index(token)]
                assert log_prob == pytest.approx(float(among), abs=1e-4)
                assert float(row.softmax(-1)[kept].sum()) >= 0.8 - 1e-4
        # A request that is wrong is not one that another actor should get.
        with pytest.raises(RequestRefused):
            agent.generate(max_tokens=4, top_p=1.5)


def transformers_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    from tests.engines.models import _loaded

    with torch.no_grad():
        return _loaded(folder, "float32")(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_requests_in_flight_go_on_under_new_weights(
    agent: Agent, engine_model: Model, processes: Processes, tmp_path: Path, kv: str
) -> None:
    other = beside(processes, agent, f"kv-{kv}", engine_model(seed=0), "--in-flight-kv", kv)
    with training(engine_model, tmp_path / "run", other) as trainer:
        check_goes_on(other, trainer, kv)


def check_goes_on(agent: Agent, trainer: Trainer, kv: str) -> None:
    """A completion that a version interrupts is of the old weights first and of the new ones then."""
    old = trainer.folder
    (completion,) = agent.ask(functools.partial(publish_meanwhile, trainer))
    new = trainer.folder
    assert len(completion.token_ids) == 300
    assert [span.version for span in completion.spans] == [0, 1]
    cut = completion.spans[0].end
    assert 0 < cut < 300
    whole = PROMPT + completion.token_ids
    first = len(PROMPT) - 1
    assert completion.log_probs[:cut] == pytest.approx(log_probs(old, whole)[first : first + cut], abs=1e-4)
    after = torch.tensor(completion.log_probs[cut:])
    fresh = torch.tensor(log_probs(new, whole)[first + cut :])
    if kv == "recompute":
        # As if the new weights had seen all of it.
        assert torch.allclose(after, fresh, atol=1e-4)
    else:
        # The context is still what the old weights made of it.
        assert float((after - fresh).abs().max()) > 0.01


async def health_at_version(handler: ActorClient, version: int) -> ActorHealth:
    """Its health once it has that version, or after a while all the same."""
    for _ in range(600):
        if (await handler.health(20.0)).version == version:
            break
        await asyncio.sleep(0.05)
    return await handler.health(20.0)


async def publish_meanwhile(trainer: Trainer, handler: ActorClient) -> list[Completion]:
    """A long completion during which version 1 comes; it stands still for a while in the middle of it."""
    sampling = SamplingParameters(max_tokens=300, temperature=1.0)

    async def generate() -> list[Completion]:
        return await handler.generate(GenerateRequest("long", PROMPT, sampling), 120.0)

    # How long it takes here; the pause is to come after the first tokens and before the last.
    begun = time.monotonic()
    await generate()
    alone = time.monotonic() - begun
    for part in (3, 6, 12):
        task = asyncio.ensure_future(generate())
        await asyncio.sleep(alone / part)
        await handler.pause(20.0)
        assert (await handler.health(20.0)).status == "paused"
        await asyncio.sleep(0.5)
        if not task.done():
            break
        await task
        await handler.resume(20.0)
    assert not task.done()
    trainer.publish(seed=3)
    health = await health_at_version(handler, 1)
    assert not task.done() and (health.status, health.version) == ("paused", 1)
    await handler.resume(20.0)
    return await task


def test_memory_is_given_back_once_idle_and_taken_again_around_a_version(
    agent: Agent, engine_model: Model, tmp_path: Path
) -> None:
    """Its own routes and scheduler. On a CPU it has no memory saver, so that the memory itself stays."""
    with training(engine_model, tmp_path / "run", agent) as trainer:
        assert not agent.ask(lambda handler: handler.capabilities(20.0)).sleep
        (long,), (late,) = agent.ask(functools.partial(sleep_meanwhile, trainer))
        assert len(long.token_ids) == 300 and [span.version for span in long.spans] == [0]
        assert len(late.token_ids) == 4 and [span.version for span in late.spans] == [1]
        check_against_transformers(agent, trainer)


async def sleep_meanwhile(trainer: Trainer, handler: Any) -> tuple[list[Completion], list[Completion]]:
    """A long completion that sleep has to wait for, and one that is asked for asleep."""
    begun = GenerateRequest("long", PROMPT, SamplingParameters(max_tokens=300, temperature=1.0))
    long = asyncio.ensure_future(handler.generate(begun, 120.0))
    await asyncio.sleep(0.5)
    state = await handler.client.call_object("sleep", "POST", "/sleep", 60.0, {"level": 1, "finish_s": 0.0})
    assert state["status"] == "ok" or long.done()
    assert await handler.sleep(1, 100.0) and await handler.sleep(1, 100.0)
    late = asyncio.ensure_future(handler.generate(GenerateRequest("late", PROMPT, SamplingParameters(4)), 120.0))
    assert (await handler.health(20.0)).asleep == TAGS
    await handler.wake(["weights"], 20.0)
    trainer.publish(seed=3)
    health = await health_at_version(handler, 1)
    assert (health.status, health.version, health.asleep) == ("asleep", 1, ("kv_cache",)) and not late.done()
    await handler.wake(["kv_cache"], 20.0)
    return await long, await late


def test_versions_by_the_weight_group(agent: Agent, engine_model: Model, processes: Processes, tmp_path: Path) -> None:
    with training(engine_model, tmp_path / "first", agent):
        other = beside(processes, agent, "by-group", engine_model(seed=0), "--route", "engine")
        with training(engine_model, tmp_path / "second", other) as trainer:
            check_against_transformers(other, trainer)
            wait_until_lost(agent)
            for seed in (3, 4):
                other.wait_for_version(trainer.publish(seed), trainer.epoch)
                check_against_transformers(other, trainer)
    capabilities = other.ask(lambda handler: handler.capabilities(20.0))
    # What this has tried: many parameters as one broadcast.
    assert capabilities.route == "engine" and known_features(capabilities.version)[0]


@pytest.mark.parametrize("route", ["agent", "engine"])
def test_adapters_are_merged(
    agent: Agent, engine_model: Model, processes: Processes, tmp_path: Path, route: str
) -> None:
    model = engine_model(seed=0)
    other = beside(processes, agent, f"adapters-{route}", model, "--route", route)
    with adapter_trainer.training(tmp_path, model, TOKEN) as trainer:
        address = trainer.sync.coordinator_address
        other.ask(lambda handler: handler.connect_weights(address, other.name, trainer.epoch, 20.0))
        for _ in range(2):
            other.wait_for_version(trainer.publish(), trainer.epoch)
            (completion,) = other.generate(max_tokens=12, temperature=0.0)
            whole = PROMPT + completion.token_ids
            expected = trainer.log_probs(whole)
            assert completion.log_probs == pytest.approx(expected[len(PROMPT) - 1 :], abs=1e-4)
            assert max(abs(a - b) for a, b in zip(expected, trainer.base_log_probs(whole), strict=True)) > 0.3
        assert trainer.journal("applied")[-1]["figures"]["bytes_full"] < 0.15 * trainer.base_bytes


def wait_until_lost(agent: Agent) -> None:
    """It notices that its engine holds what it has not put there, and asks to be connected anew."""
    end = time.monotonic() + PATIENCE_S
    while (health := agent.health()).serves:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "started anew, or changed" in str(health.weights_failure)


def test_versions_by_files_that_wait_for_the_slower_of_two_workers(
    two_workers: Agent, engine_model: Model, tmp_path: Path
) -> None:
    hold = two_workers.processes.folder / "hold"
    with training(engine_model, tmp_path / "run", two_workers) as trainer:
        check_against_transformers(two_workers, trainer)
        hold.touch()
        version = trainer.publish(seed=2)
        two_workers.processes.wait("two-workers", hold.with_suffix(".begun").exists, 60.0)
        # Time in which the first worker, which answers, is done, and the files would go.
        time.sleep(1.0)
        files = list(Path("/dev/shm").glob("torchtitan-two-workers-*/version/model.safetensors"))
        assert len(files) == 1 and two_workers.health().version != version
        hold.unlink()
        two_workers.wait_for_version(version, trainer.epoch)
        check_against_transformers(two_workers, trainer)
        assert not files[0].exists()


def test_versions_by_the_weight_group_of_two_workers(
    two_workers: Agent, engine_model: Model, processes: Processes, tmp_path: Path
) -> None:
    """The agent that joins is not told how many they are."""
    other = beside(processes, two_workers, "by-group-of-three", engine_model(seed=0), "--route", "engine")
    with training(engine_model, tmp_path / "run", other) as trainer:
        check_against_transformers(other, trainer)
        check_goes_on(other, trainer, "keep")
        check_against_transformers(other, trainer)
    log = (two_workers.processes.folder / "two-workers.engine.log").read_text()
    assert {int(rank) for rank in re.findall(r"rank=(\d), world_size=3", log)} == {1, 2}


@pytest.mark.timeout(900)
def test_a_run_trains_through_an_update_that_is_killed(
    sglang_python: Path, processes: Processes, tmp_path: Path
) -> None:
    make = [sys.executable, "scripts/make_debug_checkpoint.py", "--output", str(tmp_path / "checkpoint")]
    subprocess.run(make, check=True, cwd=ROOT, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    config = "train_configs/debug_cpu_sglang.toml"
    command = [sys.executable, "-m", "torchtitan.grpo_train", "--job.config_file", config]
    command += [
        "--training.steps",
        "10",
        # Stale samples tell wrong weights only where a step moves the policy little: at the configuration's rate their
        # KL comes near 0.1 by itself, and it grows with the square.
        "--optimizer.lr",
        "1e-4",
        "--training.global_batch_size",
        "128",
        "--model.hf_assets_path",
        str(tmp_path / "checkpoint"),
    ]
    command += ["--job.dump_folder", str(tmp_path / "runs"), "--checkpoint.enable", "false"]
    command += ["--inference.engine_python", str(sglang_python), "--metrics.console", "plain"]
    run = processes.start("run", command, PYTHONPATH=str(ROOT))

    def metrics() -> list[dict[str, Any]]:
        files = list((tmp_path / "runs").glob("*/metrics.jsonl"))
        return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []

    def events(kind: str) -> list[dict[str, Any]]:
        files = list((tmp_path / "runs").glob("*/events.jsonl"))
        rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
        return [row for row in rows if row["kind"] == kind]

    processes.wait("run", lambda: len(metrics()) >= 4, START_S)
    kill_in_an_update(psutil.Process(run.pid), next((tmp_path / "runs").glob("*/logs/actor-0.log")))
    processes.wait("run", lambda: bool(events("actor_evicted")), 60.0)
    processes.wait("run", lambda: len(events("actor_ready")) >= 2, START_S)
    end = time.monotonic() + 120
    while run.poll() is None:
        assert time.monotonic() < end, processes.tail("run")
        time.sleep(0.2)
    assert run.returncode == 0, processes.tail("run")
    steps = [row for row in metrics() if "loss" in row]
    assert len(steps) == 10
    # Where the trainer still had the weights that sampled, both give the same log-probs.
    assert all(row["mismatch_kl"] < 1e-6 for row in steps if row["staleness/max"] == 0)
    mismatches = [(row["staleness/max"], row["mismatch_kl"]) for row in steps]
    assert mismatches[0][0] == 0 and all(mismatch < 0.1 for _, mismatch in mismatches), mismatches


def kill_in_an_update(run: psutil.Process, log: Path) -> None:
    """Freeze SGLang's scheduler until an update is under way, and kill the server then."""
    agent, server = (child_of(run, f"torchtitan.inference.{name}") for name in ("agent", "sglang.serve"))
    port = re.findall(r"listening on port (\d+)", log.read_text())[-1]
    address = f"http://127.0.0.1:{port}/weights"
    ask = urllib.request.Request(address, headers={"Authorization": f"Bearer {agent.environ()[TOKEN_VARIABLE]}"})
    parts = server.children(recursive=True)
    for _ in range(10):
        for part in parts:
            part.suspend()
        stuck = 0
        # The trainer has another batch to train, and publishes its version.
        for _ in range(30):
            with urllib.request.urlopen(ask, timeout=PATIENCE_S) as response:
                state = json.load(response)["weights"]["state"]
            stuck += state == "APPLYING"
            if stuck == 5:
                for one in [*parts, server]:
                    one.kill()
                return
            time.sleep(0.1)
        for part in parts:
            part.resume()
        time.sleep(0.2)
    raise AssertionError(f"no update came: {state}")


def child_of(run: psutil.Process, module: str) -> psutil.Process:
    """Among the processes that the run has started, the one that runs this module."""
    for child in run.children(recursive=True):
        # Some come and go.
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                return child
    raise AssertionError(f"{module} does not run")
