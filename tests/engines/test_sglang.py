"""The real SGLang behind an agent: weights by files and by its weight group, checked against transformers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.engines import adapter_trainer, sglang_holding
from tests.engines.job import (
    CALL_SECONDS,
    PROMPT,
    TOKEN,
    Actor,
    Trainer,
    check_log_probs,
    check_serves_newest,
    differences,
    start_actor,
    training,
)
from tests.engines.models import END, FP32_TOLERANCE
from tests.engines.plugins import install
from tests.patience import PATIENCE_S
from tests.processes import Processes, started_by
from tests.runs import RUN_SECONDS, Run
from torchtitan.inference.actor_client import TOKEN_VARIABLE, ActorClient, ActorHealth, RequestRefused
from torchtitan.inference.types import TAGS, Completion, GenerateRequest, SamplingParameters

SETTINGS = ("--update-timeout", "20")


@pytest.fixture(scope="module")
def model(engine_model: Callable[..., Path]) -> Path:
    """The engines start with weights that no version has."""
    return engine_model(seed=100)


@pytest.fixture(scope="module")
def agent(sglang_python: Path, model: Path, module_processes: Processes) -> Actor:
    """An engine with two tensor-parallel workers, of which the second waits with files while `hold` exists. The
    whole run below and the gateway's test have an engine with one."""
    path = install(module_processes.folder / "plugins", sglang_holding.GROUP, sglang_holding.FUNCTION)
    environment = {
        "PYTHONPATH": path,
        sglang_holding.VARIABLE: str(module_processes.folder / "hold"),
    }
    options = ("--tensor-parallel-size", "2", *SETTINGS)
    return start_actor(module_processes, "sglang", sglang_python, model, *options, name="by-files", **environment)


Beside = Callable[..., Actor]


@pytest.fixture
def beside(sglang_python: Path, model: Path, processes: Processes) -> Beside:
    """(actor, name, options …) -> another agent for its engine, whose weights are not the first one's any more then."""

    def start(actor: Actor, name: str, *options: str) -> Actor:
        return start_actor(processes, "sglang", sglang_python, model, *options, *SETTINGS, name=name, beside=actor)

    return start


@contextlib.contextmanager
def serving(actor: Actor, model: Path, folder: Path) -> Iterator[Trainer]:
    """A trainer whose first version the actor serves."""
    folder.mkdir(exist_ok=True)
    with training(folder, model) as trainer:
        actor.connect(trainer)
        trainer.bring()
        yield trainer


def test_versions_by_files(agent: Actor, model: Path, tmp_path: Path) -> None:
    assert agent.health()["state"] == "joining"
    with serving(agent, model, tmp_path) as trainer:
        check_serves_newest(agent, trainer)
        trainer.bring()
        check_serves_newest(agent, trainer)
    capabilities = agent.asking(lambda client: client.capabilities(CALL_SECONDS))
    assert (capabilities.engine, capabilities.route, capabilities.score) == ("sglang", "agent", True)
    assert capabilities.version.startswith("0.5")
    assert not list(Path("/dev/shm").glob("torchtitan-by-files-*/version"))
    log = agent.processes.log("by-files.engine").read_text()
    assert TOKEN not in log and "Load weight" in log


def test_samples_have_the_log_probs_that_they_were_drawn_with(agent: Actor, model: Path, tmp_path: Path) -> None:
    with serving(agent, model, tmp_path) as trainer:

        def logits_of(sample: Completion) -> torch.Tensor:
            return trainer.logits([*PROMPT, *sample.token_ids])[len(PROMPT) - 1 : -1]

        samples = agent.generate(PROMPT, 8, n=8, temperature=0.7)
        assert len({tuple(sample.token_ids) for sample in samples}) > 4
        for completion in samples:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] == END else "length")
            all_log_probs = (logits_of(completion) / 0.7).log_softmax(-1)
            expected = all_log_probs[range(len(completion.token_ids)), completion.token_ids].tolist()
            assert differences(completion.log_probs, expected) < FP32_TOLERANCE
        for completion in agent.generate(PROMPT, 8, n=4, temperature=0.9, top_p=0.8):
            assert completion.kept_token_ids is not None
            for token, log_prob, kept, row in zip(
                completion.token_ids,
                completion.log_probs,
                completion.kept_token_ids,
                logits_of(completion) / 0.9,
                strict=True,
            ):
                assert token in kept and len(kept) < len(row)
                among = row[kept].log_softmax(-1)[kept.index(token)]
                assert abs(log_prob - float(among)) < FP32_TOLERANCE
                assert float(row.softmax(-1)[kept].sum()) >= 0.8 - 1e-4
        # A request that is wrong is not one that another actor should get.
        with pytest.raises(RequestRefused):
            agent.generate(PROMPT, 4, temperature=1.0, top_p=1.5)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_requests_in_flight_go_on_under_new_weights(
    agent: Actor, model: Path, beside: Beside, tmp_path: Path, kv: str
) -> None:
    other = beside(agent, f"kv-{kv}", "--in-flight-kv", kv)
    with serving(other, model, tmp_path) as trainer:
        check_goes_on(other, trainer, kv)


def cached_tokens(actor: Actor, prompt: list[int]) -> tuple[int, float]:
    """(how many tokens of a prompt were not computed, the log-prob of the one sampled), under a salt of the test's,
    which the server must not keep."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "cache_salt": "mine",
    }
    about = actor.engine.call("POST", "/generate", 60, body)["meta_info"]
    return int(about["cached_tokens"]), float(about["output_token_logprobs"][0][0])


def test_a_prefix_is_shared_among_those_of_one_version(
    agent: Actor, model: Path, beside: Beside, tmp_path: Path
) -> None:
    prompt = [2 + i % 50 for i in range(200)]
    with serving(beside(agent, "prefixes"), model, tmp_path) as trainer:
        assert cached_tokens(agent, prompt)[0] == 0
        for _ in range(2):
            cached, log_prob = cached_tokens(agent, prompt)
            expected = trainer.log_probs([*prompt, *trainer.greedy(prompt, 1)])[-1]
            assert cached >= 190 and abs(log_prob - expected) < FP32_TOLERANCE
            trainer.bring()
            assert cached_tokens(agent, prompt)[0] == 0


def check_goes_on(actor: Actor, trainer: Trainer, kv: str) -> None:
    """A completion that a version interrupts is of the old weights first and of the new ones then."""
    (completion,) = actor.asking(functools.partial(publish_meanwhile, trainer))
    assert len(completion.token_ids) == 300
    assert [span.version for span in completion.spans] == [0, 1]
    cut = completion.spans[0].end
    assert 0 < cut < 300
    old, fresh = (trainer.log_probs([*PROMPT, *completion.token_ids], version)[len(PROMPT) - 1 :] for version in (0, 1))
    assert differences(completion.log_probs[:cut], old[:cut]) < FP32_TOLERANCE
    after = differences(completion.log_probs[cut:], fresh[cut:])
    if kv == "recompute":
        # As if the new weights had seen all of it.
        assert after < FP32_TOLERANCE
    else:
        # The context is still what the old weights made of it.
        assert after > 0.01


async def health_at_version(client: ActorClient, version: int) -> ActorHealth:
    """Its health once it has that version, or after a while all the same."""
    for _ in range(600):
        if (await client.health(CALL_SECONDS)).version == version:
            break
        await asyncio.sleep(0.05)
    return await client.health(CALL_SECONDS)


async def publish_meanwhile(trainer: Trainer, client: ActorClient) -> list[Completion]:
    """A long completion during which version 1 comes; it stands still for a while in the middle of it."""
    sampling = SamplingParameters(max_tokens=300, temperature=1.0)

    async def generate() -> list[Completion]:
        return await client.generate(GenerateRequest("long", PROMPT, sampling), 120.0)

    # How long it takes here; the pause is to come after the first tokens and before the last.
    started_at = time.monotonic()
    await generate()
    alone = time.monotonic() - started_at
    for part in (3, 6, 12):
        task = asyncio.ensure_future(generate())
        await asyncio.sleep(alone / part)
        await client.client.call_object("pause", "POST", "/pause", 20.0, {})
        assert (await client.health(CALL_SECONDS)).state == "paused"
        await asyncio.sleep(0.5)
        if not task.done():
            break
        await task
        await client.client.call_object("resume", "POST", "/resume", 20.0, {})
    assert not task.done()
    trainer.publish()
    health = await health_at_version(client, 1)
    assert not task.done() and (health.state, health.version) == ("paused", 1)
    await client.client.call_object("resume", "POST", "/resume", 20.0, {})
    return await task


def test_memory_is_given_back_once_idle_and_taken_again_around_a_version(
    agent: Actor, model: Path, tmp_path: Path
) -> None:
    """Its own routes and scheduler. On a CPU it has no memory saver, so that the memory itself stays."""
    with serving(agent, model, tmp_path) as trainer:
        assert not agent.asking(lambda client: client.capabilities(CALL_SECONDS)).sleep
        (long,), (late,) = agent.asking(functools.partial(sleep_meanwhile, trainer))
        assert len(long.token_ids) == 300 and [span.version for span in long.spans] == [0]
        assert len(late.token_ids) == 4 and [span.version for span in late.spans] == [1]
        check_serves_newest(agent, trainer)


async def sleep_meanwhile(trainer: Trainer, client: Any) -> tuple[list[Completion], list[Completion]]:
    """A long completion that sleep has to wait for, and one that is asked for asleep."""
    request = GenerateRequest("long", PROMPT, SamplingParameters(max_tokens=300, temperature=1.0))
    long = asyncio.ensure_future(client.generate(request, 120.0))
    await asyncio.sleep(0.5)
    state = await client.client.call_object("sleep", "POST", "/sleep", 60.0, {"level": 1, "finish_s": 0.0})
    assert state["serves"] or long.done()
    assert await client.sleep(1, 100.0) and await client.sleep(1, 100.0)
    late = asyncio.ensure_future(client.generate(GenerateRequest("late", PROMPT, SamplingParameters(4)), 120.0))
    assert (await client.health(CALL_SECONDS)).asleep == TAGS
    await client.wake(["weights"], CALL_SECONDS)
    trainer.publish()
    health = await health_at_version(client, 1)
    assert (health.state, health.version, health.asleep) == ("asleep", 1, ("kv_cache",)) and not late.done()
    await client.wake(["kv_cache"], CALL_SECONDS)
    return await long, await late


def test_adapters_are_merged(agent: Actor, model: Path, beside: Beside, tmp_path: Path) -> None:
    other = beside(agent, "adapters")
    with adapter_trainer.training(tmp_path, model) as trainer:
        other.connect(trainer)
        for _ in range(2):
            trainer.bring()
            (completion,) = other.generate(PROMPT, 12)
            check_log_probs(other, trainer, completion)
            trainer.check_matters([*PROMPT, *completion.token_ids])
        assert trainer.deliveries("applied", at_least=2)[-1]["figures"]["bytes_full"] < 0.15 * trainer.base_bytes


def test_files_wait_for_the_slower_of_two_workers(agent: Actor, model: Path, tmp_path: Path) -> None:
    hold = agent.processes.folder / "hold"
    with serving(agent, model, tmp_path) as trainer:
        hold.touch()
        trainer.publish()
        trainer.wait_for(hold.with_suffix(".begun").exists)
        # Time in which the first worker, which answers, is done, and the files would go.
        time.sleep(1.0)
        files = list(Path("/dev/shm").glob("torchtitan-by-files-*/version/model.safetensors"))
        assert len(files) == 1 and agent.health()["version"] != trainer.version
        hold.unlink()
        trainer.wait_applied()
        check_serves_newest(agent, trainer)
        assert not files[0].exists()


@pytest.mark.timeout(2 * RUN_SECONDS)
def test_a_run_trains_through_an_update_that_is_killed(
    sglang_python: Path, debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    # Stale samples tell wrong weights only where a step moves the policy little: at a rate of 1e-4 one version moved it
    # by a KL of 0.005 to 0.055, and by more than 0.1 once; at 1e-5 it is 100 times smaller.
    run = Run(
        processes, "debug_cpu_sglang", debug_checkpoint, tmp_path,
        "--training.steps", "8", "--optimizer.lr", "1e-5", "--training.global_batch_size", "128",
        "--checkpoint.enable", "false", "--eval.num_prompts", "0",
        "--inference.sglang.python", sglang_python,
    )  # fmt: skip
    run.wait(lambda: len(run.steps()) >= 3)
    kill_in_an_update(run.process, run.folder / "logs" / "actor-0.log")
    run.wait(lambda: bool(run.events("actor_evicted")))
    run.wait(lambda: len(run.events("actor_ready")) >= 2)
    run.end()
    steps = run.steps()
    assert len(steps) == 8
    # Where the trainer still had the weights that sampled, both give the same log-probs.
    assert all(row["mismatch_kl"] < 1e-6 for row in steps if row["staleness/max"] == 0)
    mismatches = [(row["staleness/max"], row["mismatch_kl"]) for row in steps]
    assert mismatches[0][0] == 0 and all(mismatch < 0.01 for _, mismatch in mismatches), mismatches


def kill_in_an_update(run: psutil.Process, log: Path) -> None:
    """Freeze SGLang's scheduler until an update is under way, and kill the server then."""
    agent = started_by(run, "torchtitan.inference.engines.sidecar")[0]
    server = started_by(agent, "torchtitan.inference.engines.sglang.serve")[0]
    port = re.findall(r"listening on port (\d+)", log.read_text())[-1]
    address = f"http://127.0.0.1:{port}/health"
    parts = server.children(recursive=True)
    # Our own processes show no key in /proc; SGLang's have it from the one that started them.
    tokens = [part.environ()[TOKEN_VARIABLE] for part in parts if TOKEN_VARIABLE in part.environ()]
    ask = urllib.request.Request(address, headers={"Authorization": f"Bearer {tokens[0]}"})
    for _ in range(10):
        for part in parts:
            part.suspend()
        stuck = 0
        # The trainer has another batch to train, and publishes its version.
        for _ in range(30):
            with urllib.request.urlopen(ask, timeout=PATIENCE_S) as response:
                state = json.load(response)["weights"]["state"]
            stuck += state == "applying"
            if stuck == 5:
                for process in [*parts, server]:
                    process.kill()
                return
            time.sleep(0.1)
        for part in parts:
            part.resume()
        time.sleep(0.2)
    raise AssertionError(f"no update came: {state}")
