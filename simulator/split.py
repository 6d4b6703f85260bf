"""Which split of a number of GPUs between trainer and actors trains fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulator.figures import Figures, simulate
from simulator.scenario import Scenario
from torchtitan.errors import ConfigError

# A split is judged by about so many steps.
STEPS = 30
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
    around the one where an estimate finds both equally long, then finer ones around the best. Raises ConfigError where
    not even one rank and one actor fit.
    """
    most_actors = (gpus - 1) // scenario.gpus_per_actor
    if most_actors < 1:
        needed = 1 + scenario.gpus_per_actor
        raise ConfigError([f"--gpus {gpus}: one rank and one actor need {needed} GPUs"])
    middle = min(range(1, most_actors + 1), key=lambda actors: _estimated_step(scenario, gpus, actors))
    seen: dict[int, Split] = {}
    low, high = max(1, middle // 2), min(most_actors, 2 * middle)
    while True:
        for actors in _spread(low, high):
            if actors not in seen:
                seen[actors] = _look(scenario, _ranks(scenario, gpus, actors), actors, asynchronous)
        ranked = sorted(seen.values(), key=lambda split: (-split.figures.tokens_per_s, split.actors))
        tried = [max(1, min(seen) // 2), *sorted(seen), min(most_actors, 2 * max(seen))]
        place = tried.index(ranked[0].actors, 1)
        low, high = tried[place - 1], tried[place + 1]
        if all(actors in seen for actors in _spread(low, high)):
            return ranked


def _ranks(scenario: Scenario, gpus: int, actors: int) -> int:
    return gpus - actors * scenario.gpus_per_actor


def _generation_s(scenario: Scenario, actors: int) -> float:
    """Seconds in which the actors generate a batch, if its groups keep them as full as max_staleness lets them."""
    batches = scenario.max_staleness + 1
    sequences = min(scenario.max_sequences, scenario.samples_per_batch * batches / scenario.usable_share / actors)
    tokens_per_s = min(scenario.tokens_per_s, sequences * scenario.sequence_tokens_per_s)
    return scenario.samples_per_batch * scenario.completion_tokens / scenario.usable_share / (actors * tokens_per_s)


def _estimated_step(scenario: Scenario, gpus: int, actors: int) -> float:
    changed = scenario.split(_ranks(scenario, gpus, actors), actors)
    return max(changed.train_s, _generation_s(changed, actors))


def _spread(low: int, high: int) -> Iterator[int]:
    """Whole numbers from low to high, evenly."""
    count = min(SPLITS_PER_ROUND, high - low + 1)
    steps = max(count - 1, 1)
    return (low + (high - low) * number // steps for number in range(count))


def _look(scenario: Scenario, ranks: int, actors: int, asynchronous: bool) -> Split:
    changed = scenario.split(ranks, actors)
    hours = min(scenario.hours, STEPS * max(changed.train_s, _generation_s(changed, actors)) / 3600)
    return Split(ranks, actors, simulate(replace(changed, hours=hours), asynchronous))
