"""Rollouts that go on: nothing is lost, nothing is trained on twice, whatever was under way."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.rollout.test_prompts import Characters
from tests.unit_tests.rollout.test_rollouts import (
    BATCH_GROUPS,
    GROUP_SIZE,
    FakeActors,
    FakeRewards,
    indices,
    make_config,
    reach,
    running,
    saved,
    take,
    wait_until_quiet,
)
from torchtitan.errors import UserError
from torchtitan.rollout.flow.journal import Journal
from torchtitan.rollout.flow.rollouts import Rollouts
from torchtitan.utils.json_lines import EventLog, read_json_lines


@pytest.mark.slow
@given(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=12)
def test_a_resume_loses_nothing_and_repeats_nothing(max_staleness: int, checkpoint: int, seed: int) -> None:
    chance = random.Random(seed)
    config = make_config(max_staleness)
    used: list[int] = []

    def train(rollouts: Rollouts, actors: FakeActors, versions: range) -> None:
        for version in versions:
            batch = take(rollouts, version)
            used.extend(indices(batch))
            actors.version = version + 1
            reach(rollouts, version + 1)

    actors = FakeActors(delay=lambda request: chance.random() / 100)
    with running(config, actors) as rollouts:
        train(rollouts, actors, range(checkpoint))
        time.sleep(chance.random() / 100)
        state = saved(rollouts)
        held_ready = _ready(state)
    # The actors are killed here with whatever was under way; a new life begins with the saved state alone.
    later = FakeActors(delay=lambda request: chance.random() / 100)
    later.version = checkpoint
    with running(config, later, state=state, version=checkpoint) as rollouts:
        train(rollouts, later, range(checkpoint, checkpoint + 3))
        end = saved(rollouts)
    redone = {int(request.rpartition("-")[2]) for request, _ in later.served}
    assert not redone & held_ready  # finished groups are not generated again
    assert len(used) == len(set(used))
    left = _ready(end) | _unfinished(end)
    assert set(range(_position(end))) == set(used) | left and not set(used) & left


@given(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=6)
def test_ranks_that_are_started_again_train_on_what_was_recorded_first(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int, steps: int, seed: int
) -> None:
    chance = random.Random(seed)
    config = make_config(max_staleness)
    journal = Journal(tmp_path_factory.mktemp("run"))
    actors = FakeActors(delay=lambda request: chance.random() / 100)
    state, batches = b"", []
    with running(config, actors) as rollouts:
        for version in range(1 + steps):
            if version == 1:
                state = saved(rollouts)
            batches.append(take(rollouts, version))
            journal.append_batch(batches[-1])
            actors.version = version + 1
            reach(rollouts, version + 1)
    _, kept = journal.set_aside(1)
    later = FakeActors(delay=lambda request: chance.random() / 100)
    with Rollouts(config, later, FakeRewards(), Characters(), None, "now", ranks=1) as rollouts:  # type: ignore[arg-type]
        rollouts.loop.call(rollouts.flow.restore_state, state)
        rollouts.loop.call(rollouts.flow.train_again, kept)
        used = indices(batches[0])
        for version in range(1, 4 + steps):
            later.version = version
            reach(rollouts, version)
            batch = take(rollouts, version)
            assert version > steps or batch == batches[version]
            used += indices(batch)
        end = saved(rollouts)
    journal.close()
    # No prompt is trained on twice, and none is lost.
    assert len(used) == len(set(used))
    left = _ready(end) | _unfinished(end)
    assert set(range(_position(end))) == set(used) | left and not set(used) & left


def _ready(state: bytes) -> set[int]:
    return {index for index, _ in json.loads(state)["ready"]["groups"]}


def _unfinished(state: bytes) -> set[int]:
    return set(json.loads(state)["unfinished"])


def _position(state: bytes) -> int:
    return json.loads(state)["streams"][""]["position"]


def test_restored_groups_are_admitted_by_version_whatever_their_epoch() -> None:
    actors = FakeActors()
    actors.epoch = "before"
    with running(make_config(1), actors) as rollouts:
        wait_until_quiet(actors)
        state = saved(rollouts)
    actors = FakeActors()
    with running(make_config(1), actors, state=state) as rollouts:
        batch = take(rollouts, 0)
        assert {span.epoch for sample in batch.samples for span in sample.spans} == {"before"}
    with running(make_config(1), actors, state=state, version=2) as rollouts:
        actors.version = 2
        batch = take(rollouts, 2)
        assert {span.epoch for sample in batch.samples for span in sample.spans} == {"now"}
        assert batch.statistics["rollout/groups_stale"] == 2 * BATCH_GROUPS


CHANGES: list[tuple[str, str, object]] = [
    ("rollout", "temperature", 0.5),
    ("rollout", "top_p", 0.9),
    ("rollout", "max_completion_tokens", 3),
    ("grpo", "group_size", GROUP_SIZE * 2),
    ("rewards", "functions", ["arithmetic", "format"]),
]


@pytest.mark.parametrize(("table", "key", "value"), [*CHANGES, ("rollout", "data_timeout_s", 30.0), ("", "", "")])
def test_groups_of_other_settings_are_made_again_and_named(tmp_path: Path, table: str, key: str, value: object) -> None:
    """What is trained after a resume has the size and the temperature of the run that trains it."""
    with running(make_config(1), actors := FakeActors()) as rollouts:
        wait_until_quiet(actors)
        state = saved(rollouts)
    left = _ready(state)
    assert len(left) == 2 * BATCH_GROUPS
    config, events = make_config(1), EventLog(tmp_path / "events.jsonl")
    if table:
        setattr(getattr(config, table), key, value)
    config.training.global_batch_size = BATCH_GROUPS * config.grpo.group_size
    later = FakeActors()
    with running(config, later, state=state, events=events) as rollouts:
        batches = [take(rollouts, 0)]
        later.version = 1
        reach(rollouts, 1)
        batches.append(take(rollouts, 1))
    assert set(indices(*batches)) == left  # no prompt is lost
    other = (table, key, value) in CHANGES
    asked = {int(request.rpartition("-")[2]) for request, _ in later.served}
    assert (left <= asked) if other else not left & asked
    assert all(len(group.samples) == config.grpo.group_size for batch in batches for group in batch.groups)
    notices = [event for event in read_json_lines(events.path) if event["kind"] == "groups_made_again"]
    assert len(notices) == other
    for event in notices:
        assert event["groups"] == len(left) and f"-> {value!r}" in event[f"{table}.{key}"]


def test_a_state_that_does_not_say_its_settings_goes_on() -> None:
    """As those of earlier releases do not."""
    with running(make_config(1), actors := FakeActors()) as rollouts:
        wait_until_quiet(actors)
        state = json.loads(saved(rollouts))
    del state["sampled_as"]
    silent = json.dumps(state).encode()
    with running(make_config(1), later := FakeActors(), state=silent) as rollouts:
        take(rollouts, 0)
    assert not {int(request.rpartition("-")[2]) for request, _ in later.served} & _ready(silent)


def test_recorded_batches_of_other_settings_are_not_trained_on_again(tmp_path: Path) -> None:
    journal, events = Journal(tmp_path), EventLog(tmp_path / "events.jsonl")
    with running(make_config(1), FakeActors()) as rollouts:
        state = saved(rollouts)
        journal.append_batch(take(rollouts, 0))
    config = make_config(1, temperature=0.5)
    _, kept = journal.set_aside(0)
    actors = FakeActors()
    with Rollouts(config, actors, FakeRewards(), Characters(), None, "now", ranks=1, events=events) as rollouts:  # type: ignore[arg-type]
        rollouts.loop.call(rollouts.flow.restore_state, state)
        rollouts.loop.call(rollouts.flow.train_again, kept)
        reach(rollouts, 0)
        batch = take(rollouts, 0)
    asked = {int(request.rpartition("-")[2]) for request, _ in actors.served}
    assert set(indices(batch)) <= asked
    (notice,) = [event for event in read_json_lines(events.path) if event["kind"] == "batches_made_again"]
    assert notice["rollout.temperature"] == "1.0 -> 0.5" and notice["batches"] == 1


def test_rollouts_do_not_go_on_from_demonstrations() -> None:
    with running(make_config(1), FakeActors()) as rollouts:
        of_the_same_rows = json.dumps({"streams": json.loads(saved(rollouts))["streams"]}).encode()
    again = running(make_config(1), FakeActors(), state=of_the_same_rows)
    with pytest.raises(UserError, match="one of job.stage = sft"), again:
        pass
