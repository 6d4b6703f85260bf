"""Who caused an episode's failure decides what it counts as, in evaluations and in training."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import (
    Branch,
    Completion,
    GenerateRequest,
    Given,
    SamplingParameters,
    VersionSpan,
    stream_seed,
)
from torchtitan.rollout.environments.environment_pool import EnvironmentPool
from torchtitan.rollout.flow.episodes import MAX_STRAYS, EpisodeFailed, EpisodePlayer, Player
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.gateway.gateway_process import GatewayLost
from torchtitan.rollout.types import Failure, Prompt, Trajectory
from torchtitan.rollout.workers.worker_process import CallFailed
from torchtitan.trainer.evaluation import Evaluator, interval_with_lost
from torchtitan.trainer.interval import interval
from torchtitan.utils.json_lines import EventLog, read_json_lines

HERE = "tests.unit_tests.rollout.failing_environments"
EPOCH, VERSION, SAMPLES = "e1-aa", 7, 6


class Engines:
    """Samples one token: a number that follows from the request's random numbers."""

    def __init__(self) -> None:
        self.statistics: dict[str, int] = {}

    async def generate(self, request: GenerateRequest, min_version: int, shares: str = "") -> list[Completion]:
        number = request.sampling.seed % 10
        span = VersionSpan(EPOCH, VERSION, 0, 1)
        return [Completion([number], [0.0], "stop", [span])]


class Rewards:
    last_failure, statistics = "", {}

    async def score(self, prompt: Prompt, trajectories: list[Trajectory], functions: Any) -> list[Any]:
        return [(None, {}) for _ in trajectories]


def make_config(factory: str, isolate: bool | str = "auto", **settings: object) -> JobConfig:
    config = JobConfig()
    config.environment.factory, config.environment.max_turns = f"{HERE}:{factory}", 1
    config.environment.step_timeout_s = 30.0
    config.rewards.functions = []
    config.eval.samples_per_prompt, config.eval.greedy = SAMPLES, False
    vars(config.environment).update(settings)
    config.environment.sandbox.isolate = isolate
    return config


async def with_groups(config: JobConfig, folder: Path, work: Any) -> Any:
    engines, events = Engines(), EventLog(folder / "events.jsonl")
    environments = EnvironmentPool(config, events, folder / "environments.log")
    tokenizer: Any = SimpleNamespace(
        eos_token_ids=[99],
        added_tokens={},
        unseen_texts=frozenset(),
        decode=lambda ids: "".join(map(str, ids)),
        unknown_id=7,
        directory="model",
        encode=lambda text: [7 if char == "ß" else 1 for char in text],
    )
    maker: Any = SimpleNamespace(extended=lambda prompt, text: prompt.token_ids, tools=[])
    player = EpisodePlayer(config, engines, environments, maker, tokenizer)  # type: ignore[arg-type]
    groups = GroupMaker(config, engines, Rewards(), tokenizer, EPOCH, player)  # type: ignore[arg-type]
    try:
        await environments.start()
        return await work(groups, player, engines, events)
    finally:
        await environments.close()


def evaluate(config: JobConfig, folder: Path, prompts: list[Prompt]) -> tuple[dict[str, Any], list[list[int]], Any]:
    """Return the figures, the numbers that were sampled for each prompt, and the counts of episodes."""

    async def work(groups: GroupMaker, player: EpisodePlayer, engines: Engines, events: EventLog) -> Any:
        evaluator = Evaluator(config, EPOCH, prompts, groups, events)
        figures = await evaluator.evaluate(0, VERSION, 100.0)
        assert figures is not None, read_json_lines(events.path)
        seeds = [evaluator._request(0, prompt, greedy=False).sampling.seed for prompt in prompts]
        # The first turn of each episode, whatever happened to it.
        numbers = [[stream_seed(stream_seed(seed, n, 0), 0) % 10 for n in range(SAMPLES)] for seed in seeds]
        return figures, numbers, player.statistics

    return asyncio.run(asyncio.wait_for(with_groups(config, folder, work), 200))


def prompts_of(count: int, **columns: object) -> list[Prompt]:
    return [Prompt(index, "p", [1, 2], dict(columns)) for index in range(count)]


@pytest.mark.parametrize(
    "factory",
    # A process is started for each of its failures.
    ["Sound", "Raises", "Exits", pytest.param("KillsItself", marks=pytest.mark.slow), "Swells", "HasNoReward"],
)
def test_samples_that_make_their_environment_fail_have_not_passed(tmp_path: Path, factory: str) -> None:
    """All episodes are in one process at a time, and none is blamed for another."""
    # The first process of a namespace does not die of its own signals.
    config = make_config(factory, isolate=False if factory == "KillsItself" else "auto")
    figures, numbers, statistics = evaluate(config, tmp_path, prompts_of(3))
    even = [sum(number % 2 == 0 for number in group) for group in numbers]
    odd = 3 * SAMPLES - sum(even)
    assert odd >= 4 and sum(even) >= 4
    assert figures["eval/pass@1"] == pytest.approx(sum(even) / SAMPLES / 3)
    assert (figures["eval/samples"], figures["eval/lost"], figures["eval/unscored"]) == (3 * SAMPLES, 0, 0)
    assert figures["eval/failed"] == statistics["episodes_failed"] == (0 if factory == "Sound" else odd)
    expected = interval([count / SAMPLES for count in even], 3 * SAMPLES)
    assert (figures["eval/interval_low"], figures["eval/interval_high"]) == expected
    assert figures["eval/truncated_fraction"] == 0 and figures["eval/length_mean"] == 1


def test_samples_past_their_deadline_are_lost_and_widen_the_interval(tmp_path: Path) -> None:
    config = make_config("Hangs", step_timeout_s=3.0, max_retries=0)
    figures, numbers, statistics = evaluate(config, tmp_path, prompts_of(3))
    even = [sum(number % 2 == 0 for number in group) for group in numbers]
    odd = 3 * SAMPLES - sum(even)
    assert figures["eval/lost"] == statistics["episodes_lost"] == odd
    assert figures["eval/samples"] == sum(even) and figures["eval/pass@1"] == 1.0
    assert (figures["eval/failed"], figures["eval/unscored"]) == (0, 0)
    assert figures["eval/interval_low"] == interval([count / SAMPLES for count in even], 3 * SAMPLES)[0]
    assert figures["eval/interval_high"] == 1.0


def test_episodes_that_the_machine_ends_are_redone(tmp_path: Path) -> None:
    figures, numbers, statistics = evaluate(
        make_config("IsKilledOnce", isolate=False), tmp_path, prompts_of(3, once=str(tmp_path / "once"))
    )
    assert figures["eval/pass@1"] == pytest.approx(sum(n % 2 == 0 for group in numbers for n in group) / SAMPLES / 3)
    assert statistics["episodes_redone"] > 0 and figures["eval/samples"] == 3 * SAMPLES
    assert (figures["eval/failed"], figures["eval/lost"], figures["eval/unscored"]) == (0, 0, 0)


def test_a_reset_that_fails_is_no_reward(tmp_path: Path) -> None:
    prompts = [*prompts_of(2), Prompt(2, "p", [1, 2], {"row_fails": True})]
    figures, numbers, statistics = evaluate(make_config("Sound"), tmp_path, prompts)
    rates = [sum(number % 2 == 0 for number in group) / SAMPLES for group in numbers[:2]]
    assert figures["eval/pass@1"] == pytest.approx(sum(rates) / 2)
    assert (figures["eval/unscored"], figures["eval/failed"], figures["eval/lost"]) == (SAMPLES, 0, 0)
    assert statistics["episodes_lost"] == SAMPLES and figures["eval/samples"] == 2 * SAMPLES


def test_answers_that_the_tokenizer_does_not_know_are_said_once(tmp_path: Path) -> None:
    async def work(groups: GroupMaker, player: EpisodePlayer, engines: Engines, events: EventLog) -> Any:
        for text in ("Size?", "Größe?", "Maß?"):
            player._note_unknown_text([{"role": "user", "content": text}])
        return read_json_lines(events.path)

    (event,) = asyncio.run(asyncio.wait_for(with_groups(make_config("Sound"), tmp_path, work), 100))
    assert (event["kind"], event["text"]) == ("environment_text_unknown", "Größe?")


@pytest.mark.parametrize("on_failure", ["zero", "leave_out"])
def test_in_training_a_key_says_what_a_failure_is_worth(tmp_path: Path, on_failure: str) -> None:
    config = make_config("Raises", on_failure=on_failure)
    config.grpo.group_size = 12

    async def work(groups: GroupMaker, player: EpisodePlayer, engines: Engines, events: EventLog) -> Any:
        (prompt,) = prompts_of(1)
        trajectories = await groups.sample(prompt, groups.request(prompt), 0)
        return trajectories, await groups.score(prompt, trajectories), player.statistics["episodes_failed"]

    trajectories, scores, failed = asyncio.run(asyncio.wait_for(with_groups(config, tmp_path, work), 100))
    numbers = [trajectory.branches[0].sampled[0].token_ids[0] for trajectory in trajectories]
    worth = (0.0, {"Raises": 0.0}) if on_failure == "zero" else (None, {})
    assert scores == [worth if number % 2 else (1.0, {"Raises": 1.0}) for number in numbers]
    assert failed == sum(number % 2 for number in numbers) > 0
    assert all(
        ("crashed" in trajectory.extra.get("failure", "")) == bool(n % 2)
        for trajectory, n in zip(trajectories, numbers, strict=True)
    )


def crash(in_flight: int, caused: bool = False) -> CallFailed:
    return CallFailed("crash", "it ended", in_flight, caused)


OWN, LACK, LATE = CallFailed("exception", "e", caused=True), CallFailed("exception", "e"), CallFailed("timeout", "t")
BEGUN = "before its first turn"


@pytest.mark.parametrize(
    ("failures", "outcome", "alone"),
    [
        ([], None, ""),
        ([OWN], Failure.OWN_TURN, ""),
        ([crash(1, caused=True)], Failure.OWN_TURN, ""),
        ([crash(3)], None, " a"),  # a neighbour's doing
        ([crash(3), crash(1, caused=True)], Failure.OWN_TURN, " a"),
        ([crash(3), crash(1), crash(1)], Failure.OWN_TURN, " aa"),  # always by a signal
        ([crash(1)], None, " a"),  # killed from outside
        ([crash(3), crash(1)], None, " aa"),
        ([LACK], None, " a"),
        ([LACK, OWN], Failure.OWN_TURN, " a"),
        ([LATE], None, "  "),
        ([LATE, LATE, LATE], Failure.LOST, "   "),
        ([LATE, OWN], Failure.OWN_TURN, "  "),
        ([GatewayLost("gone")], None, "  "),
        ([crash(0)] * 5, None, " " * 6),  # it only stood by
        ([crash(0)] * (MAX_STRAYS + 3), Failure.LOST, " " * (MAX_STRAYS + 3)),
        ([BEGUN] * 3, Failure.NOT_BEGUN, "   "),
        ([BEGUN, BEGUN], None, "   "),
        ([BEGUN, LATE, BEGUN], Failure.LOST, "   "),
    ],
)
def test_blame(failures: list[Any], outcome: Failure | None, alone: str) -> None:
    """alone: for each attempt, "a" where no other episode may be in its process."""
    attempts: list[bool] = []
    left = iter(failures)
    seeds = set()

    def played() -> Trajectory:
        branch = Branch([Given([1]), Completion([2], [0.0], "stop", [])])
        return Trajectory([branch], "stop", "")

    class Scripted(Player):
        async def play_one(self, prompt: Any, request: Any, group: Any, min_version: Any, alone: bool = False) -> Any:
            attempts.append(alone)
            seeds.add(request.sampling.seed)
            if (cause := next(left, None)) is None:
                return played()
            if cause is BEGUN:
                raise EpisodeFailed(OWN)
            raise EpisodeFailed(cause, played())

    player = Scripted(make_config("Sound"))
    request = GenerateRequest("r", [], SamplingParameters(8, 1, seed=3))
    (trajectory,) = asyncio.run(player.play(prompts_of(1)[0], request, 0))
    assert trajectory.failure is outcome and len(seeds) == 1
    assert "".join(" a"[attempt] for attempt in attempts) == alone.ljust(max(1, len(alone)))
    assert bool(trajectory.branches) == (outcome in (None, Failure.OWN_TURN))
    statistics = player.statistics
    assert statistics["episodes_failed"] == (outcome is Failure.OWN_TURN)
    assert statistics["episodes_lost"] == (outcome in (Failure.LOST, Failure.NOT_BEGUN))
    assert statistics["episodes_redone"] == len(attempts) - 1


def test_the_interval_of_an_evaluation_without_losses_is_no_wider() -> None:
    counts = [(8, 2)] * 40
    assert interval_with_lost(counts, [0] * 40) == interval([0.25] * 40, 320)
    low, high = interval_with_lost([(6, 2)] * 40, [2] * 40)
    assert low == interval([0.25] * 40, 320)[0] and high == interval([0.5] * 40, 320)[1]
    assert not math.isnan(interval_with_lost([(0, 0), *counts], [0] * 41)[0])
