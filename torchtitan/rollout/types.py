"""The data that rollouts pass from the actors to the trainer. No torch here."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.types import Branch, Completion, VersionSpan, joined_spans, sampled_segments
from torchtitan.rollout.conversation.thoughts import Turn


@dataclass
class Prompt:
    """One prompt of the dataset: its position in the data stream, its tokens and its row's other columns."""

    index: int
    """Position in its source's stream of prompts over all passes, times the number of sources, plus the number of the
    source: unique in the run, and strictly increasing within a source"""
    text: Any
    """The prompt as reward functions get it: text, or a list of chat messages"""
    token_ids: list[int]
    columns: dict[str, Any]
    prefill: str = ""
    """The beginning of the answer if it is already part of the prompt, such as the `<think>` of some chat templates"""
    hint_ids: list[int] | None = None
    """The prompt as a teacher with a hint reads it (a column that distill.hint names)"""
    row: int = -1
    """Its row, if a curriculum has drawn it"""
    from_pass: bool = False
    """Whether its position is one of those at which a curriculum goes through all prompts"""
    source: str = ""
    """Name of its source; empty in a run without [[source]]"""


class Failure(enum.Enum):
    """Why an episode has no outcome."""

    OWN_TURN = "own turn"
    """One of its own turns made its environment, or the agent, fail"""
    LOST = "lost"
    """It missed a deadline, or nobody knows what made it fail; so it was in all attempts"""
    NOT_BEGUN = "not begun"
    """The environment could not be reset, the agent asked nothing, or the prompt leaves no room for a turn"""


@dataclass
class Trajectory:
    """A finished conversation with the policy, without rewards from reward functions."""

    branches: list[Branch]
    finish_reason: str
    completion: str | list[dict[str, Any]]
    """The completion as reward functions get it: text, or chat messages if the prompt is a chat"""
    reward: float | None = None
    """The reward from its environment or agent"""
    environment: dict[str, Any] = field(default_factory=dict)
    """The environment's public attributes at the end"""
    turn_rewards: list[float] = field(default_factory=list)
    """The part of `reward` from each turn; empty if it is not known"""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values that reward functions logged with log_extra, by column"""
    opening: str = ""
    """What its environment added to the prompt"""
    turn: Turn | None = None
    """The policy's last turn, read from its tokens; None if only its text is known"""
    failed_rewards: set[str] = field(default_factory=set)
    """Reward functions that failed on it: they raised, hung or ended their worker, also alone, or gave no number"""
    failure: Failure | None = None
    """Why it has no outcome. With OWN_TURN, `branches` end with that turn; with the others there are none"""

    @property
    def completion_ids(self) -> list[int]:
        """All tokens after the prompt, sampled and given, in the branch that ended last."""
        branch = self.branches[-1]
        return branch.token_ids[len(branch.segments[0].token_ids) :]


@dataclass
class Sample:
    """One trajectory with everything that training needs.

    It is a prompt with its completion, or a conversation of many turns. See inference/types.py for the branches.
    """

    branches: list[Branch]
    finish_reason: str
    """`length` if a limit truncated it, else `stop`"""
    reward: float
    """Weighted sum of the reward functions"""
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    """The advantage of all its sampled tokens, in every branch"""
    turn_rewards: list[float] = field(default_factory=list)
    """The part of `reward` from each turn, in the order of sampled_segments; empty if it is not known"""
    turn_advantages: list[float] = field(default_factory=list)
    """One advantage per turn, which replaces `advantage`; empty if `advantage` holds for all turns"""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional columns of completions.jsonl"""

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens that were given before the first sampled one."""
        return self.branches[0].segments[0].token_ids

    @property
    def completion_ids(self) -> list[int]:
        """All sampled tokens, which are those that are trained, in the order of branches and turns."""
        return [token for completion in sampled_segments(self.branches) for token in completion.token_ids]

    @property
    def log_probs(self) -> list[float]:
        """The behaviour policy's log-probs of completion_ids."""
        return [value for completion in sampled_segments(self.branches) for value in completion.log_probs]

    @property
    def spans(self) -> list[VersionSpan]:
        """The versions that sampled completion_ids."""
        return joined_spans(sampled_segments(self.branches))

    @property
    def returns(self) -> list[float]:
        """The return of each turn: the reward minus that of the turns before it."""
        turns = len(sampled_segments(self.branches))
        earned = itertools.accumulate([0.0, *(self.turn_rewards or [0.0] * turns)])
        return [self.reward - before for before, _ in zip(earned, range(turns), strict=False)]

    @property
    def is_hinted(self) -> bool:
        """Whether a teacher reads something else than its prompt."""
        return any(completion.hint_ids is not None for completion in sampled_segments(self.branches))

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches, given and sampled, which all go through the policy."""
        return sum(len(branch) for branch in self.branches)


@dataclass
class Group:
    """All samples of one prompt."""

    prompt_index: int
    samples: list[Sample]
    source: str = ""
    """Name of its source; empty in a run without [[source]]"""
    from_pass: bool = False
    """That of its prompt"""


@dataclass
class Batch:
    """The data of one training step: whole groups, in the order in which they were admitted.

    `version` is the trainer's version when the batch was handed out; training on it produces version + 1.
    """

    version: int
    groups: list[Group]
    statistics: dict[str, float] = field(default_factory=dict)
    """Metrics for metrics.jsonl that only the rollout side knows"""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def completions(self) -> list[Completion]:
        """Everything that was sampled, in order."""
        return [completion for sample in self.samples for completion in sampled_segments(sample.branches)]

    def forget_actors(self) -> None:
        """Let what was sampled be held against no actor: the processes of an earlier start of the run are gone, and
        others have their names now."""
        for completion in self.completions:
            completion.asked_at = None
