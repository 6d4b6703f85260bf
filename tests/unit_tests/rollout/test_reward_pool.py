"""The limits of the reward workers: whatever a function does costs its own sample at most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.trajectories import answer
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import ConfigError, UserError
from torchtitan.preflight.validate import draft_of, ready
from torchtitan.rollout.rewards import reward_worker as worker
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers import isolation

Result = TypeVar("Result")

HERE = "tests.unit_tests.rollout.reward_examples"


def make_config(*functions: str, **settings: Any) -> JobConfig:
    config = JobConfig()
    config.rewards.functions = [name if name in ("arithmetic", "accuracy") else f"{HERE}:{name}" for name in functions]
    config.rollout.max_completion_tokens = 16
    config.rewards.timeout_s = 5.0
    for key, value in settings.items():
        setattr(config.rewards.sandbox if hasattr(config.rewards.sandbox, key) else config.rewards, key, value)
    return config


def completions_of(*completions: Any) -> list[Trajectory]:
    return [answer([i, 7], completion) for i, completion in enumerate(completions)]


def in_pool(config: JobConfig, run: Callable[[RewardPool], Awaitable[Result]]) -> Result:
    async def opened() -> Result:
        pool = RewardPool(config)
        await pool.start()
        try:
            return await run(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(opened(), 60))


def score(config: JobConfig, *calls: tuple[Prompt, list[Trajectory]]) -> tuple[list[Any], dict[str, int]]:
    async def run(pool: RewardPool) -> tuple[list[Any], dict[str, int]]:
        return [await pool.score(*call) for call in calls], dict(pool.statistics)

    return in_pool(config, run)


PROMPT = Prompt(0, "2+2", [1], {"answer": "4"})


def totals(scores: list[Any]) -> list[float | None]:
    return [total for total, _ in scores]


def test_values_pass_through_and_printing_does_no_harm() -> None:
    results, statistics = score(make_config("echo"), (PROMPT, completions_of("0.1", "-3.5")))
    assert totals(results[0]) == [0.1, -3.5]
    assert statistics == {"failures": 0, "timeouts": 0, "worker_restarts": 0}


def test_async_functions_are_awaited_and_weights_apply() -> None:
    config = make_config("echo", "slow_echo", weights=[1.0, 10.0])
    results, _ = score(config, (PROMPT, completions_of("1", "2")))
    assert totals(results[0]) == [11.0, 22.0]
    assert results[0][1][1] == {f"{HERE}:echo": 2.0, f"{HERE}:slow_echo": 2.0}


@pytest.mark.slow
def test_a_function_that_is_slow_for_every_sample_keeps_its_rewards() -> None:
    results, statistics = score(make_config("slow", timeout_s=1.8), (PROMPT, completions_of("1", "2", "3", "4")))
    assert totals(results[0]) == [1.0, 2.0, 3.0, 4.0]
    assert statistics["timeouts"] == 1


def test_arguments_follow_trl() -> None:
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], [1], {"level": 3, "answer": "x"})
    replies = [[{"role": "assistant", "content": text}] for text in ("a", "b")]
    config, completions = make_config("seen"), completions_of(*replies)
    config.training.steps = 30

    async def run(pool: RewardPool) -> None:
        for step in (10, 20):
            pool.set_step(step)
            assert totals(await pool.score(prompt, completions)) == [1.0, 1.0]
            await pool.score(prompt, completions, config.rewards.functions)  # an evaluation's
        assert pool.take_logged() == {"logged/steps_left": 15.0} and pool.take_logged() == {}

    in_pool(config, run)
    assert [completion.extra for completion in completions] == [{"why": "short"}, {"why": "{'of': 2}"}]


def test_async_functions_run_side_by_side_and_not_more_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.rollout.rewards.reward_pool.ASYNC_CALLS", 2)

    async def run(pool: RewardPool) -> None:
        calls = [pool.score(PROMPT, completions_of(str(number))) for number in range(6)]
        assert [totals(result) for result in await asyncio.gather(*calls)] == [[float(number)] for number in range(6)]
        # With two at a time, every pair has seen itself and those before alone: 2, 2, 4, 4, 6, 6.
        assert pool.take_logged() == {"logged/begun": 4.0}

    in_pool(make_config("in_pairs"), run)


def test_isolation_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "problem_of", lambda tool: f"{tool} is not installed")
    with pytest.raises(ConfigError, match="rewards.sandbox.isolate.*bwrap is not installed; unshare is not installed"):
        ready(draft_of({}, {"rewards.sandbox.isolate": True}))
    assert isolation.find_isolation("auto", False)[1].startswith("not isolated: this system cannot")


def test_folders_of_a_reward_worker_are_removed_with_it() -> None:
    completions = completions_of("a")

    async def run(pool: RewardPool) -> bool:
        await pool.score(PROMPT, completions)
        return await asyncio.to_thread(Path(completions[0].extra["where"]).is_dir)

    assert in_pool(make_config("leaves_a_folder", isolate=False), run)
    assert not Path(completions[0].extra["where"]).parent.exists()


DIE = ("crash", "segfault", "interrupt")
FAIL = ("leave", "async_leave", "fault", "endless_recursion", "bomb", "mapped_bomb", "wrong_length", "no_list")


@pytest.mark.parametrize("function", [*DIE, *FAIL])
def test_only_the_bad_sample_is_lost(function: str) -> None:
    config = make_config(function, memory_limit_mb=256)
    good = (PROMPT, completions_of("fine", "fine"))
    results, statistics = score(config, (PROMPT, completions_of("fine", "bad", "fine")), good)
    assert totals(results[0]) == [1.0, None, 1.0]
    assert totals(results[1]) == [1.0, 1.0]
    assert statistics["failures"] == 1
    assert statistics["worker_restarts"] == (2 if function in DIE else 0)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["hang", "native_hang", "async_hang", "async_block", "stubborn_bomb"])
def test_a_hang_ends_at_the_time_limit(function: str) -> None:
    config = make_config(function, timeout_s=1.0, memory_limit_mb=256)
    results, statistics = score(config, (PROMPT, completions_of("bad", "fine")), (PROMPT, completions_of("fine")))
    assert totals(results[0]) == [None, 1.0]
    assert totals(results[1]) == [1.0]
    # An async function that only waits is broken off without its worker, but where it is tried alone.
    assert statistics == {"failures": 1, "timeouts": 2, "worker_restarts": 1 if function == "async_hang" else 2}


@pytest.mark.parametrize("text", ["bad", "worse"])
def test_a_hang_with_a_forked_child_ends_too(text: str) -> None:
    config = make_config("hang_with_child", timeout_s=1.0)
    results, statistics = score(config, (PROMPT, completions_of(text)), (PROMPT, completions_of("fine")))
    assert [totals(result) for result in results] == [[None], [1.0]]
    assert statistics == {"failures": 1, "timeouts": 1, "worker_restarts": 1}


def test_rewards_that_compare_a_group_do_so_after_a_failure() -> None:
    """Review: samples that were tried alone got the reward of a group of one."""
    results, statistics = score(make_config("rank"), (PROMPT, completions_of("1", "bad", "3", "2")))
    assert totals(results[0]) == [0.0, None, 2.0, 1.0]
    assert statistics["failures"] == 1


def test_a_group_whose_good_samples_fail_together_has_no_rewards() -> None:
    results, statistics = score(make_config("alone_only"), (PROMPT, completions_of("1", "2")))
    assert totals(results[0]) == [None, None]
    assert statistics["failures"] == 2


@pytest.mark.parametrize("broken", ["fault", "wrong_length"])
def test_a_function_that_has_never_worked_ends_the_run_beside_others(broken: str) -> None:
    config = make_config(broken, "arithmetic")
    config.training.global_batch_size, config.grpo.group_size = 4, 2
    calls = [(PROMPT, completions_of("bad", "bad"))] * 9
    with pytest.raises(UserError, match=f"'{HERE}:{broken}' has failed on every sample of its first 8 groups"):
        score(config, *calls)
    # So it does beside the reward of an environment.
    config.rewards.functions = config.rewards.functions[:1]
    config.environment.factory = "torchtitan.rollout.environments.builtin_environments:Guess"
    with pytest.raises(UserError, match=f"'{HERE}:{broken}' has failed"):
        score(config, *calls)
    # One that has worked once may fail later, as a judge that is away does, and evaluations are not counted.
    scores, _ = score(config, (PROMPT, completions_of("good", "bad")), *calls)
    assert len(scores) == 10


def test_values_that_are_no_rewards_are_counted_and_none_is_not() -> None:
    results, statistics = score(make_config("odd_values"), (PROMPT, completions_of("nan", "true", "text", "none")))
    assert totals(results[0]) == [None, 1.0, None, None]
    assert statistics["failures"] == 2
    for text in ("infinite", "huge"):
        results, statistics = score(make_config("odd_values"), (PROMPT, completions_of(text)))
        assert totals(results[0]) == [None]
        assert statistics["failures"] == 1


def test_one_function_without_opinion_does_not_spoil_the_sum() -> None:
    config = make_config("odd_values", "wrong_length")
    results, _ = score(config, (PROMPT, completions_of("none", "true")))
    assert totals(results[0]) == [1.0, 2.0]


def test_a_function_that_forgets_to_return_is_told_so() -> None:
    assert worker.reply(None, worker.Log(2)) == {"error": "must return 2 rewards in a list, returned NoneType"}


def test_math_verify_works_in_the_worker() -> None:
    prompt = Prompt(0, "half", [1], {"answer": r"\frac{1}{2}"})
    results, _ = score(make_config("accuracy"), (prompt, completions_of(r"\boxed{0.5}", r"\boxed{\frac{2}{3}}")))
    assert totals(results[0]) == [1.0, 0.0]


def test_the_pool_refuses_unknown_functions_as_it_starts() -> None:
    async def run(pool: RewardPool) -> None:
        raise AssertionError("it has started")

    with pytest.raises(UserError, match="could not load its code.*crash"):
        in_pool(make_config("crush"), run)
