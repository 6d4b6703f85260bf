"""An asyncio loop in a thread of its own, for code that must go on while the caller's thread is busy."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, overload

from torchtitan.errors import UserError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# The loop answers at once; this is for a machine that is very busy.
CALL_TIMEOUT_S = 60.0


class BackgroundLoop:
    """Runs functions and coroutines for other threads. The thread is a daemon: it never keeps the process alive."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @overload
    def call(
        self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any, timeout_s: float = ...
    ) -> Result: ...

    @overload
    def call(self, function: Callable[..., Result], *arguments: Any, timeout_s: float = ...) -> Result: ...

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a function in the loop's thread, or await a coroutine function there, and return what it returns.

        Raises:
            UserError: it was not done within `timeout_s`; it is cancelled then.
        """
        future = self.submit(function, *arguments)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the function's own
            raise UserError(
                f"the rollouts gave no answer within {timeout_s:g} s: the machine is too busy, or an actor's start "
                "hangs (see logs/ in the run folder)"
            ) from None
        finally:
            future.cancel()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
        """As `call`, without waiting for the end."""
        if self._loop.is_closed():
            raise RuntimeError(f"the thread {self._thread.name} has ended")

        async def work() -> Any:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what still runs and end the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("thread %s did not end within %g s", self._thread.name, timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
