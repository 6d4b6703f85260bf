"""Actors that look healthy and answer requests with anything else: the run goes on with the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.patience import asynchronous, eventually
from tests.unit_tests.inference.stand_in_actor import StandInActor
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import TOKEN_VARIABLE, ActorError, parse_health
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.utils.json_lines import EventLog, read_json_lines

GOOD = {
    "token_ids": [1, 2], "log_probs": [-0.5, -0.25], "finish_reason": "stop",
    "spans": [{"epoch": "e", "version": 0, "start": 0, "end": 2}],
}  # fmt: skip
LONG = {
    "token_ids": [1] * 5, "log_probs": [-0.5] * 5, "finish_reason": "length",
    "spans": [{"epoch": "e", "version": 0, "start": 0, "end": 5}],
}  # fmt: skip
Answer = Callable[[], web.Response]


class Answering(StandInActor):
    """It takes so long to answer a request so."""

    def __init__(self, answer: Answer, seconds: float = 0.0, version: int = 0):
        super().__init__(version)
        self._answer, self._seconds = answer, seconds

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(self._seconds)
        return self._answer()


async def all_are_answered(folder: Path, sick: Answer, seconds: float = 0.0, **inference: Any) -> None:
    config = JobConfig()
    config.inference.num_actors, config.inference.discover = 0, True
    vars(config.inference).update({"health_interval_s": 0.05, **inference})
    pool = InferencePool(config, "e", "secret", folder, EventLog(folder / "events.jsonl"))
    healthy = Answering(lambda: web.json_response({"completions": [GOOD]}), seconds)
    async with healthy.running() as well, Answering(sick).running() as ill:
        await pool.start()
        try:
            await pool.admit({"ill": ill, "well": well})
            await pool.connect_weights("127.0.0.1:5", {0})
            await eventually(lambda: pool.actors == {"ill": "ready", "well": "ready"}, why=lambda: pool.actors)
            all_requests = [GenerateRequest(f"r{number}", [1], SamplingParameters(4)) for number in range(16)]
            for (completion,) in await asyncio.gather(*map(pool.generate, all_requests)):
                assert completion.to_json().items() >= GOOD.items()
            assert pool.statistics["requests_redone"] > 0
        finally:
            await pool.close()


BIG = 10**400
ANSWERS = {
    "nested": '{"completions":' + "[" * 50_000,
    "long": json.dumps({"completions": [GOOD]}) + " " * 100_000,
    "more tokens than were requested": json.dumps({"completions": [LONG]}),
    **{
        f"{name} {value!r:.35}": json.dumps({"completions": [{**GOOD, name: value}]})
        for name, value in [
            ("token_ids", 7), ("token_ids", ["a", "b"]), ("token_ids", [-1, 2]), ("token_ids", [BIG, 2]),
            ("log_probs", ["a", "b"]), ("log_probs", [BIG, 0]), ("finish_reason", ["stop"]),
            ("kept_token_ids", 5), ("kept_token_ids", [[1]]), ("kept_token_ids", [["a"], []]),
            ("spans", [{**GOOD["spans"][0], "version": BIG}]), ("spans", [{**GOOD["spans"][0], "version": "0"}]),
            ("spans", [{**GOOD["spans"][0], "version": 1}]), ("spans", [{**GOOD["spans"][0], "version": 2**62}]),
        ]
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "token")


@pytest.mark.parametrize("kind", ANSWERS)
@asynchronous
async def test_answers_that_are_none_are_redone_elsewhere(tmp_path: Path, kind: str) -> None:
    await all_are_answered(tmp_path, lambda: web.Response(text=ANSWERS[kind]))


@pytest.mark.parametrize("state", ["starting", "suspect", "late", "evicted", "given_up", "well"])
def test_health_with_a_state_that_only_others_give_an_actor_is_malformed(state: str) -> None:
    for answer in ({"state": state, "serves": False}, {"state": "ready", "serves": True, "weights": {"state": state}}):
        with pytest.raises(ActorError, match="malformed"):
            parse_health(answer)


@pytest.mark.parametrize("state", ["joining", "paused", "asleep", "poisoned", "leaving"])
def test_health_that_serves_in_a_state_without_service_is_malformed(state: str) -> None:
    assert not parse_health({"state": state, "serves": False}).serves
    with pytest.raises(ActorError, match=f"it says that it serves while it is {state}"):
        parse_health({"state": state, "serves": True})


@pytest.mark.parametrize("version", [1, 2**62, -1])
@asynchronous
async def test_actor_that_says_it_serves_what_was_not_published_gets_no_requests(tmp_path: Path, version: int) -> None:
    config = JobConfig()
    config.inference.num_actors, config.inference.discover = 0, True
    pool = InferencePool(config, "e", "secret", tmp_path, EventLog(tmp_path / "events.jsonl"))
    answer = lambda: web.json_response({"completions": [GOOD]})  # noqa: E731
    async with Answering(answer).running() as well, Answering(answer, version=version).running() as liar:
        await pool.start()
        try:
            await pool.admit({"liar": liar, "well": well})
            await pool.connect_weights("127.0.0.1:5", {0})
            await eventually(lambda: pool.actors == {"liar": "joining", "well": "ready"}, why=lambda: pool.actors)
            all_requests = [GenerateRequest(f"r{number}", [1], SamplingParameters(4)) for number in range(8)]
            await asyncio.gather(*map(pool.generate, all_requests))
            assert pool.serving_version() == 0 and pool.statistics["requests_redone"] == 0
        finally:
            await pool.close()


class StartedAnew(Answering):
    """It serves once it is connected, until it is another process, which nobody has connected."""

    connected = False

    async def health(self, _request: web.Request) -> web.Response:
        served = {"epoch": "e", "version": 0, "weights": {"state": "ready"}} if self.connected else {"weights": None}
        state = "ready" if self.connected else "joining"
        return web.json_response({"state": state, "serves": self.connected, **served})

    async def connect(self, request: web.Request) -> web.Response:
        self.connected = True
        return await super().connect(request)


@asynchronous
async def test_server_that_starts_anew_between_two_looks_at_it_is_connected_at_once(tmp_path: Path) -> None:
    """Not only at the deadline of its first version, inference.startup_timeout_s, ten minutes."""
    config = JobConfig()
    config.inference.num_actors, config.inference.discover = 0, True
    pool = InferencePool(config, "e", "secret", tmp_path, EventLog(tmp_path / "events.jsonl"))
    server = StartedAnew(lambda: web.json_response({"completions": [GOOD]}))
    async with server.running() as url:
        await pool.start()
        try:
            await pool.admit({"a": url})
            await pool.connect_weights("127.0.0.1:5", {0})
            await eventually(lambda: pool.actors == {"a": "ready"}, why=lambda: pool.actors)
            for count in (2, 3):
                server.connected = False
                await eventually(lambda: server.connections == count, why=lambda: pool.actors)  # noqa: B023
                await eventually(lambda: pool.actors == {"a": "ready"}, why=lambda: pool.actors)
        finally:
            await pool.close()
    evicted = [row["reason"] for row in read_json_lines(tmp_path / "events.jsonl") if row["kind"] == "actor_evicted"]
    assert len(evicted) == 2 and all("was started anew" in reason for reason in evicted)


@asynchronous
async def test_refusal_of_one_that_has_joined_does_not_end_the_run(tmp_path: Path) -> None:
    await all_are_answered(tmp_path, lambda: web.json_response({"error": "no"}, status=400))


@asynchronous
async def test_request_does_not_fail_twice_on_an_actor_while_another_one_is_busy(tmp_path: Path) -> None:
    """The sick one is idle at once, and would get what it has just failed with until inference.max_retries."""
    await all_are_answered(tmp_path, lambda: web.Response(status=500), seconds=0.2, max_sequences=1, max_retries=1)
