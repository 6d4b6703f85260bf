"""A request on its way through the engine: its JSON forms, what makes it invalid, what is known while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchtitan.errors import UserError
from torchtitan.inference.embedded.prefixes import Prefix
from torchtitan.inference.embedded.sampler import stream_keys
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, VersionSpan

# Beyond these bounds logits divided by the temperature overflow, or a request alone fills the memory.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-4, 1e4
MOST_SAMPLES = 4096
_SAMPLING = set(SamplingParameters.__dataclass_fields__)
# What OpenAI's route takes beside the sampling parameters and has no meaning here unless it is at its default.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"stream": (False, None), "echo": (False, None), "best_of": (None,)}
_IGNORED = {"model", "user", "logprobs"}


class InvalidRequest(UserError):
    """The request cannot be served by any engine with this model: the message says what is wrong."""


class TooLong(InvalidRequest):
    """The request needs more tokens than the engine was started for."""


def _integers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def check_request(request: GenerateRequest, vocab_size: int, max_length: int) -> None:
    """Raise InvalidRequest or TooLong for a request that cannot be served; types are checked too (it may be JSON)."""
    sampling, prompt = request.sampling, request.prompt_ids
    if not _integers(prompt) or not prompt:
        raise InvalidRequest("prompt_ids must be a non-empty list of token ids")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(f"prompt_ids must lie in 0..{vocab_size - 1}, got {min(prompt)}..{max(prompt)}")
    if not _integers(sampling.stop_token_ids):
        raise InvalidRequest("stop_token_ids must be a list of token ids")
    integers: Mapping[str, tuple[int, int]] = {
        "max_tokens": (sampling.max_tokens, 1),
        "n": (sampling.n, 1),
        "top_k": (sampling.top_k, 0),
    }
    for name, (value, least) in integers.items():
        if type(value) is not int or value < least:
            raise InvalidRequest(f"{name} must be an integer of at least {least}, got {value!r}")
    if sampling.n > MOST_SAMPLES:
        raise InvalidRequest(f"n must be at most {MOST_SAMPLES}, got {sampling.n}")
    if type(sampling.seed) is not int:
        raise InvalidRequest(f"seed must be an integer, got {sampling.seed!r}")
    numbers = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
    for name, number in numbers.items():
        if type(number) not in (int, float) or not 0 <= number < float("inf"):
            raise InvalidRequest(f"{name} must be a finite number of at least 0, got {number!r}")
    if sampling.temperature and not LEAST_TEMPERATURE <= sampling.temperature <= MOST_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be 0 (greedy) or lie in {LEAST_TEMPERATURE:g}..{MOST_TEMPERATURE:g}, "
            f"got {sampling.temperature!r}"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.min_p > 1:
        raise InvalidRequest(f"min_p must be at most 1, got {sampling.min_p}")
    needed = len(prompt) + sampling.max_tokens
    if needed > max_length:
        raise TooLong(
            f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} = {needed} exceeds the engine's "
            f"max_length {max_length}"
        )


def _check_keys(where: str, given: set[str], required: set[str], allowed: set[str]) -> None:
    if missing := sorted(required - given):
        raise InvalidRequest(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(given - allowed):
        raise InvalidRequest(f"{where} has unknown {', '.join(unknown)}; known: {', '.join(sorted(allowed))}")


def parse_generate(data: dict[str, Any]) -> GenerateRequest:
    """A GenerateRequest in its own JSON form. Raises InvalidRequest; values are checked by the engine."""
    _check_keys(
        "the body", set(data), {"request_id", "prompt_ids", "sampling"}, {"request_id", "prompt_ids", "sampling"}
    )
    if not isinstance(data["sampling"], dict):
        raise InvalidRequest("sampling must be an object")
    _check_keys("sampling", set(data["sampling"]), {"max_tokens"}, _SAMPLING)
    return GenerateRequest.from_json(data)


def parse_score(data: dict[str, Any]) -> list[int]:
    """The token ids of a score request: at least two. Raises InvalidRequest; ids are checked by the engine's limits."""
    _check_keys("the body", set(data), {"token_ids"}, {"token_ids"})
    token_ids = data["token_ids"]
    if not isinstance(token_ids, list) or len(token_ids) < 2:
        raise InvalidRequest("token_ids must be a list of at least two token ids")
    return token_ids


def parse_completions(data: dict[str, Any]) -> GenerateRequest:
    """An OpenAI-like completions request whose prompt is a list of token ids. Raises InvalidRequest."""
    _check_keys("the body", set(data), {"prompt"}, {"prompt", *_SAMPLING, *_NEUTRAL, *_IGNORED})
    for name, values in _NEUTRAL.items():
        if data.get(name) not in values:
            raise InvalidRequest(f"{name} = {data[name]!r} is not supported")
    prompt = data["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt must be a list of token ids: this server takes and gives tokens, not text")
    sampling = {name: data[name] for name in _SAMPLING & set(data)}
    return GenerateRequest("completion", prompt, SamplingParameters(**{"max_tokens": 16, **sampling}))


def completions_answer(model: str, request: GenerateRequest, completions: list[Completion]) -> dict[str, Any]:
    """The OpenAI-like answer; tokens, log-probs, kept tokens and version spans stand in each choice."""
    choices = [
        {
            "index": index,
            "text": "",
            "token_ids": one.token_ids,
            "logprobs": {"token_logprobs": one.log_probs},
            "finish_reason": one.finish_reason,
            "weight_versions": [vars(span) for span in one.spans],
            "kept_token_ids": one.kept_token_ids,
        }
        for index, one in enumerate(completions)
    ]
    generated = sum(len(one.token_ids) for one in completions)
    usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": generated}
    return {"object": "text_completion", "model": model, "choices": choices, "usage": usage}


@dataclass
class Running:
    """A request that was accepted and is not finished."""

    request: GenerateRequest
    prompt: np.ndarray
    """[tokens] int64"""
    stops: frozenset[int]
    keys: np.ndarray
    """[n] uint64, the stream of each sample"""
    completions: list[Completion | None]
    next_sample: int = 0
    unfinished: int = 0
    prompt_logits: torch.Tensor | None = None
    """[V], after the prompt; kept while samples of the request wait for a row"""
    sequences: list[Sequence] = field(default_factory=list)

    @classmethod
    def start(cls, request: GenerateRequest, eos_token_ids: frozenset[int]) -> Running:
        """Accept a checked request."""
        n = request.sampling.n
        stops = eos_token_ids | frozenset(request.sampling.stop_token_ids)
        prompt = np.array(request.prompt_ids, np.int64)
        return cls(request, prompt, stops, stream_keys(request.sampling.seed, n), [None] * n, unfinished=n)


@dataclass(eq=False)
class Sequence:
    """One sample that holds a row of the cache."""

    owner: Running
    index: int
    row: int
    marks: list[tuple[str, int, int]]
    """(epoch, version, first token sampled under it)"""
    prefilled_under: int
    """Count of weight updates when the prompt's keys and values were computed"""
    computed_under: int
    """The same of everything in its row; older than the engine's count where some of it is of older weights"""
    kept: list[list[int]] | None
    prefix: Prefix | None = None
    """Of the first sample of a prompt that was computed in its row: what others may begin with"""
    routes: np.ndarray | None = None
    """[tokens, layers, k], where the request wants the experts of each token"""
    routes_from: int = 0
    """The first token whose experts are known"""

    def spans(self, tokens: int) -> list[VersionSpan]:
        """Of its first `tokens` sampled tokens."""
        ends = [start for _, _, start in self.marks[1:]] + [tokens]
        return [
            VersionSpan(epoch, version, start, end)
            for (epoch, version, start), end in zip(self.marks, ends, strict=True)
            if end > start
        ]
