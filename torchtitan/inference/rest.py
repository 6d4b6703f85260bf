"""What is wanted of one actor's memory, and whether its supervision has seen to that."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from torchtitan.inference.types import Tag


@dataclass(frozen=True, eq=False)
class Wish:
    """asleep: what the actor is to do without; level: how deep it sleeps then."""

    asleep: frozenset[Tag] = frozenset()
    level: int = 0


class Rest:
    """Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self.wish = Wish()
        self._settled = asyncio.Event()

    @property
    def deep(self) -> bool:
        """Whether also the weights are to be away: then the actor's memory is somebody else's."""
        return "weights" in self.wish.asleep

    def want(self, asleep: Collection[Tag], level: int = 0) -> None:
        self.wish = Wish(frozenset(asleep), level)
        self._settled.clear()

    def settle(self, wish: Wish) -> None:
        """This wish is fulfilled, or cannot be. A later one goes on waiting."""
        if wish is self.wish:
            self._settled.set()

    async def settled(self, timeout_s: float) -> bool:
        """Whether the last wish is settled within that time."""
        try:
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True
