"""Supervised fine-tuning and distillation: their gradients, the same on every layout, and a run that is resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scripts.make_debug_checkpoint import write_tokenizer
from tests.distributed_launcher import run_distributed
from torchtitan import train
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims
from torchtitan.grpo.loss import FixedLogProbs, MicroBatchLoss, stage_settings
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstrations
from torchtitan.trainer.packing import MicroBatch
from torchtitan.trainer.policy_trainer import PolicyTrainer
from torchtitan.trainer.reference import build_reference
from torchtitan.utils.json_lines import read_json_lines

FUNCTION = "tests.unit_tests.trainer.test_stages:train_stages"
STEPS = 2


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A policy and a teacher of another shape with the symbols of arithmetic."""
    made = []
    for tied in (True, False):
        directory = tmp_path_factory.mktemp("stages") / "checkpoint"
        shutil.copytree(tiny_checkpoint("qwen3", tied=tied), directory)
        write_tokenizer(directory)
        made.append(str(directory))
    return made


def make_config(stage: str, checkpoints: list[str]) -> JobConfig:
    config = JobConfig()
    config.job.stage = stage  # type: ignore[assignment]
    config.model.hf_assets_path, config.distill.teacher = checkpoints
    config.sft.completion_column = "answer"
    config.training.seq_len, config.training.tokens_per_micro_batch = 32, 64
    config.training.global_batch_size = 24
    config.training.max_norm = 0.0
    config.optimizer.lr = 1e-3
    return config


class Trained(PolicyTrainer):
    """A trainer of a stage that remembers the gradients of its last optimizer step."""

    def __init__(self, config: JobConfig):
        super().__init__(config, ParallelDims.from_config(config.parallelism, device.world_size(), device.rank()))
        self.gradients: dict[str, torch.Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self.gradients.update(self._now()))

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: weight.grad.clone() for name, weight in self.policy.named_parameters() if weight.grad is not None}


def demonstrations(config: JobConfig) -> Demonstrations:
    return Demonstrations(config, Tokenizer(config.model.hf_assets_path), device.world_size())


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_sft_has_the_gradient_of_the_cross_entropy_of_transformers(checkpoints: list[str], loss_on: str) -> None:
    import transformers

    config = make_config("sft", checkpoints)
    config.sft.loss_on = loss_on  # type: ignore[assignment]
    trainer = Trained(config)
    batch = demonstrations(config).next_batch(0)
    evaluated, metrics = trainer.cross_entropy(batch), trainer.train_batch(batch).metrics
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in batch.samples:
        tokens = torch.tensor([row.branches[0].token_ids])
        labels = tokens.clone()
        # "12+34=" is given, or its first symbol, which nothing predicts.
        labels[:, : 6 if loss_on == "completion" else 1] = -100
        assert tokens[0, -1] == 1, "the end token is learnt"
        logits = model(tokens).logits
        total = total + F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
        count += int((labels >= 0).sum())
    (total / count).backward()
    assert metrics["loss"] == pytest.approx(total.item() / count, rel=1e-6)
    assert evaluated == {"eval/loss": pytest.approx(metrics["loss"], rel=1e-6), "eval/tokens": count}
    expected = {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}
    assert trainer.gradients.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(trainer.gradients[name], grad, rtol=1e-3, atol=2e-6 * float(grad.abs().max() + 1))
    # Figures that compare with who has sampled would mean nothing.
    assert not {"mismatch_kl", "ratio/max", "clip/low_fraction"} & metrics.keys()


@pytest.mark.parametrize("drift", [0.0, 0.7], ids=["on policy", "off policy"])
def test_distillation_has_the_gradient_of_the_reverse_kl(drift: float) -> None:
    """Three states, five symbols: what the code makes of every (state, symbol), with its probability under the policy μ
    that samples, is Σ d(s) ∇KL(π(·|s) ‖ teacher(·|s))."""
    generator = torch.Generator().manual_seed(1)
    now, noise, teaches = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    behaviour, teacher = (now + drift * noise).log_softmax(-1), teaches.log_softmax(-1)
    visits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    config = JobConfig()
    config.job.stage, config.grpo.importance_cap = "distill", 1e6
    config.distill.coefficient = 0.7
    tokens = MicroBatch(
        **dict.fromkeys(("token_ids", "targets", "active", "actors", "same_version", "kept")),  # type: ignore[arg-type]
        layout=PackedLayout([15]), sequence=torch.zeros(15, dtype=torch.int64), advantages=torch.zeros(15).double(),
        behaviour_log_probs=behaviour.flatten(), weights=(visits[:, None] * behaviour.exp()).flatten(), trained=[],
    )  # fmt: skip
    found, defined = now.clone().requires_grad_(), now.clone().requires_grad_()
    loss_of = MicroBatchLoss(tokens, FixedLogProbs(reference=teacher.flatten()), stage_settings(config))
    log_probs = found.log_softmax(-1).flatten()
    loss_of(log_probs, torch.zeros_like(log_probs), slice(0, 15)).sum().backward()
    policy = defined.log_softmax(-1)
    (0.7 * visits @ (policy.exp() * (policy - teacher)).sum(-1)).backward()
    assert found.grad is not None and defined.grad is not None
    torch.testing.assert_close(found.grad, defined.grad, rtol=1e-9, atol=1e-12)


def train_stages(checkpoints: list[str], tp: int, stages: list[str]) -> list[list[dict[str, float | None]]]:
    """Of every stage, figures of a few batches of demonstrations (with a teacher: taken for samples) and of an
    evaluation, in this process's layout."""
    device.set_threads(1, 1)
    figures: list[list[dict[str, float | None]]] = []
    for stage in stages:
        config = make_config(stage, checkpoints)
        config.parallelism.tensor_parallel_degree = tp
        trainer, source = Trained(config), demonstrations(make_config("sft", checkpoints))
        figures.append([])
        for version in range(STEPS):
            batch = source.next_batch(version)
            for sample in batch.samples if stage == "distill" else []:
                for completion in sample.branches[0].sampled:
                    completion.log_probs = [-3.0] * len(completion.token_ids)
            metrics = trainer.train_batch(batch).metrics
            names = ("loss", "grad_norm", "teacher_kl") if stage == "distill" else ("loss", "grad_norm")
            figures[-1].append({name: metrics[name] for name in names})
        figures[-1].append(dict(trainer.cross_entropy(source.held_out())))
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2], ids=["fsdp", "tp"])
def test_two_ranks_train_as_one_does(checkpoints: list[str], tp: int) -> None:
    alone = train_stages(checkpoints, 1, ["sft", "distill"])
    assert len({str(metrics) for stage in alone for metrics in stage}) == 2 * (STEPS + 1)
    for rank in run_distributed(FUNCTION, 2, checkpoints=checkpoints, tp=tp, stages=["sft", "distill"]):
        for stage, expected in zip(rank, alone, strict=True):
            assert stage == [pytest.approx(metrics, rel=1e-4, abs=1e-5) for metrics in expected]


def test_a_policy_that_is_its_own_teacher_learns_nothing(checkpoints: list[str]) -> None:
    figures = [train_stages([checkpoints[0], teacher], 1, ["distill"])[0][0] for teacher in checkpoints]
    assert figures[0]["teacher_kl"] == figures[0]["grad_norm"] == 0.0
    assert min(value or 0.0 for value in figures[1].values()) > 1e-3


def test_a_teacher_has_its_own_bits_whatever_the_policy_has(checkpoints: list[str]) -> None:
    config, teacher = make_config("distill", checkpoints), load_policy(checkpoints[1])
    config.lora.rank, config.lora.base_bits = 4, 4
    reference = build_reference(config, ParallelDims(1, 1, 1, 1), teacher).policy
    assert [*reference.state_dict()] == [*teacher.state_dict()]
    assert all(torch.equal(tensor, teacher.state_dict()[name]) for name, tensor in reference.state_dict().items())


@pytest.mark.slow
def test_a_resumed_stage_goes_on_as_the_unbroken_one(checkpoints: list[str], tmp_path: Path) -> None:
    """Two passes over 20 rows in steps of 8, evaluated by loss: without an actor, in this very process."""
    rows = [{"prompt": f"{a}+11=", "answer": str(a)} for a in range(10, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    common: dict[str, Any] = {
        "job.stage": "sft", "job.dump_folder": tmp_path / "runs", "model.hf_assets_path": checkpoints[0],
        "sft.completion_column": "answer", "sft.epochs": 2, "training.global_batch_size": 8, "training.seq_len": 32,
        "optimizer.lr": 1e-3, "eval.dataset": tmp_path / "rows.jsonl", "eval.interval": 2, "checkpoint.enable": True,
        "metrics.loggers": [], "checkpoint.last_save_in_hf": False, "checkpoint.interval": 2,
    }  # fmt: skip
    whole = train({}, common, dataset=rows)
    assert whole.version == 5 and whole.exit_code == 0
    resumed = {"checkpoint.resume": whole.folder / "checkpoint" / "step-2"}
    expected = [keep(row) for row in read_json_lines(whole.folder / "metrics.jsonl")]
    assert train({}, {**common, **resumed}, dataset=rows).version == 5
    assert [keep(row) for row in read_json_lines(whole.folder / "metrics.jsonl")] == expected
    assert [row["step"] for row in expected if row["eval/loss"] is not None] == [0, 2, 4, 5]


def keep(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in ("step", "loss", "grad_norm", "eval/loss", "demonstrations/epoch")}
