"""Operations of a batch against torch's own count of what is really computed, and their share of a device's peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.unit_tests.trainer.test_gradient_independence import make_batch
from tests.unit_tests.trainer.test_policy_trainer import SpiedTrainer, run_config
from torchtitan.config.job_config import Lora
from torchtitan.models.layers.batch_invariance import InvariantSizes
from torchtitan.models.shape.checkpoint_shape import FLAVORS
from torchtitan.models.shape.costs import Passes, model_flops, throughput
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.types import Group, Sample
from torchtitan.utils.cards import find_card

PRODUCTS = ("mm", "addmm", "_foreach_mm")


@pytest.fixture(autouse=True)
def without_tokens_that_fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens that fill a pack up to whole rows of a kernel would count in packs as small as these."""
    monkeypatch.setattr("torchtitan.models.decoder.invariant_sizes", lambda *_: InvariantSizes())


def products(counter: FlopCounterMode) -> int:
    """Operations of products with weights."""
    counted = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counted.items() if str(name).split(".")[-1] in PRODUCTS)


@pytest.mark.parametrize("scored", [False, True])
def test_operations_are_those_that_torch_counts(tiny_checkpoint: Callable[..., Path], scored: bool) -> None:
    config = run_config(tiny_checkpoint())
    config.grpo.recompute_old_log_probs = scored
    # So that the operations of attention are half of a square for each sequence; products are counted either way.
    trainer, batch = SpiedTrainer(config, merges_prefixes=False), make_batch(0)
    # Logits that are computed again to save memory would be counted again.
    trainer.policy.lm_head.mode = "full"
    with FlopCounterMode(display=False) as counter:
        metrics = trainer.train_batch(batch).metrics
    flops = trainer._operations(trainer._pack(batch.groups, 0))
    attention = attention_flops(trainer.policy.args, batch.samples, 3 + scored)
    # The head leaves out tokens without weight.
    assert flops - attention == pytest.approx(products(counter), rel=0.02)
    assert metrics["tflops_per_rank"] == pytest.approx(flops / metrics["time/train_s"] / 1e12)
    assert "mfu" not in metrics


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_modules_that_are_trained_beside_adapters_are_counted(tiny_checkpoint: Callable[..., Path], tied: bool) -> None:
    def count(*saved: str) -> tuple[int, float]:
        """(what torch counts without the adapters' own products, what we do without attention)"""
        config = run_config(tiny_checkpoint("qwen3", tied=tied))
        # Trained norms cost nothing here, but have gradients go through all of the first layer.
        config.lora = Lora(rank=1, target_modules=["o_proj"], modules_to_save=["input_layernorm", *saved])
        trainer, batch = SpiedTrainer(config, merges_prefixes=False), make_batch(0)
        trainer.policy.lm_head.mode = "full"
        with FlopCounterMode(display=False) as counter:
            trainer.train_batch(batch)
        args, samples = trainer.policy.args, batch.samples
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) - 1 for sample in samples)
        adapters = 6 * args.num_hidden_layers * sum(args.projection_shapes()["o_proj"]) * tokens
        ours = trainer._operations(trainer._pack([Group(0, samples)], 0))
        return products(counter) - adapters, ours - attention_flops(args, samples, 3)

    torch_alone, ours_alone = count()
    assert ours_alone == pytest.approx(torch_alone, rel=0.02)
    heads: list[list[str]] = [] if tied else [["lm_head"]]
    for saved in (["v_proj", "down_proj"], ["norm", "embed_tokens"], *heads):
        by_torch, ours = count(*saved)
        assert ours == pytest.approx(by_torch, rel=0.02)
        assert ours - ours_alone == pytest.approx(by_torch - torch_alone, rel=0.02)


def attention_flops(args: ModelArgs, samples: list[Sample], forwards: int) -> float:
    """Scores and weighted values, each a product of 2 operations per element, over half of a square (causal)."""
    lengths = [len(sample.prompt_ids) + len(sample.completion_ids) - 1 for sample in samples]
    square = sum(length * (length + 1) for length in lengths) / 2
    return forwards * args.num_hidden_layers * args.num_attention_heads * args.head_dim * square * 2 * 2


def test_operations_of_merged_prefixes_count_once(tiny_checkpoint: Callable[..., Path]) -> None:
    """In products with weights by torch's count, and in pairs of attention by the definition."""
    found = []
    for merged in (False, True):
        config = run_config(tiny_checkpoint())
        config.training.tokens_per_micro_batch = 4000
        trainer, batch = SpiedTrainer(config, merges_prefixes=merged), make_batch(0)
        trainer.policy.lm_head.mode = "full"
        with FlopCounterMode(display=False) as counter:
            metrics = trainer.train_batch(batch).metrics
        (pack,) = trainer._pack(batch.groups, 0)
        pairs = float((pack.layout.positions + 1).sum())
        args = trainer.policy.args
        attention = 3 * args.num_hidden_layers * args.num_attention_heads * args.head_dim * pairs * 2 * 2
        assert trainer._operations([pack]) - attention == pytest.approx(products(counter), rel=0.02)
        assert metrics["computed_tokens"] == len(pack.token_ids)
        found.append((metrics["computed_tokens"], metrics["computed_share"], metrics["trained_tokens"]))
    (apart, whole, trained), (once, share, also_trained) = found
    assert whole == 1.0 and once == apart * share < apart and trained == also_trained


@pytest.mark.parametrize("length", [1, 100, 128, 129, 700])
def test_windows_bound_what_attention_costs(length: int) -> None:
    args = FLAVORS["gpt_oss"]["20B"]
    # All other layers see 128 tokens, themselves included.
    distance = torch.arange(length)[:, None] - torch.arange(length)
    pairs = (((distance >= 0) & (distance < 128)).sum() + (distance >= 0).sum()).item() * args.num_hidden_layers // 2
    weights = 2 * sum(args.weights_per_token().values()) * length
    # Scores and weighted values, 2 operations per element.
    expected = weights + 2 * 2 * args.num_attention_heads * args.head_dim * pairs
    assert model_flops(args, [length], 0, Passes(0, scored=1)) == expected
    assert model_flops(args, [length], 0, Passes(1)) == 3 * expected


def test_share_of_the_peak() -> None:
    assert throughput(4e15, 2.0, 4, 1e15) == {"tflops_per_rank": 500.0, "mfu": 0.5}
    assert throughput(4e15, 2.0, 4, None) == {"tflops_per_rank": 500.0} and throughput(1.0, 0.0, 1, None) == {}
    names = {
        "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12, "NVIDIA H20": 148e12,
        "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA GB200": 2500e12, "NVIDIA B200": 2250e12,
        "NVIDIA H200 NVL": 835e12, "NVIDIA GH200 480GB": 989e12, "Tesla T4": None, "NVIDIA RTX A1000": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "NVIDIA GeForce RTX 3090": 71e12, "NVIDIA A10G": 70e12,
        "NVIDIA A10": 125e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "NVIDIA RTX 6000 Ada Generation": 364e12,
    }  # fmt: skip
    assert {name: card and card.operations for name, card in zip(names, map(find_card, names), strict=True)} == names
