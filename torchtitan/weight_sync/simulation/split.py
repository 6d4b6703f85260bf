"""Which split of a number of GPUs between trainer and actors trains fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan.errors import ConfigError
from torchtitan.weight_sync.simulation.figures import Figures, simulate
from torchtitan.weight_sync.simulation.scenario import Scenario

# A split is judged by about so many steps.
STEPS = 40
# Splits that a round looks at, and how much finer the next round looks.
SPLITS_PER_ROUND = 7


@dataclass(frozen=True)
class Split:
    ranks: int
    actors: int
    figures: Figures


def best_split(scenario: Scenario, gpus: int, asynchronous: bool = True) -> list[Split]:
    """All splits that were looked at, the best (most tokens per second) first.

    Throughput rises with the trainer's share while training is the limit and falls when generation is: a few splits
    over the whole range, then finer ones around the best. Raises ConfigError where not even one rank and one actor fit.
    """
    most_actors = (gpus - 1) // scenario.gpus_per_actor
    if most_actors < 1:
        needed = 1 + scenario.gpus_per_actor
        raise ConfigError([f"--gpus {gpus}: one rank and one actor need {needed} GPUs"])
    seen: dict[int, Split] = {}
    low, high = 1, most_actors
    while True:
        for actors in _spread(low, high):
            if actors not in seen:
                seen[actors] = _look(scenario, gpus - actors * scenario.gpus_per_actor, actors, asynchronous)
        ranked = sorted(seen.values(), key=lambda split: (-split.figures.tokens_per_s, split.actors))
        tried = sorted(seen)
        place = tried.index(ranked[0].actors)
        low, high = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
        if all(actors in seen for actors in _spread(low, high)):
            return ranked


def _spread(low: int, high: int) -> Iterator[int]:
    """Whole numbers from low to high, evenly."""
    count = min(SPLITS_PER_ROUND, high - low + 1)
    steps = max(count - 1, 1)
    return (low + (high - low) * number // steps for number in range(count))


def _look(scenario: Scenario, ranks: int, actors: int, asynchronous: bool) -> Split:
    changed = scenario.split(ranks, actors)
    tokens = scenario.samples_per_batch * scenario.completion_tokens
    generation = tokens / (actors * scenario.tokens_per_s)
    hours = min(scenario.hours, STEPS * max(changed.train_s, generation) / 3600)
    return Split(ranks, actors, simulate(replace(changed, hours=hours), asynchronous))
