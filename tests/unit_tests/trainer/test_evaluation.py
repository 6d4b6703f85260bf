"""Evaluation with fake actors: estimators, pinned versions, and missing rather than wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import Completion, GenerateRequest, VersionSpan
from torchtitan.rollout.types import Prompt
from torchtitan.trainer.evaluation import MAX_ROUNDS, Evaluator, is_pinned, pass_at_k
from torchtitan.utils.events import EventLog

EPOCH, VERSION = "e1-aa", 7
PROMPTS = [Prompt(index, f"p{index}", [1, 2, index], {}) for index in range(3)]


def completion(tokens: list[int], *spans: tuple[str, int, int, int], reason: str = "stop") -> Completion:
    given = spans or ((EPOCH, VERSION, 0, len(tokens)),)
    return Completion(tokens, [0.0] * len(tokens), reason, [VersionSpan(*span) for span in given])  # type: ignore[arg-type]


class Actors:
    """Sample i of prompt p passes where p > i, the greedy answer where p is odd. Misbehaves for the first calls."""

    def __init__(self, stale_calls: int = 0, error: Exception | None = None):
        self.stale_calls, self.error = stale_calls, error
        self.calls: list[list[GenerateRequest]] = []

    def generate(
        self, requests: list[GenerateRequest], timeout_s: float, min_version: int = 0
    ) -> list[list[Completion]]:
        assert 0 < timeout_s <= 300 and min_version == VERSION
        self.calls.append(requests)
        if self.error is not None:
            raise self.error
        groups = []
        for request in requests:
            prompt = request.prompt_ids[-1]
            if request.sampling.temperature == 0:
                groups.append([completion([prompt % 2])])
            else:
                groups.append([completion([int(prompt > i), 0]) for i in range(request.sampling.n)])
        if len(self.calls) <= self.stale_calls:
            wrong = completion([1, 1], (EPOCH, VERSION, 0, 1), (EPOCH, VERSION + 1, 1, 2))  # would pass
            groups[min(1, len(groups) - 1)][-1] = wrong
        return groups

    def score(
        self, prompts: list[Prompt], groups: list[list[Completion]], timeout_s: float
    ) -> list[list[float | None]]:
        assert [prompt.token_ids[-1] for prompt in prompts] == [0, 1, 2] * (len(prompts) // 3)
        return [[float(sample.token_ids[0]) for sample in group] for group in groups]


def make(tmp_path: Path, actors: Actors, **settings: object) -> Evaluator:
    config = JobConfig()
    config.eval.pass_at_k, config.eval.samples_per_prompt = [1, 2, 4], 4
    for name, value in settings.items():
        setattr(config.eval, name, value)
    return Evaluator(config, PROMPTS, actors.generate, actors.score, EventLog(tmp_path / "events.jsonl"))


def test_figures(tmp_path: Path) -> None:
    actors = Actors()
    figures = make(tmp_path, actors).evaluate(5, EPOCH, VERSION)
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
    right, actors = Actors(), Actors(stale_calls=2)
    expected = make(tmp_path, right).evaluate(5, EPOCH, VERSION)
    figures = make(tmp_path, actors).evaluate(5, EPOCH, VERSION)
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
        (Actors(stale_calls=MAX_ROUNDS), {}, "1 of 6 requests were answered by other versions than 7"),
        (Actors(error=TimeoutError()), {}, "TimeoutError"),
        (Actors(error=ConnectionResetError("gone")), {}, "ConnectionResetError: gone"),
        (Actors(), {"timeout_s": 0.0}, "eval.timeout_s passed"),
        (Actors(), {"num_prompts": 0}, "no held-out prompts"),
    ],
)
def test_missing_is_an_event_and_no_figure(tmp_path: Path, actors: Actors, settings: dict, reason: str) -> None:
    evaluator = make(tmp_path, actors, **settings)
    assert evaluator.evaluate(5, EPOCH, VERSION) is None
    (event,) = evaluator.events.read()
    assert event["kind"] == "evaluation_missing" and reason in event["reason"] and event["version"] == VERSION
    assert len(actors.calls) <= MAX_ROUNDS


def test_pass_at_1_is_always_there(tmp_path: Path) -> None:
    figures = make(tmp_path, Actors(), pass_at_k=[4]).evaluate(5, EPOCH, VERSION)
    assert figures is not None
    assert [name for name in figures if "pass@" in name] == ["eval/pass@1", "eval/pass@4"]


def test_mistakes_in_the_program_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        make(tmp_path, Actors(error=ZeroDivisionError())).evaluate(5, EPOCH, VERSION)


def test_unjudged_samples_are_left_out(tmp_path: Path) -> None:
    actors = Actors()
    evaluator = make(tmp_path, actors, greedy=False)
    score = actors.score

    def half_blind(*args: object) -> list[list[float | None]]:
        rewards = score(*args)  # type: ignore[arg-type]
        rewards[0] = [None] * 4
        rewards[1][3] = None
        return rewards

    evaluator.score = half_blind  # type: ignore[assignment]
    figures = evaluator.evaluate(5, EPOCH, VERSION)
    assert figures is not None
    assert figures["eval/pass@1"] == pytest.approx((1 / 3 + 2 / 4) / 2)
    assert figures["eval/pass@4"] == 1.0  # only the third prompt has four judged samples
    assert figures["eval/unscored"] == 5 and "eval/greedy" not in figures
    evaluator.score = lambda prompts, groups, timeout_s: [[None] * len(group) for group in groups]
    assert evaluator.evaluate(5, EPOCH, VERSION) is None


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
