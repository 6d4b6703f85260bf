"""A linear recurrence S[n + 1] = A[n] S[n] + B[n] of matrices in few launches, for GPUs.

One product after another would cost a launch for each step. Here steps are joined in pairs, a level at a time: two of
them are again one, with A = A2 A1 and B = A2 B1 + B2. What is left after a few levels is computed step by step, and
then, back down the levels, the second step of each pair begins with A1 S + B1 (Blelloch 1990, "Prefix sums and their
applications"). Every state is written to its place among all states, so that none is copied.
"""

from __future__ import annotations

import itertools

import torch


def _levels(steps: int) -> int:
    """The number of levels with few launches: three for each, and one for each step that is left. A level counts as
    four, because it doubles what the number of steps is rounded up to."""
    return min(range(steps.bit_length()), key=lambda levels: 4 * levels + -(-steps >> levels))


def padded_steps(steps: int) -> int:
    """The least number of steps, not below `steps`, that the levels divide."""
    levels = _levels(steps)
    return -(-steps >> levels) << levels


def linear_scan(
    a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None = None, *, backward: bool = False
) -> torch.Tensor:
    """The states before all steps: S[0] = start, S[n + 1] = a[n] S[n] + b[n].

    Args:
        a: [rows, steps, D, D], where `steps` is a result of padded_steps(). Steps with zeros begin a new recurrence.
        b: [rows, steps, D, V].
        start: [rows, D, V]; None: 0.
        backward: from the last step to the first: S[steps - 1] = start, S[n - 1] = a[n] S[n] + b[n].

    Returns: [rows, steps, D, V].
    """
    rows, steps, size, width = b.shape
    assert padded_steps(steps) == steps
    direction, levels = -1 if backward else 1, _levels(steps)
    first_steps: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(levels):
        # Views of pairs, over which products run without a copy.
        first_a, second_a = a.reshape(-1, 2, size, size).unbind(1)[::direction]
        first_b, second_b = b.reshape(-1, 2, size, width).unbind(1)[::direction]
        first_steps.append((first_a, first_b))
        a, b = torch.bmm(second_a, first_a), torch.baddbmm(second_b, second_a, first_b)
    a, b = a.reshape(rows, -1, size, size), b.reshape(rows, -1, size, width)
    states = b.new_empty(rows * steps, size, width)
    # A group of 2 ** levels steps begins with its last one if the scan runs backward.
    joined = states[-backward % (1 << levels) :: 1 << levels].view(rows, -1, size, width)
    order = list(range(b.shape[1]))[::direction]
    if start is None:
        joined[:, order[0]].zero_()
    else:
        joined[:, order[0]].copy_(start)
    for step, following in itertools.pairwise(order):
        torch.baddbmm(b[:, step], a[:, step], joined[:, step], out=joined[:, following])
    for level in reversed(range(levels)):
        first_a, first_b = first_steps.pop()
        half, pair = 1 << level, 2 << level
        begins = states[-backward % pair :: pair]
        torch.baddbmm(first_b, first_a, begins, out=states[half - backward :: pair])
    return states.view(rows, steps, size, width)
