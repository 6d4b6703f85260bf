"""How many groups of every batch each source has."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any, TypeVar


class SourceScheduler:
    """Divides every batch among the sources by largest remainder; what the division of whole groups leaves over is
    carried to the next batch.

    Each place of a batch goes to the source that has had least in relation to its share of all batches so far, this one
    included. All is counted in whole numbers, so that nothing is lost however long the run is: after every batch, each
    source has had less than one group above its share of all groups, and of two sources none is a whole group below.
    """

    def __init__(self, weights: Mapping[str, float], groups: int):
        """groups: those of a batch. weights: all greater than 0."""
        self.groups = groups
        self._set({name: Fraction(str(weight)) for name, weight in weights.items()})

    def _set(self, weights: Mapping[str, Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights.values()))
        self._weights = {name: int(weight * scale) for name, weight in weights.items()}
        self._total = sum(self._weights.values())
        self._batches, self._served = 0, dict.fromkeys(self._weights, 0)
        self._planned: deque[dict[str, int]] = deque()

    @property
    def names(self) -> list[str]:
        return list(self._weights)

    def share(self, name: str) -> float:
        """The share of a source; 0 after it has left."""
        return self._weights.get(name, 0) / self._total

    def upcoming(self, name: str, batches: int) -> list[int]:
        """Return the groups of a source in each of the next `batches` batches."""
        while len(self._planned) < batches:
            self._planned.append(self._plan())
        return [counts.get(name, 0) for counts in islice(self._planned, batches)]

    def served(self, counts: Mapping[str, int]) -> None:
        """Note the groups of each source in a batch that has been handed out."""
        if not self._planned or self._planned.popleft() != counts:
            self._planned.clear()
        self._batches += 1
        for name in self._served:
            self._served[name] += counts.get(name, 0)

    def remove(self, name: str) -> None:
        """Divide the share of a source among the others, from the next batch on."""
        self._set({other: Fraction(weight) for other, weight in self._weights.items() if other != name})

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._weights, "batches": self._batches, "given": self._served}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; with other weights than those, begin anew."""
        for name in set(self._weights) - set(state["weights"]):
            self.remove(name)
        saved: dict[str, int] = state["weights"]
        total = sum(saved.values())
        if all(self._weights[source] * total == weight * self._total for source, weight in saved.items()):
            self._batches, self._served = state["batches"], dict(state["given"])
            self._planned.clear()

    def _plan(self) -> dict[str, int]:
        """Return the batch after the planned ones."""
        due = (self._batches + len(self._planned) + 1) * self.groups
        deficit: dict[str, int] = {}
        for name, weight in self._weights.items():
            planned = sum(counts[name] for counts in self._planned)
            deficit[name] = due * weight - self._total * (self._served[name] + planned)
        counts = dict.fromkeys(deficit, 0)
        for _ in range(self.groups):
            # The first of equals, in the order of the configuration.
            name = max(deficit, key=deficit.__getitem__)
            deficit[name] -= self._total
            counts[name] += 1
        return counts


Item = TypeVar("Item")


def in_turns(shares: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the items of all sources, each source's spread evenly over the whole."""
    placed = [((i + 0.5) / len(items), number, i) for number, items in enumerate(shares) for i in range(len(items))]
    return [shares[number][i] for _, number, i in sorted(placed)]
