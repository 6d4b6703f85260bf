"""Where requests wait for the trainer's own devices."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.patience import asynchronous
from tests.unit_tests.inference.test_colocated_replica import completion, request
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.engines.replicas.replica_pool import ReplicaAnswer, ReplicaPool, Round


def pool(replicas: int = 1, max_sequences: int = 4) -> ReplicaPool:
    config = JobConfig()
    config.inference.max_sequences = max_sequences
    return ReplicaPool(config, "e1-x", replicas)


def names(round_: Round) -> list[int]:
    return [len(requests) for requests in round_.requests]


@asynchronous
async def test_requests_wait_for_their_version() -> None:
    waiting = pool()
    task = asyncio.create_task(waiting.generate(request(), min_version=4))
    await asyncio.sleep(0)
    assert not waiting.wanted(3)
    assert waiting.wanted(4)
    assert names(waiting.begin_round(3)) == [0]
    waiting.finish_round([])
    command = waiting.begin_round(4)
    assert command.label == "e1-x/4"
    name = command.requests[0][0].request_id
    waiting.finish_round([ReplicaAnswer(name, [completion("a.0"), completion("a.1")])])
    assert [sample.token_ids for sample in await task] == [[0], [1]]
    assert not waiting.wanted(4)


@asynchronous
async def test_the_least_loaded_replica_gets_a_whole_group() -> None:
    shared = pool(replicas=2, max_sequences=4)
    tasks = [asyncio.create_task(shared.generate(request(n=n))) for n in (3, 1, 1, 1, 4, 4)]
    await asyncio.sleep(0)
    first = shared.begin_round(0)
    # 3 | 1 1 1 and then one group more than fits on each side; the last waits.
    assert [[query.sampling.n for query in requests] for requests in first.requests] == [[3, 4], [1, 1, 1, 4]]
    shared.finish_round([])
    assert names(shared.begin_round(0)) == [0, 0]
    await shared.close()
    assert all(task.cancelled() for task in await finished(tasks))


async def finished(tasks: list[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


@asynchronous
async def test_an_abandoned_request_is_cancelled_in_the_engine() -> None:
    shared = pool()
    task = asyncio.create_task(shared.generate(request()))
    other = asyncio.create_task(shared.generate(request(n=1)))
    await asyncio.sleep(0)
    (requests,) = shared.begin_round(0).requests
    shared.finish_round([])
    task.cancel()
    await finished([task])
    command = shared.begin_round(0)
    assert command.cancelled == [requests[0].request_id]
    # Its answer was on the way: it is passed over, and the place is free for another.
    shared.finish_round(
        [ReplicaAnswer(requests[0].request_id), ReplicaAnswer(requests[1].request_id, [completion("b.0")])]
    )
    assert len(await other) == 1
    assert not shared.wanted(0)


@asynchronous
async def test_a_refusal_ends_the_run_with_the_engines_words() -> None:
    shared = pool()
    task = asyncio.create_task(shared.generate(request("g-7")))
    await asyncio.sleep(0)
    ((sent,),) = shared.begin_round(0).requests
    shared.finish_round([ReplicaAnswer(sent.request_id, refused="longer than the model")])
    with pytest.raises(UserError, match=r"refused request g-7: longer than the model"):
        await task


@asynchronous
async def test_an_answer_with_invalid_log_probs_is_sampled_again_within_a_bound() -> None:
    shared = pool()
    task = asyncio.create_task(shared.generate(request("g-8", n=1)))
    spoilt = replace(completion("a.0"), log_probs=[math.nan])
    for _ in range(1 + JobConfig().inference.max_retries):
        await asyncio.sleep(0)
        ((sent,),) = shared.begin_round(0).requests
        shared.finish_round([ReplicaAnswer(sent.request_id, [spoilt])])
        await asyncio.sleep(0.01)
    with pytest.raises(UserError, match=r"g-8 failed . times .*replica-0: the log-prob of token 1 is nan"):
        await task
    assert shared.statistics["requests_redone"] == JobConfig().inference.max_retries


def test_rounds_become_as_long_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("torchtitan.inference.engines.replicas.replica_pool.time.monotonic", lambda: now[0])
    shared = pool()
    steps = []
    for _ in range(12):
        command = shared.begin_round(0)
        steps.append(command.steps)
        now[0] += command.steps * 0.01
        shared.finish_round([])
    assert steps[0] < steps[-1] == 25
