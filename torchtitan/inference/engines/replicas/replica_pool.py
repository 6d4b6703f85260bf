"""The rollouts' side of generation on the trainer's own devices: requests wait here until a command takes them along.

Coroutines of the rollouts' loop submit requests and wait. The trainer's thread collects them into a round, has all
ranks generate, and returns the answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import ActorError, failed_too_often
from torchtitan.inference.answer_checks import check_completions
from torchtitan.inference.types import Completion, GenerateRequest, make_label
from torchtitan.models.shape.checkpoint_shape import vocabulary_of

logger = logging.getLogger(__name__)

# The number of engine steps in a round is chosen so that it takes about this long. Between two rounds, finished
# completions are scored and the trainer looks for a batch.
ROUND_S = 0.25
FIRST_STEPS = 4
MAX_STEPS = 256


@dataclass
class Round:
    """The replicas' next work: accept requests, drop some, and generate for a bounded number of engine steps."""

    label: str
    """Label of the weights that every replica must hold; it generates nothing with others"""
    steps: int
    """Limit of engine steps; a replica without work ends sooner"""
    requests: list[list[GenerateRequest]] = field(default_factory=list)
    """New requests, per replica"""
    cancelled: list[str] = field(default_factory=list)
    """Names of requests whose answer is no longer awaited"""

    def encode(self) -> bytes:
        requests = [_to_json(of_replica) for of_replica in self.requests]
        return json.dumps({**vars(self), "requests": requests}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Round:
        fields = json.loads(data)
        fields["requests"] = [_from_json(of_replica) for of_replica in fields["requests"]]
        return cls(**fields)


def _to_json(requests: list[GenerateRequest]) -> list[dict[str, Any]]:
    return [request.to_json() for request in requests]


def _from_json(requests: list[dict[str, Any]]) -> list[GenerateRequest]:
    return [GenerateRequest.from_json(request) for request in requests]


@dataclass
class ReplicaAnswer:
    """All completions of one request, or the engine's reason for refusing it."""

    request_id: str
    completions: list[Completion] = field(default_factory=list)
    refused: str = ""
    replica: str = ""
    """The name of the replica that it comes from, once it has arrived"""


def encode_answers(answers: list[ReplicaAnswer]) -> bytes:
    if not answers:
        return b""
    rows: list[dict[str, Any]] = []
    for answer in answers:
        completions = [completion.to_json() for completion in answer.completions]
        rows.append({**vars(answer), "completions": completions})
    return json.dumps(rows).encode()


def decode_answers(data: bytes) -> list[ReplicaAnswer]:
    if not data:
        return []
    answers: list[ReplicaAnswer] = []
    for row in json.loads(data):
        completions = [Completion.from_json(completion) for completion in row["completions"]]
        answers.append(ReplicaAnswer(row["request_id"], completions, row["refused"]))
    return answers


@dataclass
class _Waiting:
    request: GenerateRequest
    min_version: int
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[ReplicaAnswer] = field(repr=False)
    replica: int = 0
    version: int | None = None
    """That the replica held when it was given the request"""


class ReplicaPool:
    """Takes the place of InferencePool. Each rank has the weights and memory of its engine: see replica.py."""

    def __init__(self, config: JobConfig, epoch: str, replicas: int):
        self._max_sequences = config.inference.max_sequences
        self._max_retries, self._redone = config.inference.max_retries, 0
        self._vocabulary = vocabulary_of(config)
        self._epoch = epoch
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[str, _Waiting] = {}
        """Requests that no replica has yet, oldest first"""
        self._under_way: dict[str, _Waiting] = {}
        self._cancelled: list[str] = []
        self._loads = [0] * replicas
        self._version: int | None = None
        self._steps = FIRST_STEPS
        self._round_began: float | None = None
        self._closed = False

    # Called in the rollouts' loop

    @property
    def statistics(self) -> Counter[str]:
        return Counter(requests_redone=self._redone, evictions=0, restarts=0)

    @property
    def actors(self) -> dict[str, str]:
        state = "starting" if self._version is None else "ready"
        return {replica_name(number): state for number in range(len(self._loads))}

    def describe_actors(self) -> str:
        return "; ".join(f"{name} {state}" for name, state in self.actors.items()) or "none"

    async def start(self) -> None:
        """The engines start with the trainer's ranks."""

    async def generate(self, request: GenerateRequest, min_version: int = 0, *, shares: str = "") -> list[Completion]:
        """Sample a request with weights of at least `min_version`, however long that takes.

        shares: see InferencePool; here only a replica's load decides.

        Raises:
            UserError: the engine refuses the request, its answers could not be trained on 1 + Inference.max_retries
                times, or the run is closing.
        """
        failures: list[str] = []
        while True:
            answer = await self._answer(request, min_version)
            if answer.refused:
                raise UserError(f"the engine refused request {request.request_id}: {answer.refused}")
            try:
                return check_completions(answer.completions, request.sampling, self._vocabulary)
            except ActorError as error:
                failures.append(f"{answer.replica}: {error}")
            if len(failures) > self._max_retries:
                raise failed_too_often(request.request_id, failures, self._max_retries)
            self._redone += 1

    async def _answer(self, request: GenerateRequest, min_version: int) -> ReplicaAnswer:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise UserError("the run is closing")
            # A retried request keeps its id, so every attempt gets a name of its own.
            self._number += 1
            name = str(self._number)
            waiting = _Waiting(replace(request, request_id=name), min_version, loop, loop.create_future())
            self._waiting[name] = waiting
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._forget(name)
            raise

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            left = [*self._waiting.values(), *self._under_way.values()]
            self._waiting, self._under_way = {}, {}
        for waiting in left:
            waiting.answer.cancel()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._waiting.pop(name, None)
            waiting = self._under_way.pop(name, None)
            if waiting is not None:
                self._loads[waiting.replica] -= waiting.request.sampling.n
                self._cancelled.append(name)

    # Called in the trainer's thread

    def wanted(self, version: int) -> bool:
        """Whether the replicas, which hold `version`, have work."""
        with self._lock:
            return (
                bool(self._under_way)
                or bool(self._cancelled)
                or any(waiting.min_version <= version for waiting in self._waiting.values())
            )

    def begin_round(self, version: int) -> Round:
        """Return the replicas' next work; `finish_round` comes after it."""
        with self._lock:
            self._version = version
            requests: list[list[GenerateRequest]] = [[] for _ in self._loads]
            for name, waiting in list(self._waiting.items()):
                replica = min(range(len(self._loads)), key=self._loads.__getitem__)
                if waiting.min_version > version:
                    continue
                # One request more than fits is handed over, so that the next one is there when one ends.
                if self._loads[replica] >= self._max_sequences:
                    break
                del self._waiting[name]
                waiting.replica, waiting.version = replica, version
                self._loads[replica] += waiting.request.sampling.n
                self._under_way[name] = waiting
                requests[replica].append(waiting.request)
            cancelled, self._cancelled = self._cancelled, []
        self._round_began = time.monotonic()
        return Round(make_label(self._epoch, version), self._steps, requests, cancelled)

    def finish_round(self, answers: list[ReplicaAnswer]) -> None:
        """Hand the answers to their callers."""
        assert self._round_began is not None
        self._pace(time.monotonic() - self._round_began)
        for answer in answers:
            with self._lock:
                waiting = self._under_way.pop(answer.request_id, None)
                if waiting is None:
                    continue  # cancelled meanwhile
                self._loads[waiting.replica] -= waiting.request.sampling.n
            answer.replica = replica_name(waiting.replica)
            for completion in answer.completions:
                completion.actor, completion.asked_at = answer.replica, waiting.version
            waiting.loop.call_soon_threadsafe(_resolve, waiting.answer, answer)

    def _pace(self, seconds: float) -> None:
        """Set the steps of the next round from the duration of this one. Change slowly: a round that ended early says
        little."""
        wanted = self._steps * ROUND_S / max(seconds, 1e-3)
        bounded = min(max(wanted, self._steps / 2), self._steps * 2)
        self._steps = max(1, min(MAX_STEPS, round(bounded)))


def replica_name(number: int) -> str:
    return f"replica-{number}"


def _resolve(future: asyncio.Future[ReplicaAnswer], answer: ReplicaAnswer) -> None:
    if not future.done():
        future.set_result(answer)
