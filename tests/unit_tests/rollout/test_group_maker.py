"""Distillation from a teacher that a server has: the same as from one that the trainer's ranks hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.patience import asynchronous
from tests.unit_tests.inference.json_server import serving
from tests.unit_tests.trainer.test_gradient_independence import LONGEST, make_batch
from torchtitan.config.job_config import JobConfig
from torchtitan.config.training_tables import Distill, TeacherServer
from torchtitan.distributed.placement import ParallelDims
from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.server import EngineServer
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.rollout.flow.group_maker import Teacher, make_sample
from torchtitan.rollout.flow.journal import decode_batch, encode_batch
from torchtitan.rollout.types import Batch, Trajectory
from torchtitan.trainer.policy_trainer import PolicyTrainer

FIGURES = ("loss", "grad_norm", "teacher_kl")


async def taught(teacher_path: Path) -> Batch:
    """A batch whose tokens a server has scored, on its way to another rank."""
    server = EngineServer(Engine(load_policy(teacher_path), 4, 128), "its token")
    port = await server.start("127.0.0.1", 0)
    with mock.patch.dict(os.environ, TORCHTITAN_TEACHER_TOKEN="its token"):
        teacher = Teacher(Distill(server=TeacherServer(f"http://127.0.0.1:{port}", "embedded")))
    batch = make_batch(0)
    try:
        await teacher.teach([Trajectory(sample.branches, sample.finish_reason, "") for sample in batch.samples])
    finally:
        await teacher.close()
        await server.close()
    return decode_batch(encode_batch(batch))


def train(config: JobConfig, batch: Batch) -> list[float]:
    trainer = PolicyTrainer(config, ParallelDims(1, 1, 1, world_size=1, rank=0))
    metrics = trainer.train_batch(batch).metrics
    return [metrics[name] or 0.0 for name in FIGURES]


@asynchronous
async def test_a_server_teaches_what_ranks_do(tiny_checkpoint: Callable[..., Path]) -> None:
    teacher = tiny_checkpoint("qwen3", tied=False)
    config = JobConfig()
    config.job.stage = "distill"
    config.model.hf_assets_path = str(tiny_checkpoint("qwen3", tied=True))
    config.rollout.max_completion_tokens = LONGEST
    config.distill.server.url = "http://localhost"
    by_server = train(config, await taught(teacher))
    config.distill.teacher, config.distill.server.url = str(teacher), ""
    assert by_server == pytest.approx(train(config, make_batch(0)), rel=1e-4)
    assert min(by_server) > 1e-3


ROWS = [None, {"5": {"logprob": -0.5}}, {"7": {"logprob": -1.5}, "9": {"logprob": -0.1}}]


@pytest.mark.parametrize(
    ("backend", "path", "answer"),
    [
        ("vllm", "/v1/completions", {"choices": [{"prompt_logprobs": ROWS}]}),
        ("sglang", "/generate", {"meta_info": {"input_token_logprobs": [[None, 3], [-0.5, 5], [-1.5, 7]]}}),
    ],
)
@asynchronous
async def test_answers_of_engines_are_read(backend: Any, path: str, answer: Any) -> None:
    """Shapes as the engines' servers have them."""
    asked: list[tuple[str, Any]] = []

    def post(path: str, body: bytes) -> tuple[int, Any]:
        asked.append((path, json.loads(body)))
        return 200, answer if len(asked) == 1 else {"other": 1}

    with serving(post) as url:
        teacher = Teacher(Distill(server=TeacherServer(url, backend)))
        assert await teacher.score([3, 5, 7]) == [-0.5, -1.5]
        assert asked[0][0] == path and [3, 5, 7] in asked[0][1].values()
        with pytest.raises(
            UserError, match=f"distill.server.url = '{url}' returns no log-probs: {path} did not answer as"
        ):
            await teacher.score([3, 5, 7])
        await teacher.close()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"7": {"logprob": -9999.0}}, "the log-prob of token 2 is -9999"),
        ({"7": {"logprob": 0.2}}, "the log-prob of token 2 is 0.2, above 0"),
        ({"7": {"logprob": -0.5}, "9": {"logprob": 0.3}}, "one of the likeliest tokens"),
        ({"7": {"logprob": -0.5}, "12": {"logprob": -0.1}}, "token 12 is not of the run's vocabulary"),
    ],
)
@asynchronous
async def test_a_teachers_answer_that_cannot_be_is_refused(row: Any, reason: str) -> None:
    rows = [None, {"5": {"logprob": -0.5}, "9": {"logprob": -1.0}}, {"1": {"logprob": -2.0}, **row}]
    with serving(lambda path, body: (200, {"choices": [{"prompt_logprobs": rows}]})) as url:
        config = Distill(server=TeacherServer(url, "vllm"), divergence="forward_kl")
        config.top_k = 2
        teacher = Teacher(config, vocabulary=12)
        with pytest.raises(UserError, match=reason):
            await teacher.ask([3, 5, 7])
        await teacher.close()


@asynchronous
async def test_a_server_that_fails_is_asked_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.rollout.flow.group_maker.PAUSE_S", 0.0)
    asked: list[str] = []

    def post(path: str, body: bytes) -> tuple[int, Any]:
        asked.append(path)
        return 500, {"error": "out of memory"}

    with serving(post) as url:
        teacher = Teacher(Distill(server=TeacherServer(url)))
        with pytest.raises(UserError, match="500: .*out of memory"):
            await teacher.score([3, 5])
        await teacher.close()
    assert len(asked) == 3


def test_of_a_long_reference_answer_the_end_goes_with_a_sample() -> None:
    answer = "def test(): ...\n" * 10_000 + "#### 18"
    shown = make_sample(Trajectory([], "stop", ""), 1.0, {}, answer).extra["answer"]
    assert answer.endswith(shown) and 100 < len(shown) <= 1000
    logged = Trajectory([], "stop", "", extra={"answer": "of a reward function"})
    assert make_sample(logged, 1.0, {}, answer).extra == logged.extra
