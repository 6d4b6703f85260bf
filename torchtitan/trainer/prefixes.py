"""Finds what sequences begin with together, so that a pack computes it once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

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
        before, own = sequences[order[place - 1]], sequences[order[place]]
        shorter = min(len(before), len(own))
        differing = np.flatnonzero(before[:shorter] != own[:shorter])
        common[place] = int(differing[0]) if len(differing) else shorter
    return order, common


def clusters(sequences: Sequence[np.ndarray], trained: Sequence[int], budget: int) -> tuple[list[list[int]], list[int]]:
    """Sequences that are worth computing together, each cluster within the budget as far as its sequences are.

    trained: how many tokens of each sequence are trained. Returns the clusters and their sizes: the most tokens that
    `merge` lets be computed, or the trained ones or the KEYS_PER_TOKEN-th part of all keys if these are more, because
    all of them need memory.
    """
    found: list[list[int]] = []
    needs: list[tuple[int, int, int]] = []
    """(computed, trained, keys) of each cluster"""

    def size(computed: int, active: int, keys: int) -> int:
        return max(computed, active, -(-keys // KEYS_PER_TOKEN))

    for number, common in zip(*sorted_with_prefixes(sequences), strict=True):
        length = len(sequences[number])
        if common >= LEAST_SAVED:
            computed, active, keys = needs[-1]
            # Where sequences part, up to LEAST_SAVED - 1 tokens may stay in each of them.
            further = length - common + LEAST_SAVED - 1
            together = computed + further, active + trained[number], keys + length
            if size(*together) <= budget:
                found[-1].append(number)
                needs[-1] = together
                continue
        found.append([number])
        needs.append((length, trained[number], length))
    return found, [size(*need) for need in needs]


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
        if shared > depth if alone else (end - first - 1) * (shared - depth) >= LEAST_SAVED:
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
