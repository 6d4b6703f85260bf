"""Scored samples on their way from the actors to the trainer. No torch here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.types import Branch, VersionSpan, joined_spans, sampled_segments


@dataclass
class Prompt:
    """One prompt of the dataset: its position in the data stream, its tokens and its row's other columns."""

    index: int
    """Running number in the stream of prompts (over all passes), strictly increasing"""
    text: Any
    """What reward functions get as the prompt: text, or a list of chat messages"""
    token_ids: list[int]
    columns: dict[str, Any]
    prefill: str = ""
    """The beginning of the answer where it stands in the prompt already: the `<think>` of some chat templates"""


@dataclass
class Trajectory:
    """A finished conversation with the policy, not judged yet."""

    branches: list[Branch]
    finish_reason: str
    completion: str | list[dict[str, Any]]
    """What reward functions get: text, or chat messages where the prompt is a chat"""
    reward: float | None = None
    """What its environment gives"""
    environment: dict[str, Any] = field(default_factory=dict)
    """The environment's public attributes at the end"""
    turn_rewards: list[float] = field(default_factory=list)
    """What each turn has added to `reward`; empty where that is not known"""
    extra: dict[str, Any] = field(default_factory=dict)
    """What reward functions have noted beside it (log_extra), by column"""

    @property
    def completion_ids(self) -> list[int]:
        """Everything behind the prompt, in the branch that ended last: sampled and given."""
        branch = self.branches[-1]
        return branch.token_ids[len(branch.segments[0].token_ids) :]


@dataclass
class Sample:
    """One trajectory with everything that training needs to know about it.

    A prompt and its completion, or a conversation of many turns: see inference/types.py, which makes the branches.
    """

    branches: list[Branch]
    finish_reason: str
    """`length` where a limit has cut it off, else `stop`"""
    reward: float
    """Weighted sum of the reward functions"""
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    """Of all its sampled tokens, in every branch"""
    turn_rewards: list[float] = field(default_factory=list)
    """Parts of `reward` that single turns have brought, in the order of sampled_segments; empty: none is known"""
    turn_advantages: list[float] = field(default_factory=list)
    """In the place of `advantage`, one for each turn; empty where that holds for all of them"""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns of completions.jsonl"""

    @property
    def prompt_ids(self) -> list[int]:
        """What was given before anything was sampled."""
        return self.branches[0].segments[0].token_ids

    @property
    def completion_ids(self) -> list[int]:
        """Everything that was sampled, in the order of branches and turns: what is trained."""
        return [token for completion in sampled_segments(self.branches) for token in completion.token_ids]

    @property
    def log_probs(self) -> list[float]:
        """Of completion_ids: the behaviour policy's."""
        return [value for completion in sampled_segments(self.branches) for value in completion.log_probs]

    @property
    def spans(self) -> list[VersionSpan]:
        """The versions that sampled completion_ids."""
        return joined_spans(sampled_segments(self.branches))

    @property
    def returns(self) -> list[float]:
        """What is left of the reward at the beginning of each turn."""
        turns = len(sampled_segments(self.branches))
        earned = itertools.accumulate([0.0, *(self.turn_rewards or [0.0] * turns)])
        return [self.reward - before for before, _ in zip(earned, range(turns), strict=False)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches, given and sampled: what goes through the policy."""
        return sum(len(branch) for branch in self.branches)


@dataclass
class Group:
    """All samples of one prompt."""

    prompt_index: int
    samples: list[Sample]


@dataclass
class Batch:
    """What one training step trains on: whole groups, in the order in which they were admitted.

    `version` is the trainer's version when the batch was handed out: training it makes version + 1.
    """

    version: int
    groups: list[Group]
    statistics: dict[str, float] = field(default_factory=dict)
    """Figures for metrics.jsonl that only the rollout side knows"""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]
