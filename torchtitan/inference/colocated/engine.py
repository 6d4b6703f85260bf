"""What a replica needs of the engine that it holds in its own process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from torchtitan.inference.types import Completion, SamplingParameters, Tag


class SampleRefused(Exception):
    """The engine does not take such a request; the message is the reason."""


class Engine(Protocol):
    """One rank's part of an engine. Everything happens in the calling thread; the ranks of a tensor-parallel group call
    everything alike, in the same order, and get the same results."""

    label: str | None
    """Of the weights that it holds, None where they are no version or only part of one"""

    @property
    def busy(self) -> bool:
        """Whether a sample is not finished."""

    def add(self, name: str, prompt_ids: list[int], sampling: SamplingParameters, seed: int) -> None:
        """Take one sample on; sampling.n and sampling.seed are not looked at. Raises SampleRefused."""

    def cancel(self, names: list[str]) -> None:
        """Forget samples; names that are finished are passed over."""

    def step(self) -> list[tuple[str, Completion]]:
        """One step of all samples; returns those that finished in it."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
        """Replace all weights by (checkpoint name, whole tensor), one at a time. What was computed with the old ones is
        not used for samples that come later. After an exception `label` is None."""

    def sleep(self) -> None:
        """Give the device's memory back; unfinished samples stay and begin their computation again."""

    def wake(self, tag: Tag) -> None:
        """Take memory again: of the weights first, and of the KV cache before the next step."""

    def close(self) -> None: ...
