"""How old a sample is, and how far ahead of the trainer the actors may generate. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.inference.types import VersionSpan
from torchtitan.rollout.types import Group

GateOn = Literal["oldest", "mean"]


def sample_version(spans: Sequence[VersionSpan], gate_on: GateOn = "oldest") -> float:
    """The version of a sample's oldest token, or the mean version of its tokens.

    Raises:
        ValueError: a sample without tokens.
    """
    tokens = sum(span.end - span.start for span in spans)
    if tokens == 0:
        raise ValueError("a sample without tokens has no version")
    if gate_on == "oldest":
        return min(span.version for span in spans)
    return sum(span.version * (span.end - span.start) for span in spans) / tokens


def group_version(group: Group, gate_on: GateOn = "oldest") -> float:
    """The version that the staleness gate holds against a group: that of its stalest sample."""
    return min(sample_version(sample.spans, gate_on) for sample in group.samples)


@dataclass
class Pace:
    """How much may be generated ahead.

    A group sampled under version w can be trained on up to version w + max_staleness. So at trainer version v, new
    groups can serve the batches of versions v (where that has not been handed out yet) to v + max_staleness and no
    more: whatever else is generated could only be thrown away. With max_staleness 0 that is the on-policy batch alone.
    """

    groups_per_batch: int
    max_staleness: int
    max_groups: int = 0
    """Bound of groups under way or ready, 0 for none; one batch is always allowed"""
    version: int = 0
    handed_out: bool = False
    """The batch of `version` is with the trainer already"""

    @property
    def next_version(self) -> int:
        """The version at which the next batch will be trained on."""
        return self.version + self.handed_out

    def wanted(self) -> int:
        """Usable groups that may be under way or ready now."""
        ahead = self.groups_per_batch * (self.max_staleness + 1 - self.handed_out)
        return min(ahead, max(self.max_groups, self.groups_per_batch)) if self.max_groups > 0 else ahead

    def oldest_useful_version(self, position: float) -> int:
        """The oldest version under which a new group may be sampled to be admitted in its turn.

        `position` is the number of usable groups that will be handed out before it.
        """
        turn = self.next_version + int(position // self.groups_per_batch)
        return max(0, min(turn - self.max_staleness, self.version))
