"""Passes over a batch: how many optimizer steps, against which log-probs, on which tokens, in which gradient."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.distributed_launcher import run_distributed
from tests.mixtures import make_mixture
from tests.unit_tests.trainer.test_gradient_independence import LONGEST, make_batch
from torchtitan.config.job_config import Checkpoint, JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims, full_tensor
from torchtitan.grpo.loss import FixedLogProbs
from torchtitan.models.decoder import Decoder
from torchtitan.models.head import fused_head
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.layers.mixture import ExpertLinear
from torchtitan.models.parallelize import build_policy
from torchtitan.trainer.checkpoint import Checkpointer, collect
from torchtitan.trainer.packing import MicroBatch, trained_tokens
from torchtitan.trainer.policy_trainer import PolicyTrainer

SHARE = 0.4
STEADY = ("loss", "grad_norm", "entropy", "mismatch_kl", "ratio/max", "learning_rate")


def run_config(checkpoint: str | Path) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = str(checkpoint)
    config.optimizer.lr = 1e-3
    config.training.tokens_per_micro_batch = 40
    config.rollout.max_completion_tokens = LONGEST
    return config


def inner_steps(config: JobConfig, iterations: int) -> JobConfig:
    config.grpo.recompute_old_log_probs = True
    config.grpo.num_minibatches, config.grpo.num_iterations = 2, iterations
    config.grpo.geometric_mask = []
    return config


class SpiedTrainer(PolicyTrainer):
    """Remembers what every optimizer step was given."""

    def __init__(self, config: JobConfig, merges_prefixes: bool = True):
        dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
        super().__init__(config, dims, merges_prefixes=merges_prefixes)
        self.given: list[tuple[list[MicroBatch], list[FixedLogProbs]]] = []

    def _forward_backward(
        self, part: list[MicroBatch], fixed: list[FixedLogProbs], *others: Any, **named: Any
    ) -> torch.Tensor:
        self.given.append((part, fixed))
        return super()._forward_backward(part, fixed, *others, **named)

    def train(self, seed: int) -> dict[str, float | None]:
        return self.train_batch(make_batch(seed)).metrics


def test_iterations_repeat_the_minibatches_with_old_log_probs_of_the_start(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    trainer = SpiedTrainer(inner_steps(run_config(tiny_checkpoint()), iterations=3))
    untrained = build_policy(trainer.config, trainer.dims)
    steps: list[float] = []
    trainer.optimizer.register_step_post_hook(
        lambda *_: steps.append(trainer.policy.model.norm.weight.detach().sum().item())
    )
    metrics = trainer.train(0)
    assert len(steps) == len(set(steps)) == metrics["optimizer_steps"] == 3 * 2
    for place, (part, fixed) in enumerate(trainer.given):
        first, _ = trainer.given[place % 2]
        assert part is first and (place == 0 or part is not trainer.given[place - 1][0])
        for micro_batch, known in zip(part, fixed, strict=True):
            with torch.no_grad():
                expected, _ = trainer._forward(untrained, micro_batch)
            assert known.old is not None and torch.equal(known.old, expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_keep_their_log_probs_from_before_the_batch(
    tiny_checkpoint: Callable[..., Path], recompute: bool
) -> None:
    config = inner_steps(run_config(tiny_checkpoint()), iterations=2) if recompute else run_config(tiny_checkpoint())
    config.grpo.mask_truncated = True
    trainer = SpiedTrainer(config)
    untrained = build_policy(config, trainer.dims)
    batch = make_batch(0)
    trainer.train_batch(batch)
    assert {sample.branches[0].trainer_log_probs is None for sample in batch.samples} == {False, True}
    for sample in batch.samples:
        tokens = torch.tensor([*sample.prompt_ids, *sample.completion_ids])
        with torch.no_grad():
            expected, _ = untrained(tokens[:-1], PackedLayout([len(tokens) - 1]), tokens[1:])
        if trained_tokens(sample, mask_truncated=True):
            found = sample.branches[0].trainer_log_probs
            torch.testing.assert_close(found, expected[-len(sample.completion_ids) :], atol=1e-4, rtol=1e-4)
            assert not found.requires_grad
        else:
            assert sample.branches[0].trainer_log_probs is None


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.policy.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_minibatch_without_a_trained_token_takes_no_step(
    tiny_checkpoint: Callable[..., Path], recompute: bool
) -> None:
    config = run_config(tiny_checkpoint())
    config.grpo.num_minibatches, config.grpo.mask_truncated = 2, True
    config.grpo.recompute_old_log_probs = recompute

    def after(truncated: slice, groups: slice) -> tuple[PolicyTrainer, dict[str, float | None]]:
        """The second batch consists of some groups, and some are truncated."""
        trainer, batch = SpiedTrainer(config), make_batch(1)
        trainer.train(0)  # AdamW has momentum
        for group in batch.groups:
            for sample in group.samples:
                sample.finish_reason = "stop"
        for group in batch.groups[truncated]:
            for sample in group.samples:
                sample.finish_reason = "length"
        config.grpo.num_minibatches = 2 if groups == slice(None) else 1
        batch.groups = batch.groups[groups]
        before = weights(trainer)
        metrics = trainer.train_batch(batch).metrics
        moved = any(not torch.equal(weight, before[name]) for name, weight in weights(trainer).items())
        assert moved == bool(metrics["optimizer_steps"]) and metrics["optimizer_steps_skipped"] == 0
        config.grpo.num_minibatches = 2
        return trainer, metrics

    # Group i is in minibatch i mod 2.
    half, metrics = after(slice(1, None, 2), slice(None))
    expected, of_half = after(slice(0), slice(0, None, 2))
    torch.testing.assert_close(weights(half), weights(expected), rtol=0, atol=0)
    assert metrics["optimizer_steps"] == 1 and metrics["loss"] == of_half["loss"]
    _, metrics = after(slice(None), slice(None))
    assert metrics["optimizer_steps"] == 0 and metrics["grad_norm"] is None and metrics["loss"] == 0


def test_an_optimizers_state_in_host_memory_changes_no_bit(tiny_checkpoint: Callable[..., Path]) -> None:
    def trained(offload: Any) -> tuple[PolicyTrainer, list[torch.Tensor]]:
        config = inner_steps(run_config(tiny_checkpoint("qwen3", True)), iterations=1)
        config.training.enable_cpu_offload = offload
        trainer, stepped_with = SpiedTrainer(config), list[torch.Tensor]()
        first = trainer.parameters[0]
        trainer.optimizer.register_step_pre_hook(lambda *_: stepped_with.extend(moments(trainer, first)))
        for seed in range(2):
            trainer.train(seed)
        return trainer, stepped_with

    def moments(trainer: PolicyTrainer, parameter: torch.Tensor) -> list[torch.Tensor]:
        return [value for value in trainer.optimizer.state[parameter].values() if value.dim()]

    (stays, _), (moves, stepped_with) = trained(False), trained("optimizer")
    assert all(torch.equal(value, weights(moves)[name]) for name, value in weights(stays).items())
    for ours, other in zip(stays.parameters, moves.parameters, strict=True):
        assert all(map(torch.equal, moments(stays, ours), moments(moves, other)))
    # A step has copies of what host memory holds between the steps.
    assert stepped_with and not {id(moment) for moment in stepped_with} & {
        id(moment) for moment in moments(moves, moves.parameters[0])
    }


@pytest.mark.parametrize("offload", [False, "optimizer"])
def test_a_resume_has_the_bits_of_the_save_however_late_it_is_written(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: Any
) -> None:
    config = inner_steps(run_config(tiny_checkpoint("qwen3", True)), iterations=1)
    config.training.enable_cpu_offload = offload
    settings = Checkpoint(enable=True, async_mode="async")

    def started() -> tuple[SpiedTrainer, Checkpointer]:
        trainer = SpiedTrainer(config)
        return trainer, Checkpointer(settings, tmp_path, trainer.policy, trainer.optimizer, trainer.scheduler)

    def bits(trainer: SpiedTrainer) -> dict[str, torch.Tensor]:
        state = collect(trainer.policy, trainer.optimizer, 0)
        return {name: value.clone() for name, value in state.items() if not name.startswith("random.")}

    unbroken, checkpoints = started()
    unbroken.train(0)
    go_on, write = threading.Event(), checkpoints._write_guarded

    def write_later(*arguments: Any) -> None:
        assert go_on.wait(300)
        write(*arguments)

    monkeypatch.setattr(checkpoints, "_write_guarded", write_later)
    saved = bits(unbroken)
    checkpoints.save(1)
    # The writer has not read anything yet; what these steps write must not reach it.
    expected = [(unbroken.train(seed), bits(unbroken)) for seed in (1, 2)]
    go_on.set()
    checkpoints.wait()
    resumed, checkpoints = started()
    checkpoints.load(1)
    assert all(torch.equal(value, saved[name]) for name, value in bits(resumed).items())
    for seed, (metrics, after) in zip((1, 2), expected, strict=True):
        found = resumed.train(seed)
        assert {name: found[name] for name in STEADY} == {name: metrics[name] for name in STEADY}
        assert all(torch.equal(value, after[name]) for name, value in bits(resumed).items())


def test_mismatch_is_that_of_all_minibatches(tiny_checkpoint: Callable[..., Path]) -> None:
    def figures(minibatches: int, lr: float) -> dict[str, float | None]:
        config = run_config(tiny_checkpoint())
        config.grpo.num_minibatches, config.optimizer.lr = minibatches, lr
        trainer, batch = SpiedTrainer(config), make_batch(0)
        metrics = trainer.train_batch(batch).metrics
        assert all(sample.branches[0].trainer_log_probs is not None for sample in batch.samples)
        return metrics

    whole, still, moved = figures(1, 1e-2), figures(4, 0.0), figures(4, 1e-2)
    for name in ("mismatch_kl", "mismatch_kl/max"):
        assert still[name] == pytest.approx(whole[name], rel=1e-5)
    # What a step of this batch has moved is no longer the version that has sampled.
    assert moved["mismatch_kl"] != pytest.approx(still["mismatch_kl"], rel=1e-3)
    assert moved["mismatch_kl/same_version"] == pytest.approx(still["mismatch_kl/same_version"], rel=1e-5)


def train_with_everything(checkpoint: str) -> dict[str, Any]:
    """Two batches in this process's layout, with a reference that follows and tokens of high entropy only."""
    config = inner_steps(run_config(checkpoint), iterations=2)
    config.grpo.entropy_top_share = SHARE
    config.grpo.kl_coefficient, config.grpo.reference_ema_decay = 0.1, 0.5
    trainer = SpiedTrainer(config)
    names = ("loss", "grad_norm", "reference_kl", "entropy", "ratio/max", "mismatch_kl/max")
    figures = [[metrics[name] for name in names] for metrics in (trainer.train(0), trainer.train(1))]
    trained: list[tuple[float, float]] = []
    for part, fixed in trainer.given[:2]:
        for micro_batch, known in zip(part, fixed, strict=True):
            assert known.trained is not None
            # No two tokens have the same: their names.
            trained += zip(micro_batch.behaviour_log_probs.tolist(), known.trained.tolist(), strict=True)
    tokens = torch.arange(3, 23)
    with torch.no_grad():
        log_probs, _ = trainer.references[""].policy(tokens[:-1], PackedLayout([19]), tokens[1:])
    return {"figures": figures, "trained": trained, "reference": log_probs.tolist()}


@pytest.mark.slow
def test_two_ranks_train_the_same_tokens_and_follow_alike(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = str(tiny_checkpoint())
    alone = train_with_everything(checkpoint)
    ranks = run_distributed(
        "tests.unit_tests.trainer.test_policy_trainer:train_with_everything", 2, checkpoint=checkpoint
    )
    counts = [len(rank["trained"]) for rank in ranks]
    assert counts[0] != counts[1]
    assert sorted(map(tuple, ranks[0]["trained"] + ranks[1]["trained"])) == sorted(alone["trained"])
    for rank in ranks:
        for found, expected in zip(rank["figures"], alone["figures"], strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert rank["reference"] == pytest.approx(alone["reference"], abs=1e-4)
    # The first loss of all is without divergence; the reference has followed, but is not there yet.
    assert alone["figures"][1][2] > 1e-6
    entropies = entropy_of_tokens(checkpoint)
    kept = [entropies[name] for name, flag in alone["trained"] if flag]
    left_out = [entropies[name] for name, flag in alone["trained"] if not flag]
    assert len(left_out) == int((1 - SHARE) * len(entropies)) and min(kept) >= max(left_out)


def entropy_of_tokens(checkpoint: str) -> dict[float, float]:
    trainer = SpiedTrainer(run_config(checkpoint))
    found: dict[float, float] = {}
    for micro_batch in trainer._pack(make_batch(0).groups, 0):
        with torch.no_grad():
            _, entropy = trainer._forward(trainer.policy, micro_batch)
        found |= dict(zip(micro_batch.behaviour_log_probs.tolist(), entropy.tolist(), strict=True))
    return found


class Gradients:
    """What the head's backward returns for its weight, where the weight's gradient lies meanwhile, and the result."""

    def __init__(self, trainer: PolicyTrainer):
        self.returned: list[bool] = []
        self.places: list[int] = []
        self.result = torch.zeros(0)
        self.weight = trainer.policy.lm_head.weight
        trainer.policy.register_forward_hook(self._forward)
        trainer.optimizer.register_step_pre_hook(self._step)

    def _forward(self, policy: Decoder, _: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        outputs[0].grad_fn.register_hook(self._backward)

    def _backward(self, gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
        self.returned.append(any(grad is not None and grad.shape == self.weight.shape for grad in gradients))
        if self.weight.grad is not None:
            self.places.append(self.weight.grad.data_ptr())

    def _step(self, *_: Any) -> None:
        self.places.append(self.weight.grad.data_ptr())
        self.result = self.weight.grad.clone()


def train_counting_reductions(checkpoint: str) -> dict[str, Any]:
    """One batch of several micro-batches; how often gradients were reduced, and what came of it."""
    config = run_config(checkpoint)
    trainer = SpiedTrainer(config)
    places: list[bool] = []
    find = fused_head.places_of

    def spied(*arguments: Any) -> list[torch.Tensor | None]:
        found = find(*arguments)
        places.append(any(place is not None for place in found))
        return found

    with (
        mock.patch.object(fused_head, "places_of", spied),
        mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as reductions,  # type: ignore[attr-defined]
    ):
        metrics = trainer.train(0)
    groups = 1 + len(trainer.policy.model.layers)
    norm = full_tensor(trainer.policy.model.embed_tokens.weight.detach()).norm().item()
    return {
        "micro_batches": len(trainer.given[0][0]),
        "reductions": reductions.call_count / groups,
        "in_place": places,
        "figures": [metrics["loss"], metrics["grad_norm"], norm],
    }


@pytest.mark.slow
def test_gradients_are_reduced_in_every_micro_batch(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = str(tiny_checkpoint())
    alone = train_counting_reductions(checkpoint)
    function = "tests.unit_tests.trainer.test_policy_trainer:train_counting_reductions"
    # The loss is what is left of a sum of terms of both signs and of size 1: there is no share of it to be off by.
    tokens = sum(len(sample.completion_ids) for sample in make_batch(0).samples)
    rounding = 4 * torch.finfo(torch.float32).eps * math.sqrt(tokens)
    for rank in run_distributed(function, 2, checkpoint=checkpoint):
        assert rank["reductions"] == rank["micro_batches"] >= 2
        # No gradient stays on its rank for the next micro-batch to be added to.
        assert rank["in_place"] == [False] * rank["micro_batches"]
        assert rank["figures"][0] == pytest.approx(alone["figures"][0], rel=0, abs=rounding)
        assert rank["figures"][1:] == pytest.approx(alone["figures"][1:], rel=1e-5)


def train_counting_copies(checkpoint: str, reshard: str) -> dict[str, Any]:
    """One batch in bfloat16, whose experts are spread over all ranks; what FSDP2 did, and what came of it."""
    config = run_config(checkpoint)
    config.parallelism.expert_parallel_degree = device.world_size()
    config.parallelism.fsdp_reshard_after_forward = reshard  # type: ignore[assignment]
    config.training.mixed_precision_param = "bfloat16"
    trainer = SpiedTrainer(config)
    group = _fsdp_param_group.FSDPParamGroup
    with (
        mock.patch.object(group, "_to_unsharded", autospec=True, side_effect=group._to_unsharded) as gathers,
        mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as reductions,  # type: ignore[attr-defined]
    ):
        metrics = trainer.train(0)
    trainer.score([1, 2, 3])
    trainer.next_log_probs([1, 2, 3], [1, 3])
    return {
        "micro_batches": len(trainer.given[0][0]),
        "gathers": gathers.call_count,
        "reductions": reductions.call_count,
        "gathered": [m.weight.dtype == torch.bfloat16 for m in trainer.policy.modules() if isinstance(m, ExpertLinear)],
        "lr": config.optimizer.lr,
        "grad_norm": metrics["grad_norm"],
        "sums": [full_tensor(parameter.detach()).double().sum().item() for parameter in trainer.parameters],
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_unsharded_parameters_are_gathered_and_reduced_once_per_step(ranks: int, tmp_path: Path) -> None:
    checkpoint = str(make_mixture(tmp_path, "qwen3_moe"))
    function = "tests.unit_tests.trainer.test_policy_trainer:train_counting_copies"
    kept, freed = (
        run_distributed(function, ranks, checkpoint=checkpoint, reshard=way) for way in ("default", "always")
    )
    for kept_run, other in zip(kept, freed, strict=True):
        assert not any(kept_run["gathered"])
        # Micro-batches' gradients are added up in bfloat16 before they are reduced, or afterwards: where one is nearly
        # 0, its sign may differ, and with it the direction of AdamW's first step of length lr.
        assert kept_run["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        few_signs = 4 * 2 * kept_run["lr"]
        assert kept_run["sums"] == pytest.approx(other["sums"], rel=1e-5, abs=few_signs)
        several = kept_run["micro_batches"]
        layers, mixtures = 3, 2
        groups = layers + 1 + mixtures * (ranks > 1)
        assert several >= 2 and other["gathers"] == 2 * groups * several and other["reductions"] == groups * several
        if ranks == 1:
            # The last micro-batch frees layers after its forward, but not embedding and head.
            assert kept_run["gathers"] == 2 * layers + 1 and kept_run["reductions"] == groups
        else:
            # By default the last layer, embedding and head stay until the backward.
            assert kept_run["gathers"] == (2 * (layers - 1) + 2) * several + 2 * mixtures
            assert kept_run["reductions"] == (groups - mixtures) * several + mixtures


@pytest.mark.parametrize("tied", [True, False])
def test_a_default_run_adds_to_the_heads_gradient_in_place(
    tiny_checkpoint: Callable[..., Path], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default sequences are masked in direct mode, so the head takes two passes."""
    checkpoint = tiny_checkpoint("qwen3", tied)
    trainer = SpiedTrainer(run_config(checkpoint))
    gradients = Gradients(trainer)
    trainer.train(0)
    assert len(trainer.given[0][0]) >= 2
    # Only the first micro-batch's backward makes a gradient.
    assert gradients.returned == [True] + [False] * (len(gradients.returned) - 1) and len(set(gradients.places)) == 1
    monkeypatch.setattr(fused_head, "places_of", lambda weights, needed: [None] * len(weights))
    trainer = SpiedTrainer(run_config(checkpoint))
    separate = Gradients(trainer)
    trainer.train(0)
    assert all(separate.returned) and separate.result.abs().max() > 0
    torch.testing.assert_close(gradients.result, separate.result, rtol=1e-5, atol=1e-7)


def test_next_token_log_probs_agree_with_scores_at_the_runs_temperature(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    trainer = SpiedTrainer(run_config(tiny_checkpoint()))
    tokens = [3, 20, 21, 22]
    behind = trainer.next_log_probs(tokens, [1, 3])
    scored = trainer.score(tokens)
    assert [behind[0, 20], behind[1, 22]] == pytest.approx([scored[0], scored[2]], abs=1e-6)
    trainer.config.rollout.temperature = 0.5
    cooler = trainer.next_log_probs(tokens, [1])[0]
    sharpened = 2 * behind[0]
    assert cooler == pytest.approx(sharpened - np.logaddexp.reduce(sharpened), abs=1e-5)
