"""How long a test waits for what has to come, and how."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import time
from collections.abc import Callable, Coroutine
from typing import Any

# Only a failure takes so long. On two busy cores and a cold disk, starting a few processes has taken 40 s.
PATIENCE_S = float(os.environ.get("TORCHTITAN_TEST_PATIENCE_S", "120"))
LOOK_S = 0.02


def until(
    condition: Callable[[], Any],
    seconds: float = PATIENCE_S,
    process: subprocess.Popen[Any] | None = None,
    why: Callable[[], object] = lambda: "it never happened",
) -> Any:
    """What condition() returns once that holds. Fails with why() after `seconds`, or when `process` has ended."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline and (process is None or process.poll() is None), why()
        time.sleep(LOOK_S)
    return value


async def eventually(
    condition: Callable[[], Any],
    seconds: float = PATIENCE_S,
    why: Callable[[], object] = lambda: "it never happened",
) -> Any:
    """`until`, while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, why()
        await asyncio.sleep(LOOK_S)
    return value


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function: it runs in an event loop of its own, with a deadline."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 2 * PATIENCE_S))

    return run
