"""Trajectories: what one conversation with the policy leaves for training. No torch here.

A trajectory is a list of branches, a branch is a sequence of tokens in segments: some were given to the policy (the
prompt, what an environment answered), some were sampled from it. What was sampled is trained, what was given never is.
One prompt with one completion is the branch of two segments.

A recorder of calls makes a trajectory with add_turn alone. A call whose prompt goes on from a branch
extends it; one that does not (a program has rewritten its history, or talks to the policy twice at a time) begins a
branch of its own. There, all of its prompt is given, so that a token that was sampled before is trained in the branch
where it was sampled, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.inference.types import Completion, VersionSpan
from torchtitan.models.model_args import MISSING


@dataclass
class Given:
    """Tokens that the policy read and did not sample here."""

    token_ids: list[int]


Segment = Given | Completion


@dataclass
class Branch:
    """One sequence of tokens, as the policy has read and sampled it, from its first token to its last."""

    segments: list[Segment]
    trainer_log_probs: Any = None
    """Of its sampled tokens before the batch's first optimizer step (a tensor), where this process computed them"""

    @property
    def token_ids(self) -> list[int]:
        """All tokens, given and sampled."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def sampled(self) -> list[Completion]:
        """The sampled segments."""
        return [segment for segment in self.segments if isinstance(segment, Completion)]

    @property
    def sampled_at(self) -> list[int]:
        """The place of every sampled token among token_ids: the mask of what is trained."""
        places: list[int] = []
        end = 0
        for segment in self.segments:
            begin, end = end, end + len(segment.token_ids)
            if isinstance(segment, Completion):
                places += range(begin, end)
        return places

    def __len__(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)


def add_turn(branches: list[Branch], prompt_ids: Sequence[int], completion: Completion) -> Branch:
    """Record that the policy sampled `completion` behind `prompt_ids`; returns the branch that ends with it now.

    It extends the longest branch that prompt_ids begins with, whole: what prompt_ids has beyond it is given. Without
    such a branch it begins a new one, at the end of `branches`.
    """
    prompt_ids = list(prompt_ids)
    for branch in sorted(branches, key=len, reverse=True):
        held = branch.token_ids
        if prompt_ids[: len(held)] == held:
            branch.segments += [Given(prompt_ids[len(held) :])] if len(prompt_ids) > len(held) else []
            branch.segments.append(completion)
            return branch
    branches.append(Branch([Given(prompt_ids), completion]))
    return branches[-1]


def sampled_segments(branches: Sequence[Branch]) -> list[Completion]:
    """Everything that was sampled, branch by branch."""
    return [completion for branch in branches for completion in branch.sampled]


def joined_spans(completions: Sequence[Completion]) -> list[VersionSpan]:
    """The spans of completions behind each other: positions count the tokens of all of them, and neighbours of the
    same version are one span."""
    spans: list[VersionSpan] = []
    begin = 0
    for completion in completions:
        for span in completion.spans:
            last = spans[-1] if spans else None
            if last is not None and (last.epoch, last.version, last.end) == (
                span.epoch,
                span.version,
                begin + span.start,
            ):
                last.end = begin + span.end
            else:
                spans.append(VersionSpan(span.epoch, span.version, begin + span.start, begin + span.end))
        begin += len(completion.token_ids)
    return spans


def branch_routes(branch: Branch) -> np.ndarray | None:
    """int16 [tokens - 1, layers, experts per token], MISSING where nothing is known; None where that is everything.

    A completion tells of all that was read before it, too: of what is told twice the first counts, which is how the
    sampled tokens came about.
    """
    rows: np.ndarray | None = None
    end = 0
    for segment in branch.segments:
        end += len(segment.token_ids)
        if not isinstance(segment, Completion) or segment.routes is None:
            continue
        routes = segment.routes
        if rows is None:
            rows = np.full((len(branch) - 1, *routes.experts.shape[1:]), MISSING, np.int16)
        place = rows[routes.first : end - 1]
        np.copyto(place, routes.experts[: len(place)], where=place[:, :1, :1] == MISSING)
    return rows
