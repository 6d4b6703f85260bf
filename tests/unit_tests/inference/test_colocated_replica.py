"""Generation on the trainer's own devices, with an engine that is a few lines of Python."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.distributed_launcher import run_distributed
from tests.patience import PATIENCE_S
from torchtitan.config.job_config import Comm
from torchtitan.errors import EXIT_RETRYABLE
from torchtitan.inference.engines.replicas.replica import Replica, SampleRefused
from torchtitan.inference.engines.replicas.replica_pool import ReplicaAnswer, Round, decode_answers, encode_answers
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, Tag, VersionSpan

LABEL = "e1-x/3"


class FakeEngine:
    """Finishes a sample after as many steps as its prompt's first token says; notes what is asked of it."""

    def __init__(self, sleep_level: int = 1):
        self.label: str | None = None
        self.calls: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self._left: dict[str, int] = {}
        self._sleep_level = sleep_level

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def add(self, name: str, prompt_ids: list[int], sampling: SamplingParameters, seed: int) -> None:
        if len(prompt_ids) > 8:
            raise SampleRefused("too long")
        self._left[name] = prompt_ids[0]

    def cancel(self, names: list[str]) -> None:
        for name in names:
            self._left.pop(name, None)

    def step(self) -> list[tuple[str, Completion]]:
        assert self.label is not None
        self._left = {name: left - 1 for name, left in self._left.items()}
        done = [name for name, left in self._left.items() if left <= 0]
        self.cancel(done)
        return [(name, completion(name)) for name in done]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
        self.calls.append("load")
        self.loaded, self.label = dict(weights), label

    def sleep(self) -> None:
        self.calls.append("sleep")
        if self._sleep_level == 2:
            self.label = None

    def wake(self, tag: Tag) -> None:
        self.calls.append(f"wake {tag}")

    def close(self) -> None:
        self.calls.append("close")


def completion(name: str) -> Completion:
    return Completion([int(name.rpartition(".")[2])], [-1.0], "stop", [VersionSpan("e1-x", 3, 0, 1)])


def request(name: str = "a", steps: int = 1, n: int = 2, length: int = 2) -> GenerateRequest:
    return GenerateRequest(name, [steps] * length, SamplingParameters(8, n, seed=5))


def replica(engine: FakeEngine | None = None, **options: Any) -> tuple[Replica, FakeEngine]:
    engine = engine or FakeEngine()
    made = Replica(engine, rank=0, tensor_parallel_size=1, **options)
    made.load([], LABEL)
    engine.calls.clear()
    return made, engine


# What travels


def test_rounds_and_answers_survive_the_wire() -> None:
    sent = Round(LABEL, 7, [[request("a"), request("b", n=3)], []], ["c"])
    assert Round.decode(sent.encode()) == sent
    answers = [ReplicaAnswer("a", [completion("a.0")]), ReplicaAnswer("b", refused="too long")]
    assert decode_answers(encode_answers(answers)) == answers
    assert decode_answers(encode_answers([])) == []


# A rank's replica


def test_a_group_comes_back_whole_and_in_order() -> None:
    made, _ = replica()
    assert made.run(Round(LABEL, 1, [[request("slow", steps=3, n=3), request("quick")]])) == [
        ReplicaAnswer("quick", [completion("quick.0"), completion("quick.1")])
    ]
    assert made.run(Round(LABEL, 1, [[]])) == []
    answers = made.run(Round(LABEL, 5, [[]]))
    assert answers is not None
    assert [sample.token_ids for sample in answers[0].completions] == [[0], [1], [2]]


def test_a_refused_request_leaves_the_others_alone() -> None:
    made, engine = replica()
    answers = made.run(Round(LABEL, 4, [[request("long", length=9), request("a")]]))
    assert answers is not None
    assert [(answer.request_id, answer.refused) for answer in answers] == [("long", "too long"), ("a", "")]
    assert not engine.busy


def test_cancelled_requests_are_dropped() -> None:
    made, engine = replica()
    made.run(Round(LABEL, 1, [[request("a", steps=9)]]))
    assert engine.busy
    assert made.run(Round(LABEL, 4, [[]], cancelled=["a", "unknown"])) == []
    assert not engine.busy


def test_no_token_with_other_weights_than_the_order_names() -> None:
    made, _ = replica()
    with pytest.raises(RuntimeError, match="holds weights e1-x/3 instead of e1-x/4"):
        made.run(Round("e1-x/4", 1, [[request()]]))


def test_memory_goes_back_and_forth() -> None:
    """Weights wake for a version, the KV cache only for its first tokens."""
    made, engine = replica(sleeps=True)
    made.run(Round(LABEL, 1, [[]]))
    assert engine.calls == []
    made.release_memory()
    made.release_memory()
    assert engine.calls == ["sleep"]
    engine.calls.clear()
    made.load([], LABEL)
    assert engine.calls == ["wake weights", "load"]
    engine.calls.clear()
    made.run(Round(LABEL, 1, [[]]))
    assert engine.calls == ["wake kv_cache"]


def hang_in_first_sleep() -> None:
    made, engine = replica(sleeps=True)
    Comm.init_timeout_seconds = 1.0  # type: ignore[assignment, method-assign]
    engine.sleep = lambda: time.sleep(PATIENCE_S)  # type: ignore[method-assign]
    sys.stderr = io.StringIO()  # no file, as in a notebook
    made.release_memory()


@pytest.mark.slow
def test_an_engine_that_does_not_fall_asleep_ends_its_rank_with_a_message() -> None:
    code = "from tests.unit_tests.inference import test_colocated_replica as t; t.hang_in_first_sleep()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == EXIT_RETRYABLE
    assert "did not fall asleep within 1 s, after which other ranks give up too" in ended.stderr
    assert "in release_memory" in ended.stderr


def test_weights_that_sleep_has_dropped_do_not_generate() -> None:
    made, engine = replica(FakeEngine(sleep_level=2), sleeps=True)
    made.release_memory()
    with pytest.raises(RuntimeError, match="holds weights None"):
        made.run(Round(LABEL, 1, [[request()]]))
    made.load([], LABEL)
    assert made.run(Round(LABEL, 1, [[request()]]))
    assert engine.calls[-1] == "load"


def generate_on_four_ranks(label: str) -> Any:
    """Two replicas of two ranks; what this rank's replica is called and what rank 0 gets."""
    import torch.distributed as dist

    made = Replica(FakeEngine(), rank=dist.get_rank(), tensor_parallel_size=2)
    made.load([], label)
    answers = made.run(Round(label, 4, [[request("a")], [request("b"), request("c", length=9)]]))
    return [made.number, None if answers is None else json.loads(encode_answers(answers))]


@pytest.mark.slow
def test_every_group_of_ranks_answers_once() -> None:
    seen = run_distributed("tests.unit_tests.inference.test_colocated_replica:generate_on_four_ranks", 4, label=LABEL)
    assert [number for number, _ in seen] == [0, 0, 1, 1]
    assert [answers for _, answers in seen[1:]] == [None] * 3
    assert [(answer["request_id"], answer["refused"]) for answer in seen[0][1]] == [
        ("a", ""), ("c", "too long"), ("b", ""),
    ]  # fmt: skip
