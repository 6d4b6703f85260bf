"""Evaluation with fake actors: estimators, pinned versions, and missing rather than wrong."""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import Completion, GenerateRequest, VersionSpan
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.types import Failure, Prompt, Trajectory
from torchtitan.trainer.evaluation import MAX_ROUNDS, Evaluator, evaluate_all, is_pinned, pass_at_k
from torchtitan.trainer.interval import interval
from torchtitan.utils.json_lines import EventLog, read_json_lines

EPOCH, VERSION = "e1-aa", 7
PROMPTS = [Prompt(index, f"p{index}", [1, 2, index], {}) for index in range(3)]


def completion(tokens: list[int], *spans: tuple[str, int, int, int], reason: str = "stop") -> Completion:
    given = spans or ((EPOCH, VERSION, 0, len(tokens)),)
    return Completion(tokens, [0.0] * len(tokens), reason, [VersionSpan(*span) for span in given])  # type: ignore[arg-type]


class Actors:
    """Sample i of prompt p passes where p > i, the greedy answer where p is odd. Misbehaves for the first rounds.

    Stands for the pool of actors and for the reward workers.
    """

    def __init__(self, stale_rounds: int = 0, error: Exception | None = None, delay: float = 0.0):
        self.stale_rounds, self.error, self.delay = stale_rounds, error, delay
        self.rounds: dict[str, list[GenerateRequest]] = {}
        self.cancelled, self.last_failure = 0, "no such move"
        self.blind: Callable[[int, int], bool] = lambda prompt, sample: False

    @property
    def calls(self) -> list[list[GenerateRequest]]:
        return list(self.rounds.values())

    async def generate(self, request: GenerateRequest, min_version: int = 0) -> list[Completion]:
        assert min_version == VERSION and request.sampling.stop_token_ids == [9]
        round_name = request.request_id.rpartition("-again")[2] if "-again" in request.request_id else ""
        self.rounds.setdefault(round_name, []).append(request)
        try:
            await asyncio.sleep(self.delay * request.prompt_ids[-1])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        prompt = request.prompt_ids[-1]
        if request.sampling.temperature == 0:
            return [completion([prompt % 2])]
        group = [completion([int(prompt > i), 0]) for i in range(request.sampling.n)]
        if len(self.calls) <= self.stale_rounds and prompt == 1:
            group[-1] = completion([1, 1], (EPOCH, VERSION, 0, 1), (EPOCH, VERSION + 1, 1, 2))  # would pass
        return group

    async def score(
        self, prompt: Prompt, completions: list[Trajectory], functions: list[str]
    ) -> list[tuple[float | None, dict[str, float | None]]]:
        assert functions == ["arithmetic"]
        rewards = [
            None if self.blind(prompt.index, i) else float(sample.completion_ids[0])
            for i, sample in enumerate(completions)
        ]
        return [(reward, {"arithmetic": reward}) for reward in rewards]


def make(tmp_path: Path, actors: Actors, **settings: object) -> Evaluator:
    config = JobConfig()
    config.eval.samples_per_prompt = 4
    vars(config.eval).update(settings)
    tokenizer = SimpleNamespace(eos_token_ids=[9], decode=str, added_tokens={}, unseen_texts=frozenset())
    groups = GroupMaker(config, actors, actors, tokenizer, EPOCH)  # type: ignore[arg-type]
    prompts = PROMPTS[: config.eval.num_prompts]
    return Evaluator(config, EPOCH, prompts, groups, EventLog(tmp_path / "events.jsonl"))


def evaluate(evaluator: Evaluator) -> dict[str, float | int | None] | None:
    return asyncio.run(evaluator.evaluate(5, VERSION, evaluator.config.eval.timeout_s))


def test_figures(tmp_path: Path) -> None:
    actors = Actors()
    figures = evaluate(make(tmp_path, actors))
    assert figures is not None
    # Passing samples of 4: none, one, two.
    assert figures["eval/pass@1"] == pytest.approx((0 + 1 / 4 + 2 / 4) / 3)
    assert figures["eval/pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6) / 3)
    assert figures["eval/pass@4"] == pytest.approx(2 / 3)
    assert figures["eval/greedy"] == pytest.approx(1 / 3)
    assert (figures["eval/version"], figures["eval/redone"], figures["eval/samples"]) == (VERSION, 0, 12)
    assert figures["eval/length_mean"] == 2 and figures["eval/time_s"] >= 0
    sampled, greedy = actors.calls[0][0], actors.calls[0][3]
    assert (sampled.sampling.n, sampled.sampling.temperature, sampled.sampling.top_p) == (4, 1.0, 1.0)
    assert (greedy.sampling.n, greedy.sampling.temperature) == (1, 0.0)
    assert len({request.request_id for request in actors.calls[0]}) == 6


def test_other_versions_are_redone_with_the_same_seed(tmp_path: Path) -> None:
    right, actors = Actors(), Actors(stale_rounds=2)
    expected = evaluate(make(tmp_path, right))
    figures = evaluate(make(tmp_path, actors))
    assert figures is not None and expected is not None
    assert {**figures, "eval/time_s": 0, "eval/redone": 0} == {**expected, "eval/time_s": 0}
    assert figures["eval/redone"] == 2
    first, again, last = actors.calls
    assert [request.prompt_ids for request in again] == [PROMPTS[1].token_ids]
    assert again[0].sampling == first[1].sampling
    assert len({first[1].request_id, again[0].request_id, last[0].request_id}) == 3


@pytest.mark.parametrize(
    ("actors", "settings", "reason"),
    [
        (Actors(stale_rounds=MAX_ROUNDS), {}, "1 of 6 requests were answered by other versions than 7"),
        (Actors(error=TimeoutError()), {}, "TimeoutError"),
        (Actors(error=ConnectionResetError("gone")), {}, "ConnectionResetError: gone"),
        (Actors(), {"timeout_s": 0.0}, "eval.timeout_s passed"),
        (Actors(), {"num_prompts": 0}, "no held-out prompts"),
    ],
)
def test_missing_is_an_event_and_no_figure(tmp_path: Path, actors: Actors, settings: dict, reason: str) -> None:
    evaluator = make(tmp_path, actors, **settings)
    assert evaluate(evaluator) is None
    (event,) = read_json_lines(evaluator.events.path)
    assert event["kind"] == "evaluation_missing" and reason in event["reason"] and event["version"] == VERSION
    assert len(actors.calls) <= MAX_ROUNDS


def test_a_reward_function_that_fails_leaves_both_outcomes_open(tmp_path: Path) -> None:
    """A policy on whose wrong answers it crashes does not look better for it."""
    actors = Actors()
    evaluator, other = make(tmp_path, actors, greedy=False), make(tmp_path, Actors(), greedy=False)
    score = actors.score

    async def failing(prompt: Prompt, completions: list[Trajectory], functions: list[str]) -> list[Any]:
        found = await score(prompt, completions, functions)
        for completion, (reward, _) in zip(completions, found, strict=True):
            if reward == 0:
                completion.failed_rewards.add("arithmetic")
        return [outcome if outcome[0] else (None, {"arithmetic": None}) for outcome in found]

    actors.score = failing  # type: ignore[method-assign]
    figures, true = evaluate(evaluator), evaluate(other)
    assert figures is not None and true is not None
    assert (figures["eval/lost"], figures["eval/unscored"], figures["eval/samples"]) == (9, 0, 3)
    assert figures["eval/interval_low"] == true["eval/interval_low"] and figures["eval/interval_high"] == 1.0


@pytest.mark.parametrize("failure", [Failure.LOST, Failure.NOT_BEGUN])
def test_missing_since_all_episodes_failed_says_why(tmp_path: Path, failure: Failure) -> None:
    evaluator = make(tmp_path, Actors())

    async def sample(prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        return [Trajectory([], "stop", "", failure=failure) for _ in range(request.sampling.n)]

    evaluator.groups.sample = sample  # type: ignore[method-assign]
    assert evaluate(evaluator) is None
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert event["kind"] == "evaluation_missing" and event["reason"].endswith("no such move")


@pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (3, [1, 2]), (4, [1, 2, 4]), (9, [1, 2, 4, 8])])
def test_pass_at_k_is_there_for_powers_of_two(tmp_path: Path, samples: int, expected: list[int]) -> None:
    figures = evaluate(make(tmp_path, Actors(), samples_per_prompt=samples))
    assert figures is not None
    assert [name for name in figures if "pass@" in name] == [f"eval/pass@{k}" for k in expected]


def test_mistakes_in_the_program_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        evaluate(make(tmp_path, Actors(error=ZeroDivisionError())))


def test_an_evaluation_past_its_deadline_cancels_its_requests(tmp_path: Path) -> None:
    actors = Actors(delay=60.0)
    evaluator = make(tmp_path, actors, timeout_s=0.2)
    assert evaluate(evaluator) is None
    assert "not done within 0" in read_json_lines(evaluator.events.path)[0]["reason"] and actors.cancelled == 4


def test_a_cancelled_evaluation_leaves_no_unretrieved_failure(tmp_path: Path) -> None:
    """A stop signal cancels an evaluation, and its requests may fail of that in their own way."""
    complaints: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ConnectionError("the actor is stopped")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about["message"]))
        actors = Actors()
        actors.generate = lambda *_: work()  # type: ignore[method-assign, assignment]
        evaluation = asyncio.create_task(make(tmp_path, actors).evaluate(20, VERSION, 60.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        evaluation.cancel()
        await asyncio.wait([evaluation])
        assert evaluation.cancelled()
        gc.collect()

    asyncio.run(main())
    assert not complaints


def test_unjudged_samples_are_left_out(tmp_path: Path) -> None:
    actors = Actors()
    evaluator = make(tmp_path, actors, greedy=False)
    actors.blind = lambda prompt, sample: prompt == 0 or (prompt == 1 and sample == 3)
    figures = evaluate(evaluator)
    assert figures is not None
    assert figures["eval/pass@1"] == pytest.approx((1 / 3 + 2 / 4) / 2)
    assert figures["eval/pass@4"] == 1.0  # only the third prompt has four judged samples
    assert figures["eval/unscored"] == 5 and "eval/greedy" not in figures
    actors.blind = lambda prompt, sample: True
    assert evaluate(evaluator) is None


@pytest.mark.parametrize(
    ("sample", "pinned"),
    [
        (completion([1, 2]), True),
        (completion([1, 2], (EPOCH, 7, 0, 1), (EPOCH, 7, 1, 2)), True),
        (completion([1, 2], (EPOCH, 6, 0, 1), (EPOCH, 7, 1, 2)), False),
        (completion([1, 2], ("e0-bb", 7, 0, 2)), False),
        (completion([1, 2], (EPOCH, 7, 0, 1)), False),
        (completion([1, 2], (EPOCH, 7, 1, 2)), False),
        (completion([1, 2], reason="abort"), False),
        (Completion([], [], "stop", []), False),
    ],
)
def test_pinned_means_every_token(sample: Completion, pinned: bool) -> None:
    assert is_pinned(sample, EPOCH, VERSION) is pinned


@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_by_counting_subsets(n: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    share = sum(any(index < passed for index in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, passed, k) == pytest.approx(share)


def test_several_sets_have_figures_of_their_own_and_a_mean(tmp_path: Path) -> None:
    few = make(tmp_path, Actors(), num_prompts=2, samples_per_prompt=1)
    sets = {"all": make(tmp_path, Actors()), "few": few}
    of_all, of_few = evaluate(sets["all"]), evaluate(few)
    assert of_all is not None and of_few is not None
    found = asyncio.run(evaluate_all(sets, 2, 5, VERSION, 300.0))
    assert found is not None
    for name, figures in (("all", of_all), ("few", of_few)):
        for key, value in figures.items():
            if key.startswith("eval/") and key != "eval/time_s":
                assert found[key.replace("eval/", f"eval/{name}/")] == value
    assert found["eval/pass@1"] == pytest.approx((of_all["eval/pass@1"] + of_few["eval/pass@1"]) / 2)
    assert found["eval/samples"] == 12 + 2 and "eval/pass@2" not in found
    # One that is not due, or is missing, leaves no mean.
    found = asyncio.run(evaluate_all({"few": few}, 2, 5, VERSION, 300.0))
    assert found is not None and found["eval/few/pass@1"] == of_few["eval/pass@1"] and "eval/pass@1" not in found
    assert found["eval/version"] == VERSION


def test_the_interval_of_a_mean_of_sets_covers_the_truth_as_often_as_it_says() -> None:
    generator = numpy.random.default_rng(0)
    truth = {"hard": 0.05, "half": 0.5, "easy": 0.9}

    class Drawn:
        def __init__(self, share: float):
            self.share = share

        async def evaluate(self, *_: object) -> dict[str, float]:
            rates = generator.binomial(4, generator.beta(self.share, 1 - self.share, 60)) / 4
            low, high = interval(list(rates), 240)
            return {"eval/pass@1": rates.mean(), "eval/interval_low": low, "eval/interval_high": high}

    async def covered() -> float:
        sets = {name: Drawn(share) for name, share in truth.items()}
        found = [await evaluate_all(sets, 3, 0, 0, 1.0) for _ in range(1000)]  # type: ignore[arg-type]
        mean = statistics.fmean(truth.values())
        return statistics.fmean(result["eval/interval_low"] <= mean <= result["eval/interval_high"] for result in found)

    assert 0.93 < asyncio.run(covered()) < 0.98
