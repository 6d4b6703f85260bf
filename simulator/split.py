"""Which split of a number of GPUs between trainer and actors trains fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.figures import Figures, simulate
from simulator.scenario import Scenario
from torchtitan.errors import ConfigError

# A split is judged by about so many steps.
STEPS = 30
# Splits that a round looks at, and how much finer the next round looks.
SPLITS_PER_ROUND = 7
SPLITS_SHOWN = 8


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
    most = (gpus - 1) // scenario.gpus_per_actor
    if most < 1:
        raise ConfigError([f"--gpus {gpus}: one rank and one actor need {1 + scenario.gpus_per_actor} GPUs"])
    splits = {actors: scenario.split(gpus - actors * scenario.gpus_per_actor, actors) for actors in range(1, most + 1)}
    middle = min(splits, key=lambda actors: _step_s(splits[actors]))
    seen: dict[int, Split] = {}
    ranked: list[Split] = []
    low, high = max(1, middle // 2), min(most, 2 * middle)
    while True:
        count = min(SPLITS_PER_ROUND, high - low + 1)
        new = {low + (high - low) * number // max(count - 1, 1) for number in range(count)} - seen.keys()
        if not new:
            return ranked
        for actors in sorted(new):
            short = replace(splits[actors], hours=min(scenario.hours, STEPS * _step_s(splits[actors]) / 3600))
            seen[actors] = Split(short.ranks, actors, simulate(short, asynchronous))
        ranked = sorted(seen.values(), key=lambda split: (-split.figures["tokens_per_s"], split.actors))
        tried = [max(1, min(seen) // 2), *sorted(seen), min(most, 2 * max(seen))]
        place = tried.index(ranked[0].actors, 1)
        low, high = tried[place - 1], tried[place + 1]


def _step_s(scenario: Scenario) -> float:
    """The longer one of training on a batch and generating it, with actors as full as max_staleness lets them be."""
    batches = scenario.max_staleness + 1
    sequences = scenario.samples_per_batch * batches / scenario.usable_share / scenario.actors
    tokens_per_s = min(scenario.tokens_per_s, min(scenario.max_sequences, sequences) * scenario.sequence_tokens_per_s)
    tokens = scenario.samples_per_batch * scenario.completion_tokens / scenario.usable_share
    return max(scenario.train_s, tokens / (scenario.actors * tokens_per_s))


def split_table(gpus: int, splits: list[Split]) -> str:
    """The best split and the next ones."""
    lines = [f"Best split of {gpus} GPUs: {splits[0].ranks} trainer ranks and {splits[0].actors} actors"]
    lines.append("ranks  actors  tokens/s     steps/hour  data wait  actors generating")
    for split in splits[:SPLITS_SHOWN]:
        found = split.figures
        wait = found["data_wait_s"] / (found["step_s"] or 1.0)
        lines.append(
            f"{split.ranks:5}  {split.actors:6}  {found['tokens_per_s']:11,.0f}  {found['steps_per_hour']:10,.1f}"
            f"  {wait:9.1%}  {found['actor_utilisation']:.1%}"
        )
    return "\n".join(lines)
