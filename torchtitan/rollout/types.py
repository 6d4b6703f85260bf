"""Scored samples on their way from the actors to the trainer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.types import VersionSpan


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
class Sample:
    """One completion with everything that training needs to know about it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    log_probs: list[float]
    spans: list[VersionSpan]
    finish_reason: str
    reward: float
    """Weighted sum of the reward functions"""
    rewards: dict[str, float | None] = field(default_factory=dict)
    kept_token_ids: list[list[int]] | None = None
    advantage: float = 0.0
    trainer_log_probs: Any = None
    """The tokens' log-probs before the batch's first optimizer step (a tensor), where this process computed them"""


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
