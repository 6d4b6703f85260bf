"""Several sources in one run, with scripted actors: quotas, resumes, and sources that fail."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit_tests.rollout.test_prompts import Characters
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
    wait_until_quiet,
)
from torchtitan.config.job_config import JobConfig
from torchtitan.config.sources import Source
from torchtitan.errors import UserError
from torchtitan.inference.types import GenerateRequest, VersionSpan
from torchtitan.report.metrics import describe_sample
from torchtitan.rollout.flow.journal import Journal, decode_batch, encode_batch
from torchtitan.rollout.flow.rollouts import Rollouts, make_backends
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Batch, Failure, Prompt, Trajectory
from torchtitan.utils.json_lines import EventLog, read_json_lines

WEIGHTS = {"sums": 2.0, "more": 1.0, "rare": 0.2}


def mixed(max_staleness: int = 1, required: bool = True, **of_rare: Any) -> JobConfig:
    config = make_config(max_staleness)
    config.source = [Source(name=name, weight=weight) for name, weight in WEIGHTS.items()]
    config.source[2].required = required
    config.source[2].values = {key.replace("__", "."): value for key, value in of_rare.items()}
    return config


def of(request: GenerateRequest) -> int:
    """The number of a request's source."""
    return int(request.request_id.rpartition("-")[2]) % len(WEIGHTS)


def names(batch: Batch) -> list[str]:
    return [group.source for group in batch.groups]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_slow_source_has_its_share_of_every_batch(max_staleness: int) -> None:
    chance = random.Random(0)
    actors = FakeActors(delay=lambda request: chance.random() / 20 if of(request) == 1 else 0.0)
    rewards = FakeRewards()
    rewards.equal = lambda prompt: prompt.source == "sums" and chance.random() < 0.5
    counts: Counter[str] = Counter()
    with running(mixed(max_staleness), actors, rewards) as rollouts:
        for version in range(16):
            batch = take(rollouts, version)
            counts.update(names(batch))
            for name, weight in WEIGHTS.items():
                share = BATCH_GROUPS * (version + 1) * weight / sum(WEIGHTS.values())
                assert abs(counts[name] - share) < 1
                assert batch.statistics[f"groups/{name}/trained"] == names(batch).count(name)
            by_source = {
                name: [sample.reward for group in batch.groups if group.source == name for sample in group.samples]
                for name in set(names(batch))
            }
            assert all(f"staleness/{name}/mean" in batch.statistics for name in by_source)
            assert batch.statistics["reward/more/mean"] == 0.5
            # Sources count as they do in the batch, and not by how many of their groups were done meanwhile.
            means = [batch.statistics[f"reward/{name}/mean"] for name in names(batch)]
            assert batch.statistics["reward/mean"] == pytest.approx(sum(means) / len(means))
            assert batch.statistics.get("groups/rare/zero_variance_fraction", 0.0) == 0.0
            actors.version = version + 1
            reach(rollouts, version + 1)
    for number in range(len(WEIGHTS)):
        by_source = [index for index in indices(batch) if index % len(WEIGHTS) == number]
        assert by_source == sorted(by_source)


def test_batches_keep_their_sources_on_the_way_to_ranks_and_files() -> None:
    with running(mixed(), FakeActors()) as rollouts:
        batch = take(rollouts, 0)
    assert decode_batch(encode_batch(batch)) == batch
    assert describe_sample(1, 0, batch.samples[0], Characters(), {})["step"] == 1  # type: ignore[arg-type]


def train(rollouts: Rollouts, actors: FakeActors, versions: Sequence[int]) -> list[Batch]:
    batches = []
    for version in versions:
        batches.append(take(rollouts, version))
        actors.version = version + 1
        reach(rollouts, version + 1)
    return batches


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_resume_has_the_same_prompts_in_the_same_order(tmp_path: Path, max_staleness: int) -> None:
    chance = random.Random(max_staleness)

    def actors() -> FakeActors:
        return FakeActors(delay=lambda request: chance.random() / 100)

    config = mixed(max_staleness)
    first, journal = actors(), Journal(tmp_path)
    with running(config, first) as rollouts:
        straight = train(rollouts, first, range(2))
        state = saved(rollouts)
        straight += train(rollouts, first, range(2, 8))
    for batch in straight[:5]:
        journal.append_batch(batch)
    later = actors()
    later.version = 2
    with running(config, later, state=state, version=2) as rollouts:
        resumed = train(rollouts, later, range(2, 8))
    assert [indices(step_batch) for step_batch in resumed] == [indices(step_batch) for step_batch in straight[2:]]
    assert [names(step_batch) for step_batch in resumed] == [names(step_batch) for step_batch in straight[2:]]
    trained = indices(*straight[:2], *resumed)
    assert len(trained) == len(set(trained))
    # After a restart of the ranks, the recorded batches come first.
    _, kept = journal.set_aside(2)
    again = actors()
    with Rollouts(config, again, FakeRewards(), Characters(), None, "now", ranks=1) as rollouts:  # type: ignore[arg-type]
        rollouts.loop.call(rollouts.flow.restore_state, state)
        rollouts.loop.call(rollouts.flow.train_again, kept)
        again.version = 2
        reach(rollouts, 2)
        repeated = train(rollouts, again, range(2, 8))
    journal.close()
    assert repeated[:3] == straight[2:5]
    assert [names(step_batch) for step_batch in repeated] == [names(step_batch) for step_batch in straight[2:]]
    trained = indices(*straight[:2], *repeated)
    assert len(trained) == len(set(trained))
    config.source[0].name = "other"
    with (
        pytest.raises(UserError, match=r"not those of the checkpoint \(sums, more, rare\)"),
        running(config, actors(), state=state),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["rewards", "environment", "time"])
def test_a_source_that_fails_ends_the_run_or_only_itself(tmp_path: Path, how: str) -> None:
    class Dying(FakeActors):
        async def generate(self, request: GenerateRequest, min_version: int = 0) -> Any:
            if how == "environment" and of(request) == 1 and self.version > 0:
                raise UserError("the environment worker does not start")
            return await super().generate(request, min_version)

    def start(required: bool) -> Any:
        config = mixed()
        config.source[1].required = required
        config.rollout.data_timeout_s = 0.5 if how == "time" else 20.0
        rewards, actors = FakeRewards(), Dying()
        rewards.lost = lambda prompt, i: how == "rewards" and prompt.source == "more" and actors.version > 0
        rewards.equal = lambda prompt: how == "time" and prompt.source == "more" and actors.version > 0
        events = EventLog(tmp_path / f"{required}.jsonl")
        return actors, events, running(config, actors, rewards, events=events)

    reasons = {
        "rewards": "got no reward at all; it was lost",
        "environment": "does not start",
        "time": "had equal rewards",
    }
    actors, events, run = start(required=True)
    with run as rollouts, pytest.raises(UserError, match=f"source 'more': .*{reasons[how]}"):
        for version in range(30):
            train(rollouts, actors, [version])
    assert not events.path.exists()
    actors, events, run = start(required=False)
    with run as rollouts:
        batches = train(rollouts, actors, range(12))
        state = json.loads(saved(rollouts))
    left = {name: sum(names(batch).count(name) for batch in batches[-6:]) for name in WEIGHTS}
    assert left["more"] == 0 and abs(left["sums"] - 6 * BATCH_GROUPS * 2 / 2.2) < 2 and left["rare"]
    (event,) = [entry for entry in read_json_lines(events.path) if entry["kind"] == "source_left"]
    assert event["source"] == "more" and reasons[how] in event["reason"]
    assert list(state["mix"]["weights"]) == ["sums", "rare"]
    assert not any(index % 3 == 1 for index in state["unfinished"])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["reward", "environment", "failures"])
def test_the_last_error_says_that_every_call_timed_out_or_raised(tmp_path: Path, what: str) -> None:
    class Actors(FakeActors):
        async def generate(self, request: GenerateRequest, min_version: int = 0, shares: str = "") -> Any:
            fields = {"token_ids": [*map(ord, "bad")], "log_probs": [-1.0] * 3, "spans": [VersionSpan("now", 0, 0, 3)]}
            return [replace(completion, **fields) for completion in await super().generate(request, min_version)]

    class Text(Characters):
        shield, encode_shielded = staticmethod(str), Characters.encode

    config, package = make_config(), "tests.unit_tests.rollout"
    config.training.global_batch_size, config.rewards.timeout_s = 2, 0.2
    config.training.seq_len, config.rollout.max_completion_tokens = 32, 8
    backends = {}
    if what == "reward":
        config.rewards.functions = [f"{package}.reward_examples:async_hang"]
    else:
        factory = "environment_examples:HangsAsleep" if what == "environment" else "failing_environments:Raises"
        config.environment.factory = f"{package}.{factory}"
        config.environment.step_timeout_s = 0.2 if what == "environment" else PATIENCE_S
        config.environment.max_retries, config.rewards.functions = 0, []
        backends = make_backends(config, Actors(), EventLog(tmp_path / "events.jsonl"), tmp_path)  # type: ignore[arg-type]
    actors: Any = Actors()
    tokenizer: Any = Text()
    rollouts = Rollouts(config, actors, RewardPool(config), tokenizer, None, "now", ranks=1, backends=backends)
    errors = {
        "reward": r"got no reward at all; reward function '.*:async_hang': timeout \(the reward worker gave no answer "
        r"within 0.2 s\): fix the reward functions",
        "environment": "got no reward at all; an episode was lost: the environment worker gave no answer within 0.2 s",
        "failures": r"every episode of the last \d+ groups failed; an episode was lost: ValueError: invalid literal",
    }
    with rollouts, pytest.raises(UserError, match=errors[what]):
        rollouts.loop.call(rollouts.flow.restore_state, b"")
        reach(rollouts, 0)
        look(rollouts, 0, PATIENCE_S)


def test_an_environment_that_fails_from_the_start_ends_the_run_and_one_that_has_worked_may_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config()
    config.training.global_batch_size = config.grpo.group_size = 2
    fine, failed = Trajectory([], "stop", ""), Trajectory([], "stop", "", failure=Failure.OWN_TURN)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("torchtitan.rollout.flow.source_flow.time", clock)
    for worked_before in (False, True):
        # No group of the flow itself ends, and so counts as one that has worked.
        with running(config, FakeActors(lambda request: 2 * PATIENCE_S), FakeRewards()) as rollouts:
            (source,) = rollouts.flow._sources
            look_for_failures, groups = source.look_for_failures, [[failed, failed]] * 8
            # Of batches of one group, two are too few to tell.
            for group in ([[fine, failed]] if worked_before else []) + groups[1:]:
                look_for_failures(group)
            if worked_before:
                clock.monotonic = lambda: config.rollout.data_timeout_s - 1
                look_for_failures(groups[0])
                clock.monotonic = lambda: config.rollout.data_timeout_s
            with pytest.raises(UserError, match=f"every episode of the last {8 + worked_before} groups failed"):
                look_for_failures(groups[0])


def test_a_lone_source_ends_the_run_even_if_it_is_not_required() -> None:
    config, rewards = make_config(), FakeRewards()
    config.source = [Source(name="only", required=False)]
    rewards.lost = lambda prompt, i: True
    with running(config, FakeActors(), rewards) as rollouts, pytest.raises(UserError, match="source 'only': the last"):
        take(rollouts, 0)


def test_prompts_too_long_for_one_source_end_only_it(tmp_path: Path) -> None:
    config = mixed(required=False, rollout__max_completion_tokens=15)
    events = EventLog(tmp_path / "events.jsonl")
    actors = FakeActors()
    with running(config, actors, events=events) as rollouts:
        assert not any("rare" in names(batch) for batch in train(rollouts, actors, range(6)))
    (event,) = read_json_lines(events.path)
    assert "none of the" in event["reason"]


def test_sources_that_run_the_same_share_its_processes(tmp_path: Path) -> None:
    config, guess = make_config(), "torchtitan.rollout.environments.builtin_environments:Guess"
    config.source = [
        Source("a", {"environment.factory": guess, "rollout.max_completion_tokens": 8}),
        Source("b", {"environment.factory": guess, "rollout.max_completion_tokens": 10}),
        Source("c", {"environment.factory": guess, "environment.max_turns": 3}),
        Source(name="d"),
    ]
    backends = make_backends(config, FakeActors(), EventLog(tmp_path / "events.jsonl"), tmp_path)  # type: ignore[arg-type]
    assert backends["a"] is backends["b"] is not backends["c"] and "d" not in backends
    rewards = RewardPool(config)
    assert rewards.statistics["failures"] == 0


def test_groups_of_a_source_have_its_rewards_lengths_and_ends(tmp_path: Path) -> None:
    config = mixed(
        rewards__functions=["length", "format"], rewards__weights=[0.5, 2.0], rollout__max_completion_tokens=2,
        rollout__stop_token_ids=[7],
    )  # fmt: skip
    with running(config, FakeActors()) as rollouts:
        requests = [
            task.groups.request(Prompt(9 + number, "", [1], {})).sampling for number, task in enumerate(rollouts.tasks)
        ]
        wait_until_quiet(rollouts.pool)  # type: ignore[arg-type]
    assert [request.max_tokens for request in requests] == [4, 4, 2]
    assert [7 in request.stop_token_ids for request in requests] == [False, False, True]
    assert len({request.seed for request in requests}) == 3
