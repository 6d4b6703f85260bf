"""Finds what sequences begin with together, so that a pack computes it once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# A shared run costs each layer another call of its attention, so one that saves fewer tokens stays in every sequence.
LEAST_SAVED = 4
# Attention holds the keys of every path at a time, so a micro-batch has at most this many for each token of its budget.
KEYS_PER_TOKEN = 8


@dataclass
class MergedRuns:
    """A forest of runs (see models.attention.PackedLayout) in which every sequence is a path."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of each run, in the order of the pack"""
    parents: list[int] = field(default_factory=list)
    """The run that each continues, or -1"""
    sources: list[tuple[int, int, int]] = field(default_factory=list)
    """Where each run's tokens are found: (sequence, first, end)"""
    places: list[np.ndarray] = field(default_factory=list)
    """For each sequence the rows of its tokens in the pack, int64"""


def sorted_with_prefixes(sequences: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """The sequences [tokens] of uint64 in lexicographic order, as numbers, and how many first elements each of them has
    in common with the one before it in this order (0 for the first)."""
    keys = [sequence.astype(">u8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    common = [0] * len(order)
    for place in range(1, len(order)):
        common[place] = _common_beginning(sequences[order[place - 1]], sequences[order[place]])
    return order, common


def clusters(
    sequences: Sequence[np.ndarray],
    trained: Sequence[int],
    budget: int,
    taught: Sequence[np.ndarray] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Sequences that are worth computing together, each cluster within the budget as far as its sequences are.

    trained: how many tokens of each sequence are trained. taught: what a teacher reads in place of each sequence, if
    that differs: it computes the same cluster, and needs as much memory for it. Returns the clusters and their sizes:
    the most tokens that `merge` lets be computed, or the trained ones or the KEYS_PER_TOKEN-th part of all keys if
    these are more, because all of them need memory.
    """
    found: list[list[int]] = []
    needs: list[_Need] = []
    for number, common in zip(*sorted_with_prefixes(sequences), strict=True):
        need = _Need(len(sequences[number]), len(sequences[number]), trained[number])
        if taught is not None:
            need = need.with_teacher(len(taught[number]), len(taught[number]))
        if common >= LEAST_SAVED:
            together = needs[-1].extended(need, common)
            if taught is not None:
                shared = _common_beginning(taught[found[-1][-1]], taught[number])
                together = together.with_teacher(
                    needs[-1].taught + need.taught - _saved(shared), needs[-1].taught_keys + need.taught_keys
                )
            if together.size <= budget:
                found[-1].append(number)
                needs[-1] = together
                continue
        found.append([number])
        needs.append(need)
    return found, [need.size for need in needs]


@dataclass(frozen=True)
class _Need:
    """What a cluster takes."""

    computed: int
    keys: int
    trained: int
    taught: int = 0
    """Tokens that the teacher computes where it reads something else"""
    taught_keys: int = 0

    @property
    def size(self) -> int:
        keys = max(self.keys, self.taught_keys)
        return max(self.computed, self.trained, self.taught, -(-keys // KEYS_PER_TOKEN))

    def with_teacher(self, tokens: int, keys: int) -> _Need:
        return replace(self, taught=tokens, taught_keys=keys)

    def extended(self, other: _Need, common: int) -> _Need:
        """With a sequence that begins with `common` tokens as the last one does."""
        return _Need(
            self.computed + other.computed - _saved(common), self.keys + other.keys, self.trained + other.trained
        )


def _saved(common: int) -> int:
    """How many of the tokens that two sequences begin with need not be computed twice, at the least: where they part,
    up to LEAST_SAVED - 1 tokens may stay in each of them."""
    return max(0, common - (LEAST_SAVED - 1))


def _common_beginning(first: np.ndarray, second: np.ndarray) -> int:
    """How many first elements two sequences have in common."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differing[0]) if len(differing) else shorter


def merge(sequences: Sequence[np.ndarray]) -> MergedRuns:
    """The fewest runs that hold all sequences, except that a run that saves fewer than LEAST_SAVED tokens is not
    shared. Elements [tokens] of uint64 that are equal, behind equal ones, are the same token."""
    order, common = sorted_with_prefixes(sequences)
    merged = MergedRuns(places=[np.empty(len(sequence), np.int64) for sequence in sequences])
    total = 0
    # Neighbours in this order, from first to end, which are the same up to a depth and continue a run there.
    waiting = [(0, len(order), 0, -1)] if order else []
    while waiting:
        first, end, depth, parent = waiting.pop()
        alone = end - first == 1
        shared = len(sequences[order[first]]) if alone else min(common[first + 1 : end])
        if alone:
            makes_run = shared > depth
        else:
            makes_run = (end - first - 1) * (shared - depth) >= LEAST_SAVED
        if makes_run:
            merged.lengths.append(shared - depth)
            merged.parents.append(parent)
            merged.sources.append((order[first], depth, shared))
            for number in order[first:end]:
                merged.places[number][depth:shared] = np.arange(total, total + shared - depth)
            total, depth, parent = total + shared - depth, shared, len(merged.lengths) - 1
        if not alone:
            cuts = [first, *(place for place in range(first + 1, end) if common[place] == shared), end]
            parts = [(begin, stop, depth, parent) for begin, stop in itertools.pairwise(cuts)]
            # What comes first in the batch comes first in the pack.
            waiting += sorted(parts, key=lambda part: -min(order[part[0] : part[1]]))
    return merged


def keep_apart(sequences: Sequence[np.ndarray]) -> MergedRuns:
    """Every sequence as a run of its own."""
    lengths = [len(sequence) for sequence in sequences]
    ends = np.cumsum([0, *lengths])
    return MergedRuns(
        lengths=lengths,
        parents=[-1] * len(lengths),
        sources=[(number, 0, length) for number, length in enumerate(lengths)],
        places=[np.arange(begin, begin + length) for begin, length in zip(ends, lengths, strict=False)],
    )
