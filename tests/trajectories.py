"""Samples as tests write them down."""

from __future__ import annotations

from typing import Any

from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.rollout.types import Sample, Trajectory


def single_turn(
    prompt_ids: list[int],
    completion_ids: list[int],
    log_probs: list[float],
    spans: list[VersionSpan],
    finish_reason: str = "stop",
    reward: float = 0.0,
    rewards: dict[str, float | None] | None = None,
    kept_token_ids: list[list[int]] | None = None,
    advantage: float = 0.0,
) -> Sample:
    """A prompt and one completion."""
    completion = Completion(completion_ids, log_probs, finish_reason, spans, kept_token_ids)  # type: ignore[arg-type]
    return Sample([Branch([Given(prompt_ids), completion])], finish_reason, reward, rewards or {}, advantage)


def completion_of(sample: Sample) -> Completion:
    """The one completion of a sample of a single turn."""
    (completion,) = sample.branches[0].sampled
    return completion


def answer(token_ids: list[int], said: Any, finish_reason: str = "stop") -> Trajectory:
    """A trajectory of one turn that reward functions are to judge by what it says."""
    branch = single_turn([1], token_ids, [0.0] * len(token_ids), [VersionSpan("e", 0, 0, len(token_ids))]).branches
    return Trajectory(branch, finish_reason, said)
