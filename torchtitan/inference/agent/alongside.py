"""Two halves of one thing at the same time: an engine answers when it has done its half, the agent does the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torchtitan.inference.agent.control import EngineError


class Alongside:
    """Runs `function` in a thread.

    who: what does that half, for messages.
    """

    def __init__(self, function: Callable[[], Any], who: str = "the engine"):
        self._function, self._who = function, who
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="alongside", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> None:
        """Wait for it; raises what it raised, EngineError where it takes longer."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineError(f"{self._who} did not answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
