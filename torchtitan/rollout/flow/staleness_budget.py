"""How far ahead groups are generated, and which of them make up a batch. The rollouts and the simulator share it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

# If most groups are dropped, up to this many times the wanted groups are generated at once to compensate.
MAX_SPARES = 8.0


@dataclass
class StalenessBudget:
    """Limits how much is generated ahead, and forms batches in the order of the prompts.

    A group sampled under version w can be trained on up to version w + max_staleness. At trainer version v, new groups
    can therefore serve only the batches of versions v (unless it has been handed out) to v + max_staleness; any further
    group would be discarded. With max_staleness 0, this is the on-policy batch alone.

    A batch is the first usable groups in prompt order, whichever finish first: otherwise prompts with short completions
    would be trained on more often.

    Each source has its own budget, with its share of every batch: no source waits for another's groups, and none takes
    another's places.
    """

    groups_per_batch: float
    """The mean over batches"""
    max_staleness: int
    version: int = 0
    handed_out: bool = False
    """The batch of `version` has been handed to the trainer"""
    survival: float = 1.0
    """Estimated share of groups that are usable"""
    sampled_at: dict[int, int] = field(default_factory=dict)
    """Prompt index of each finished group that is not used up -> version of its oldest token"""
    ready: list[int] = field(default_factory=list)
    """The usable ones, ascending"""
    quotas: Callable[[int], Sequence[int]] | None = None
    """Returns the groups of each of the next so many batches; None: groups_per_batch of each"""

    @property
    def next_version(self) -> int:
        """The version at which the next batch will be trained."""
        return self.version + self.handed_out

    def upcoming(self, batches: int) -> Sequence[int]:
        """Return the groups of each of the next batches."""
        return [int(self.groups_per_batch)] * batches if self.quotas is None else self.quotas(batches)

    def wanted(self) -> int:
        """Return how many usable groups may be in flight or ready now."""
        return sum(self.upcoming(self.max_staleness + 1 - self.handed_out))

    def add(self, index: int, sampled_at: int, usable: bool) -> None:
        """Take in a finished group, by prompt index; sampled_at: the version of its oldest token."""
        self.sampled_at[index] = sampled_at
        if usable:
            bisect.insort(self.ready, index)

    def remove(self, indices: Collection[int]) -> None:
        """Forget these finished groups."""
        for index in indices:
            del self.sampled_at[index]
        self.ready = [index for index in self.ready if index in self.sampled_at]

    def count(self, usable: bool) -> None:
        """Take a finished group into the estimate."""
        # Average over about two batches: fast enough to follow the policy, slow enough to ignore single groups.
        self.survival += (usable - self.survival) / (2 * max(self.groups_per_batch, 1))
        self.survival = max(self.survival, 1 / MAX_SPARES)

    def position(self, index: int | None, in_flight: Collection[int]) -> float:
        """Return how many usable groups are expected to be handed out before the group of this prompt index; None: a
        new prompt."""
        if index is None:
            finished, count = len(self.ready), len(in_flight)
        else:
            finished = bisect.bisect(self.ready, index)
            count = sum(earlier < index for earlier in in_flight)
        expected = count * self.survival
        if self.max_staleness:
            # A group too many would be sampled twice, and one too few can still be sampled in time: allow for one
            # standard deviation. On policy, a missing group delays the batch by its whole time.
            expected = min(count, expected + math.sqrt(expected * (1 - self.survival)))
        return finished + expected

    def training_version(self, position: float) -> int:
        """Return the version at which a group is trained on if `position` usable groups are handed out before it."""
        batches = self.max_staleness + 2
        ends = list(itertools.accumulate(self.upcoming(batches)))
        while ends[-1] <= position:
            batches *= 2
            ends = list(itertools.accumulate(self.upcoming(batches)))
        return self.next_version + bisect.bisect(ends, position)

    def oldest_useful_version(self, position: float) -> int:
        """Return the oldest version under which a new group may be sampled and still be admitted in its turn."""
        return max(0, min(self.training_version(position) - self.max_staleness, self.version))

    def batch(self, unfinished: Iterable[int]) -> list[int] | None:
        """Return the next batch; None if it is not complete, or if a group before its last is not finished."""
        (count,) = self.upcoming(1)
        first = self.ready[:count]
        complete = len(first) == count and (not first or first[-1] < min(unfinished, default=math.inf))
        return first if complete else None

    def consumed(self, batch: list[int]) -> None:
        """Note that the trainer has this batch. With it, all groups before its last are used up."""
        self.handed_out = True
        if batch:
            self.remove([index for index in self.sampled_at if index <= batch[-1]])

    def take_stale(self, max_staleness: int, only: int | None = None) -> list[int]:
        """Forget and return the groups that will be too stale in their turn; only: look at this one.

        Unusable groups are among them: if only the usable ones were sampled again, prompts that are rarely usable would
        be trained on even more rarely.
        """
        stale: list[int] = []
        for index in self.sampled_at if only is None else [only]:
            trained_at = self.training_version(bisect.bisect_left(self.ready, index))
            if trained_at - self.sampled_at[index] > max_staleness:
                stale.append(index)
        self.remove(stale)
        return stale
