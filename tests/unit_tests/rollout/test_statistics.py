"""What is counted of rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.rollout.flow.statistics import RolloutStatistics
from torchtitan.rollout.types import Trajectory


def branch(*lengths: int) -> Branch:
    """Tokens that were given and sampled in turn."""
    segments: list[Any] = []
    for place, length in enumerate(lengths):
        sampled = Completion([5] * length, [-0.5] * length, "stop", [VersionSpan("e", 1, 0, length)])
        segments.append(sampled if place % 2 else Given([4] * length))
    return Branch(segments)


def test_branches_of_an_episode_and_the_share_of_tokens_beside_its_longest_one_are_metrics() -> None:
    statistics = RolloutStatistics({})
    episodes = [[branch(3, 2, 4, 1)], [branch(5, 5), branch(6, 2, 10, 2), branch(9, 1)]]
    for branches in episodes:
        statistics.add_sample(Trajectory(branches, "stop", "x"), 1.0, {})
    spans = [VersionSpan("e", 1, 0, 3)]
    sample: Any = SimpleNamespace(reward=1.0, finish_reason="stop", spans=spans, branches=[])
    figures = statistics.figures(1, [sample])
    assert figures["environment/branches_mean"] == 2
    # Of 10 + 10 + 20 + 10 tokens.
    assert figures["environment/branches_token_share"] == 20 / 50
