"""Rollouts with scripted actors in this process: budget, gate, drops, failures, and resumes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S, until
from tests.trajectories import single_turn
from tests.unit_tests.rollout.test_prompts import Characters
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.grpo.advantages import group_advantages, normalized_each
from torchtitan.inference.types import Completion, GenerateRequest, VersionSpan
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.flow.rollouts import Rollouts
from torchtitan.rollout.flow.source_flow import has_no_advantage
from torchtitan.rollout.flow.staleness_budget import StalenessBudget
from torchtitan.rollout.flow.statistics import sample_version
from torchtitan.rollout.rewards.reward_pool import Score
from torchtitan.rollout.types import Batch, Group, Prompt, Trajectory
from torchtitan.utils.json_lines import EventLog, read_json_lines

GROUP_SIZE, BATCH_GROUPS = 2, 4


class FakeActors:
    """Serves requests after `delay(request)` seconds under `version`, which the test moves; keeps count."""

    def __init__(self, delay: Callable[[GenerateRequest], float] = lambda request: 0.0):
        self.delay = delay
        self.version = 0
        self.epoch = "now"
        self.served: list[tuple[str, int]] = []
        self.stop_token_ids: set[tuple[int, ...]] = set()
        self.running = self.most_running = 0
        self.failure: Exception | None = None
        self.statistics = {"evictions": 0}
        self.actors = {"actor-0": "ready"}
        self.described = "actor-0 ready"

    def describe_actors(self) -> str:
        return self.described

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def generate(self, request: GenerateRequest, min_version: int = 0) -> list[Completion]:
        while self.version < min_version:  # noqa: ASYNC110 (the test's thread moves it)
            await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        self.stop_token_ids.add(tuple(request.sampling.stop_token_ids))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        version = self.version
        try:
            await asyncio.sleep(self.delay(request))
        finally:
            self.running -= 1
        self.served.append((request.request_id, version))
        spans = [VersionSpan(self.epoch, version, 0, 1), VersionSpan(self.epoch, max(version, self.version), 1, 2)]
        return [Completion([48 + i, 1], [-0.5, -0.1], "stop", spans) for i in range(request.sampling.n)]


class FakeRewards:
    """Rewards 0 and 1 in every group; `equal(prompt)` makes them equal, `lost(prompt)` None."""

    def __init__(self) -> None:
        self.statistics = {"failures": 0}
        self.last_failure = "it was lost"
        self.missing_isolation = ""
        self.equal: Callable[[Prompt], bool] = lambda prompt: False
        self.lost: Callable[[Prompt, int], bool] = lambda prompt, i: False

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def set_step(self, step: int) -> None:
        pass

    def take_logged(self) -> dict[str, float]:
        return {}

    async def score(
        self, prompt: Prompt, completions: Sequence[Trajectory], functions: Sequence[str] | None = None
    ) -> list[Score]:
        name = functions[0] if functions else "arithmetic"
        values = [
            None if self.lost(prompt, i) else 0.0 if self.equal(prompt) else float(i) for i in range(len(completions))
        ]
        return [(value, {name: value}) for value in values]


def make_config(max_staleness: int = 1, **rollout: Any) -> JobConfig:
    config = JobConfig()
    config.training.seq_len, config.rollout.max_completion_tokens = 16, 4
    config.training.global_batch_size = GROUP_SIZE * BATCH_GROUPS
    config.grpo.group_size = GROUP_SIZE
    config.rollout.max_staleness = max_staleness
    config.rollout.data_timeout_s = 20.0
    vars(config.rollout).update(rollout)
    return config


@contextmanager
def running(
    config: JobConfig,
    actors: FakeActors,
    rewards: FakeRewards | None = None,
    state: bytes = b"",
    version: int = 0,
    events: EventLog | None = None,
) -> Iterator[Rollouts]:
    scored: Any = rewards or FakeRewards()
    with Rollouts(config, actors, scored, Characters(), None, "now", ranks=1, events=events) as rollouts:  # type: ignore[arg-type]
        rollouts.loop.call(rollouts.flow.restore_state, state)
        reach(rollouts, version)
        yield rollouts


def reach(rollouts: Rollouts, version: int) -> None:
    rollouts.loop.call(rollouts.flow.set_version, version)


def look(rollouts: Rollouts, version: int, timeout: float) -> Batch | None:
    return rollouts.loop.call(rollouts.flow.next_batch, version, timeout)


def saved(rollouts: Rollouts) -> bytes:
    return rollouts.loop.call(rollouts.flow.export_state)


def take(rollouts: Rollouts, version: int, timeout: float = 10.0) -> Batch:
    batch = look(rollouts, version, timeout)
    assert batch is not None
    return batch


def indices(*batches: Batch) -> list[int]:
    return [group.prompt_index for batch in batches for group in batch.groups]


def wait_until_quiet(actors: FakeActors) -> None:
    """Wait until the rollouts has nothing under way any more."""
    deadline = time.monotonic() + PATIENCE_S
    quiet = 0
    while quiet < 10:
        assert time.monotonic() < deadline
        before = len(actors.served)
        time.sleep(0.005)
        quiet = quiet + 1 if actors.running == 0 and len(actors.served) == before else 0


def test_batches_hold_whole_groups_in_order_with_their_figures() -> None:
    actors = FakeActors(delay=lambda request: random.random() / 50)
    with running(make_config(), actors) as rollouts:
        batch = take(rollouts, 0)
    assert indices(batch) == sorted(indices(batch))
    assert [len(group.samples) for group in batch.groups] == [GROUP_SIZE] * BATCH_GROUPS
    assert batch.statistics["reward/mean"] == batch.statistics["reward/std"] == 0.5
    assert batch.statistics["completion/length_mean"] == 2.0
    assert batch.statistics["staleness/max"] == 0.0
    assert batch.statistics["inference/evictions"] == 0.0
    sample = batch.samples[1]
    assert (sample.completion_ids, sample.log_probs, sample.reward) == ([49, 1], [-0.5, -0.1], 1.0)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_only_what_can_be_used_is_generated(max_staleness: int) -> None:
    actors = FakeActors()
    with running(make_config(max_staleness), actors) as rollouts:
        wait_until_quiet(actors)
        assert len(actors.served) == BATCH_GROUPS * (max_staleness + 1)
        take(rollouts, 0)
        wait_until_quiet(actors)
        assert len(actors.served) == BATCH_GROUPS * (max_staleness + 1)
        actors.version = 1
        reach(rollouts, 1)
        wait_until_quiet(actors)
        assert len(actors.served) == BATCH_GROUPS * (max_staleness + 2)


def test_without_staleness_training_is_on_policy() -> None:
    actors = FakeActors(delay=lambda request: 0.002)
    with running(make_config(0), actors) as rollouts:
        for version in range(5):
            batch = take(rollouts, version)
            assert {span.version for sample in batch.samples for span in sample.spans} == {version}
            reach(rollouts, version + 1)
            time.sleep(0.01)  # the actors get the new version a little later
            actors.version = version + 1
        wait_until_quiet(actors)
    assert all(version <= 5 for _, version in actors.served)
    assert len(actors.served) == 6 * BATCH_GROUPS  # nothing was thrown away


def test_actors_that_lag_never_break_the_gate_and_nothing_is_wasted_on_them() -> None:
    actors = FakeActors()
    staleness = []
    with running(make_config(2), actors) as rollouts:
        for version in range(12):
            actors.version = max(0, version - version % 3)  # the actors get every third version
            batch = take(rollouts, version)
            staleness += [version - sample_version(sample.spans) for sample in batch.samples]
            assert batch.statistics["staleness/max"] <= 2
            assert batch.statistics["rollout/admission_rate"] == 1.0
            reach(rollouts, version + 1)
    assert max(staleness) == 2


def test_groups_beyond_an_on_policy_batch_are_too_old_for_the_next_and_are_done_again() -> None:
    actors = FakeActors()
    rewards = FakeRewards()
    rewards.equal = lambda prompt: prompt.index < 8 or prompt.index == 13
    with running(make_config(0), actors, rewards) as rollouts:
        batches = [take(rollouts, 0)]
        wait_until_quiet(actors)
        spare = len(actors.served) - 9 - BATCH_GROUPS  # usable, but not in the batch
        actors.version = 1
        reach(rollouts, 1)
        batches.append(take(rollouts, 1))
    assert indices(*batches) == [8, 9, 10, 11, 12, 14, 15, 16] and spare >= BATCH_GROUPS
    for again in ("now-12", "now-13"):  # also the unusable one, so that a prompt's turn does not depend on its rewards
        assert [version for request, version in actors.served if request == again] == [0, 1]
    assert batches[1].statistics["staleness/max"] == 0.0
    assert sum(batch.statistics["rollout/groups_stale"] for batch in batches) >= spare
    assert min(batch.statistics["rollout/admission_rate"] for batch in batches) < 1


@pytest.mark.parametrize("drop", [True, False])
def test_groups_with_equal_rewards_do_not_count_for_the_batch(drop: bool) -> None:
    config = make_config()
    config.grpo.drop_zero_variance = drop
    rewards = FakeRewards()
    rewards.equal = lambda prompt: prompt.index % 2 == 0
    with running(config, FakeActors(), rewards) as rollouts:
        batch = take(rollouts, 0)
        assert len(batch.groups) == BATCH_GROUPS
        if drop:
            assert all(index % 2 for index in indices(batch))
            assert 0.3 < batch.statistics["groups/zero_variance_fraction"] < 0.7
            assert batch.statistics["reward/mean"] < 0.4  # the dropped groups' zeros are in it
        else:
            assert indices(batch) == [0, 1, 2, 3]
            assert batch.statistics["groups/zero_variance_fraction"] == 0.0


def odd(group: Group) -> bool:
    return len(group.samples) == GROUP_SIZE and bool(group.prompt_index % 2)


def broken(group: Group) -> bool:
    return bool(len(group.samples) // 0)


def test_groups_that_ones_own_filter_leaves_out_do_not_count_for_the_batch() -> None:
    config = make_config()
    config.grpo.group_filter = f"{__name__}:broken"
    named = rf"grpo.group_filter = '{__name__}:broken' raised ZeroDivisionError: .*test_rollouts.py, line \d+"
    with running(config, FakeActors()) as rollouts, pytest.raises(UserError, match=named):
        take(rollouts, 0)
    config.grpo.group_filter = f"{__name__}:odd"
    with running(config, FakeActors()) as rollouts:
        batch = take(rollouts, 0)
    assert len(batch.groups) == BATCH_GROUPS and all(index % 2 for index in indices(batch))
    assert 0.3 < batch.statistics["groups/filtered_fraction"] < 0.7
    assert batch.statistics["groups/zero_variance_fraction"] == 0.0


def group_of(*rewards: dict[str, float | None]) -> Group:
    samples = []
    for reward in rewards:
        total = sum(value for value in reward.values() if value is not None)
        samples.append(single_turn([1], [2], [0.0], [VersionSpan("e", 0, 0, 1)], "stop", total, reward))
    return Group(0, samples)


EQUAL = group_of({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0})
TIED = group_of({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
ABSENT = group_of({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": None})


@pytest.mark.parametrize(
    ("advantage", "aggregation", "group", "weights", "dropped"),
    [
        ("group", "sum", EQUAL, [], True), ("rloo", "sum", TIED, [], True), ("batch", "sum", EQUAL, [], False),
        ("batch", "normalize_each", EQUAL, [], False), ("group", "normalize_each", TIED, [], False),
        ("group", "normalize_each", EQUAL, [], True), ("group", "normalize_each", ABSENT, [], True),
        ("group", "normalize_each", TIED, [0.0, 0.0], True),
    ],
)  # fmt: skip
def test_groups_that_teach_are_not_dropped(
    advantage: str, aggregation: str, group: Group, weights: list[float], dropped: bool
) -> None:
    """Review: all-right groups have an advantage of ±½ against the batch, tied sums hide different parts."""
    config = make_config()
    config.grpo.advantage, config.grpo.reward_aggregation = advantage, aggregation
    config.rewards.functions, config.rewards.weights = ["a", "b"], weights
    assert has_no_advantage(group, config) is dropped
    # A teacher has something to say of every sample; a source that has none learns from rewards alone.
    config.job.stage, config.distill.add_rewards = "distill", True
    assert has_no_advantage(group, config) is dropped
    config.distill.teacher = "teacher"
    assert not has_no_advantage(group, config)
    config.job.stage = "grpo"
    other = group_of({"a": 0.0, "b": 0.25}, {"a": 0.0, "b": 0.5})
    groups = [group, other]
    if aggregation == "sum":
        values = group_advantages([[s.reward for s in candidate.samples] for candidate in groups], "none", advantage)
    else:
        by_function = [[s.rewards for s in candidate.samples] for candidate in groups]
        values = normalized_each(by_function, dict(zip("ab", weights or [1.0, 1.0], strict=True)), "none", advantage)
    if dropped:
        assert values[0] == [0.0, 0.0]


def test_samples_without_any_reward_are_left_out_and_counted() -> None:
    config = make_config()
    config.grpo.group_size, config.training.global_batch_size = 3, 3 * BATCH_GROUPS
    rewards = FakeRewards()
    # group 0 keeps two samples; group 1 keeps one, which has nothing to be compared with
    rewards.lost = lambda prompt, i: (prompt.index == 0 and i == 0) or (prompt.index == 1 and i < 2)
    with running(config, FakeActors(), rewards) as rollouts:
        batch = take(rollouts, 0)
    assert indices(batch) == [0, 2, 3, 4]
    assert [len(group.samples) for group in batch.groups] == [2, 3, 3, 3]
    assert batch.statistics["rollout/samples_unscored"] == 3.0
    assert batch.statistics["groups/unscored"] == 1.0


def test_rewards_that_always_fail_stop_the_run() -> None:
    rewards = FakeRewards()
    rewards.lost = lambda prompt, i: True
    with running(make_config(), FakeActors(), rewards) as rollouts, pytest.raises(UserError, match="it was lost"):
        take(rollouts, 0)


def test_no_batch_in_time_is_none_and_too_long_is_an_error_that_says_for_whom_it_waited(tmp_path: Path) -> None:
    actors, events = FakeActors(delay=lambda request: 60.0), EventLog(tmp_path / "events.jsonl")
    actors.described = "actor-0 evicted (its weights are stale)"
    with running(make_config(data_timeout_s=1.0), actors, events=events) as rollouts:
        assert look(rollouts, 0, 0.0) is None
        assert look(rollouts, 0, 0.05) is None
        with pytest.raises(UserError, match=r"no completion arrived for 1 s.*evicted \(its weights are stale\)"):
            while True:
                assert look(rollouts, 0, 0.1) is None
    (event,) = (row for row in read_json_lines(events.path) if row["kind"] == "waiting_for_completions")
    assert event["actors"] == actors.described


def test_completions_without_a_usable_group_are_an_error_too() -> None:
    rewards = FakeRewards()
    rewards.equal = lambda prompt: True
    actors = FakeActors(delay=lambda request: 0.005)
    with (
        running(make_config(data_timeout_s=0.3), actors, rewards) as rollouts,
        pytest.raises(UserError, match="had equal rewards"),
    ):
        while True:
            assert look(rollouts, 0, 0.1) is None


def test_a_failure_of_the_actors_reaches_the_trainer() -> None:
    actors = FakeActors()
    actors.failure = UserError("no inference actor is left")
    with running(make_config(), actors) as rollouts, pytest.raises(UserError, match="no inference actor is left"):
        take(rollouts, 0)


def test_held_out_prompts_are_never_trained_on() -> None:
    config = make_config(0)
    config.rollout.stop_token_ids = [10]
    actors = FakeActors()
    with running(config, actors) as rollouts:
        (task,) = rollouts.tasks
        prompts = task.held_out_prompts()
        assert len(prompts) == 128 and prompts == task.held_out_prompts()
        trained = {tuple(sample.prompt_ids) for sample in take(rollouts, 0).samples}
    assert not trained & {tuple(prompt.token_ids) for prompt in prompts}
    assert actors.stop_token_ids == {(10, 1)} == {tuple(task.groups.stop_token_ids)}


def test_a_group_that_is_redone_asks_for_the_same_random_numbers() -> None:
    def seeds(job_seed: int) -> list[int]:
        config = make_config()
        config.training.seed = job_seed
        groups = GroupMaker(config, FakeActors(), FakeRewards(), Characters(), "any")  # type: ignore[arg-type]
        return [groups.request(Prompt(i, "", [1], {})).sampling.seed for i in range(50)]

    assert seeds(0) == seeds(0)
    assert len(set(seeds(0) + seeds(1))) == 100


def test_actors_that_sleep_between_batches_generate_nothing_ahead() -> None:
    actors = FakeActors()
    config = make_config(max_staleness=2)
    config.grpo.async_weight_update, config.inference.sleep_level = False, 1
    with running(config, actors) as rollouts:
        wait_until_quiet(actors)
        assert len(actors.served) == BATCH_GROUPS
        take(rollouts, 0)
        wait_until_quiet(actors)
        assert len(actors.served) == BATCH_GROUPS
        actors.version = 1
        reach(rollouts, 1)
        take(rollouts, 1)
        assert {version for _, version in actors.served[BATCH_GROUPS:]} == {1}


@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 20), st.booleans(), st.data())
@settings(max_examples=200)
def test_pace_never_asks_for_a_version_that_does_not_exist_or_is_too_old(
    batch: int, max_staleness: int, version: int, handed_out: bool, data: st.DataObject
) -> None:
    budget = StalenessBudget(batch, max_staleness, version, handed_out)
    if budget.wanted() == 0:
        assert max_staleness == 0 and handed_out
        return
    position = data.draw(st.integers(0, budget.wanted() - 1))
    oldest = budget.oldest_useful_version(position)
    assert 0 <= oldest <= version
    trained_at = budget.next_version + position // batch
    # sampled at that version it is admitted in its turn; one version earlier it is not
    assert trained_at - oldest <= max_staleness
    assert oldest == 0 or trained_at - (oldest - 1) > max_staleness


def test_ahead_of_time_rather_a_group_too_few_is_sampled_than_one_too_many() -> None:
    on_policy, ahead = (StalenessBudget(4, max_staleness, survival=0.5, ready=[1, 5]) for max_staleness in (0, 1))
    in_flight = range(6, 22)
    assert [on_policy.position(index, in_flight) for index in (None, 0, 3, 10)] == [10, 0, 1, 4]
    # The standard deviation of 16 and of 4 draws with a chance of one half is 2 and 1.
    assert [ahead.position(index, in_flight) for index in (None, 0, 3, 10)] == [12, 0, 1, 5]


@pytest.mark.parametrize("first_reward_at", [None, 2, 20])
def test_a_run_without_any_reward_says_what_it_samples(tmp_path: Path, first_reward_at: int | None) -> None:
    """No batch comes of it, as groups of equal rewards are dropped: nothing else would be said."""
    rewards, events = FakeRewards(), EventLog(tmp_path / "events.jsonl")
    rewards.equal = lambda prompt: first_reward_at is None or prompt.index < first_reward_at
    with running(make_config(), FakeActors(), rewards, events=events) as rollouts:
        if first_reward_at is None:
            until(events.path.exists)
        else:
            take(rollouts, 0)
    notices = read_json_lines(events.path)
    assert [event["kind"] for event in notices] == ([] if first_reward_at == 2 else ["no_reward_yet"])
    for event in notices:
        assert event["groups"] == 2 * BATCH_GROUPS and len(event["completions"]) == 3
        for shown in event["completions"]:
            left, right = shown["prompt"].rstrip("=").split("+")
            # The task's sums are written from right to left.
            assert int(shown["answer"][::-1]) == int(left) + int(right) and shown["completion"]


@pytest.mark.parametrize(("hint", "has_success"), [("success", True), ("success", False), ("feedback", True)])
def test_a_run_of_a_self_teacher_without_any_hint_says_so_once(tmp_path: Path, hint: str, has_success: bool) -> None:
    """Its batches are trained without a loss where groups that teach nothing are kept: nothing else would be said."""
    config, rewards, events = make_config(), FakeRewards(), EventLog(tmp_path / "events.jsonl")
    config.job.stage, config.distill.hint, config.grpo.drop_zero_variance = "distill", hint, False
    rewards.equal = lambda prompt: not has_success
    is_said = hint != "success" or not has_success

    def hint_events() -> list[dict[str, Any]]:
        found = read_json_lines(events.path) if events.path.exists() else []
        return [event for event in found if event["kind"] == "no_hint_yet"]

    with running(config, FakeActors(), rewards, events=events) as rollouts:
        take(rollouts, 0)
        if is_said:
            until(hint_events)
    assert [(event["groups"], event["hint"]) for event in hint_events()] == [(2 * BATCH_GROUPS, hint)] * is_said


def test_code_that_runs_without_isolation_is_an_event(tmp_path: Path) -> None:
    rewards, events = FakeRewards(), EventLog(tmp_path / "events.jsonl")
    rewards.missing_isolation = "not isolated: there are no namespaces"
    with running(make_config(), FakeActors(), rewards, events=events):
        (event,) = read_json_lines(events.path)
    assert (event["kind"], event["table"]) == ("isolation_missing", "rewards")
    assert event["reason"] == rewards.missing_isolation and "keys" in event["meaning"]
