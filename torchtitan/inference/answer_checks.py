"""What an engine can have computed for this run. Everything else that an actor answers is refused where it arrives:
trained on, a single such value would spoil the whole batch, and nobody would know which actor it came from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.inference.actor_client import ActorError, AnswerRefused
from torchtitan.inference.types import Completion, SamplingParameters, check_routes

# A probability of 1 that is computed in fp32 from logits of some hundreds may come out as much too large.
ROUNDING_ABOVE_ZERO = 1e-4
# The exponential of anything less is 0, in fp64 too. vLLM writes -9999 in place of -inf and of NaN, and others write
# the least number of a type.
LEAST_LOG_PROB = -745.0
# The number of a version has to fit a tensor, and that of a token where the vocabulary is not known.
LARGEST = 1 << 63


@dataclass(frozen=True)
class MixtureShape:
    """What the experts of a token are chosen from."""

    layers: int
    per_token: int
    """Experts of a token in each layer"""
    experts: int
    """Experts of a layer"""


def check_completions(
    completions: list[Completion], sampling: SamplingParameters, vocabulary: int | None = None
) -> list[Completion]:
    """Check that these are as many as were requested, and each as long; that their tokens, log-probs and version spans
    fit together; and that tokens are of the run's `vocabulary`, and log-probs are those of sampled tokens.

    Raises AnswerRefused; ActorError for a completion that the engine ended early; TypeError or OverflowError for what
    has another type.
    """
    if len(completions) != sampling.n:
        raise AnswerRefused("generate", f"{len(completions)} completions were returned, {sampling.n} were requested")
    for completion in completions:
        _check_length(completion, sampling.max_tokens)
        _check_values(completion, vocabulary)
        if sampling.truncated and completion.kept_token_ids is None:
            text = "the tokens that top-p, top-k or min-p kept are missing, without which log-probs mean nothing"
            raise AnswerRefused("generate", text)
        _check_spans(completion)
    return completions


def check_log_probs(log_probs: Sequence[float], phase: str, what: str = "the log-prob") -> None:
    """Raise AnswerRefused, of an answer to `phase`, unless all of these can be log-probs."""
    for place, value in enumerate(log_probs, start=1):
        # NaN is in no interval.
        if not LEAST_LOG_PROB <= value <= ROUNDING_ABOVE_ZERO:
            raise AnswerRefused(phase, f"{what} of token {place} is {value:g}, {_cause(value)}")


def check_token_ids(token_ids: Sequence[int], vocabulary: int | None, phase: str) -> None:
    """Raise AnswerRefused, of an answer to `phase`, unless all of these are tokens of the run's vocabulary."""
    if not token_ids:
        return
    if {*map(type, token_ids)} != {int}:
        raise AnswerRefused(phase, "a token is not a number of a token")
    least, largest = min(token_ids), max(token_ids)
    size = LARGEST if vocabulary is None else vocabulary
    if least < 0 or largest >= size:
        wrong = least if least < 0 else largest
        text = f"token {wrong} is not of the run's vocabulary (0 to {size - 1}): the actor serves another model"
        raise AnswerRefused(phase, text)


def check_experts(completion: Completion, tokens: int, shape: MixtureShape) -> None:
    """Check the experts that an engine was asked to name for a prompt and completion of so many tokens. Raises
    AnswerRefused unless they are experts of the run's model."""
    if completion.routes is None:
        raise AnswerRefused("generate", "it does not name the experts of its tokens, which grpo.routing_replay needs")
    experts = completion.routes.experts
    try:
        check_routes(completion.routes, tokens)
    except ValueError as error:
        raise AnswerRefused("generate", str(error)) from error
    # Some engines give flat numbers, which the reader divides into layers.
    size, needed = math.prod(experts.shape[1:]), shape.layers * shape.per_token
    if size != needed:
        text = f"{size} experts are named for each token, and this model has {shape.layers} layers x {shape.per_token}"
        raise AnswerRefused("generate", f"{text}: the actor serves another model")
    largest = int(experts.max(initial=0))
    if largest >= shape.experts:
        text = f"expert {largest} is named, and this model has {shape.experts} (from 0 on)"
        raise AnswerRefused("generate", f"{text}: the actor serves another model")


def _cause(value: float) -> str:
    if value > 0:
        return "above 0, the logarithm of a probability above 1: the engine reports something else than log-probs"
    return (
        "a probability of 0: its logits are not finite (-9999 is what vLLM writes for that), or it reports no log-prob"
    )


def _check_length(completion: Completion, max_tokens: int) -> None:
    length, reason = len(completion.token_ids), completion.finish_reason
    if reason not in ("stop", "length"):
        raise ActorError("generate", f"the engine ended a completion with finish_reason = {reason!r}")
    if length > max_tokens:
        raise AnswerRefused("generate", f"{length} tokens were returned, at most {max_tokens} were requested")
    if not length:
        raise AnswerRefused("generate", "a completion is without tokens")
    if reason == "length" and length < max_tokens:
        raise AnswerRefused(
            "generate",
            f"a completion ended for its length after {length} of {max_tokens} tokens: the engine's own limit (vLLM's "
            "max-model-len, SGLang's context-length, --max-length of ours) is below training.seq_len",
        )


def _check_values(completion: Completion, vocabulary: int | None) -> None:
    length, kept = len(completion.token_ids), completion.kept_token_ids
    if len(completion.log_probs) != length:
        raise AnswerRefused("generate", f"{length} tokens were returned with {len(completion.log_probs)} log-probs")
    check_log_probs(completion.log_probs, "generate")
    check_token_ids(completion.token_ids, vocabulary, "generate")
    if kept is None:
        return
    if len(kept) != length:
        raise AnswerRefused("generate", f"{length} tokens were returned with {len(kept)} lists of kept ones")
    check_token_ids([token for ids in kept for token in ids], vocabulary, "generate")
    for token, ids in zip(completion.token_ids, kept, strict=True):
        # An empty list stands for all tokens.
        if ids and token not in ids:
            raise AnswerRefused("generate", f"token {token} was sampled, but is not among those that truncation kept")


def _check_spans(completion: Completion) -> None:
    length, position, version = len(completion.token_ids), 0, -1
    for span in completion.spans:
        if span.start != position or span.end <= span.start or not version <= span.version < LARGEST:
            raise AnswerRefused("generate", f"version spans do not cover the tokens in order: {completion.spans}")
        position, version = span.end, span.version
    if position != length:
        raise AnswerRefused("generate", f"version spans cover {position} of {length} tokens")
