"""Prompts that are drawn by what their groups have shown: how often, in which order, and after a resume."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.rollout.test_order_of_batches import UnevenActors
from tests.unit_tests.rollout.test_prompts import Characters
from tests.unit_tests.rollout.test_prompts import make_config as prompt_config
from tests.unit_tests.rollout.test_rollouts import (
    GROUP_SIZE,
    FakeActors,
    FakeRewards,
    make_config,
    reach,
    running,
    saved,
    take,
)
from torchtitan.config.job_config import JobConfig
from torchtitan.config.sources import Source
from torchtitan.errors import UserError
from torchtitan.rollout.data.curriculum import CurriculumStream
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.types import Batch, Prompt
from torchtitan.trainer.packing import minibatches

PAGE = Path(__file__).parents[3] / "docs" / "sources.md"
BATCHES = 6


def make_stream(
    texts: list[str], sampler: str = "variance", half_life: float = 100.0, pass_every: int = 10
) -> CurriculumStream:
    maker = PromptMaker(prompt_config(), Characters())
    stream = CurriculumStream([{"prompt": text} for text in texts], maker, 0, True, sampler, False)
    stream._half_life, stream._every = half_life, pass_every
    return stream


def play(stream: CurriculumStream, batches: int, rewards: Callable[[str], list[float]]) -> list[Prompt]:
    """Batches of ten groups, all of which are used."""
    drawn: list[Prompt] = []
    for _ in range(batches):
        drawn += [stream.next() for _ in range(10)]
        for prompt in drawn[-10:]:
            stream.note(prompt.index, rewards(prompt.text))
        stream.consumed(drawn[-1].index)
    return drawn


def differ(text: str) -> list[float]:
    """Of the prompts 0 to 29 every third is half solved, the others always or never."""
    kind = int(text) % 3
    return [1.0, 0.0, 1.0, 0.0] if kind == 0 else [kind - 1.0] * 4


def test_prompts_that_differ_are_drawn_more_often_and_every_prompt_comes_back() -> None:
    drawn = play(make_stream([str(i) for i in range(30)]), 90, differ)
    assert [prompt.index for prompt in drawn] == list(range(900))
    often = Counter(prompt.text for prompt in drawn[-600:])
    of_kinds = [sum(often[str(i)] for i in range(kind, 30, 3)) for kind in range(3)]
    assert of_kinds[0] > 4 * (of_kinds[1] + of_kinds[2])
    # One group in ten goes through all of them, 30 prompts ÷ 0.1; one that is under way counts as there.
    for begin in (10, 310, 610):
        assert {prompt.text for prompt in drawn[begin - 10 : begin + 290]} == {str(i) for i in range(30)}


def test_draws_follow_the_expected_variance() -> None:
    """Frequencies against the formula, in plain arithmetic, for three prompts whose estimates stay as they are."""
    stream = make_stream(["a", "b", "c"], pass_every=10**6)
    variances, groups, typical = [0.2, 0.05, 0.0], [2.0, 1.0, 0.5], 0.1
    stream.variances[:], stream.groups[:], stream._typical[1] = variances, groups, typical
    expected = [(n * v + 0.25 * typical) / (n + 0.25) for n, v in zip(groups, variances, strict=True)]
    counts, draws = Counter(), 4000
    for index in range(1, draws + 1):
        counts[stream._draw(index)] += 1
    for row, weight in enumerate(expected):
        assert counts[row] / draws == pytest.approx(weight / sum(expected), abs=0.025)


@pytest.mark.parametrize(
    ("weights", "groups", "repeated"),
    [
        ([1e4, 1e4, *[1.0] * 48], 8, 0),
        ([1e12, *[1e-6] * 49], 50, 0),
        ([1e4, *[1.0] * 4], 12, 7),  # of five prompts, seven groups must have one that is under way
        ([0.0] * 6, 6, 0),
    ],
)
def test_a_prompt_is_drawn_again_only_if_no_other_is_left(weights: list[float], groups: int, repeated: int) -> None:
    for seed in range(20):
        stream = make_stream([str(i) for i in range(len(weights))])
        stream._seed, stream._weigh = seed, lambda *_: np.array(weights)
        rows = [stream.next().row for _ in range(groups)]
        assert groups - len(set(rows)) == repeated


def test_a_prompt_without_weight_comes_in_the_pass_alone_even_if_all_others_are_under_way() -> None:
    stream = make_stream([str(i) for i in range(5)])
    stream._weigh = lambda *_: [3.0, 1.0, 0.0, 0.0, 0.0]
    assert {stream.next().row for _ in range(10)} - {stream._order_of(0)[0]} <= {0, 1}


def test_draws_beside_prompts_under_way_follow_the_weights_of_the_others() -> None:
    weights, counts, draws = [50.0, 1.0, 2.0, 5.0, 30.0], Counter[int](), 4000
    stream = make_stream(["a", "b", "c", "d", "e"], pass_every=10**6)
    stream._weigh, stream._drawn = (lambda *_: weights), {1: 0, 2: 4}
    for index in range(3, draws + 3):
        counts[stream._draw(index)] += 1
    for row, weight in enumerate(weights):
        assert counts[row] / draws == pytest.approx(weight / 8 if row in (1, 2, 3) else 0, abs=0.025)


@pytest.mark.parametrize("names", [(), ("x", "y", "z")])
@pytest.mark.parametrize("count", [2, 4, 5])
def test_every_minibatch_has_its_part_of_the_passes(count: int, names: tuple[str, ...]) -> None:
    config = curriculum_config(0)
    config.grpo.drop_zero_variance, config.training.global_batch_size = False, GROUP_SIZE * 60
    config.source = [Source(name=name) for name in names]
    with running(config, FakeActors()) as rollouts:
        batch = take(rollouts, 0)
    sources = max(1, len(names))
    for number in range(sources):
        at = [group.prompt_index // sources for group in batch.groups if group.prompt_index % sources == number]
        assert at == list(range(60 // sources))
    parts = minibatches(batch, count)
    for name in names or ("",):
        selected = [[group for group in part if group.source == name] for part in parts]
        passes = [sum(group.prompt_index // sources % 10 == 0 for group in part) for part in selected]
        assert sum(passes) == 6 // sources and max(passes) - min(passes) <= 1
        assert {len(part) for part in selected} == {60 // sources // count}


def test_estimates_of_a_curriculum_decay_with_their_age() -> None:
    stream = make_stream([str(i) for i in range(30)], half_life=2.0)
    play(stream, 30, differ)
    weigh = [0.0] * 30

    def recorded(means: Any, variances: Any, groups: Any, typical: float) -> Any:
        weigh[:] = groups
        return groups + 1

    stream._weigh = recorded
    play(stream, 4, lambda text: [0.0, 0.0])
    row = max(range(30), key=lambda i: 30 - stream.seen[i])
    before, age = stream.groups[row], 33 - stream.seen[row]
    assert weigh[row] == pytest.approx(before * 0.5 ** (age / 2))
    # The newest group counts at least half.
    newest = max(range(30), key=lambda i: stream.seen[i])
    assert stream.variances[newest] <= 0.125 and stream.groups[newest] <= 2


def prompts_of(batch: Batch) -> list[list[int]]:
    return [group.samples[0].prompt_ids for group in batch.groups]


class SomeEqual(FakeRewards):
    """Whether a group differs depends on its prompt and on its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.equal = lambda prompt: Random(f"{prompt.text} {prompt.index // 20}").random() < 0.6


def curriculum_config(max_staleness: int) -> JobConfig:
    config = make_config(max_staleness)
    config.rollout.sampler = "variance"
    return config


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from([0, 20, 200]))
@settings(max_examples=6, deadline=None)
def test_on_policy_the_prompts_follow_from_the_rewards_alone(seed: int, longest: int) -> None:
    """Against actors that answer at once; a run that resumes goes on with the same prompts."""
    batches: list[list[Any]] = []
    state = b""
    for actors in (UnevenActors(0, 0), UnevenActors(seed, longest)):
        batches.append([])
        with running(curriculum_config(0), actors, SomeEqual()) as rollouts:
            for version in range(BATCHES):
                actors.version = version
                batches[-1].append(prompts_of(take(rollouts, version)))
                reach(rollouts, version + 1)
                if version == 2:
                    state = saved(rollouts)
    assert batches[0] == batches[1]
    actors = UnevenActors(seed + 1, longest)
    with running(curriculum_config(0), actors, SomeEqual(), state, version=3) as rollouts:
        for version in range(3, BATCHES):
            actors.version = version
            assert prompts_of(take(rollouts, version)) == batches[0][version]
            reach(rollouts, version + 1)


def test_a_resumed_run_has_the_same_estimates_and_prompts_under_way() -> None:
    actors = UnevenActors(1, 20)
    with running(curriculum_config(2), actors, SomeEqual()) as rollouts:
        for version in range(3):
            actors.version = version
            take(rollouts, version)
            reach(rollouts, version + 1)
        actors.version = 3
        state = saved(rollouts)
        under_way = dict(json.loads(state)["streams"][""]["drawn"])
        expected = prompts_of(take(rollouts, 3))
    with running(curriculum_config(2), actors, SomeEqual(), state, version=3) as rollouts:
        again = json.loads(saved(rollouts))["streams"][""]
        assert under_way.items() <= dict(again["drawn"]).items()
        assert again["means"] == json.loads(state)["streams"][""]["means"] and len(again["known"]) > 8
        assert prompts_of(take(rollouts, 3)) == expected
    with pytest.raises(UserError, match="rollout.sampler changed"), running(make_config(2), actors, state=state):
        pass


def test_prompts_that_are_too_long_are_never_drawn() -> None:
    stream = make_stream(["1", "x" * 100, "2", "y" * 100])
    assert {prompt.text for prompt in play(stream, 5, lambda text: [0.0, 1.0])} == {"1", "2"} and stream.dropped == 2
    with pytest.raises(UserError, match="training.seq_len"):
        make_stream(["x" * 100]).next()


def test_a_sampler_of_ones_own_is_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(# my_samplers.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "my_samplers.py").write_text(code + "\ndef bad(means, *_):\n    return means[1:]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    stream = make_stream([str(i) for i in range(30)], sampler="my_samplers:hardest", half_life=1000.0)
    means = {"0": 0.9, "3": 0.1}
    rewards = {text: [1.0] * round(10 * mean) + [0.0] * round(10 - 10 * mean) for text, mean in means.items()}
    drawn = play(stream, 60, lambda text: rewards.get(text, [1.0, 1.0]))
    often = Counter(prompt.text for prompt in drawn[300:])
    assert often["3"] > 3 * often["0"] > 3 * max(often[str(i)] for i in range(30) if str(i) not in means)
    with pytest.raises(UserError, match="must return 30 weights"):
        play(make_stream([str(i) for i in range(30)], sampler="my_samplers:bad"), 2, differ)
