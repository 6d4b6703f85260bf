"""The embedded engine: continuous batching over the trainer's own decoder.

    engine = Engine(load_policy(directory), max_sequences=256, max_length=2048)
    completions = engine.generate([GenerateRequest("a", prompt_ids, SamplingParameters(max_tokens=48, n=8))])

One thread drives it: `submit`, then `step` until everything is finished; weights change between two steps.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from torchtitan.inference.engines.embedded.admission import Admission
from torchtitan.inference.engines.embedded.cache import KeyValueCache
from torchtitan.inference.engines.embedded.forwards import (
    BatchSampler,
    Forwards,
    RouteRecorder,
    SequencePart,
    packs,
    rescore,
)
from torchtitan.inference.engines.embedded.prefixes import Prefix
from torchtitan.inference.engines.embedded.sequences import Rows, Running, Sequence, TooLong, check_request
from torchtitan.inference.engines.embedded.weights import EngineWeights
from torchtitan.inference.types import TAGS, Completion, FinishReason, GenerateRequest, Tag
from torchtitan.models.decoder import Decoder
from torchtitan.models.fused_projections import fuse_projections
from torchtitan.utils.machine import return_freed_memory
from torchtitan.weight_sync.memory.staging import WeightsRefused

Finished = list[tuple[str, list[Completion]]]


class Poisoned(Exception):
    """A weight update failed half-way: nothing may be sampled until a whole version was applied."""


class NonFiniteLogits(Exception):
    """The weights in use gave NaN."""


@dataclass
class Statistics:
    """Counters since the engine was made."""

    steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    """Of prompts, which another sequence had computed"""
    finished_requests: int = 0
    aborted_requests: int = 0
    versions_applied: int = 0
    apply_seconds: float = 0.0
    drain_seconds: float = 0.0
    """Before updates, while running requests were let finish"""


class Engine:
    """Samples completions with log-probs, many sequences at a time.

    Log-probs are those of the trainer: same modules, same log-softmax over fp32 logits divided by the temperature, over
    the kept tokens where sampling is truncated. In fp32 on a CPU it computes at sizes at which this processor's kernels
    give a token the same bits whatever else is in the batch, as the trainer does (models/layers/batch_invariance.py):
    where such sizes are found, all log-probs of one version equal the trainer's to the last bit. Where they are not,
    and for other types and devices, `exact` rescores every completion that one version sampled with the trainer's own
    forward when it finishes, which leaves only what differs between two packs of the trainer itself.

    Args:
        policy: whole, on the device it will run on. The engine takes it over: its projections are fused.
        max_sequences: sequences that generate at a time; more wait.
        max_length: tokens of prompt and completion together.
        eos_token_ids: tokens that end a completion; the model's own by default.
        in_flight_kv: what running sequences do with keys and values of older weights.
        exact: rescore finished completions, at the price of one more forward.
        cache_bytes: limit of the cache's memory; 0 for none.

    Raises UserError where the cache would not even hold short sequences.
    """

    def __init__(
        self,
        policy: Decoder,
        max_sequences: int = 256,
        max_length: int = 4096,
        eos_token_ids: tuple[int, ...] | None = None,
        *,
        in_flight_kv: Literal["keep", "recompute"] = "keep",
        exact: bool = False,
        cache_bytes: int = 0,
    ):
        self.policy = policy.eval().requires_grad_(False)
        fuse_projections(policy)
        self.args = policy.args
        self.device, self.dtype = policy.lm_head.weight.device, policy.lm_head.weight.dtype
        self.max_length, self.in_flight_kv, self.exact = max_length, in_flight_kv, exact
        self.eos_token_ids = frozenset(self.args.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.weights = EngineWeights(policy, self._progress)
        self.epoch, self.version = "", 0
        self.paused = self.poisoned = False
        self.poison_reason = ""
        """Why the weights in use turned out not to be the version's, where that is why the engine is poisoned"""
        self.asleep: set[Tag] = set()
        """Memory that it has given back"""
        self.admission_paused = False
        """Requests that have not begun wait, the others go on: what a weight update waits for in drain mode"""
        self.statistics = Statistics()
        self.waiting = 0
        """Samples that wait for a row"""
        self._waiting: deque[Running] = deque()
        self._requests: dict[str, Running] = {}
        self._recorder = None if policy.args.experts is None else RouteRecorder(policy)
        self._finished: list[Running] = []
        self._ended: list[tuple[Running, Completion]] = []
        self._failures: dict[str, str] = {}
        self._updates = 0
        self._over_whole_sequences = False
        self.sizes = policy.invariant_sizes()
        """At which its results do not depend on the batch"""
        with torch.inference_mode():
            self._cache = KeyValueCache(
                self.args, max_sequences, max_length, cache_bytes, self.dtype, self.device, self.sizes
            )
            if exact:
                for layer in policy.model.layers:
                    layer.register_forward_pre_hook(self._progress)
            self._forwards = Forwards(policy, self._cache, max_length)
        self._rows = Rows(self._cache, self._cache.whole_rows(max_sequences), self._recorder)
        self._sampler: BatchSampler | None = None

    # Requests

    @property
    def running(self) -> int:
        """Sequences that hold a row."""
        return len(self._rows)

    @property
    def progressed_at(self) -> float:
        """When it last got on within what it is doing (time.monotonic): to the next layer, or the next weight."""
        return self._cache.touched_at

    @property
    def computes_whole(self) -> bool:
        """Whether it is in a forward over whole sequences on a CPU. There, a layer over a long prompt is one kernel,
        which may take longer than an engine may be silent, and in which only processor time shows that it gets on."""
        return self._over_whole_sequences and self.device.type == "cpu"

    @contextlib.contextmanager
    def over_whole_sequences(self) -> Iterator[None]:
        """For a forward over whole sequences, see `computes_whole`."""
        self._over_whole_sequences = True
        try:
            yield
        finally:
            self._over_whole_sequences = False

    def _progress(self, *_: object) -> None:
        self._cache.touched_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._requests)

    @property
    def is_stopped(self) -> bool:
        """Whether `step` must do nothing, even if requests wait."""
        return self.paused or self.poisoned or bool(self.asleep)

    @property
    def has_sampled(self) -> bool:
        """Whether a request is under way that has sampled something; only the first in the queue can be among them."""
        return bool(self._rows) or (bool(self._waiting) and self._waiting[0].next_sample > 0)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest for one that cannot be served, ValueError for an id in use."""
        check_request(request, self.args.vocab_size, self.max_length)
        length = len(request.prompt_ids) + request.sampling.max_tokens
        if self._cache.room(length, 0) < 1:
            raise TooLong(f"{length} tokens do not fit into the cache's {self._cache.max_bytes} bytes")
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is running already")
        running = Running.start(request, self.eos_token_ids)
        self._requests[request.request_id] = running
        self._waiting.append(running)
        self.waiting += request.sampling.n

    def abort(self, request_id: str) -> None:
        """Drop a request, where it is still there."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return
        for sequence in list(running.sequences):
            self._release(sequence, "abort")
        if running in self._waiting:
            self._waiting.remove(running)
            self.waiting -= running.request.sampling.n - running.next_sample
        self.statistics.aborted_requests += 1

    def abort_all(self) -> None:
        """Drop every request."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def pause(self) -> None:
        """Make `step` do nothing until `resume`; requests are kept."""
        self.paused = True

    def resume(self) -> None:
        """End a pause."""
        self.paused = False

    def generate(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        """Submit and run to the end: per request, its n completions. Raises NonFiniteLogits where one failed."""
        for request in requests:
            self.submit(request)
        wanted = {request.request_id for request in requests}
        done: dict[str, list[Completion]] = {}
        while wanted - done.keys():
            if self.paused or self.asleep or self.admission_paused:
                raise RuntimeError("the engine is paused or asleep, or holds back what has not begun")
            done.update(self.step())
            failures = self.take_failures()
            if failures:
                raise NonFiniteLogits("; ".join(failures.values()))
        return [done[request.request_id] for request in requests]

    # Steps

    def step(self) -> Finished:
        """Admit what fits, give every running sequence one more token, and return the requests that are finished.

        Requests whose log-probs are not finite are dropped; `take_failures` tells them. Raises Poisoned after a failed
        weight update.
        """
        if self.poisoned:
            raise Poisoned("a weight update failed half-way; waiting for a whole version")
        if self.is_stopped:
            return []
        with torch.inference_mode():
            while self._waiting and self._admit():
                pass
            if self._rows:
                self._decode()
            if self._ended:
                self._rescore()
        self.statistics.steps += 1
        finished, self._finished = self._finished, []
        self.statistics.finished_requests += len(finished)
        answers: list[tuple[str, list[Completion]]] = []
        for running in finished:
            completions = [completion for completion in running.completions if completion is not None]
            answers.append((running.request.request_id, completions))
        return answers

    def take_failures(self) -> dict[str, str]:
        """Requests that failed since the last call, with the reason."""
        failures, self._failures = self._failures, {}
        return failures

    def _admit(self) -> bool:
        """Give waiting samples rows, compute their prompts (what several begin with, once) and sample their first
        tokens. Returns whether more can follow at once: what was computed now is what the next one begins with."""
        admission = Admission(first_row=len(self._rows))
        while self._waiting and self._give_rows(self._waiting[0], admission):
            pass
        if not admission.samples:
            return False
        self._compute_prompts(admission)
        self._sample_first_tokens(admission)
        return admission.waits_for_prompt

    def _give_rows(self, running: Running, admission: Admission) -> bool:
        """Give the next samples of the first waiting request rows, as many as fit. False where nothing more can join
        this admission."""
        rows, prompt, used = self._rows, running.prompt, len(self._rows)
        length = len(prompt) + running.request.sampling.max_tokens
        count = self._samples_that_fit(running, length)
        if count <= 0:
            return False
        sibling = self._computed_sibling(running)
        source: Prefix | None = None
        shared = 0
        if sibling is not None:
            admission.copies.append((sibling.row, used, count, len(prompt)))
        else:
            # The last token is computed in any case: what comes after it is sampled.
            source, shared = rows.prefixes.find(prompt[:-1], rows.stands_at if self.args.delta_layers else None)
            if admission.has_to_wait(source, len(prompt) - shared):
                return False
            admission.compute(running, SequencePart(prompt, used, shared))
            if count > 1:
                admission.copies.append((used, used + 1, count - 1, len(prompt)))
        rows.prefixes.trim(self._cache.spare_bytes(used + count, length, used))
        self._cache.reserve(used + count, length, used)
        started = rows.start(running, count, (self.epoch, self.version), self._updates)
        self.waiting -= count
        if source is not None:
            rows.begin_with(started, source, shared)
            self.statistics.reused_tokens += shared
        if sibling is None:
            started.prefix = rows.prefixes.begin(prompt, started)
            admission.prefixes.append(started.prefix)
        admission.samples.append((running, count))
        if running.next_sample == running.request.sampling.n:
            self._waiting.popleft()
        return True

    def _samples_that_fit(self, running: Running, length: int) -> int:
        """How many more samples of a request, of at most `length` tokens each, can have rows; none while those that
        have not begun are held back."""
        if self.admission_paused and running.next_sample == 0:
            return 0
        used = len(self._rows)
        return min(running.request.sampling.n - running.next_sample, self._cache.room(length, used) - used)

    def _computed_sibling(self, running: Running) -> Sequence | None:
        """A sample of the request whose row has the prompt, computed with the weights in use."""
        for sequence in running.sequences:
            # A recurrent state is that of all tokens so far: it must not have gone on.
            ends_there = not self.args.delta_layers or self._rows.lengths[sequence.row] == len(running.prompt)
            if sequence.prefilled_under == self._updates and ends_there:
                return sequence
        return None

    def _compute_prompts(self, admission: Admission) -> None:
        for prefills in (admission.full_prompts, admission.prompt_ends):
            if not prefills:
                continue
            parts = [part for _, part in prefills]
            logits = self._forward_prompts(parts)
            if self._recorder is not None:
                self._recorder.note([(self._rows.sequences[part.row], part.start, part.tokens) for part in parts])
            for (running, _), row_logits in zip(prefills, logits, strict=True):
                running.prompt_logits = row_logits
        for prefix in admission.prefixes:
            prefix.computed = True
        for row, target, count, length in admission.copies:
            self._rows.copy(row, target, count, length)

    def _sample_first_tokens(self, admission: Admission) -> None:
        """Sample every admitted sample's first token, from what its prompt gave."""
        logits = []
        for running, count in admission.samples:
            assert running.prompt_logits is not None
            logits.append(running.prompt_logits.expand(count, -1))
            if running.next_sample == running.request.sampling.n:
                running.prompt_logits = None
        # It was for the rows before these.
        self._sampler = None
        self._emit(admission.first_row, self._make_sampler(admission.first_row), torch.cat(logits))

    def _forward_prompts(self, parts: list[SequencePart]) -> torch.Tensor:
        self.statistics.prefilled_tokens += sum(part.tokens for part in parts)
        with self.over_whole_sequences():
            return self._forwards.prompts(parts)

    def _decode(self) -> None:
        """One more token for every row."""
        rows = self._rows
        used = len(rows)
        if self._sampler is None:
            self._sampler = self._make_sampler(0)
        width = self._cache.whole_rows(used)
        # Dummies begin a sequence of token 0 in rows that are not in use.
        rows.lengths[used:width] = rows.last[used:width] = 0
        logits = self._forwards.next_tokens(rows.lengths[:width], rows.last[:width], used)
        if self._recorder is not None:
            self._recorder.note([(sequence, int(rows.lengths[sequence.row]), 1) for sequence in rows.sequences])
        rows.lengths[:used] += 1
        self._emit(0, self._sampler, logits)

    def _make_sampler(self, first: int) -> BatchSampler:
        parameters = [sequence.owner.request.sampling for sequence in self._rows.sequences[first:]]
        return BatchSampler(parameters, self._rows.keys[first : len(self._rows)].copy(), self.device)

    def _emit(self, first: int, sampler: BatchSampler, logits: torch.Tensor) -> None:
        """Sample rows [first, B) from logits, record the tokens, and release the rows that are finished."""
        rows = self._rows
        used = len(rows)
        choice = sampler(logits, rows.generated[first:used])
        rows.add(first, choice.token_ids, choice.log_probs)
        self.statistics.generated_tokens += used - first
        sequences = rows.sequences[first:]
        if choice.kept is not None:
            for sequence, kept_ids in zip(sequences, choice.kept, strict=True):
                if sequence.kept is not None:
                    sequence.kept.append(kept_ids)
        if not np.isfinite(choice.log_probs).all():
            broken = [
                sequence for sequence, value in zip(sequences, choice.log_probs, strict=True) if not np.isfinite(value)
            ]
            self._fail(broken)
            # What failed may have been released from rows before `first`, and new rows have taken their places.
            first, sequences = 0, list(rows.sequences)
        stopped = [sequence for sequence in sequences if int(rows.last[sequence.row]) in sequence.owner.stops]
        for sequence in stopped:
            self._release(sequence, "stop")
        left = slice(first, len(rows))
        full = np.flatnonzero(rows.generated[left] >= rows.limits[left])
        # From the end, so that no row that is still to be released is moved.
        for row in full[::-1]:
            self._release(rows.sequences[first + row], "length")

    def _fail(self, broken: list[Sequence]) -> None:
        message = f"log-probs under version {self.version} are not finite"
        for sequence in broken:
            self._cache.clear_row(sequence.row)
        for request_id in {sequence.owner.request.request_id for sequence in broken}:
            self.abort(request_id)
            self._failures[request_id] = message

    def _release(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sample is over: make its completion, and free its row."""
        rows, running = self._rows, sequence.owner
        completion = rows.completion(sequence, reason)
        running.completions[sequence.index] = completion
        running.sequences.remove(sequence)
        if sequence.prefix is not None:
            rows.prefixes.drop(sequence.prefix)
        if reason != "abort" and sequence.computed_under == self._updates:
            rows.keep(sequence)
        rows.release(sequence)
        self._sampler = None
        if reason == "abort":
            return
        if self.exact and len(completion.spans) == 1:
            self._ended.append((running, completion))
        running.unfinished -= 1
        if running.unfinished == 0:
            del self._requests[running.request.request_id]
            self._finished.append(running)

    def _rescore(self) -> None:
        ended, self._ended = self._ended, []
        with self.over_whole_sequences():
            rescore(
                self.policy, [(run.request.prompt_ids, done, run.request.sampling.temperature) for run, done in ended]
            )

    # Memory

    def sleep(self, level: int) -> bool:
        """Give the KV cache back, with level 2 the weights too; False, and nothing has changed, while requests run.

        At level 1 the weights stay: they are in host memory already. Dropped ones poison the engine until a whole
        version has been applied.
        """
        if self._requests:
            return False
        if "kv_cache" not in self.asleep:
            self._rows.prefixes.clear()
            self._cache.release()
        if level == 2:
            self.poisoned, self.poison_reason = True, "its weights were dropped when it fell asleep"
            self.weights.drop()
        self._sampler = None
        self.asleep = set(TAGS)
        return_freed_memory()
        return True

    def wake(self, tags: Collection[Tag]) -> None:
        """Take these parts of its memory again; the KV cache not before the weights."""
        if tags and "weights" in self.asleep:
            self.weights.take()
            self.asleep.discard("weights")
        if "kv_cache" in self.asleep and "kv_cache" in tags:
            with torch.inference_mode():
                self._cache.take()
            self.asleep.discard("kv_cache")

    # Weights

    def apply_weights(self, epoch: str, version: int, tensors: Mapping[str, torch.Tensor]) -> float:
        """Replace all weights, or merge adapters into the base's, between two steps; returns the seconds it took.

        tensors: parameter name -> whole tensor, any floating type; tied weights under one of their names or both. Or
        adapters, see weights.py. Raises WeightsRefused, with nothing changed, where names or shapes are not the
        model's, or the weights are asleep. Anything that fails later poisons the engine until a whole version has been
        applied.
        """
        if "weights" in self.asleep:
            raise WeightsRefused("the engine is asleep")
        begin = time.perf_counter()
        change = self.weights.plan(tensors)
        self.poisoned = True
        self._rows.prefixes.clear()
        with torch.no_grad():
            change()
        self.epoch, self.version = epoch, version
        self._updates += 1
        for sequence in self._rows.sequences:
            generated = int(self._rows.generated[sequence.row])
            sequence.marks = [mark for mark in sequence.marks if mark[2] < generated]
            sequence.marks.append((epoch, version, generated))
        if self.in_flight_kv == "recompute":
            self._recompute()
        self.poisoned, self.poison_reason = False, ""
        seconds = time.perf_counter() - begin
        self.statistics.versions_applied += 1
        self.statistics.apply_seconds += seconds
        return seconds

    @torch.inference_mode()
    def _recompute(self) -> None:
        """Keys and values of all rows anew, under the weights in use."""
        # The last token is not in the cache yet: the next step puts it there.
        parts = [SequencePart(self._rows.of(sequence)[:-1], sequence.row) for sequence in self._rows.sequences]
        for pack in packs(parts, lambda part: part.tokens):
            self._forward_prompts(pack)
        for sequence in self._rows.sequences:
            sequence.computed_under = self._updates
