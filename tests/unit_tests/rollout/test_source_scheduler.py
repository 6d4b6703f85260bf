"""The share of every source in every batch."""

from __future__ import annotations

import heapq
import json
import random
from fractions import Fraction
from math import floor

import pytest

from torchtitan.rollout.data.source_scheduler import SourceScheduler, in_turns
from torchtitan.rollout.flow.staleness_budget import StalenessBudget
from torchtitan.rollout.types import Batch, Group
from torchtitan.trainer.packing import minibatches

TRIALS, BATCHES = 25, 400


class Traffic:
    """A source whose groups take random times, and are dropped at random."""

    def __init__(self, name: str, scheduler: SourceScheduler, chance: random.Random, max_staleness: int):
        self.budget = StalenessBudget(
            scheduler.groups * scheduler.share(name),
            max_staleness,
            quotas=lambda batches: scheduler.upcoming(name, batches),
        )
        self.chance, self.speed, self.usable = chance, 10 ** chance.uniform(-2, 1), chance.uniform(0.2, 1)
        self.in_flight: dict[int, tuple[float, int]] = {}
        self.resample: list[int] = []
        self.drawn = self.generated = 0
        self.ready: set[int] = set()

    def fill(self, now: float) -> None:
        while True:
            position = self.budget.position(self.resample[0] if self.resample else None, self.in_flight)
            if position >= self.budget.wanted():
                return
            index = heapq.heappop(self.resample) if self.resample else self.drawn
            self.drawn = max(self.drawn, index + 1)
            self.generated += 1
            self.in_flight[index] = (now + self.chance.expovariate(self.speed), self.budget.version)

    def finish_one(self) -> float:
        index = min(self.in_flight, key=lambda candidate: self.in_flight[candidate][0])
        finished, version = self.in_flight.pop(index)
        usable = self.chance.random() < self.usable
        self.budget.count(usable)
        self.budget.add(index, version, usable)
        self.ready |= {index} if usable else set()
        self.resample_stale(index)
        return finished

    def resample_stale(self, only: int | None = None) -> None:
        for index in self.budget.take_stale(self.budget.max_staleness, only):
            heapq.heappush(self.resample, index)
            self.ready.discard(index)


def largest_remainder(groups: int, owed: dict[str, Fraction]) -> dict[str, int]:
    """Whole parts first, and what is left to the largest fractions."""
    counts = {name: floor(value) for name, value in owed.items()}
    by_fraction = sorted(owed, key=lambda name: counts[name] - owed[name])
    for name in by_fraction[: groups - sum(counts.values())]:
        counts[name] += 1
    return counts


@pytest.mark.slow
def test_every_batch_has_the_exact_share_of_every_source_whatever_is_slow_dropped_or_lost() -> None:
    checked = 0
    for trial in range(TRIALS):
        chance = random.Random(trial)
        names = [f"s{number}" for number in range(chance.randint(2, 4))]
        weights = {name: chance.choice([1, 2, 3, 5, 0.5, 0.1]) for name in names}
        groups, max_staleness = chance.randint(1, 9), chance.randint(0, 2)
        scheduler = SourceScheduler(weights, groups)
        sources = {name: Traffic(name, scheduler, chance, max_staleness) for name in names}
        deaths = {chance.randrange(BATCHES): name for name in names[1:] if chance.random() < 0.4}
        owed, used, now = dict.fromkeys(names, Fraction(0)), {name: list[int]() for name in names}, 0.0
        for version in range(BATCHES):
            if (dead := deaths.get(version)) is not None:
                scheduler.remove(dead)
                del sources[dead]
                owed = dict.fromkeys(sources, Fraction(0))
            for source in sources.values():
                source.budget.version, source.budget.handed_out = version, False
                source.resample_stale()
                source.fill(now)
            while True:
                parts = {
                    name: part
                    for name, producer in sources.items()
                    if (part := producer.budget.batch([*producer.in_flight, *producer.resample])) is not None
                }
                if len(parts) == len(sources):
                    break
                # Whatever finishes next, of whichever source: none can keep the others from their places.
                source = chance.choice([producer for producer in sources.values() if producer.in_flight])
                now = max(now, source.finish_one())
                source.fill(now)
            counts = {name: len(part) for name, part in parts.items()}
            total = sum(Fraction(str(weights[name])) for name in sources)
            owed = {name: value + groups * Fraction(str(weights[name])) / total for name, value in owed.items()}
            assert sum(counts.values()) == groups
            if min(owed.values()) >= 0:
                assert counts == largest_remainder(groups, owed)
                checked += 1
            owed = {name: value - counts[name] for name, value in owed.items()}
            assert all(abs(value) < 1 for value in owed.values())
            for name, traffic in sources.items():
                assert all(traffic.budget.sampled_at[index] >= version - max_staleness for index in parts[name])
                used[name] += parts[name]
                traffic.ready -= set(parts[name])
                traffic.budget.consumed(parts[name])
            scheduler.served(counts)
            for traffic in sources.values():
                traffic.resample_stale()
        for name in sources:
            # In the order of the prompts, and none twice.
            assert used[name] == sorted(set(used[name]))
    assert TRIALS * BATCHES == 10_000 and checked > 8000


def test_upcoming_batches_come_as_announced_and_a_saved_scheduler_goes_on() -> None:
    scheduler = SourceScheduler({"a": 3, "b": 1, "c": 0.7}, 5)
    ahead = [scheduler.upcoming(name, 40) for name in scheduler.names]
    other = SourceScheduler({"a": 3, "b": 1, "c": 0.7}, 5)
    for batch in range(40):
        counts = {name: other.upcoming(name, 1)[0] for name in other.names}
        assert [counts[name] for name in other.names] == [forecast[batch] for forecast in ahead]
        other.served(counts)
        again = SourceScheduler({"a": 3, "b": 1, "c": 0.7}, 5)
        again.load_state_dict(json.loads(json.dumps(other.state_dict())))
        assert [again.upcoming(name, 9) for name in "abc"] == [other.upcoming(name, 9) for name in "abc"]
    other.remove("b")
    again.load_state_dict(other.state_dict())
    assert again.names == ["a", "c"] and again.share("b") == 0.0
    # With other weights, what was before does not count.
    fresh = SourceScheduler({"a": 1, "c": 1}, 4)
    fresh.load_state_dict(other.state_dict())
    assert fresh.upcoming("a", 3) == fresh.upcoming("c", 3) == [2, 2, 2]


@pytest.mark.parametrize("sizes", [(4,), (2, 4), (1, 0, 7), (3, 3, 3)])
def test_sources_are_spread_over_the_batch(sizes: tuple[int, ...]) -> None:
    shares = [[(number, i) for i in range(size)] for number, size in enumerate(sizes)]
    mixed = in_turns(shares)
    for share in shares:
        assert [group for group in mixed if group in share] == share
    half = len(mixed) // 2
    assert all(abs(sum(group in share for group in mixed[:half]) - len(share) / 2) <= 1 for share in shares)


@pytest.mark.parametrize("count", range(1, 11))
@pytest.mark.parametrize("sources", range(2, 7))
def test_every_minibatch_has_its_part_of_every_source_and_of_its_passes(sources: int, count: int) -> None:
    """Whatever the shares are, and in whatever rhythm a curriculum's passes come."""
    for trial in range(12):
        chance = random.Random(f"{sources} {count} {trial}")
        weights = {f"s{number}": 1 if trial < 4 else chance.choice([1, 2, 3, 0.5]) for number in range(sources)}
        interval, groups = chance.choice([1, 2, 5, 10]), count * chance.randint(1, 12)
        scheduler, first = SourceScheduler(weights, groups), chance.randrange(20)
        shares = [
            [Group(i, [], name, i % interval == 0) for i in range(first, first + scheduler.upcoming(name, 1)[0])]
            for name in weights
        ]
        batch = Batch(0, in_turns(shares) if trial % 2 else [group for share in shares for group in share])
        parts = minibatches(batch, count)
        assert {len(part) for part in parts} == {groups // count}
        for share in shares:
            for kind in (share, [group for group in share if group.from_pass]):
                counts = [sum(group in kind for group in part) for part in parts]
                assert sum(counts) == len(kind) and max(counts) - min(counts) <= 1
        for part in parts:
            assert part == [group for group in batch.groups if group in part]
