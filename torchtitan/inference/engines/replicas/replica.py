"""Generation on the trainer's own devices: this rank's part of an engine, driven by GENERATE commands.

Ranks r, r + 1, … of a tensor-parallel group hold one replica of the model; the groups are data parallel. Trainer and
engine take turns with the memory: before training on a batch, the engine goes to sleep; a new version wakes its
weights; the first engine step after that wakes the rest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from torchtitan.config.job_config import Comm
from torchtitan.distributed.collectives import gather_bytes
from torchtitan.errors import EXIT_RETRYABLE
from torchtitan.inference.engines.replicas.replica_pool import (
    ReplicaAnswer,
    Round,
    decode_answers,
    encode_answers,
    replica_name,
)
from torchtitan.inference.types import (
    TAGS,
    Completion,
    GenerateRequest,
    SamplingParameters,
    Tag,
    make_label,
    stream_seed,
)
from torchtitan.models.decoder import Decoder
from torchtitan.models.lora import base_parameters, whole_weights
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.facade import ActorStatus

logger = logging.getLogger(__name__)


def _end_rank(text: str) -> None:
    # Logging may wait for a lock that the hanging thread holds.
    os.write(2, f"\n{text}\n".encode())
    faulthandler.dump_traceback(2)  # what a notebook has put in place of sys.stderr may be no file
    os._exit(EXIT_RETRYABLE)


class SampleRefused(Exception):
    """The engine does not accept the request; the message is the reason."""


class RankEngine(Protocol):
    """One rank's part of an engine. The ranks of a tensor-parallel group make the same calls in the same order and get
    the same results. Nothing happens between two calls."""

    label: str | None
    """Of the weights that it holds (types.make_label); None if they are of no version, or gone"""

    @property
    def busy(self) -> bool:
        """Whether samples are unfinished."""

    def add(self, name: str, prompt_ids: list[int], sampling: SamplingParameters, seed: int, /) -> None:
        """Begin one sample, which `name` tells from all others. Raises SampleRefused."""

    def cancel(self, names: list[str], /) -> None:
        """Drop samples; those that are unknown are passed over."""

    def step(self) -> list[tuple[str, Completion]]:
        """Compute once for all samples; returns those that are finished, by name."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], label: str, /) -> None:
        """Take a complete version: HF parameter names and whole tensors."""

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache."""

    def wake(self, tag: Tag, /) -> None:
        """Take back a part of it, weights first."""

    def close(self) -> None: ...


class Replica:
    """Every rank has one, and all ranks make the same calls. `busy_s` is the time spent generating."""

    def __init__(
        self,
        engine: RankEngine,
        rank: int,
        tensor_parallel_size: int,
        sleeps: bool = False,
        comm: Comm | None = None,
    ):
        """comm: of the run, whose deadlines sleep and waking have."""
        self.number = rank // tensor_parallel_size
        self.busy_s = 0.0
        self._engine = engine
        self._leads = rank % tensor_parallel_size == 0
        self._sleeps = sleeps
        self._asleep: list[Tag] = []
        self._comm = comm or Comm()
        self._has_done: set[str] = set()
        self._groups: dict[str, list[Completion | None]] = {}

    def run(self, round_: Round) -> list[ReplicaAnswer] | None:
        """Generate as the command says (collective). Rank 0 gets the finished requests of all replicas."""
        started = time.perf_counter()
        self._wake_for_generation()
        if self._engine.label != round_.label:
            # Never sample a token with weights of another version, whatever went wrong before.
            raise RuntimeError(f"the engine holds weights {self._engine.label} instead of {round_.label}")
        self._cancel(round_.cancelled)
        answers = [self._add(request) for request in round_.requests[self.number]]
        for _ in range(round_.steps):
            if not self._engine.busy:
                break
            answers += [self._take(name, done) for name, done in self._engine.step()]
        finished = [answer for answer in answers if answer is not None]
        gathered = gather_bytes(encode_answers(finished) if self._leads else b"")
        self.busy_s += time.perf_counter() - started
        if gathered is None:
            return None
        return list(itertools.chain.from_iterable(map(decode_answers, gathered)))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
        """Give the engine a version (collective: the weights are gathered one by one)."""
        self._wake("weights")
        self._engine.load(weights, label)

    def release_memory(self) -> None:
        """Prepare for training: the engine gives back its memory."""
        if self._sleeps and not self._asleep:
            with self._deadline("fall asleep"):
                self._engine.sleep()
            self._asleep = list(TAGS)

    def close(self) -> None:
        self._engine.close()

    def _wake_for_generation(self) -> None:
        if self._asleep and torch.cuda.is_available():
            # The allocator still holds what training has freed, but the engine takes its memory from the device.
            torch.cuda.empty_cache()
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, tag: Tag) -> None:
        if tag in self._asleep:
            with self._deadline(f"wake its {tag}"):
                self._engine.wake(tag)
            self._asleep.remove(tag)

    @contextlib.contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        """End this rank, with a message, where vLLM takes longer than the other ranks would wait for it: a call that
        hangs in the driver cannot be interrupted. The first one allocates pinned memory, so it may take longer."""
        first = what not in self._has_done
        seconds = self._comm.init_timeout_seconds if first else self._comm.train_timeout_seconds
        text = f"vLLM in this rank's process did not {what} within {seconds:g} s, after which other ranks give up too "
        text += "(comm.train_timeout_seconds): this rank ends. It was here:"
        timer = threading.Timer(seconds, _end_rank, [text])
        timer.daemon = True
        timer.start()
        # For a call that does not even let other threads run.
        faulthandler.dump_traceback_later(seconds + 10, exit=True, file=2)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
        self._has_done.add(what)

    def _add(self, request: GenerateRequest) -> ReplicaAnswer | None:
        samples = request.sampling.n
        try:
            for sample in range(samples):
                # The seed is the same on every rank of a tensor-parallel group, whatever else a rank has drawn.
                seed = stream_seed(request.sampling.seed, sample)
                self._engine.add(_name(request.request_id, sample), request.prompt_ids, request.sampling, seed)
        except SampleRefused as error:
            self._engine.cancel([_name(request.request_id, sample) for sample in range(samples)])
            return ReplicaAnswer(request.request_id, refused=str(error))
        self._groups[request.request_id] = [None] * samples
        return None

    def _cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            samples = self._groups.pop(request_id, [])
            self._engine.cancel([_name(request_id, sample) for sample, done in enumerate(samples) if done is None])

    def _take(self, name: str, completion: Completion) -> ReplicaAnswer | None:
        request_id, _, sample = name.rpartition(".")
        samples = self._groups.get(request_id)
        if samples is None:
            return None
        samples[int(sample)] = completion
        finished = [sample for sample in samples if sample is not None]
        if len(finished) < len(samples):
            return None
        del self._groups[request_id]
        return ReplicaAnswer(request_id, finished)


def _name(request_id: str, sample: int) -> str:
    return f"{request_id}.{sample}"


class ReplicaWeights:
    """A trainer.weight_path.WeightPath that publishes every version, since there is no slot to wait for.

    Each version is handed over at the step boundary, parameter by parameter; there is never a second copy of the model.
    """

    def __init__(self, policy: Decoder, replica: Replica, replicas: int, epoch: str, dtype: torch.dtype):
        """replicas: number of the model's replicas over all ranks. dtype: type of the engines' weights."""
        self._policy = policy
        self._replica = replica
        self._replicas = replicas
        self._epoch = epoch
        self._dtype = dtype
        self._version = -1
        self._published = 0
        self._stall_s = 0.0
        self._generated_s = 0.0

    def commit(self, version: int, votes_against: int) -> str:
        """Hand `version` to the engine on every rank, even if the last step was skipped: these are its weights."""
        started = time.perf_counter()
        self._replica.load(self._tensors(), make_label(self._epoch, version))
        self._version = version
        self._published += 1
        self._stall_s += time.perf_counter() - started
        return "published"

    def actors(self) -> Mapping[str, ActorStatus]:
        status = ActorStatus(ActorState.READY, self._version, self._version >= 0, "", 0)
        return {replica_name(number): status for number in range(self._replicas)}

    def states(self) -> Mapping[str, str]:
        return {name: f"{status.state} v{status.version}" for name, status in self.actors().items()}

    def statistics(self) -> dict[str, float]:
        generated = self._replica.busy_s
        figures = {
            "weight_sync/versions_published": float(self._published),
            "weight_sync/versions_skipped": 0.0,
            "time/snapshot_s": 0.0,
            "time/sync_stall_s": self._stall_s,
            "time/generate_s": generated - self._generated_s,
        }
        self._stall_s, self._generated_s = 0.0, generated
        return figures

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The complete model, one gathered parameter at a time (a collective if it is sharded)."""
        return whole_weights(self._policy, base_parameters(self._policy), self._dtype)
