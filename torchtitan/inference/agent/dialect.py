"""How a foreign engine is asked for tokens, and how its answers are read. Pure functions; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan.inference.client import ScoredTokens
from torchtitan.inference.routes import Routes
from torchtitan.inference.types import Completion, FinishReason, GenerateRequest, VersionSpan, parse_label

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Call:
    """One POST to the engine."""

    path: str
    body: dict[str, Any]


class Malformed(ValueError):
    """An engine's answer is not what its dialect knows."""


class NoVersion(ValueError):
    """An engine's answer is from weights of no version of ours."""


class Dialect(Protocol):
    """How an engine is asked for tokens, and how it answers. Pure functions; no torch."""

    name: str

    def generate(self, request: GenerateRequest) -> list[Call]:
        """What to ask; all calls are made at the same time. Raises RequestRefused where the engine cannot do that."""

    def completions(self, request: GenerateRequest, answers: list[Any]) -> list[Completion]:
        """The answers (JSON) of these calls, with spans from the engine's version labels.

        Raises Malformed, NoVersion, or KeyError, TypeError, IndexError, ValueError for an answer that is not
        well-formed.
        """

    def score(self, token_ids: list[int]) -> Call: ...

    def scored(self, token_ids: list[int], answer: Any) -> ScoredTokens:
        """Raises as `completions` does."""

    def refused(self, status: int, reason: str) -> bool:
        """Whether an error answer finds fault with the request itself, so that no other actor will like it better."""


def read_spans(parts: list[dict[str, Any]]) -> list[VersionSpan]:
    """The versions that an engine names by label, each with `start` and `end`. Raises NoVersion."""
    spans = []
    for part in parts:
        held = parse_label(part["version"])
        if held is None:
            raise NoVersion(f"sampled under {part['version']!r}, which is no version of ours")
        if part["end"] > part["start"]:
            spans.append(VersionSpan(*held, int(part["start"]), int(part["end"])))
    return spans


def make_completion(
    token_ids: list[int],
    scored: list[int],
    log_probs: list[float],
    finished: FinishReason,
    spans: list[VersionSpan],
    kept: list[list[int]] | None,
    routes: Routes | None = None,
) -> Completion:
    """A completion whose parts fit together. scored: the tokens that the log-probs are of. Raises Malformed."""
    if scored != token_ids:
        raise Malformed("the log-probs are of other tokens than those of the answer")
    if kept is not None and len(kept) != len(token_ids):
        raise Malformed(f"{len(kept)} sets of kept tokens came for {len(token_ids)} tokens")
    return Completion(token_ids, log_probs, finished, spans, kept, routes)


def aborted() -> Completion:
    """The caller has to ask again: what there is of an answer that was broken off means nothing."""
    return Completion([], [], "abort", [])
