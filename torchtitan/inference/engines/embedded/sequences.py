"""Requests to the engine (their JSON forms, what makes one invalid), and the sequences that it generates for them: what
is known of each, and of its row of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field

from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.cache import KeyValueCache
from torchtitan.inference.engines.embedded.forwards import RouteRecorder, stream_keys
from torchtitan.inference.engines.embedded.prefixes import Prefix, PrefixStore
from torchtitan.inference.types import Body, Completion, FinishReason, GenerateRequest, Routes, VersionSpan

# Beyond these bounds logits divided by the temperature overflow, or a request alone fills the memory.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
MAX_SAMPLES = 4096
FIRST_WIDTH = 64
# What ended may take as much memory as the cache where conversations go on from it, and so much less where others can
# only begin with the same instructions.
SINGLE_TURNS_SHARE = 8


class InvalidRequest(UserError):
    """The request cannot be served by any engine with this model: the message says what is wrong."""


class TooLong(InvalidRequest):
    """The request needs more tokens than the engine was started for."""


def _in_bounds(temperature: float) -> float:
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or lie in {MIN_TEMPERATURE:g}..{MAX_TEMPERATURE:g}")
    return temperature


class _Strict(Body):
    model_config = ConfigDict(extra="forbid")


class _Sampling(_Strict):
    """SamplingParameters."""

    max_tokens: int = Field(ge=1)
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: Annotated[float, AfterValidator(_in_bounds)] = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    stop_token_ids: list[int] = []
    seed: int = 0
    routes: bool = False


class GenerateBody(_Strict):
    """GenerateRequest."""

    request_id: str
    prompt_ids: list[int] = Field(min_length=1)
    sampling: _Sampling
    single_turn: bool = False


class ScoreBody(_Strict):
    token_ids: list[int] = Field(min_length=2)
    top: int = Field(default=0, ge=0)


def check_request(request: GenerateRequest, vocab_size: int, max_length: int) -> None:
    """Raise InvalidRequest or TooLong for a request that cannot be served; types are checked too (it may be JSON)."""
    GenerateBody.read(request.to_json(), InvalidRequest)
    prompt, sampling = request.prompt_ids, request.sampling
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(f"prompt_ids must lie in 0..{vocab_size - 1}, got {min(prompt)}..{max(prompt)}")
    needed = len(prompt) + sampling.max_tokens
    if needed > max_length:
        raise TooLong(
            f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} = {needed} exceeds the engine's "
            f"max_length {max_length}"
        )


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

    @property
    def known_routes(self) -> np.ndarray | None:
        """The experts of its tokens, where they are known from the first one on."""
        return self.routes if self.routes_from == 0 else None

    def begin_routes(self, rows: np.ndarray | None, tokens: int) -> None:
        """It begins with so many tokens of another one, which has these rows; None: they are not known, so that what
        comes before the next one is left out of what is told."""
        if self.routes is None:
            return
        if rows is None:
            self.routes_from = max(self.routes_from, tokens)
        else:
            self.routes[:tokens] = rows[:tokens]

    def reported_routes(self, tokens: int) -> Routes | None:
        """Of all but the last of its `tokens` tokens."""
        if self.routes is None:
            return None
        first = min(self.routes_from, tokens - 1)
        return Routes(first, self.routes[first : tokens - 1].copy())

    def spans(self, tokens: int) -> list[VersionSpan]:
        """Of its first `tokens` sampled tokens."""
        ends = [start for _, _, start in self.marks[1:]] + [tokens]
        return [
            VersionSpan(epoch, version, start, end)
            for (epoch, version, start), end in zip(self.marks, ends, strict=True)
            if end > start
        ]


class Rows:
    """The sequences that run; each has a row of `cache`, and of arrays on the host. Rows in use stand first, without
    gaps."""

    def __init__(self, cache: KeyValueCache, count: int, recorder: RouteRecorder | None):
        self._cache, self._recorder = cache, recorder
        self.prefixes = PrefixStore()
        """What others may begin with"""
        self.sequences: list[Sequence] = []
        self.lengths = np.zeros(count, np.int64)
        """Tokens in the cache"""
        self.generated = np.zeros(count, np.int64)
        """Tokens generated"""
        self.limits = np.zeros(count, np.int64)
        """Most tokens that may be"""
        self.last = np.zeros(count, np.int64)
        """The last one, which is not in the cache yet"""
        self.keys = np.zeros(count, np.uint64)
        """The stream of random numbers"""
        self._tokens = np.zeros((count, FIRST_WIDTH), np.int64)
        self._log_probs = np.zeros((count, FIRST_WIDTH), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    def start(self, running: Running, count: int, version: tuple[str, int], updates: int) -> Sequence:
        """The next `count` samples of a request take the rows after the last one in use; returns the first of them."""
        sampling, length = running.request.sampling, len(running.prompt)
        begin, limit = len(self.sequences), sampling.max_tokens
        rows = slice(begin, begin + count)
        self._cache.start_rows(begin, count, length)
        self.lengths[rows], self.generated[rows], self.limits[rows] = length, 0, limit
        self.keys[rows] = running.keys[running.next_sample : running.next_sample + count]
        if limit > self._tokens.shape[1]:
            wider = ((0, 0), (0, limit - self._tokens.shape[1]))
            self._tokens, self._log_probs = np.pad(self._tokens, wider), np.pad(self._log_probs, wider)
        for row in range(begin, begin + count):
            kept: list[list[int]] | None = [] if sampling.truncated else None
            sequence = Sequence(running, running.next_sample, row, [(*version, 0)], updates, updates, kept)
            if sampling.routes and self._recorder is not None:
                self._recorder.begin(sequence, length + limit)
            running.next_sample += 1
            running.sequences.append(sequence)
            self.sequences.append(sequence)
        return self.sequences[begin]

    def stands_at(self, prefix: Prefix) -> bool:
        """Whether what holds these tokens holds nothing after them: a recurrent state is right at its end only."""
        return prefix.sequence is None or self.lengths[prefix.sequence.row] == len(prefix.token_ids)

    def begin_with(self, sequence: Sequence, source: Prefix, tokens: int) -> None:
        """A sequence begins with so many tokens of what another one has computed."""
        if source.sequence is not None:
            self._cache.copy_row(source.sequence.row, sequence.row, 1, tokens)
            sequence.begin_routes(source.sequence.known_routes, tokens)
        else:
            self._cache.write_row(sequence.row, source.copy, tokens)
            sequence.begin_routes(source.routes, tokens)

    def copy(self, row: int, first: int, count: int, tokens: int) -> None:
        """The first tokens of a row for `count` others from `first` on."""
        self._cache.copy_row(row, first, count, tokens)
        for sequence in self.sequences[first : first + count]:
            sequence.begin_routes(self.sequences[row].known_routes, tokens)

    def add(self, first: int, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """One more token for each row from `first` on; both [rows]."""
        used = slice(first, first + len(token_ids))
        rows = np.arange(used.start, used.stop)
        self._tokens[rows, self.generated[used]] = token_ids
        self._log_probs[rows, self.generated[used]] = log_probs
        self.last[used] = token_ids
        self.generated[used] += 1

    def of(self, sequence: Sequence) -> np.ndarray:
        """[tokens] int64, its prompt and what it has sampled."""
        return np.concatenate((sequence.owner.prompt, self._tokens[sequence.row, : self.generated[sequence.row]]))

    def completion(self, sequence: Sequence, reason: FinishReason) -> Completion:
        """What a sequence has sampled."""
        row, count = sequence.row, int(self.generated[sequence.row])
        return Completion(
            token_ids=self._tokens[row, :count].tolist(),
            log_probs=self._log_probs[row, :count].tolist(),
            finish_reason=reason,
            spans=sequence.spans(count),
            kept_token_ids=sequence.kept,
            routes=sequence.reported_routes(len(sequence.owner.prompt) + count),
        )

    def keep(self, sequence: Sequence) -> None:
        """What a sequence that ends has computed is there for others."""
        length = int(self.lengths[sequence.row])
        routes = sequence.known_routes
        if routes is not None:
            routes = routes[:length].copy()
        self.prefixes.keep(self.of(sequence)[:length], self._cache.read_row(sequence.row, length), routes)
        limit = self._cache.spare_bytes(0, 0, 0)
        self.prefixes.trim(limit // SINGLE_TURNS_SHARE if sequence.owner.request.single_turn else limit)

    def release(self, sequence: Sequence) -> None:
        """A sequence is over: the last row takes its row's place."""
        row, moved = sequence.row, self.sequences.pop()
        if moved is sequence:
            return
        self._cache.move_row(moved.row, row, int(self.lengths[moved.row]))
        for state in (self.lengths, self.generated, self.limits, self.last, self.keys, self._tokens, self._log_probs):
            state[row] = state[moved.row]
        moved.row = row
        self.sequences[row] = moved
