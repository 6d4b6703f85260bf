"""Weight updates that let running requests finish first: in the engine's thread and over HTTP."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.inference.engines.embedded.__main__ import parse_arguments
from torchtitan.inference.engines.embedded.engine import Engine, Finished
from torchtitan.inference.engines.embedded.loop import Applied, EngineLoop, Unavailable
from torchtitan.inference.pool.actor_process import actor_command
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.rollout.flow.statistics import sample_version
from torchtitan.utils.json_lines import ActivityLog, read_json_lines

LONG = 60.0


class Served:
    """An engine in its thread, at version 1, whose steps are counted and can be held up."""

    def __init__(self, directory: Path, rows: int, drain_timeout_s: float, activity: Path | None = None):
        self.engine = Engine(load_policy(directory), rows, 400, ())
        self.weights = {name: tensor.detach().clone() for name, tensor in load_policy(directory).named_parameters()}
        self.go = threading.Semaphore(0)
        self.free = False
        step = self.engine.step

        def gated() -> Finished:
            if not self.free:
                assert self.go.acquire(timeout=LONG)
            return step()

        self.engine.step = gated  # type: ignore[method-assign]
        self.failures: list[BaseException] = []
        self.loop = EngineLoop(self.engine, 1, False, self.failures.append, drain_timeout_s, ActivityLog(activity))
        self.loop.start()
        self.loop.apply("e", 1, self.weights)
        self.threads = ThreadPoolExecutor()

    def apply(self, version: int, **broken: torch.Tensor) -> Any:
        return self.threads.submit(self.loop.apply, "e", version, {**self.weights, **broken})

    async def until(self, condition: Callable[[], Any], stepping: bool = True) -> None:
        """Look until it holds, letting one more step happen each time."""
        deadline = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < deadline
            if stepping:
                self.go.release()
            await asyncio.sleep(0.005)

    def run_free(self) -> None:
        self.free = True
        self.go.release()

    def close(self) -> None:
        self.run_free()
        self.loop.close(LONG)
        self.threads.shutdown()


@pytest.fixture
def serve(tiny_checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(rows: int = 4, drain_timeout_s: float = LONG, activity: Path | None = None) -> Served:
        made.append(Served(tiny_checkpoint(), rows, drain_timeout_s, activity))
        return made[-1]

    yield make
    for served in made:
        served.close()
        assert not served.failures


def request(name: str, max_tokens: int, n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, [5, 9, 3], SamplingParameters(max_tokens, n=n))


def versions(completions: list[Completion]) -> list[list[tuple[int, int, int]]]:
    return [[(span.version, span.start, span.end) for span in completion.spans] for completion in completions]


def test_started_requests_end_under_their_version_and_queued_ones_start_under_the_new(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(rows=3, activity=tmp_path / "activity.jsonl")

    async def scenario() -> None:
        first = asyncio.create_task(served.loop.generate(request("first", 9)))
        # Two of its five samples get a row at first: the others have begun with them, so they may go on.
        group = asyncio.create_task(served.loop.generate(request("group", 6, n=5)))
        queued = asyncio.create_task(served.loop.generate(request("queued", 4, n=2)))
        await served.until(lambda: served.engine.running == 3 and len(served.loop._waiters) == 3)
        update = served.apply(2)
        await served.until(lambda: served.engine.admission_paused)
        assert not first.done()
        late = asyncio.create_task(served.loop.generate(request("late", 4)))
        served.run_free()
        cost = await asyncio.wrap_future(update)
        assert isinstance(cost, Applied) and cost.drain_s > cost.pause_s > 0
        assert versions(await first) == [[(1, 0, 9)]]
        assert versions(await group) == [[(1, 0, 6)]] * 5
        assert versions(await queued) == [[(2, 0, 4)]] * 2
        assert versions(await late) == [[(2, 0, 4)]]
        assert not served.engine.admission_paused

    asyncio.run(scenario())
    served.close()
    rows = read_json_lines(tmp_path / "activity.jsonl")
    assert sum(row.get("tokens", 0) for row in rows if row["version"] == 1) == 9 + 5 * 6
    assert sum(row.get("tokens", 0) for row in rows if row["version"] == 2) == 3 * 4
    (drain,) = [row for row in rows if row["what"] == "drain" and row["version"] == 2]
    (apply,) = [row for row in rows if row["what"] == "apply" and row["version"] == 2]
    assert drain["begin"] < drain["end"] <= apply["begin"] < apply["end"]
    assert served.engine.statistics.drain_seconds > 0


def test_at_the_deadline_weights_change_in_flight(serve: Callable[..., Served]) -> None:
    served = serve(rows=2, drain_timeout_s=0.05)

    async def scenario() -> None:
        endless = asyncio.create_task(served.loop.generate(request("endless", 300, n=2)))
        queued = asyncio.create_task(served.loop.generate(request("queued", 4)))
        await served.until(lambda: served.engine.running == 2 and len(served.loop._waiters) == 2)
        update = served.apply(2)
        await served.until(update.done)  # some steps until the deadline, far fewer than the request has tokens
        assert (await asyncio.wrap_future(update)).drain_s >= 0.05
        served.run_free()
        for (before, start, cut), (after, again, end) in versions(await endless):
            assert (before, start, after, end) == (1, 0, 2, 300) and 0 < cut == again < 300
        assert versions(await queued) == [[(2, 0, 4)]]
        # The staleness gate counts from the oldest token: the cut request is of version 1, the queued one of 2.
        assert {sample_version(completion.spans) for completion in await endless} == {1}
        assert sample_version((await queued)[0].spans) == 2

    asyncio.run(scenario())


def test_pause_poison_and_shutdown_do_not_wait_for_what_cannot_finish(serve: Callable[..., Served]) -> None:
    served = serve(drain_timeout_s=10 * LONG)

    async def scenario() -> None:
        for version in (2, 3):  # an idle engine has nothing to finish
            await asyncio.wait_for(asyncio.wrap_future(served.apply(version)), LONG)
        running = asyncio.create_task(served.loop.generate(request("running", 8)))
        await served.until(lambda: served.engine.running)
        paused = served.loop.call(served.engine.pause)
        await served.until(paused.done)
        await asyncio.wrap_future(served.apply(4))
        served.loop.call(served.engine.resume)
        await served.until(lambda: served.engine.statistics.generated_tokens >= 4)
        # Half of a version while something drains: nobody gets an answer made of it.
        broken = served.apply(5, **{"model.norm.weight": torch.zeros(64, device="meta")})
        served.run_free()
        with pytest.raises((RuntimeError, NotImplementedError)):
            await asyncio.wrap_future(broken)
        assert versions(await running)[0][-1][0] == 4
        assert served.loop.why_unavailable() is not None
        await asyncio.wrap_future(served.apply(6))
        assert served.loop.why_unavailable() is None
        served.free = False
        stuck = asyncio.create_task(served.loop.generate(request("stuck", 300)))
        await served.until(lambda: served.engine.running)
        update = served.apply(7)
        await served.until(lambda: served.engine.admission_paused)
        closing = served.threads.submit(served.loop.close, LONG)
        await served.until(lambda: served.loop._closing, stepping=False)
        served.run_free()
        for future in (asyncio.wrap_future(update), stuck):
            with pytest.raises(Unavailable, match="shutting down"):
                await future
        await asyncio.wrap_future(closing)

    asyncio.run(scenario())


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=8),
    updates=st.integers(1, 3),
)
def test_no_request_is_lost_and_none_mixes_versions(
    tiny_checkpoint: Callable[..., Path], requests: list[tuple[int, int]], updates: int
) -> None:
    served = Served(tiny_checkpoint(), rows=3, drain_timeout_s=LONG)
    served.run_free()

    async def scenario() -> None:
        tasks, ordered = [], []
        for number, (tokens, n) in enumerate(requests):
            tasks.append(asyncio.create_task(served.loop.generate(request(str(number), tokens, n))))
            if number < updates:
                await asyncio.sleep(0.002)
                ordered.append(served.apply(number + 2))
        for answer, (tokens, n) in zip(await asyncio.gather(*tasks), requests, strict=True):
            assert [len(completion.token_ids) for completion in answer] == [tokens] * n
            # All samples of a group come from one version, whole.
            assert len({span.version for completion in answer for span in completion.spans}) == 1
            assert all(len(completion.spans) == 1 and completion.finish_reason == "length" for completion in answer)
        for update in ordered:
            await asyncio.wrap_future(update)

    try:
        asyncio.run(scenario())
        assert served.engine.version == 1 + min(updates, len(requests))
    finally:
        served.close()


def test_the_mode_reaches_the_actor_and_fits_its_deadline(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JobConfig()
    config.model.hf_assets_path = str(tiny_checkpoint())
    config.inference.update_mode, config.inference.drain_timeout_s = "drain", 2.5
    command = actor_command(config, tmp_path / "port")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    arguments = parse_arguments(command[command.index("torchtitan.inference.engines.embedded") + 1 :])
    assert (arguments.update_mode, arguments.drain_timeout) == ("drain", 2.5)
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "x", "--drain-timeout", "0"])
    # An agent's orders to its engine have what the deadline of an apply leaves.
    config.inference.backend, config.inference.engine.python = "vllm", sys.executable
    config.inference.drain_timeout_s = 4.0
    command = actor_command(config, tmp_path / "port")
    deadline_s = config.weight_sync.apply_deadline(0, drain_s=4.0)
    assert 4.0 + float(command[command.index("--update-timeout") + 1]) < deadline_s
