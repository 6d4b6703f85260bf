"""What the user's code writes in the worker's place: it is refused, the worker replaced, no reward made up."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import pytest

from tests.trajectories import answer
from torchtitan.config.job_config import JobConfig
from torchtitan.rollout.rewards.reward_pool import REPLY_BYTES, SAMPLE_BYTES, RewardPool
from torchtitan.rollout.types import Prompt
from torchtitan.rollout.workers import replies
from torchtitan.rollout.workers.inside import HEADER
from torchtitan.utils.typed_json import IN_PLACE_BYTES, WrongForm

LONGEST = REPLY_BYTES + SAMPLE_BYTES
FORGED = {
    "lists in place of numbers": ('{"id":%d,"values":[' + "[]," * 50_000 + "[]]}", "Expected `float | null`"),
    "more lists than values may come": ('{"id":%d,"x":[' + "[]," * 100_000 + "[]]}", "65536 values"),
    "rewards of other samples": ('{"id":%d,"values":[1,1,1]}', "not about 1 samples"),
    "nothing": ('{"id":%d}', "not about 1 samples"),
    "a number that is none": ('{"id":%d,"values":[1e999]}', "out of range"),
    "a text": ('{"id":%d,"values":["1.0"]}', "Expected `float | null`"),
    "another call": ('{"id":7%d,"values":[1]}', "which nobody has asked for"),
    "no number of a call": ('{"id":"%d","values":[1]}', "Expected `int`"),
    "no JSON": ("%d", "Expected `object`"),
    "half of a reply": ('{"id":%d,"values":[1', "truncated"),
    "a long reply": ('{"id":%d,"values":[1],"x":"' + LONGEST * "x" + '"}', f"{LONGEST} are allowed"),
}


def forger(completions: list[str], **_: Any) -> list[float]:
    """Answers 1, or in the worker's place with what the completion names, and waits."""
    kind = completions[0]
    if kind in FORGED:
        frame: Any = sys._getframe()
        while "outgoing" not in frame.f_locals:
            frame = frame.f_back
        data = (FORGED[kind][0] % frame.f_locals["message"]["id"]).encode()
        frame.f_locals["outgoing"].write(HEADER.pack(len(data)) + data)
        frame.f_locals["outgoing"].flush()
        time.sleep(60)
    return [1.0] * len(completions)


@pytest.fixture(scope="module")
def config() -> JobConfig:
    config = JobConfig()
    config.rewards.functions, config.rewards.num_workers = [f"{__name__}:forger"], 1
    return config


def test_forged_replies_are_refused_and_their_worker_replaced(config: JobConfig) -> None:
    async def run() -> None:
        pool = RewardPool(config)
        await pool.start()
        try:
            for number, (kind, (_, reason)) in enumerate(FORGED.items()):
                ((total, _),) = await pool.score(Prompt(0, "", [1], {}), [answer([1, 7], kind)])
                assert total is None and reason in pool.last_failure, (kind, pool.last_failure)
                assert pool.statistics["failures"] == number + 1 and not pool.statistics["timeouts"]
                ((total, _),) = await pool.score(Prompt(0, "", [1], {}), [answer([1, 7], "honest")])
                assert total == 1.0, kind
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 600))


def test_a_long_reply_may_have_long_texts_only() -> None:
    text = json.dumps({"id": 3, "text": "[{,}]" * IN_PLACE_BYTES}).encode()
    asyncio.run(replies.check_reply(text))
    with pytest.raises(WrongForm, match="more than 65536 values"):
        asyncio.run(replies.check_reply(b'{"id":3,"calls":[' + b"{}," * IN_PLACE_BYTES + b"{}]}"))
