"""Whether a thread that works beside an event loop still gets on."""

from __future__ import annotations

import time


class Progress:
    """Told by the thread when a piece of work begins, and asked by others whether one has taken too long.

    longest_s: seconds that no piece takes unless its thread hangs.
    """

    def __init__(self, longest_s: float):
        self.longest_s = longest_s
        self._begun: float | None = None

    def begin(self) -> None:
        """A piece of work begins, and the one before it has ended."""
        self._begun = time.monotonic()

    def end(self) -> None:
        """There is nothing to do."""
        self._begun = None

    @property
    def goes_on(self) -> bool:
        """False where the piece that was begun last should have ended."""
        begun = self._begun
        return begun is None or time.monotonic() - begun < self.longest_s
