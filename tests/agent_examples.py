"""Agents for tests: good ones and bad ones."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import openai


async def play(base_url: str, key: str, row: dict[str, Any]) -> float:
    """Two questions; the reward counts the letters `e` of the answers."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    replies = ""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as api:
        for _ in range(2):
            answer = await api.chat.completions.create(model="policy", messages=messages, max_tokens=12)
            text = answer.choices[0].message.content or ""
            replies += text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    return replies.count("e") / 10


async def raises(base_url: str, key: str, row: dict[str, Any]) -> float:
    await play(base_url, key, row)
    raise ValueError("no idea")


async def hangs(base_url: str, key: str, row: dict[str, Any]) -> float:
    await play(base_url, key, row)
    await asyncio.sleep(1000)
    return 1.0


def hangs_in_a_loop(base_url: str) -> float:
    while True:
        time.sleep(0.1)


async def shouts(base_url: str, key: str, row: dict[str, Any]) -> float:
    print("x" * 10_000_000)
    return await play(base_url, key, row)


async def silent() -> float:
    return 1.0


async def nonsense(base_url: str, key: str, row: dict[str, Any]) -> Any:
    await play(base_url, key, row)
    return "well"


async def goes_on(base_url: str, key: str, row: dict[str, Any]) -> float:
    """Leaves something behind that asks when the episode is over, twice: what is under way at its end is not late."""

    def late() -> None:
        refused = 0
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as api:
            while refused < 2:
                time.sleep(0.5)
                try:
                    api.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
                except openai.APIStatusError as error:
                    refused += error.status_code == 410

    threading.Thread(target=late, daemon=True).start()
    return await play(base_url, key, row)


if __name__ == "__main__":
    # As a command: the row comes in, the address and the key are in the environment, the reward goes out.
    row = json.loads(sys.stdin.readline())
    with openai.OpenAI() as client:
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": row["prompt"]}], max_tokens=5
        )
    print("a line of something else\n0.25")
