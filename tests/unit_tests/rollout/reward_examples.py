"""Reward functions that behave badly, for test_reward_pool.py. A sample misbehaves where its completion says so."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def echo(completions: list[str], **kwargs: Any) -> list[float]:
    print("this must not end up between the replies")
    return [float(text) for text in completions]


def reads(completions: list[str], **kwargs: Any) -> list[float]:
    """The size of the file that each completion names."""
    return [float(len(Path(text).read_bytes())) for text in completions]


async def slow_echo(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(text) for text in completions]


def slow(completions: list[str], **kwargs: Any) -> list[float]:
    time.sleep(0.5 * len(completions))
    return [float(text) for text in completions]


def bad(misbehave: Callable[[], Any]) -> Callable[..., list[float]]:
    """A function that gives 1, and does this where a completion is bad."""

    def function(completions: list[str], **kwargs: Any) -> list[float]:
        if "bad" in completions:
            misbehave()
        return [1.0] * len(completions)

    return function


def spin() -> None:
    while True:
        pass


def throw(error: BaseException) -> None:
    raise error


def recurse() -> None:
    sys.setrecursionlimit(2000)
    recurse()


hang, crash, leave = bad(spin), bad(lambda: os._exit(17)), bad(lambda: throw(SystemExit(3)))
fault = bad(lambda: throw(ValueError("no opinion on this one")))
interrupt = bad(lambda: throw(KeyboardInterrupt()))  # what `except Exception` does not catch
segfault = bad(lambda: ctypes.string_at(0))  # as a broken native library does
endless_recursion = bad(recurse)
bomb = bad(lambda: [bytearray(64 * 2**20) for _ in range(10_000)])
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared mappings count only once they are written
mapped_bomb = bad(lambda: [mmap.mmap(-1, 256 * 2**20, PRIVATE) for _ in range(1000)])  # past Python's allocator


def hang_with_child(completions: list[str], **kwargs: Any) -> list[float]:
    """Hangs beside a forked child, which holds the worker's pipes; "worse" puts it out of the group's reach."""
    if completions != ["fine"] and os.fork() == 0:
        if "worse" in completions:
            os.setsid()
        time.sleep(20)
        os._exit(0)
    return hang(["bad" if text == "worse" else text for text in completions])


def rank(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that compares the completions of its group."""
    values = [int(text) for text in completions]
    return [float(sum(other < value for other in values)) for value in values]


def alone_only(completions: list[str], **kwargs: Any) -> list[float]:
    if len(completions) > 1:
        raise ValueError("one at a time")
    return [1.0]


async def async_leave(completions: list[str], **kwargs: Any) -> list[float]:
    return leave(completions)


def no_list(completions: list[str], **kwargs: Any) -> list[float] | None:
    return None if "bad" in completions else [1.0] * len(completions)


def stubborn_bomb(completions: list[str], **kwargs: Any) -> list[float]:
    """Takes memory for ever and goes on where there is none."""
    hoard = []
    while "bad" in completions:
        try:
            hoard.append(bytearray(8 * 2**20))
        except MemoryError:
            time.sleep(0.01)
    return [1.0] * len(completions)


def native_hang(completions: list[str], **kwargs: Any) -> list[float]:
    """A regular expression that takes years, in C: neither signals nor other threads are served meanwhile."""
    return [0.0 if text == "bad" and re.match("(a+)+$", "a" * 60 + "b") else 1.0 for text in completions]


async def async_block(completions: list[str], **kwargs: Any) -> list[float]:
    return hang(completions)


waiting: list[asyncio.Event] = []
pair_calls: list[int] = []


async def in_pairs(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
    """Every call waits for a second one that is under way."""
    pair_calls.append(1)
    if waiting:
        waiting.pop().set()
    else:
        waiting.append(other := asyncio.Event())
        await other.wait()
    log_metric("begun", len(pair_calls))
    log_metric("nothing", float("nan"))
    return [float(text) for text in completions]


async def async_hang(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(3600 if "bad" in completions else 0)
    return [1.0] * len(completions)


def wrong_length(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 for text in completions if text != "bad"]


def odd_values(completions: list[str], **kwargs: Any) -> list[Any]:
    values = {"nan": float("nan"), "infinite": float("inf"), "text": "1.0", "none": None, "true": True, "huge": 10**400}
    return [values[text] for text in completions]


def seen(**kwargs: Any) -> list[float]:
    """1 where the arguments are exactly what TRL's convention and the data columns promise."""
    expected = {
        "prompts": [[{"role": "user", "content": "hello"}]] * 2,
        "completions": [[{"role": "assistant", "content": text}] for text in ("a", "b")],
        "thoughts": [None, None], "final_texts": ["a", "b"],
        "completion_ids": [[0, 7], [1, 7]], "finish_reasons": ["stop", "stop"], "max_completion_tokens": 16,
        "prefill": "", "level": [3, 3], "answer": ["x", "x"],
    }  # fmt: skip
    state, log_extra, log_metric = (kwargs.pop(name) for name in ("trainer_state", "log_extra", "log_metric"))
    log_extra("why", ["short", {"of": 2}])
    log_metric("steps_left", state.max_steps - state.global_step)
    return [float(kwargs == expected)] * 2


def leaves_a_folder(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
    """Leaves a temporary folder behind, and tells where."""
    log_extra("where", [tempfile.mkdtemp() for _ in completions])
    return [1.0] * len(completions)


not_a_function = 3


def share_of_digits(completions: list[str], **kwargs: Any) -> list[float]:
    """Something that random weights get right now and then."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def parts_of_a_turn(thoughts: list[str | None], final_texts: list[str], log_extra: Any, **_: Any) -> list[None]:
    """Shows what it gets, and has no opinion."""
    log_extra("thought", thoughts)
    log_extra("final", final_texts)
    return [None] * len(thoughts)
