"""Actors that sleep while the trainer trains: real engines, a foreign engine's agent, and a run by its command."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration_tests.test_actors import Run, make_config, running
from tests.integration_tests.test_agent import check, engine_of, foreign_config
from tests.integration_tests.test_embedded_server import TOKEN, start
from tests.patience import PATIENCE_S, until
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import ActorNotReady
from torchtitan.inference.engines.embedded.client import EmbeddedClient
from torchtitan.inference.types import TAGS, GenerateRequest, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.rollout.types import Batch

MIB = 2**20


class SleepingRun(Run):
    """`step` as the trainer's loop has it in blocking mode; `while_asleep` is called where it would train."""

    while_asleep: Callable[[], None] = staticmethod(lambda: None)

    def step(self) -> Batch:
        batch = self.next_batch()
        self.call(self.pool.sleep, timeout_s=PATIENCE_S)
        self.while_asleep()
        self.train()
        self.call(self.pool.wake, "weights", timeout_s=PATIENCE_S)
        self.publish()
        self.sync.wait_until_applied(self.version, 30)
        self.call(self.pool.wake, "kv_cache", timeout_s=PATIENCE_S)
        self.call(self.flow.set_version, self.version)
        return batch


@contextlib.contextmanager
def sleeping(config: JobConfig, policy: Decoder, run_dir: Path, level: int = 1) -> Iterator[SleepingRun]:
    config.grpo.async_weight_update = False
    config.inference.sleep_level = level
    # A group that is redone or waits for its reward may be of the version before; here it is dropped then.
    config.rollout.max_staleness = 0
    config.inference.drain_timeout_s, config.inference.sleep_timeout_s = 30.0, 30.0
    # A busy machine is no frozen actor; what died is noticed at once.
    config.inference.health_timeout_s = 20.0
    with running(config, policy, run_dir) as run:
        run.__class__ = SleepingRun
        assert isinstance(run, SleepingRun)
        yield run


def states(run: Run) -> dict[str, str]:
    actors: dict[str, str] = run.pool.actors
    return actors


def test_an_actor_that_is_killed_asleep_is_replaced_when_its_memory_is_free(tmp_path: Path) -> None:
    config, policy = make_config(tmp_path / "checkpoint")
    with sleeping(config, policy, tmp_path / "run") as run:
        until(lambda: set(states(run).values()) == {"ready"})
        killed: list[int] = []

        def kill() -> None:
            if not killed:
                victim = run.process_of("actor-1")
                killed.append(victim.pid)
                victim.send_signal(signal.SIGKILL)
                # The pool lives in another thread, where the event follows the state.
                until(lambda: states(run)["actor-1"] == "evicted" and run.events("actor_evicted", "actor-1"))
                # The trainer has that memory now.
                assert not run.events("actor_restarting", "actor-1")

        run.while_asleep = kill  # type: ignore[method-assign]
        run.step()
        run.steps_until(lambda: len(run.events("actor_ready", "actor-1")) == 2, 90)
        assert run.process_of("actor-1").pid not in killed
        run.step()
        assert not run.events("actor_evicted", "actor-0")


def test_a_sleeping_engine_takes_less_memory(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its KV cache goes, as the system counts it, and what it samples afterwards is what it sampled before."""
    options = ("--token-env", "ENGINE_TOKEN", "--port-file", str(tmp_path / "port"))
    server = start(tiny_checkpoint(), *options, "--max-sequences", "64", "--max-length", "2048", ENGINE_TOKEN=TOKEN)
    # Sixty-four times a long prompt fill the cache with 100 MB.
    prompt = [3 + number % 100 for number in range(1900)]
    request = GenerateRequest("a", prompt, SamplingParameters(max_tokens=2, n=64, temperature=0.0))

    async def scenario() -> None:
        handler = EmbeddedClient(f"http://127.0.0.1:{(tmp_path / 'port').read_text().strip()}", TOKEN)
        process = psutil.Process(server.pid)
        try:
            assert (await handler.capabilities(30)).sleep
            before = await handler.generate(request, 120)
            awake = process.memory_info().rss
            assert await handler.sleep(1, 60)
            assert (await handler.health(30)).asleep == TAGS and not (await handler.health(30)).serves
            assert awake - process.memory_info().rss > 60 * MIB
            with pytest.raises(ActorNotReady, match="asleep"):
                await handler.generate(request, 30)
            with pytest.raises(ActorNotReady, match="asleep"):
                await handler.score(prompt[:8], 30)
            await handler.wake(["weights"], 30)
            assert (await handler.health(30)).asleep == ("kv_cache",)
            with pytest.raises(ActorNotReady, match="asleep"):
                await handler.generate(request, 30)
            await handler.wake(["kv_cache"], 30)
            assert await handler.generate(request, 120) == before
        finally:
            await handler.close()

    try:
        assert server.stdout is not None
        assert "listening" in server.stdout.readline()
        asyncio.run(scenario())
    finally:
        server.kill()
        server.wait(PATIENCE_S)


def test_a_foreign_engine_sleeps_with_every_version_and_is_started_anew_where_it_does_not(tmp_path: Path) -> None:
    """An agent, whose fake engine ends where a real one would."""
    config, policy = foreign_config(tmp_path)
    # A configuration for a machine without GPUs would be refused; the fake needs none.
    with sleeping(config, policy, tmp_path / "run", level=2) as run:
        for _ in range(3):
            run.step()
        first = engine_of(tmp_path)
        assert first.is_running()
        for event in ("actor_evicted", "actor_stays_awake", "actor_restarting"):
            assert not run.events(event, "actor-0")
        orders = (tmp_path / "slept").read_text().splitlines()
        assert orders == ["release weights kv_cache", "resume weights", "resume kv_cache"] * 3
        check(run)  # weights that were dropped give no number
        versions = [{span.version for sample in batch.samples for span in sample.spans} for batch in run.batches]
        assert versions == [{0}, {1}, {2}]
        (tmp_path / "no_release").touch()
        run.while_asleep = lambda: until(lambda: not first.is_running())  # type: ignore[method-assign]
        run.step()
        (tmp_path / "no_release").unlink()
        run.while_asleep = lambda: None  # type: ignore[method-assign]
        run.step()
        evicted = run.events("actor_evicted", "actor-0")[0]
        assert evicted["noticed_by"] == "sleep" and "/release_memory_occupation" in evicted["reason"]
        assert run.events("actor_restarting", "actor-0") and engine_of(tmp_path).pid != first.pid
