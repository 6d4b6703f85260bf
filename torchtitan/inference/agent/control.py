"""What an agent asks of the engine beside it: to stand still, to go on, what it holds. One class per engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torchtitan.inference.client import Capabilities
from torchtitan.inference.types import Tag

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to running requests: they stand still and go on afterwards; they end before, while new ones wait or are
sent away; they end at once, incomplete."""


class EngineError(Exception):
    """The engine did not do as asked, or not in time. The message is one line for people."""


class EngineNotListening(EngineError):
    """Its port is closed: a frozen engine keeps it open, one that is ending does not."""


@dataclass(frozen=True)
class EngineFacts:
    """What the engine's server says about itself."""

    capabilities: Capabilities
    """With the engine's name and version"""
    world_size: int = 1
    """Its workers, each with a part of the model"""
    can_wait: bool = True
    """It has the pause mode `wait`"""


class EngineControl(Protocol):
    """Blocking client of an engine's admin routes. Every method has a deadline and raises EngineError.

    Called from several threads; each call makes its own connection.
    """

    def describe(self) -> EngineFacts: ...

    def check_health(self, timeout_s: float) -> None:
        """Raises EngineError unless all of the engine's processes live and answer, also while it is paused."""

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        """Have the engine stand still: nothing is computed when this returns True.

        False: `wait` was asked for and running requests have not ended within `timeout_s`; the caller then asks for
        `keep`. Pausing an engine that stands already is allowed.
        """

    def resume(self) -> None:
        """Go on. Allowed where it is not paused."""

    def is_paused(self) -> bool: ...

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        """Have the engine stand still once nothing runs, and give these parts of its memory back, which it still has.

        False: something still ran after `finish_s`. It has its memory then, but may stand still: resume() has it go on.
        """

    def drops_weights(self, level: int) -> bool:
        """Whether weights that sleep so are lost. Known after describe()."""

    def wake(self, tag: Tag) -> None:
        """Have the engine take a part of its memory again that it gave back, weights first. With the last one it may go
        on by itself, or stand still until resume()."""

    def reset_prefix_cache(self) -> None:
        """No request that begins from here on reuses what was computed before. Called while it is paused."""

    def weights_label(self) -> str | None:
        """The label (labels.py) of the version that the engine says it holds; None where it has none."""

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of all tokens but the first."""
