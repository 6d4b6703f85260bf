"""Distillation over the whole vocabulary through the trainer: against plain tensors, on every layout, from a server."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from scripts.make_debug_checkpoint import write_tokenizer
from tests.distributed_launcher import run_distributed
from tests.patience import asynchronous
from tests.unit_tests.trainer.test_stages import Trained, demonstrations, make_config
from torchtitan.config.job_config import JobConfig
from torchtitan.config.sources import Source
from torchtitan.distributed import device
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.server import EngineServer
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import estimate_memory
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.flow.group_maker import Teacher
from torchtitan.rollout.flow.journal import decode_batch, encode_batch
from torchtitan.rollout.types import Batch, Trajectory
from torchtitan.trainer.teaching import hinted

BETA = 0.3
HINT = [5, 3, 4]


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A policy and a teacher of another shape."""
    made = []
    for tied in (True, False):
        directory = tmp_path_factory.mktemp("teaching") / "checkpoint"
        shutil.copytree(tiny_checkpoint("qwen3", tied=tied), directory)
        write_tokenizer(directory)
        made.append(str(directory))
    return made


def configured(checkpoints: list[str], divergence: str, teacher: str | None = None, **lora: Any) -> JobConfig:
    config = make_config("distill", checkpoints)
    config.distill.divergence, config.distill.jsd_beta, config.distill.coefficient = divergence, BETA, 0.7
    config.distill.teacher = config.distill.teacher if teacher is None else teacher
    config.distill.hint = "hint" if teacher == "" else ""
    config.rollout.temperature = 0.8
    for name, value in lora.items():
        setattr(config.lora, name, value)
    return config


def sampled(config: JobConfig, hint: list[int] | None = None) -> Batch:
    """Demonstrations, taken for samples of some policy, of which every other has a hint."""
    batch = demonstrations(make_config("sft", [config.model.hf_assets_path, ""])).next_batch(0)
    for number, sample in enumerate(batch.samples):
        for completion in sample.branches[0].sampled:
            completion.log_probs = [-3.0] * len(completion.token_ids)
            completion.hint_ids = hint if number % 2 else None
    return batch


@pytest.mark.parametrize(
    ("divergence", "teacher", "hint", "column"),
    [
        ("forward_kl", None, None, ""),
        ("reverse_kl", None, HINT, ""),
        ("jsd", "", HINT, "hint"),
        ("reverse_kl", "", HINT, "success"),
    ],
    ids=["another policy", "another policy with a hint", "itself with a hint", "itself with a success (SDPO)"],
)
def test_the_gradient_is_that_of_transformers_in_float64(
    checkpoints: list[str], divergence: str, teacher: str | None, hint: list[int] | None, column: str
) -> None:
    """A sample without a success to read is not trained, and does not count in the mean (SDPO)."""
    import transformers

    config = configured(checkpoints, divergence, teacher)
    config.distill.hint = column
    trainer, batch = Trained(config), sampled(config, hint)
    metrics = trainer.train_batch(batch).metrics
    model, other = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (checkpoints[0], checkpoints[0 if teacher == "" else 1])
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in batch.samples:
        if column == "success" and not sample.is_hinted:
            continue
        prompt, completion = (segment.token_ids for segment in sample.branches[0].segments)
        read = sample.branches[0].sampled[0].hint_ids or prompt
        p = (model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
        with torch.no_grad():
            q = (other(torch.tensor([read + completion])).logits[0, len(read) - 1 : -1] / 0.8).log_softmax(-1)
        mixed = torch.logaddexp(q + torch.tensor(BETA).log(), p + torch.tensor(1 - BETA).log())
        jsd = BETA * q.exp() * (q - mixed) + (1 - BETA) * p.exp() * (p - mixed)
        by_token = {"forward_kl": q.exp() * (q - p), "reverse_kl": p.exp() * (p - q), "jsd": jsd}[divergence]
        total, count = total + by_token.sum(), count + len(completion)
    (0.7 * total / count).backward()
    assert metrics["teacher_kl"] == pytest.approx(total.item() / count, rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.7 * total.item() / count, rel=1e-5)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(
                trainer.gradients[name], weight.grad.float(), rtol=1e-3, atol=2e-6 * float(weight.grad.abs().max() + 1)
            )


def test_the_moving_average_teaches_in_place_of_the_policy(checkpoints: list[str]) -> None:
    """Without hints, the policy differs from its average only by what it has just learnt: against transformers'
    float64, whose teacher has the average of the weights before and after the first step."""
    import transformers

    config = configured(checkpoints, "reverse_kl", "")
    config.grpo.reference_ema_decay, config.rollout.temperature = 0.75, 1.0
    trainer, batch = Trained(config), sampled(config)
    assert trainer.train_batch(sampled(config, HINT)).metrics["teacher_kl"] > 1e-4
    policy, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float64) for _ in range(2)
    )
    with torch.no_grad():
        for name, weight in trainer.policy.named_parameters():
            policy.get_parameter(name).copy_(weight)
            teacher.get_parameter(name).mul_(0.75).add_(0.25 * weight.double())
    total, count = 0.0, 0
    with torch.no_grad():
        for sample in batch.samples:
            prompt, completion = (segment.token_ids for segment in sample.branches[0].segments)
            tokens, predicting = torch.tensor([prompt + completion]), slice(len(prompt) - 1, -1)
            p, q = (model(tokens).logits[0, predicting].log_softmax(-1) for model in (policy, teacher))
            total, count = total + float((p.exp() * (p - q)).sum()), count + len(completion)
    assert trainer.train_batch(batch).metrics["teacher_kl"] == pytest.approx(total / count, rel=1e-3)
    assert total / count > 1e-5


@pytest.mark.parametrize("divergence", ["sampled", "jsd"])
def test_each_source_is_pulled_towards_its_own_teacher(checkpoints: list[str], divergence: str) -> None:
    """Loss and gradients are the sums of those of each source alone with its teacher, summed in float64. One source has
    none, and teaches nothing."""
    config = configured(checkpoints, divergence, "")
    config.rollout.temperature, config.distill.hint = 1.0, ""
    named = {"a": checkpoints[1], "b": checkpoints[0] + "/../checkpoint", "c": "", "d": checkpoints[1]}
    config.source = [Source(name, {"distill.teacher": path}) for name, path in named.items()]
    batch = sampled(config)
    for group, name in zip(batch.groups, itertools.cycle(named), strict=False):
        group.source = name
        for sample in group.samples:
            for completion in sample.branches[0].sampled:
                completion.log_probs = [-2.0] * len(completion.token_ids)
    trainer = Trained(config)
    # The same directory is held once, however it is written.
    assert [*trainer.references] == [os.path.realpath(path) for path in (checkpoints[1], checkpoints[0])]
    shape = read_shape(config)
    assert shape is not None
    held = sum(
        parameter.nbytes for reference in trainer.references.values() for parameter in reference.policy.parameters()
    )
    assert estimate_memory(config, shape, 1).reference == held
    # A policy that moved is another one than its own checkpoint.
    generator = torch.Generator().manual_seed(2)
    noise = [0.05 * torch.randn(parameter.shape, generator=generator) for parameter in trainer.policy.parameters()]

    def figures(trainer: Trained, batch: Batch) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        with torch.no_grad():
            for parameter, moved in zip(trainer.policy.parameters(), noise, strict=True):
                parameter.add_(moved)
        return trainer.train_batch(batch).metrics, {name: grad.double() for name, grad in trainer.gradients.items()}

    together, gradients = figures(trainer, copy.deepcopy(batch))
    loss, kl, taught, count = 0.0, 0.0, 0, 0
    total = {name: torch.zeros_like(tensor) for name, tensor in gradients.items()}
    for name, path in named.items():
        part = Batch(0, [group for group in batch.groups if group.source == name])
        tokens = sum(len(sample.completion_ids) for sample in part.samples)
        count += tokens
        if path:
            alone = configured(checkpoints, divergence, path)
            alone.rollout.temperature = 1.0
            metrics, source_gradients = figures(Trained(alone), copy.deepcopy(part))
            loss, kl, taught = loss + tokens * metrics["loss"], kl + tokens * metrics["teacher_kl"], taught + tokens
            for key, gradient in source_gradients.items():
                total[key] += tokens * gradient
        else:
            assert "teacher_kl" not in figures(Trained(config), copy.deepcopy(part))[0]
    assert kl / taught > 1e-3
    assert together["loss"] == pytest.approx(loss / count, rel=1e-5, abs=1e-7)
    assert together["teacher_kl"] == pytest.approx(kl / taught, rel=1e-5)
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max() + 1e-3)
        torch.testing.assert_close(gradient, total[name] / count, rtol=1e-3, atol=2e-5 * scale)


def test_hinted_prompts_are_computed_once_for_a_teacher(checkpoints: list[str]) -> None:
    """Completions of one prompt with one hint are merged for the teacher as for the policy, in the same order."""
    hint, branches = list(range(20, 60)), []
    for answer in ([3, 4, 5], [3, 4, 6, 7], [8]):
        span = VersionSpan("e", 0, 0, len(answer))
        completion = Completion(answer, [-1.0] * len(answer), "stop", [span], hint_ids=hint)
        branches.append(Branch([Given([1, 2]), completion]))
    policy, states = load_policy(checkpoints[0]).double(), []
    for merged, computed in ((False, 3 * 40 + 2 + 3), (True, 40 + 2 + 3)):
        tokens, layout, active = hinted(branches, merged)
        assert len(tokens) == layout.total == computed
        assert tokens[active].tolist() == [59, 3, 4, 59, 3, 4, 6, 59]
        states.append(policy.hidden_states(tokens, layout.positions, layout, None)[active])
    torch.testing.assert_close(*states)


def figures(checkpoints: list[str], tp: int) -> list[list[float]]:
    """Of two batches each: an in-process teacher; the policy itself, with adapters on its head too; sources with two
    teachers, of which the second batch needs one alone; the policy's moving average, which reads successes."""
    device.set_threads(1, 1)
    found = []
    adapters = {"rank": 2, "target_modules": ["q_proj", "lm_head"]}
    several = configured(checkpoints, "jsd", "")
    several.distill.hint = ""
    several.source = [Source(str(number), {"distill.teacher": path}) for number, path in enumerate(checkpoints[::-1])]
    self_taught = configured([checkpoints[1], ""], "reverse_kl", "", **adapters)
    average = configured([checkpoints[1], ""], "forward_kl", "")
    average.distill.hint, average.grpo.reference_ema_decay = "success", 0.5
    for config in (configured(checkpoints, "jsd"), self_taught, several, average):
        config.parallelism.tensor_parallel_degree = tp
        trainer = Trained(config)
        for number in range(2):
            batch = sampled(config, None if config is several else HINT)
            for group, name in zip(batch.groups, itertools.cycle("01" if number == 0 else "0"), strict=False):
                group.source = name if config is several else group.source
            metrics = trainer.train_batch(batch).metrics
            found.append([metrics[name] or 0.0 for name in ("loss", "grad_norm", "teacher_kl")])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2], ids=["fsdp", "tp"])
def test_two_ranks_teach_as_one_does(checkpoints: list[str], tp: int) -> None:
    alone = figures(checkpoints, 1)
    assert all(value > 1e-4 for row in alone for value in row)
    for rank in run_distributed("tests.unit_tests.trainer.test_teaching:figures", 2, checkpoints=checkpoints, tp=tp):
        assert rank == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in alone]


@asynchronous
async def test_a_server_that_is_asked_for_all_tokens_teaches_what_ranks_do(checkpoints: list[str]) -> None:
    config = configured(checkpoints, "reverse_kl")
    config.rollout.temperature = 1.0
    batch = sampled(config, HINT)
    by_rank = Trained(config).train_batch(copy.deepcopy(batch)).metrics
    policy = load_policy(checkpoints[1])
    server = EngineServer(Engine(policy, 4, 128), "its token")
    port = await server.start("127.0.0.1", 0)
    config.distill.server.url, config.distill.server.backend = f"http://127.0.0.1:{port}", "embedded"
    config.distill.top_k = policy.args.vocab_size - 1
    with mock.patch.dict(os.environ, TORCHTITAN_TEACHER_TOKEN="its token"):
        teacher = Teacher(config.distill)
    try:
        await teacher.teach([Trajectory(sample.branches, sample.finish_reason, "") for sample in batch.samples])
    finally:
        await teacher.close()
        await server.close()
    by_server = Trained(config).train_batch(decode_batch(encode_batch(batch))).metrics
    for name in ("loss", "grad_norm", "teacher_kl"):
        assert by_server[name] == pytest.approx(by_rank[name], rel=1e-3)


def test_a_hint_stands_where_the_template_says(checkpoints: list[str]) -> None:
    config = make_config("distill", checkpoints)
    config.distill.hint, config.distill.hint_template = "answer", "{hint}={prompt}"
    maker = PromptMaker(config, tokenizer := Tokenizer(checkpoints[0]))
    prompt = maker.make({"prompt": "12+34=", "answer": "640"}, 0)
    assert prompt.hint_ids == tokenizer.encode_prompt("640=12+34=")
    assert maker.length(prompt) == len(prompt.hint_ids) > len(prompt.token_ids)
    assert maker.make({"prompt": "12+34="}, 0).hint_ids is None
