"""Actors that join a running job by its registry's address and a token, and leave it: engines, registry and pool."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, asynchronous, eventually
from tests.unit_tests.weight_sync.clients import GUEST_TOKEN
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.inference.engines.embedded.__main__ import parse_arguments
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.server import EngineServer
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.serving.joining import Guest, demands, offers
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.utils.json_lines import EventLog, read_json_lines
from torchtitan.weight_sync import servers
from torchtitan.weight_sync.facade import WeightSync

LENGTH = 500


class Job:
    """A run without actors of its own: it publishes, and has a pool that meets whoever comes."""

    def __init__(self, checkpoint: Path, folder: Path):
        self.config = config = JobConfig()
        config.model.hf_assets_path, config.training.seq_len = str(checkpoint), LENGTH
        config.inference.num_actors, config.inference.discover = 0, True
        config.inference.health_timeout_s = 2.0
        config.inference.max_sequences = 8
        self.folder, self.checkpoint = folder, checkpoint
        parameters = dict(load_policy(checkpoint).named_parameters())
        self.sync = WeightSync(
            config.weight_sync, parameters, epoch="e", token="secret", run_dir=folder, guests=demands(config)
        )
        self.pool = InferencePool(config, "e", "secret", folder, EventLog(folder / "events.jsonl"))

    def publish(self, version: int) -> None:
        assert self.sync.reserve() and self.sync.commit(version, 0) == "published"

    async def meet(self) -> None:
        while True:
            await self.pool.admit(self.sync.guests())
            await asyncio.sleep(0.02)

    async def ready(self, *names: str) -> None:
        await eventually(lambda: self.pool.actors == dict.fromkeys(names, "ready"), why=lambda: self.pool.actors)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.folder / "events.jsonl") if event["kind"] == kind]

    def journal(self, kind: str) -> list[str]:
        lines = read_json_lines(self.folder / "weight_sync" / "registry.jsonl")
        return [line["actor"] for line in lines if line["event"] == kind]


class Spot:
    """An actor as its program makes it, in this process."""

    def __init__(self, job: Job, name: str, *options: str):
        self.arguments: argparse.Namespace = parse_arguments([
            "--model", str(job.checkpoint), "--join", job.sync.registry_address, "--join-as", name, "--join-for", "3",
            "--max-sequences", "8", "--max-length", str(LENGTH), *options,
        ])  # fmt: skip
        policy = load_policy(job.checkpoint)
        self.server = EngineServer(Engine(policy, 8, LENGTH), GUEST_TOKEN, 1, require_version=True)

    async def start(self) -> Spot:
        port = await self.server.start("127.0.0.1", 0)
        self.guest = Guest(self.arguments, offers(self.arguments, "embedded"), port, GUEST_TOKEN)
        self.stay = asyncio.create_task(self.guest.stay(self.server.stopped, self.server))
        return self

    async def leave(self) -> None:
        """As at SIGTERM."""
        self.server.stopped.set()
        await self.stay
        await self.server.close()

    async def die(self) -> None:
        """As at SIGKILL."""
        self.stay.cancel()
        self.guest._runtime.stop()
        self.server.loop.abort_all()
        await self.server.close()


@pytest.fixture
def job(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], contextlib.AbstractAsyncContextManager[Job]]:
    monkeypatch.setenv(TOKEN_VARIABLE, GUEST_TOKEN)

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Job]:
        job = Job(tiny_checkpoint(), tmp_path)
        meeting = None
        try:
            job.publish(0)
            await job.pool.start()
            await job.pool.connect_weights(job.sync.registry_address)
            meeting = asyncio.create_task(job.meet())
            yield job
        finally:
            if meeting is not None:
                meeting.cancel()
            await job.pool.close()
            job.sync.close()

    return running


def endless(name: str) -> GenerateRequest:
    """From this prompt the most likely token is never the end."""
    return GenerateRequest(name, [4, 9, 3], SamplingParameters(LENGTH - 3, 1, 0.0))


@asynchronous
async def test_actors_join_serve_leave_when_they_have_answered_and_are_missed_by_nobody(
    job: Callable[[], contextlib.AbstractAsyncContextManager[Job]],
) -> None:
    async with job() as run:
        waiting = asyncio.create_task(run.pool.generate(endless("first")))
        await asyncio.sleep(0.1)
        assert run.pool.actors == {} and not waiting.done()
        first_spot = await Spot(run, "one").start()
        # The request that waits for it is the one that it has to finish.
        await eventually(lambda: run.pool._actors and run.pool._actors[0].load, why=lambda: run.pool.actors)
        leaving = asyncio.create_task(first_spot.leave())
        two = await Spot(run, "two").start()
        await leaving
        (completion,) = await waiting
        assert len(completion.token_ids) == LENGTH - 3 and completion.spans[0].version == 0
        await run.ready("two")
        assert run.pool.statistics["requests_redone"] == run.pool.statistics["evictions"] == 0
        assert not run.events("actor_evicted") and [event["actor"] for event in run.events("actor_left")] == ["one"]
        await eventually(lambda: run.journal("left") == ["one"])
        assert not run.journal("evicted")
        # Another version, and one that goes without a word: what it has not answered is redone by whoever comes.
        run.publish(1)
        waiting = asyncio.create_task(run.pool.generate(endless("second"), min_version=1))
        await eventually(lambda: run.pool._actors[0].load, why=lambda: run.pool.actors)
        await two.die()
        assert not waiting.done()
        three = await Spot(run, "three").start()
        (completion,) = await waiting
        assert [span.version for span in completion.spans] == [1]
        await run.ready("three")
        await eventually(lambda: run.journal("evicted") == ["two"])
        assert run.sync.actors().keys() <= {"two", "three"}
        await three.leave()
        await eventually(lambda: not run.pool.actors)


@asynchronous
async def test_server_that_does_not_fit_the_run_never_gets_a_request_and_ends_with_the_reason(
    job: Callable[[], contextlib.AbstractAsyncContextManager[Job]],
) -> None:
    async with job() as run:
        wrong = await Spot(run, "wrong", "--join-for", "1", "--dtype", "bfloat16").start()
        with pytest.raises(UserError, match="its dtype is bfloat16, and this job needs float32"):
            await wrong.stay
        await wrong.server.close()
        assert run.pool.actors == {} and not run.events("actor_joined")


@asynchronous
async def test_guests_stay_while_they_answer_though_the_registry_has_forgotten_them(
    job: Callable[[], contextlib.AbstractAsyncContextManager[Job]],
) -> None:
    async with job() as run:
        spot = await Spot(run, "spot").start()
        await run.ready("spot")
        assert run.sync.registry is not None
        run.sync.registry.process.kill()  # type: ignore[attr-defined]
        # The next one knows no guest until it comes back, which a slow machine may see too late.
        await eventually(lambda: run.sync.registry.restarts == 1)  # type: ignore[union-attr]
        assert await run.pool.generate(endless("meanwhile"))
        await eventually(lambda: set(run.sync.guests()) == {"spot"})
        assert not run.events("actor_left")
        await spot.leave()
        await eventually(lambda: not run.pool.actors)


@asynchronous
async def test_guest_that_ends_while_the_registry_is_away_answers_what_it_has_begun(
    job: Callable[[], contextlib.AbstractAsyncContextManager[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "RESTART_SECONDS", 600.0)
    async with job() as run:
        spot = await Spot(run, "spot").start()
        await run.ready("spot")
        waiting = asyncio.create_task(run.pool.generate(endless("last")))
        await eventually(lambda: run.pool._actors[0].load, why=lambda: run.pool.actors)
        assert run.sync.registry is not None
        run.sync.registry.process.kill()  # type: ignore[attr-defined]
        await eventually(lambda: not spot.guest._client.connected)
        await spot.leave()
        (completion,) = await waiting
        assert len(completion.token_ids) == LENGTH - 3 and run.pool.statistics["requests_redone"] == 0


@asynchronous
async def test_guest_of_no_run_ends_at_once(
    job: Callable[[], contextlib.AbstractAsyncContextManager[Job]],
) -> None:
    async with job() as run:
        wrong = await Spot(run, "wrong", "--leave-within", "600", "--dtype", "bfloat16").start()
        await asyncio.wait_for(wrong.leave(), PATIENCE_S)
