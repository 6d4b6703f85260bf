"""Functions and coroutines that run in the loop's thread: results, errors, deadlines and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from torchtitan.errors import UserError
from torchtitan.rollout.flow.rollouts import BackgroundLoop


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("of the test")
    yield loop
    loop.close()


async def later(value: int, seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    return value


def test_functions_and_coroutines_run_in_one_thread(loop: BackgroundLoop) -> None:
    assert loop.call(later, 3) == 3
    assert loop.call(threading.get_ident) == loop.call(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        loop.call(divmod, 1, 0)


def test_a_call_past_its_deadline_is_cancelled_with_a_message(loop: BackgroundLoop) -> None:
    with pytest.raises(UserError, match=r"no answer within 0\.05 s"):
        loop.call(later, 3, 60.0, timeout_s=0.05)
    release = threading.Event()
    try:
        with pytest.raises(UserError, match="the machine is too busy"):
            loop.call(release.wait, 60.0, timeout_s=0.05)
    finally:
        release.set()
    assert loop.call(later, 4) == 4, "the loop goes on"


def test_a_timeout_raised_by_the_function_is_passed_on(loop: BackgroundLoop) -> None:
    async def impatient() -> None:
        await asyncio.wait_for(asyncio.sleep(60.0), 0.01)

    with pytest.raises(TimeoutError):
        loop.call(impatient)


def test_the_end_cancels_what_still_runs(loop: BackgroundLoop) -> None:
    future = loop.submit(later, 3, 60.0)
    loop.call(later, 0)
    loop.close()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="of the test has ended"):
        loop.call(later, 3)
