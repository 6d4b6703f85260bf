"""Reward functions that behave badly, for test_reward_pool.py. A sample misbehaves where its completion says so."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


def echo(completions: list[str], **kwargs: Any) -> list[float]:
    print("this must not end up between the replies")
    return [float(text) for text in completions]


async def slow_echo(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(text) for text in completions]


def hang(completions: list[str], **kwargs: Any) -> list[float]:
    while "bad" in completions:
        pass
    return [1.0] * len(completions)


def hang_with_child(completions: list[str], **kwargs: Any) -> list[float]:
    """Hangs beside a forked child, which holds the worker's pipes; "worse" puts it out of the group's reach."""
    if completions != ["fine"] and os.fork() == 0:
        if "worse" in completions:
            os.setsid()
        time.sleep(20)
        os._exit(0)
    return hang(["bad" if text == "worse" else text for text in completions])


def bomb(completions: list[str], **kwargs: Any) -> list[float]:
    if "bad" in completions:
        hoard = [bytearray(64 * 2**20) for _ in range(10_000)]
        return [float(len(hoard))]
    return [1.0] * len(completions)


def crash(completions: list[str], **kwargs: Any) -> list[float]:
    if "bad" in completions:
        os._exit(17)
    return [1.0] * len(completions)


def leave(completions: list[str], **kwargs: Any) -> list[float]:
    if "bad" in completions:
        raise SystemExit(3)
    return [1.0] * len(completions)


def wrong_length(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 for text in completions if text != "bad"]


def odd_values(completions: list[str], **kwargs: Any) -> list[Any]:
    values = {"nan": float("nan"), "infinite": float("inf"), "text": "1.0", "none": None, "true": True}
    return [values[text] for text in completions]


def seen(**kwargs: Any) -> list[float]:
    """1 where the arguments are exactly what TRL's convention and the data columns promise."""
    expected = {
        "prompts": [[{"role": "user", "content": "hello"}]] * 2,
        "completions": [[{"role": "assistant", "content": text}] for text in ("a", "b")],
        "completion_ids": [[0, 7], [1, 7]],
        "finish_reasons": ["stop", "stop"],
        "max_completion_tokens": 16,
        "level": [3, 3],
        "answer": ["x", "x"],
    }
    return [float(kwargs == expected)] * 2


not_a_function = 3


def share_of_digits(completions: list[str], **kwargs: Any) -> list[float]:
    """Something that random weights get right now and then."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]
