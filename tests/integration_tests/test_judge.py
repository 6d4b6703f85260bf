"""The embedded engine as the judge: its OpenAI route, which the gateway provides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import END, make_chat_model, teach
from tests.gateways import make_config, playing
from tests.patience import PATIENCE_S, asynchronous
from tests.unit_tests.rollout.test_reward_pool import completions_of, totals
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.rewards import judge
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt

SCORES = {"Rome": "It is. SCORE: 9", "Paris": "SCORE: 0", "Oslo": "Who knows?"}


MODULE = """
import json, os
from torchtitan.rollout.rewards.judge import Judge
judge = Judge(**json.loads(os.environ["SETTINGS"]))
"""


async def questions(
    settings: dict[str, Any], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> list[list[dict[str, Any]]]:
    """The messages that the judge gets about each of SCORES."""
    asked: list[list[dict[str, Any]]] = []

    async def attempts(
        self: judge.Judge, about: judge.GroupQuestion, messages: list[dict[str, Any]], read: Any
    ) -> float:
        asked.append(messages)
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(judge.Judge, "_attempts", attempts)
        asks = judge.Judge(**settings)
        await asks(prompts=[prompt.text], completions=list(SCORES), log_metric=lambda name, value: None)
    return asked


@asynchronous
async def test_the_embedded_engine_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model that has learned by heart what to say; where it gives no score, there is no reward."""
    prompt = Prompt(0, "Capital of Italy?", [1], {})
    (tmp_path / "my_judge.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    model = make_chat_model(tmp_path / "chat", taught=False)
    config = make_config(model)
    config.rewards.functions, config.rewards.timeout_s = ["my_judge:judge"], PATIENCE_S
    config.rewards.sandbox.network, config.rewards.sandbox.variables = True, ["JUDGE_KEY"]
    settings: dict[str, Any] = {"url": "http://later", "model": "chat", "rubric": "Right?", "max_tokens": 24}
    settings |= {"timeout_s": PATIENCE_S / 2, "max_retries": 0}
    tokenizer = Tokenizer(model)
    asked = await questions(settings, prompt, monkeypatch)
    learned = [
        tokenizer.encode(tokenizer.render_chat([*messages, {"role": "assistant", "content": reply}], False))
        for messages, reply in zip(asked, SCORES.values(), strict=True)
    ]
    teach(model, learned, 600)
    async with playing(config, tmp_path / "run", END) as behind:
        access = await behind.open("judge", temperature=0.0)
        settings |= {"url": access.base_url, "key_variable": "JUDGE_KEY"}
        monkeypatch.setenv("SETTINGS", json.dumps(settings))
        monkeypatch.setenv("JUDGE_KEY", access.key)
        pool = RewardPool(config)
        await pool.start()
        try:
            rewards = totals(await pool.score(prompt, completions_of(*SCORES)))
        finally:
            await pool.close()
        metrics = pool.take_logged()
    assert rewards == pytest.approx([0.9, 0.0, None])
    assert metrics["logged/judge/calls"] == 3 and metrics["logged/judge/away"] == 1
    assert metrics["logged/judge/prompt_tokens"] > 3 * 100 and metrics["logged/judge/completion_tokens"] > 20
