"""A curriculum: prompts whose groups differ are drawn more often, because only from differences is anything learned.

The advantage of a sample is its reward minus that of its group, so the gradient that a prompt gives grows with the
variance of the rewards in its groups, which is p(1 - p) where a reward is 1 with probability p and else 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean, pvariance
from typing import Any

import numpy as np

from torchtitan.errors import UserError, load_function
from torchtitan.rollout.data.prompt_stream import PromptStream
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.data.rows import Row
from torchtitan.rollout.types import Prompt

# The mean variance of all prompts counts as much as this share of a group in the estimate of each prompt.
PRIOR = 0.25
# The variance of an average prompt is a moving mean over this many groups.
TYPICAL_OVER = 128.0
# One position in so many takes the next prompt of a pass over all of them, so that every prompt comes back.
PASS_EVERY = 10
# Batches after which what is known of a prompt counts half.
HALF_LIFE = 100.0
VARIANCE = "variance"
ESTIMATES = ("means", "variances", "groups", "seen")


class CurriculumStream(PromptStream):
    """Draws the prompt of each position from the results of the batches that have been handed out.

    Results count when their batch is handed out, in the order of the prompts, together with those of the groups that
    were dropped before it. So no result counts sooner because it was quick.
    """

    def __init__(self, rows: Sequence[Row], maker: PromptMaker, seed: int, shuffle: bool, sampler: str, redraws: bool):
        """sampler: rollout.sampler, `variance` or a function. redraws: groups behind a batch that is handed out are all
        sampled again (rollout.max_staleness = 0). Their prompts are then drawn again, too, so that they follow from the
        results alone.

        Raises UserError if the function cannot be loaded.
        """
        super().__init__(rows, maker, seed, shuffle)
        self._sampler, self._redraws = sampler, redraws
        self._weigh: Callable[..., Any] = expected_variance
        if sampler != VARIANCE:
            self._weigh = load_function(sampler, "rollout.sampler")
        self._every, self._half_life = PASS_EVERY, HALF_LIFE
        self._next = self._batches = 0
        self._drawn: dict[int, int] = {}
        """Position -> row, of all prompts that have been drawn and are not used up"""
        self._results: dict[int, list[float]] = {}
        """Position -> rewards, of finished groups that are not used up"""
        self._too_long: set[int] = set()
        self.means, self.variances, self.groups, self.seen = np.zeros((4, len(rows)))
        """[rows]: mean and variance of the rewards, how many groups they come from, and after how many batches the last
        of these was"""
        self._typical = [0.0, 0.0]
        """Groups, and the mean of their variances: of positions that go through all prompts, as others are chosen"""
        self._weights: np.ndarray | None = None

    def next(self) -> Prompt:
        prompt = self.prompt_at(self._position)
        self._position += 1
        return prompt

    def prompt_at(self, index: int) -> Prompt:
        # In the order of positions, because no prompt is drawn that is under way.
        while self._next <= index:
            self._drawn[self._next] = self._draw(self._next)
            self._next += 1
        row = self._drawn[index]
        prompt = self._maker.make(self._rows[row], index)
        prompt.row, prompt.from_pass = row, self._is_of_pass(index)
        return prompt

    def replaced(self, index: int, row: int) -> bool:
        return self._drawn.get(index) != row

    def note(self, index: int, rewards: Sequence[float]) -> None:
        self._results[index] = list(rewards)

    def consumed(self, last: int) -> None:
        self._batches += 1
        for index in sorted(index for index in self._results if index <= last):
            self._learn(index, self._drawn[index], self._results[index])
        if self._redraws:
            self._next, self._drawn, self._results = last + 1, {}, {}
        else:
            self._drawn = {index: row for index, row in self._drawn.items() if index > last}
            self._results = {index: rewards for index, rewards in self._results.items() if index > last}
        self._weights = None

    def state_dict(self) -> dict[str, Any]:
        known = np.flatnonzero(self.groups)
        return super().state_dict() | {
            "next": self._next,
            "batches": self._batches,
            "drawn": list(self._drawn.items()),
            "results": list(self._results.items()),
            "too_long": sorted(self._too_long),
            "typical": self._typical,
            "known": known.tolist(),
            **{name: getattr(self, name)[known].tolist() for name in ESTIMATES},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._next, self._batches, self._typical = state["next"], state["batches"], state["typical"]
        self._drawn, self._results = dict(state["drawn"]), dict(state["results"])
        self._too_long, self._weights = set(state["too_long"]), None
        for name in ESTIMATES:
            getattr(self, name)[state["known"]] = state[name]

    def figures(self) -> dict[str, float]:
        known = self.groups > 0
        return {
            "curriculum/seen_fraction": float(known.mean()),
            "curriculum/reward_mean": float(self.means[known].mean()) if known.any() else 0.0,
        }

    def _fingerprint(self) -> str:
        return f"curriculum {super()._fingerprint()}"

    def _learn(self, index: int, row: int, rewards: list[float]) -> None:
        fade = 0.5 ** ((self._batches - self.seen[row]) / self._half_life)
        # A group counts at least as much as all before it: what a policy has learned, it has learned lately.
        before = min(1.0, self.groups[row] * fade)
        mean, variance = fmean(rewards), pvariance(rewards)
        self.means[row] += (mean - self.means[row]) / (before + 1)
        self.variances[row] += (variance - self.variances[row]) / (before + 1)
        self.groups[row], self.seen[row] = before + 1, self._batches
        if self._is_of_pass(index):
            weight = self._typical[0] = min(self._typical[0] + 1, TYPICAL_OVER)
            self._typical[1] += (variance - self._typical[1]) / weight

    def _draw(self, index: int) -> int:
        """Return the row for a position: the next of the pass, or a row drawn by its weight."""
        under_way = list(self._drawn.values())
        number, place = divmod(index // self._every, len(self._rows))
        row = self._order_of(number)[place]
        if self._is_of_pass(index) and row not in under_way and self._fits(row):
            return row
        generator = random.Random(f"{self._seed}/draw/{index}")
        # Every attempt finds a row or rules one out.
        while True:
            cumulative = self._cumulative_weights(under_way)
            row = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
            if self._fits(row):
                return row

    def _is_of_pass(self, index: int) -> bool:
        """Whether this position takes the next prompt of a pass over all of them."""
        return index % self._every == 0

    def _fits(self, row: int) -> bool:
        if row in self._too_long:
            return False
        prompt = self._maker.make(self._rows[row], row)
        if not self._maker.fits(prompt):
            self._too_long.add(row)
            self._weights = None
            self._leave_out(prompt)
        return row not in self._too_long

    def _cumulative_weights(self, under_way: Sequence[int] = ()) -> np.ndarray:
        """[rows], the last is positive. Rows under way weigh nothing, unless no other one weighs anything.

        Raises UserError if no prompt fits, or if own weights are none.
        """
        if self._weights is None:
            if len(self._too_long) == len(self._rows):
                raise self._none_fits()
            ages = self._batches - self.seen
            fade = 0.5 ** (ages / self._half_life)
            given = self._weigh(self.means, self.variances, self.groups * fade, self._typical[1])
            weights = np.array(given, np.float64)
            if weights.shape != self.means.shape or not np.isfinite(weights).all() or (weights < 0).any():
                raise UserError(
                    f"rollout.sampler = {self._sampler!r} must return {len(self._rows)} weights, one for "
                    f"each prompt, finite and not negative; it returned {str(given)[:200]}"
                )
            weights[list(self._too_long)] = 0
            if not weights.any():
                weights = np.array([row not in self._too_long for row in range(len(self._rows))], np.float64)
            self._weights = weights
        others = self._weights.copy()
        others[list(under_way)] = 0
        return (others if others.any() else self._weights).cumsum()


def expected_variance(means: np.ndarray, variances: np.ndarray, groups: np.ndarray, typical: float) -> np.ndarray:
    """The variance of the rewards that is expected of each prompt's next group, [rows].

    The estimate of a prompt leans towards that of an average one the more, the longer ago its groups are: the posterior
    mean with a conjugate prior that is worth PRIOR groups.
    """
    return (groups * variances + PRIOR * max(typical, 1e-6)) / (groups + PRIOR)
