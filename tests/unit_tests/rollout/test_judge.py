"""The reward `judge` in its worker, against a stub of an OpenAI API: what it asks, what it makes of the answers, and
that a judge which is away gives no reward."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.patience import PATIENCE_S
from tests.unit_tests.rollout.test_reward_pool import completions_of, totals
from torchtitan.config.job_config import JobConfig
from torchtitan.preflight.validate import validate
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt

PROMPT = Prompt(0, "2+2", [1], {"answer": "4"})
PAGE = Path(__file__).parents[3] / "docs" / "adding_a_reward.md"


@dataclass
class Stub:
    """An OpenAI API that says what `says` makes of a request: a text, or a status."""

    says: Callable[[list[str]], str | int]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        said = self.says(re.findall(r"<answer \d+>\n(.*?)\n</answer", body["messages"][1]["content"], re.DOTALL))
        if isinstance(said, int):
            if said == 0:
                await asyncio.sleep(PATIENCE_S)
            return web.Response(status=said, text="no")
        message = {"role": "assistant", "content": said}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response({"choices": [{"index": 0, "message": message}], "usage": usage})


def make_config(folder: Path, **judge: Any) -> JobConfig:
    config = JobConfig()
    config.rewards.functions, config.rewards.timeout_s = ["judge"], PATIENCE_S
    (folder / "rubric.txt").write_text("Short answers are good.")
    config.rewards.network = True
    config.judge.model, config.judge.rubric = "critic", str(folder / "rubric.txt")
    config.judge.timeout_s = PATIENCE_S / 2
    vars(config.judge).update(judge)
    return config


def judged(
    config: JobConfig, stub: Stub, work: Callable[[RewardPool], Awaitable[Any]], away: bool = False
) -> tuple[Any, dict[str, float]]:
    """What `work` returns, and the metrics."""

    async def run() -> tuple[Any, dict[str, float]]:
        application = web.Application()
        application.add_routes([web.post("/v1/chat/completions", stub.answer)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        config.judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        if away:
            await runner.cleanup()
        pool = RewardPool(config)
        await pool.start()
        try:
            return await work(pool), pool.take_logged()
        finally:
            await asyncio.gather(pool.close(), runner.cleanup())

    return asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE_S))


async def score(pool: RewardPool, *said: str) -> list[float | None]:
    return totals(await pool.score(PROMPT, completions_of(*said)))


def test_scores_are_rewards_and_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRITIC_KEY", "secret")
    stub = Stub(lambda answers: f"A thought: SCORE: 3\nSCORE: {10 - len(answers[0])}")

    async def work(pool: RewardPool) -> list[Any]:
        return [await score(pool, "four", "4", "four"), await score(pool, "4", "five!")]

    config = make_config(tmp_path, key_variable="CRITIC_KEY", prompt_price=2.0, completion_price=30.0)
    (first, second), metrics = judged(config, stub, work)
    assert first == pytest.approx([0.6, 0.9, 0.6]) and second == pytest.approx([0.9, 0.5])
    # Equal answers are judged once, "4" is remembered.
    assert len(stub.requests) == 3 and set(stub.keys) == {"Bearer secret"}
    assert metrics["logged/judge/calls"] == 1.5 and metrics["logged/judge/cached"] == 0.5
    assert metrics["logged/judge/prompt_tokens"] == 150 and metrics["logged/judge/away"] == 0
    assert metrics["logged/judge/cost"] == pytest.approx((300 * 2.0 + 30 * 30.0) / 1e6 / 2)
    system, user = (message["content"] for message in stub.requests[0]["messages"])
    assert system.startswith("Short answers are good.\n\n") and "secret" not in str(stub.requests)
    assert "<question>\n2+2\n</question>" in user and "<reference>\n4\n</reference>" in user


@pytest.mark.slow
def test_a_ranking_orders_the_group_whatever_stands_first(tmp_path: Path) -> None:
    def by_length(answers: list[str]) -> str:
        places = sorted(range(len(answers)), key=lambda i: len(answers[i]))
        return "RANKING: " + ", ".join(str(place + 1) for place in places)

    stub = Stub(by_length)
    config = make_config(tmp_path, mode="rank", agreement_share=1.0)
    rewards, metrics = judged(config, stub, lambda pool: score(pool, "333", "1", "22", "1", "55555"))
    assert rewards == pytest.approx([1 / 3, 1, 2 / 3, 1, 0])
    assert metrics["logged/judge/disagreement"] == 0.0
    first, second = (re.findall(r"\n(\d+)\n</answer", one["messages"][1]["content"]) for one in stub.requests)
    assert first == second[::-1]
    # Whoever is named twice or not at all is not ranked.
    config.judge.agreement_share, config.judge.max_retries = 0.0, 0
    rewards, _ = judged(config, Stub(lambda answers: "RANKING: 1, 1"), lambda pool: score(pool, "a", "b"))
    assert rewards == [None, None]
    config.judge.agreement_share = 1.0
    # One that always prefers what stands first contradicts itself.
    rewards, metrics = judged(config, Stub(lambda answers: "RANKING: 1, 2"), lambda pool: score(pool, "a", "b"))
    assert sorted(filter(lambda one: one is not None, rewards)) == [0, 1]
    assert metrics["logged/judge/disagreement"] == 1.0


AWAY: dict[str | int, int] = {500: 3, 429: 3, 401: 1, "I cannot say.": 3, "SCORE: 11": 3}


@pytest.mark.slow
def test_a_judge_that_is_away_gives_no_reward(tmp_path: Path) -> None:
    """For each kind of failure, so many requests; what hangs may be cut off before its last one."""
    stub, counts = Stub(lambda answers: 0), []

    async def work(pool: RewardPool) -> list[Any]:
        rewards = []
        for says in AWAY:
            stub.says, before = lambda answers, says=says: says, len(stub.requests)
            rewards += await score(pool, str(says))
            counts.append(len(stub.requests) - before)
        stub.says = lambda answers: 0
        return rewards + await score(pool, "hangs")

    rewards, metrics = judged(make_config(tmp_path, timeout_s=4.0), stub, work)
    assert rewards == [None] * (len(AWAY) + 1) and metrics["logged/judge/away"] == 1
    assert counts == list(AWAY.values()) and len(stub.requests) - sum(counts) in (2, 3)


@pytest.mark.slow
def test_samples_lose_their_reward_one_by_one_and_nothing_is_remembered_of_failures(tmp_path: Path) -> None:
    working: list[bool] = []

    def says(answers: list[str]) -> str | int:
        return "SCORE: 5" if working or answers == ["good"] else 503

    async def work(pool: RewardPool) -> list[Any]:
        first = await score(pool, "good", "bad")
        working.append(True)
        return [first, await score(pool, "good", "bad")]

    rewards, _ = judged(make_config(tmp_path, max_retries=0), Stub(says), work)
    assert rewards == [[0.5, None], [0.5, 0.5]]
    rewards, metrics = judged(make_config(tmp_path), Stub(says), lambda pool: score(pool, "good"), away=True)
    assert rewards == [None] and metrics["logged/judge/calls"] == 3


def test_mistakes_are_named(tmp_path: Path) -> None:
    config = make_config(tmp_path, model="", rubric="nothing.txt", key_variable="NO_SUCH_KEY")
    config.rewards.timeout_s, config.rewards.network = config.judge.timeout_s, False
    found = {problem.key for problem in validate(config)}
    keys = ("url", "model", "rubric", "key_variable", "timeout_s")
    assert {"rewards.network", *(f"judge.{key}" for key in keys)} <= found
