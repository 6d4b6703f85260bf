"""Samples that are given rows of the embedded engine's cache together, and what has to be computed for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan.inference.engines.embedded.forwards import FORWARD_TOKENS, SequencePart
from torchtitan.inference.engines.embedded.prefixes import Prefix
from torchtitan.inference.engines.embedded.sequences import Running


@dataclass
class Admission:
    """What one pass over the waiting requests admits. Prompts are computed, and copied to other rows, once it is
    complete."""

    first_row: int
    """Where its rows begin"""
    samples: list[tuple[Running, int]] = field(default_factory=list)
    """Requests, and how many of their next samples get rows, in the order of the rows"""
    full_prompts: list[tuple[Running, SequencePart]] = field(default_factory=list)
    """Prompts to compute from their first token on"""
    prompt_ends: list[tuple[Running, SequencePart]] = field(default_factory=list)
    """Prompts that begin as another sequence does, of which only the rest is computed"""
    prefixes: list[Prefix] = field(default_factory=list)
    """The prompts that are computed, for sequences to come"""
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(a row, the first of the rows that begin as it does, how many they are, how many tokens)"""
    waits_for_prompt: bool = False
    """Whether the next request begins with a prompt of this admission, and can be admitted once that is computed"""
    _tokens: int = 0

    def has_to_wait(self, source: Prefix | None, tokens: int) -> bool:
        """Whether a prompt cannot be computed with these ones: what it begins with (source) is not computed yet, or
        its other tokens are too many for a forward."""
        self.waits_for_prompt = source is not None and not source.computed
        self._tokens += tokens
        return self.waits_for_prompt or (bool(self.samples) and self._tokens > FORWARD_TOKENS)

    def compute(self, running: Running, part: SequencePart) -> None:
        """Compute a prompt, from the token on at which `part` starts."""
        (self.prompt_ends if part.start else self.full_prompts).append((running, part))
