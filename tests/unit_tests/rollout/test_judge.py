"""A judge as a reward in its worker, against a stub of an OpenAI API: what it asks, what it makes of the answers, and
that a judge which is away gives no reward."""

from __future__ import annotations

import asyncio
import json
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
from torchtitan.errors import UserError
from torchtitan.rollout.rewards.judge import Judge
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt

PROMPT = Prompt(0, "2+2", [1], {"answer": "4"})
# A module of the user's, whose judge has the settings that a test gives it.
CRITIC = """
import json, os
from torchtitan.errors import UserError
from torchtitan.rollout.rewards.judge import Judge
judge = Judge(**json.loads(os.environ["CRITIC"]))
"""


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
        reply = self.says(re.findall(r"<answer \d+>\n(.*?)\n</answer", body["messages"][1]["content"], re.DOTALL))
        if isinstance(reply, int):
            if reply == 0:
                await asyncio.sleep(PATIENCE_S)
            return web.Response(status=reply, text="no")
        message = {"role": "assistant", "content": reply}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response({"choices": [{"index": 0, "message": message}], "usage": usage})


@dataclass
class Judged:
    """What a judge made of the completions that `work` had scored."""

    rewards: Any
    metrics: dict[str, float]


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judged]:
    """judged(stub, work, function, away, **settings of the judge): `function` is the reward's name."""
    (tmp_path / "critics.py").write_text(CRITIC)
    monkeypatch.syspath_prepend(tmp_path)

    async def run(
        stub: Stub, work: Callable[[RewardPool], Awaitable[Any]], function: str, away: bool, settings: dict[str, Any]
    ) -> Judged:
        application = web.Application()
        application.add_routes([web.post("/v1/chat/completions", stub.answer)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        defaults = {"url": url, "model": "critic", "rubric": "Short answers are good.", "timeout_s": PATIENCE_S / 2}
        monkeypatch.setenv("CRITIC", json.dumps(defaults | settings))
        monkeypatch.setenv("JUDGE_URL", url)
        if away:
            await runner.cleanup()
        config = JobConfig()
        config.rewards.functions, config.rewards.timeout_s = [function], PATIENCE_S
        config.rewards.sandbox.network = True
        config.rewards.sandbox.variables = [settings["key_variable"]] if "key_variable" in settings else []
        pool = RewardPool(config)
        try:
            await pool.start()
            return Judged(await work(pool), pool.take_logged())
        finally:
            await asyncio.gather(pool.close(), runner.cleanup())

    def judge(
        stub: Stub,
        work: Callable[[RewardPool], Awaitable[Any]],
        function: str = "critics:judge",
        away: bool = False,
        **settings: Any,
    ) -> Judged:
        return asyncio.run(asyncio.wait_for(run(stub, work, function, away, settings), 2 * PATIENCE_S))

    return judge


async def score(pool: RewardPool, *texts: str) -> list[float | None]:
    return totals(await pool.score(PROMPT, completions_of(*texts)))


def by_length(answers: list[str]) -> str:
    places = sorted(range(len(answers)), key=lambda i: len(answers[i]))
    return "RANKING: " + ", ".join(str(place + 1) for place in places)


def test_scores_are_rewards_and_are_remembered(judged: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRITIC_KEY", "secret")
    stub = Stub(lambda answers: f"A thought: SCORE: 3\nSCORE: {10 - len(answers[0])}")

    async def work(pool: RewardPool) -> list[Any]:
        return [await score(pool, "four", "4", "four"), await score(pool, "4", "five!")]

    found = judged(stub, work, key_variable="CRITIC_KEY", prompt_price=2.0, completion_price=30.0)
    assert found.rewards == [pytest.approx([0.6, 0.9, 0.6]), pytest.approx([0.9, 0.5])]
    # Equal answers are judged once, "4" is remembered.
    assert len(stub.requests) == 3 and set(stub.keys) == {"Bearer secret"}
    metrics = found.metrics
    assert metrics["logged/judge/calls"] == 1.5 and metrics["logged/judge/cached"] == 0.5
    assert metrics["logged/judge/prompt_tokens"] == 150 and metrics["logged/judge/away"] == 0
    assert metrics["logged/judge/cost"] == pytest.approx((300 * 2.0 + 30 * 30.0) / 1e6 / 2)
    system, user = (message["content"] for message in stub.requests[0]["messages"])
    assert system.startswith("Short answers are good.\n\n") and "secret" not in str(stub.requests)
    assert "<question>\n2+2\n</question>" in user and "<reference>\n4\n</reference>" in user


def test_the_examples_judge_ranks_a_group(judged: Callable[..., Judged]) -> None:
    stub = Stub(by_length)
    found = judged(stub, lambda pool: score(pool, "333", "1", "22"), function="examples.own_judge:judge")
    assert found.rewards == pytest.approx([0, 1, 0.5])
    assert stub.requests[0]["model"] == "Qwen/Qwen3-8B"


@pytest.mark.slow
def test_a_ranking_orders_the_group_whatever_stands_first(judged: Callable[..., Judged]) -> None:
    stub = Stub(by_length)
    found = judged(stub, lambda pool: score(pool, "333", "1", "22", "1", "55555"), mode="rank", agreement_share=1.0)
    assert found.rewards == pytest.approx([1 / 3, 1, 2 / 3, 1, 0])
    assert found.metrics["logged/judge/disagreement"] == 0.0
    first, second = (re.findall(r"\n(\d+)\n</answer", body["messages"][1]["content"]) for body in stub.requests)
    assert first == second[::-1]
    # Whoever is named twice or not at all is not ranked.
    twice = Stub(lambda answers: "RANKING: 1, 1")
    assert judged(twice, lambda pool: score(pool, "a", "b"), mode="rank", max_retries=0).rewards == [None, None]
    # One that always prefers what stands first contradicts itself.
    stub = Stub(lambda answers: "RANKING: 1, 2")
    found = judged(stub, lambda pool: score(pool, "a", "b"), mode="rank", agreement_share=1.0)
    assert sorted(found.rewards) == [0, 1] and found.metrics["logged/judge/disagreement"] == 1.0


AWAY: dict[str | int, int] = {500: 3, 429: 3, 401: 1, "I cannot say.": 3, "SCORE: 11": 3}


@pytest.mark.slow
def test_a_judge_that_is_away_gives_no_reward(judged: Callable[..., Judged]) -> None:
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

    found = judged(stub, work, timeout_s=4.0)
    assert found.rewards == [None] * (len(AWAY) + 1) and found.metrics["logged/judge/away"] == 1
    assert counts == list(AWAY.values()) and len(stub.requests) - sum(counts) in (2, 3)


@pytest.mark.slow
def test_samples_lose_their_reward_one_by_one_and_nothing_is_remembered_of_failures(
    judged: Callable[..., Judged],
) -> None:
    working: list[bool] = []

    def says(answers: list[str]) -> str | int:
        return "SCORE: 5" if working or answers == ["good"] else 503

    async def work(pool: RewardPool) -> list[Any]:
        first = await score(pool, "good", "bad")
        working.append(True)
        return [first, await score(pool, "good", "bad")]

    assert judged(Stub(says), work, max_retries=0).rewards == [[0.5, None], [0.5, 0.5]]
    found = judged(Stub(says), lambda pool: score(pool, "good"), away=True)
    assert found.rewards == [None] and found.metrics["logged/judge/calls"] == 3


def test_a_judge_that_could_give_no_reward_ends_the_start(judged: Callable[..., Judged]) -> None:
    with pytest.raises(ValueError) as found:
        Judge(url="localhost", model="", rubric=" ", mode="best", key_variable="NO_SUCH_KEY")  # type: ignore[arg-type]
    for mistake in (
        "url = 'localhost'",
        "model must",
        "rubric must",
        "mode = 'best'",
        "NO_SUCH_KEY: name it",
    ):
        assert mistake in str(found.value)
    with pytest.raises(UserError, match="model must name"):
        judged(Stub(lambda answers: 500), lambda pool: score(pool, "a"), model="")
    with pytest.raises(UserError, match=r"'critics:judge': its timeout_s = .* must be less than rewards.timeout_s"):
        judged(Stub(lambda answers: 500), lambda pool: score(pool, "a"), timeout_s=float(PATIENCE_S))
