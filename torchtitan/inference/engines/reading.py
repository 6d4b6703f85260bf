"""Engines' answers, read in the way of the engine that gave them: see answers.py for where, and for what comes back.

This module does not import torch.
"""

from __future__ import annotations

from typing import Any

from torchtitan.inference.actor_client import AnswerRefused
from torchtitan.inference.answer_checks import check_completions, check_log_probs
from torchtitan.inference.answers import Outcome, accepted, array, outcome_of, pack, unpack, values
from torchtitan.inference.engines.registry import load_engine
from torchtitan.inference.types import Completion, GenerateRequest, ScoredTokens
from torchtitan.utils.reader_process import Pieces


def read_completions(about: dict[str, Any], answer: bytes | memoryview) -> bytes:
    """The reading function for completions: they are those that were asked for, and can be trained on."""

    def read() -> Outcome:
        request = GenerateRequest.from_json(about["request"])
        completions = load_engine(about["engine"]).completions(request, answer)
        check_completions(completions, request.sampling, about["vocabulary"])
        return Outcome(completions=[pack(completion) for completion in completions])

    return outcome_of(read)


def read_scores(about: dict[str, Any], answer: bytes | memoryview) -> bytes:
    """The reading function for the log-probs of given tokens: one for each but the first."""

    def read() -> Outcome:
        token_ids = about["token_ids"]
        scored = load_engine(about["engine"]).scored(token_ids, answer)
        if len(scored.log_probs) != len(token_ids) - 1:
            number = len(scored.log_probs)
            raise AnswerRefused("score", f"{number} log-probs were returned for {len(token_ids)} tokens")
        check_log_probs(scored.log_probs, "score")
        return Outcome(log_probs=array(scored.log_probs, "<f8"), epoch=scored.epoch, version=scored.version)

    return outcome_of(read)


async def completions_of(
    engine: str, request: GenerateRequest, pieces: Pieces, vocabulary: int | None = None
) -> list[Completion]:
    """Return the completions in the answer of an engine (the name of its folder) to this request. vocabulary: of the
    run's model, if that is known.

    Raises AnswerRefused: it has another form, or values that cannot be (see answer_checks.py); ActorError: the engine
    ended a completion early; ActorNotReady: it comes from weights that are no version of this run; RequestRefused: the
    engine lacks what was asked for.
    """
    about = {"engine": engine, "request": request.to_json(), "vocabulary": vocabulary}
    outcome = await accepted("generate", f"{__name__}:read_completions", about, pieces)
    return [unpack(completion) for completion in outcome.completions]


async def scores_of(engine: str, token_ids: list[int], pieces: Pieces) -> ScoredTokens:
    """Return the log-probs of these tokens in an engine's answer. Raises AnswerRefused and ActorNotReady."""
    about = {"engine": engine, "token_ids": token_ids}
    outcome = await accepted("score", f"{__name__}:read_scores", about, pieces)
    return ScoredTokens(values(outcome.log_probs, "<f8").tolist(), outcome.epoch, outcome.version)
