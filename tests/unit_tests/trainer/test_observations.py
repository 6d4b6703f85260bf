"""The cross-entropy on what environments wrote: its gradient, its figure, and that the policy loss stays as it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit_tests.trainer.test_gradient_independence import Cut, gradients
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.inference.types import Branch, Completion, Given, Segment, VersionSpan
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.preflight.validate import validate
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.policy_trainer import PolicyTrainer

COEFFICIENT = 0.7


def make_batch() -> Batch:
    """Episodes of one to three turns with replies between them; one is cut off, one has two branches."""
    rng = random.Random(3)

    def random_tokens(most: int) -> list[int]:
        return [rng.randrange(128) for _ in range(rng.randint(1, most))]

    def branch(prompt: list[int], turns: int) -> Branch:
        segments: list[Segment] = [Given(prompt)]
        for turn in range(turns):
            tokens = random_tokens(5)
            log_probs = [rng.uniform(-6.0, -4.0) for _ in tokens]
            segments += [Completion(tokens, log_probs, "stop", [VersionSpan("e", 0, 0, len(tokens))])]
            segments += [Given(random_tokens(6))] if turn < turns - 1 or rng.random() < 0.5 else []
        return Branch(segments)

    groups = []
    for index in range(3):
        prompt = random_tokens(6)
        samples = [Sample([branch(prompt, rng.randint(1, 3))], "stop", rng.random()) for _ in range(3)]
        groups.append(Group(index, samples))
    groups[0].samples[0].finish_reason = "length"
    groups[1].samples[0].branches.append(branch(random_tokens(6), 3))
    return Batch(0, groups)


def run_config(checkpoint: Path, coefficient: float, loss_type: str = "dapo") -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = str(checkpoint)
    config.grpo.loss_type, config.grpo.observation_coefficient = loss_type, coefficient
    config.grpo.mask_truncated = True
    config.rollout.max_completion_tokens, config.training.max_norm, config.optimizer.lr = 40, 0.0, 0.0
    return config


def expected(checkpoint: Path, batch: Batch, names: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean cross-entropy and its gradient from transformers in float64, one sequence after the other."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="eager")
    losses = []
    for sample in batch.samples:
        for branch in sample.branches if sample.finish_reason == "stop" else ():
            tokens = [token for segment in branch.segments for token in segment.token_ids]
            log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            end = len(branch.segments[0].token_ids)
            for segment in branch.segments[1:]:
                begin, end = end, end + len(segment.token_ids)
                if isinstance(segment, Given):
                    losses += [-log_probs[place - 1, tokens[place]] for place in range(begin, end)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: dict(model.named_parameters())[name].grad for name in names}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("loss_type", "cut"),
    [
        ("dapo", Cut()),
        ("dapo", Cut(tokens=60, head="one_pass", budget=4 * 128 * 16, shuffle=1, ranks=2)),
        ("dapo", Cut(tokens=60, head="two_pass", shuffle=2, merged=True)),
        ("gspo", Cut(tokens=60, head="one_pass", budget=1)),
    ],
)
def test_the_gradient_is_that_of_the_mean_cross_entropy(
    tiny_checkpoint: Callable[..., Path], loss_type: str, cut: Cut
) -> None:
    checkpoint, batch = tiny_checkpoint("qwen3", True), make_batch()
    policy = load_policy(checkpoint)
    names = [name for name, _ in policy.named_parameters()]
    wanted_loss, wanted = expected(checkpoint, batch, names)
    without_loss, without = gradients(policy, run_config(checkpoint, 0.0, loss_type), batch, cut)
    loss, found = gradients(policy, run_config(checkpoint, COEFFICIENT, loss_type), batch, cut)
    assert loss - without_loss == pytest.approx(COEFFICIENT * wanted_loss, rel=1e-5)
    exact = COEFFICIENT * torch.cat([wanted[name].flatten() for name in names])
    difference = (found - without).double()
    assert ((difference - exact).norm() / exact.norm()).item() < 1e-5


def test_without_an_environment_it_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    config = run_config(tiny_checkpoint("qwen3", True), COEFFICIENT)
    assert [problem.key for problem in validate(config)].count("grpo.observation_coefficient") == 1
    config.environment.factory = "torchtitan.rollout.environments.builtin_environments:Guess"
    assert "grpo.observation_coefficient" not in {problem.key for problem in validate(config)}
    config.parallelism.context_parallel_degree = 2
    assert "grpo.observation_coefficient" in {problem.key for problem in validate(config)}


def test_its_figure_is_logged_and_the_others_are_as_without(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint, batch = tiny_checkpoint("qwen3", True), make_batch()
    figures = []
    for coefficient in (0.0, COEFFICIENT):
        trainer = PolicyTrainer(run_config(checkpoint, coefficient), ParallelDims(1, 1, 1, world_size=1, rank=0))
        figures.append(trainer.train_batch(make_batch()).metrics)
    mean, _ = expected(checkpoint, batch, [])
    assert figures[1].pop("observation/loss") == pytest.approx(mean, rel=1e-5)
    same = ("entropy", "ratio/mean", "ratio/max", "clip/low_fraction", "mismatch_kl", "trained_tokens")
    assert {name: figures[1][name] for name in same} == pytest.approx({name: figures[0][name] for name in same})
