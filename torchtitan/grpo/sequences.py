"""Tokens of several sequences in one row, and what is known of each sequence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sequences:
    """Which of `count` sequences each of N tokens belongs to. A sequence without tokens has sums of 0."""

    of_token: torch.Tensor
    """[N] int64"""
    count: int

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values [N] over the tokens of each sequence, [count]."""
        zero = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zero.index_add(0, self.of_token, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of values [N] over the tokens of each sequence, [count]."""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    def spread(self, of_sequence: torch.Tensor) -> torch.Tensor:
        """What each sequence has [count], for each of its tokens [N]."""
        return of_sequence[self.of_token]


@functools.cache
def takes_sequences(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `sequences`: it looks at whole sequences, and gets their Sequences."""
    return "sequences" in inspect.signature(function).parameters
