"""Batches in the order of the prompts: which groups are trained on does not depend on how long they take."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import until
from tests.unit_tests.rollout.test_rollouts import (
    BATCH_GROUPS,
    FakeActors,
    FakeRewards,
    indices,
    look,
    make_config,
    reach,
    running,
    saved,
    take,
)
from torchtitan.errors import UserError
from torchtitan.inference.types import Completion, GenerateRequest, VersionSpan
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.flow.rollouts import Rollouts

BATCHES = 5


class UnevenActors(FakeActors):
    """Every group takes a random number of the loop's turns, drawn anew each time; group `held` takes for ever."""

    def __init__(self, seed: int, longest: int, held: int = -1):
        super().__init__()
        self.chance, self.longest, self.held = Random(seed), longest, held

    async def generate(self, request: GenerateRequest, min_version: int = 0) -> list[Completion]:
        completions = await super().generate(request, min_version)
        for _ in range(self.chance.randint(0, self.longest)):
            await asyncio.sleep(0)
        while int(request.request_id.rpartition("-")[2]) == self.held:  # noqa: ASYNC110 (the test's thread changes it)
            await asyncio.sleep(0.001)
        return completions


@pytest.mark.slow
@given(st.integers(0, 2), st.sampled_from([0.3, 0.6, 1.0]), st.integers(0, 2**32), st.sampled_from([0, 20, 500]))
@settings(max_examples=30)
def test_batches_have_the_same_groups_whatever_finishes_first(
    max_staleness: int, usable_share: float, seed: int, longest: int
) -> None:
    usable = [Random(f"{seed} {index}").random() < usable_share for index in range(1000)]
    rewards = FakeRewards()
    rewards.equal = lambda prompt: not usable[prompt.index]
    actors = UnevenActors(seed, longest)
    batches = []
    with running(make_config(max_staleness), actors, rewards) as rollouts:
        for version in range(BATCHES):
            actors.version = version
            batches.append(take(rollouts, version))
            assert batches[-1].statistics["staleness/max"] <= max_staleness
            reach(rollouts, version + 1)
            if version == 2:
                state = saved(rollouts)
    usable_indices = [index for index in range(1000) if usable[index]]
    assert indices(*batches) == usable_indices[: BATCHES * BATCH_GROUPS]
    # A run that resumes goes on with the next ones.
    with running(make_config(max_staleness), actors, rewards, state, version=3) as rollouts:
        assert indices(take(rollouts, 3)) == indices(batches[3])


def wait_for_all_but_the_held(rollouts: Rollouts, ready: int) -> None:
    until(lambda: len(json.loads(saved(rollouts))["ready"]["groups"]) == ready)


def test_a_batch_waits_for_an_earlier_group_and_the_wait_is_counted() -> None:
    actors = UnevenActors(0, 0, held=1)
    with running(make_config(2), actors) as rollouts:
        wait_for_all_but_the_held(rollouts, 3 * BATCH_GROUPS - 1)
        assert look(rollouts, 0, 0.0) is None
        assert len(actors.served) == 3 * BATCH_GROUPS  # nothing is sampled in its place
        actors.held = -1
        batch = take(rollouts, 0)
    assert indices(batch) == list(range(BATCH_GROUPS))
    assert batch.statistics["rollout/straggler_wait_s"] > 0


def test_the_wait_for_an_earlier_group_has_a_bound_unless_it_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    config, turns = make_config(1), itertools.count(1)
    with running(config, UnevenActors(0, 0, held=1)) as rollouts:
        wait_for_all_but_the_held(rollouts, 2 * BATCH_GROUPS - 1)
        config.rollout.data_timeout_s = 0.05
        with monkeypatch.context() as patch:
            patch.setattr(GroupMaker, "progress", property(lambda self: next(turns)))
            assert look(rollouts, 0, 0.1) is look(rollouts, 0, 0.1) is None
        with pytest.raises(UserError, match="no completion arrived for 0.05 s .* with 1 groups under way"):
            while True:
                assert look(rollouts, 0, 0.1) is None


def test_lengths_of_trained_groups_stand_beside_those_of_all_usable_ones() -> None:
    """Groups with equal rewards have longer completions here."""

    class Long(FakeActors):
        async def generate(self, request: GenerateRequest, min_version: int = 0) -> list[Completion]:
            completions = await super().generate(request, min_version)
            if int(request.request_id.rpartition("-")[2]) % 2:
                return completions
            return [
                replace(
                    item, token_ids=[48, 48, *item.token_ids], log_probs=[-0.5] * 4, spans=[VersionSpan("now", 0, 0, 4)]
                )
                for item in completions
            ]

    rewards = FakeRewards()
    rewards.equal = lambda prompt: prompt.index % 2 == 0
    with running(make_config(0), Long(), rewards) as rollouts:
        statistics = take(rollouts, 0).statistics
    assert statistics["completion/length_trained_mean"] == statistics["completion/length_usable_mean"] == 2.0
    assert 2.5 < statistics["completion/length_mean"] < 3.5
