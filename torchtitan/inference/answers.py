"""What actors answer, on its way into the run: how long it may be, how it is read, and how it is passed on.

How long an answer may be follows from the request. It is read by type and checked where reader_process.py says, which
for a long one is another process, and comes as arrays in one buffer. This module does not import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from torchtitan.inference.actor_client import (
    ActorError,
    ActorNotReady,
    AnswerRefused,
    RequestRefused,
)
from torchtitan.inference.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    NoVersion,
    Routes,
    VersionSpan,
)
from torchtitan.utils.reader_process import Pieces, read_answer
from torchtitan.utils.typed_json import Natural, WrongForm, without_collection

if TYPE_CHECKING:
    import numpy as np

# No answer is longer, whatever was asked.
MAX_ANSWER_BYTES = 1 << 30
# What a sampled or scored token takes at most in an engine's JSON: its number, its log-prob with the names of the
# fields, and its share of the version spans. One of the likeliest tokens in its place; a kept token; the number of an
# expert, which may have eight bytes, in base64. What comes with an answer and with each of its samples.
TOKEN_BYTES, LIKELY_BYTES, KEPT_BYTES, EXPERT_BYTES, SAMPLE_BYTES, ANSWER_BYTES = 256, 192, 24, 12, 1 << 14, 1 << 16
# Without top-k, so many tokens may have been kept in a place, on average (SGLang tells no more).
MAX_KEPT = 4096

Top = tuple[list[int], list[float]]
"""Ids and log-probs of the likeliest tokens in one place"""


def generated_bytes(request: GenerateRequest, experts: int = 0) -> int:
    """Return how long the answer to a request may be. experts: how many of the model a token has, in all its layers."""
    sampling = request.sampling
    kept = min(sampling.top_k or MAX_KEPT, MAX_KEPT) * KEPT_BYTES if sampling.truncated else 0
    sample = SAMPLE_BYTES + sampling.max_tokens * (TOKEN_BYTES + kept)
    if sampling.routes:
        sample += (len(request.prompt_ids) + sampling.max_tokens) * experts * EXPERT_BYTES
    return min(MAX_ANSWER_BYTES, ANSWER_BYTES + sampling.n * sample)


def scored_bytes(tokens: int, top: int = 0) -> int:
    """Return how long the answer may be that has the log-probs of so many tokens, and of the `top` likeliest in their
    places."""
    return min(MAX_ANSWER_BYTES, ANSWER_BYTES + SAMPLE_BYTES + tokens * (TOKEN_BYTES + top * LIKELY_BYTES))


class WrittenSpan(msgspec.Struct):
    epoch: str
    version: Natural
    start: Natural
    end: Natural


class WrittenRoutes(msgspec.Struct):
    first: Natural
    shape: tuple[Natural, Natural, Natural]
    bytes: int
    experts: str


class WrittenCompletion(msgspec.Struct):
    """A completion as Completion.to_json() writes it."""

    token_ids: list[Natural]
    log_probs: list[float]
    finish_reason: str
    spans: list[WrittenSpan]
    kept_token_ids: list[list[Natural]] | None = None
    routes: WrittenRoutes | None = None


def completion_of(written: WrittenCompletion) -> Completion:
    """Return a completion that was written so. Raises ValueError or KeyError."""
    return Completion(
        written.token_ids,
        written.log_probs,
        written.finish_reason,  # type: ignore[arg-type] # check_completions() looks at it
        [VersionSpan(span.epoch, span.version, span.start, span.end) for span in written.spans],
        written.kept_token_ids,
        None if written.routes is None else Routes.from_json(msgspec.structs.asdict(written.routes)),
    )


# From the reading function to the run


class Packed(msgspec.Struct, array_like=True):
    """A completion. Arrays are little-endian: int64 for tokens, float64 for log-probs, int32 for lengths."""

    token_ids: memoryview
    log_probs: memoryview
    finish_reason: FinishReason
    spans: list[tuple[str, int, int, int]]
    kept: tuple[memoryview, memoryview] | None
    """All ids, and how many there are of each token"""
    routes: tuple[int, tuple[int, int, int], int, memoryview] | None
    """The first token, the shape of experts, the bytes of a number, and the numbers"""


class Outcome(msgspec.Struct, array_like=True):
    """What a reading function has made of an answer. refused: "" or one of REFUSALS, for `reason`."""

    refused: str = ""
    reason: str = ""
    completions: list[Packed] = []
    log_probs: memoryview = memoryview(b"")
    epoch: str = ""
    version: int = 0
    top: tuple[memoryview, memoryview] | None = None


REFUSALS: dict[str, type[ActorError]] = {
    "answer": AnswerRefused,
    "actor": ActorError,
    "not_ready": ActorNotReady,
    "request": RequestRefused,
}


def array(numbers: Sequence[int | float | None], dtype: str) -> memoryview:
    """Return numbers as bytes."""
    import numpy as np  # as in the other functions: who only plans a run has no answers

    return np.asarray(numbers, dtype).data.cast("B") if numbers else memoryview(b"")


def values(data: memoryview, dtype: str) -> np.ndarray:
    """Return the numbers in bytes that `array` has made."""
    import numpy as np

    return np.frombuffer(data, dtype)


def pack(completion: Completion) -> Packed:
    """Return a completion as arrays."""
    kept, routes = None, None
    if completion.kept_token_ids is not None:
        lengths = [len(ids) for ids in completion.kept_token_ids]
        kept = array(list(itertools.chain(*completion.kept_token_ids)), "<i8"), array(lengths, "<i4")
    if completion.routes is not None:
        import numpy as np

        experts = completion.routes.experts
        experts = np.ascontiguousarray(experts, experts.dtype.newbyteorder("<"))
        routes = completion.routes.first, experts.shape, experts.itemsize, memoryview(experts.tobytes())
    spans = [(span.epoch, span.version, span.start, span.end) for span in completion.spans]
    return Packed(
        array(completion.token_ids, "<i8"),
        array(completion.log_probs, "<f8"),
        completion.finish_reason,
        spans,
        kept,
        routes,
    )


def unpack(packed: Packed) -> Completion:
    """Return the completion that `pack` has made arrays of."""
    kept: list[list[int]] | None = None
    if packed.kept is not None:
        ids, ends = values(packed.kept[0], "<i8"), values(packed.kept[1], "<i4").cumsum()
        # One by one, so that other threads get their turns.
        with without_collection():
            kept = [ids[begin:end].tolist() for begin, end in itertools.pairwise([0, *ends.tolist()])]
    routes = None
    if packed.routes is not None:
        first, shape, itemsize, data = packed.routes
        routes = Routes(first, values(data, f"<u{itemsize}").reshape(shape))
    spans = [VersionSpan(*span) for span in packed.spans]
    token_ids, log_probs = values(packed.token_ids, "<i8").tolist(), values(packed.log_probs, "<f8").tolist()
    return Completion(token_ids, log_probs, packed.finish_reason, spans, kept, routes)


def outcome_of(read: Callable[[], Outcome]) -> bytes:
    """Return the outcome of `read`, in which an answer of another form is an outcome too."""
    try:
        outcome = read()
    except NoVersion as error:
        outcome = Outcome("not_ready", str(error))
    except RequestRefused as error:
        outcome = Outcome("request", str(error))
    except AnswerRefused as error:
        outcome = Outcome("answer", str(error))
    except ActorError as error:
        outcome = Outcome("actor", str(error))
    except Exception as error:  # libraries raise anything over what another process wrote
        text = str(error) if isinstance(error, WrongForm) else repr(error)
        outcome = Outcome("answer", f"the answer is malformed: {text}")
    return msgspec.msgpack.encode(outcome)


async def exchange(function: str, about: dict[str, Any], pieces: Pieces) -> Outcome:
    """Return what a reading function makes of an answer."""
    try:
        data = await read_answer(function, about, pieces)
    except WrongForm as error:
        return Outcome("answer", f"the answer cannot be read: {error}")
    return msgspec.msgpack.decode(data, type=Outcome)


async def accepted(phase: str, function: str, about: dict[str, Any], pieces: Pieces) -> Outcome:
    """Return what a reading function makes of an answer that is as it should be. Raises what REFUSALS says."""
    outcome = await exchange(function, about, pieces)
    if outcome.refused:
        raise REFUSALS[outcome.refused](phase, outcome.reason)
    return outcome
