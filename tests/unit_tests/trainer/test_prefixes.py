"""Packs that compute once what sequences begin with together, against packs of whole sequences."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.trainer.test_policy_trainer import SpiedTrainer, run_config
from torchtitan.inference.types import Branch, Completion, Given, Routes, VersionSpan
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.shape.checkpoint_shape import FLAVORS
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer import prefixes
from torchtitan.trainer.packing import pack
from torchtitan.trainer.prefixes import KEYS_PER_TOKEN, MergedRuns, clusters, keep_apart, merge

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=200)
@given(SEQUENCES)
def test_a_token_is_computed_once_where_it_follows_the_same_tokens(lists: list[list[int]]) -> None:
    sequences = [np.array(ids, np.uint64) for ids in lists]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST_SAVED", 1)
        merged = merge(sequences)
    assert sum(merged.lengths) == len({tuple(ids[:end]) for ids in lists for end in range(1, len(ids) + 1)})
    usual = merge(sequences)
    assert sum(merged.lengths) <= sum(usual.lengths) <= sum(map(len, lists))
    for runs in (merged, usual, keep_apart(sequences)):
        layout = PackedLayout(runs.lengths, parents=runs.parents)
        tokens = np.concatenate([sequences[number][first:end] for number, first, end in runs.sources])
        for sequence, places in zip(sequences, runs.places, strict=True):
            # The tokens of a sequence, and each in its place behind the run that it continues.
            assert tokens[places].tolist() == sequence.tolist()
            assert layout.positions[torch.from_numpy(places)].tolist() == list(range(len(sequence)))
            run = np.searchsorted(layout.cumulative.numpy(), places, side="right") - 1
            for before, after in itertools.pairwise(run):
                assert after == before or runs.parents[after] == before


@settings(max_examples=100)
@given(SEQUENCES, st.integers(12, 60), st.integers(0, 99))
def test_clusters_stay_within_the_budget(lists: list[list[int]], budget: int, seed: int) -> None:
    sequences, rng = [np.array(sequence, np.uint64) for sequence in lists], random.Random(seed)
    trained = [rng.randint(0, len(sequence)) for sequence in lists]
    # A teacher reads one of three hints before each of them, or the sequence itself.
    hints = [[rng.randint(0, 3)] * rng.randint(0, budget - max(map(len, lists), default=0)) for _ in range(3)]
    taught = [np.array([*rng.choice(hints), *sequence], np.uint64) for sequence in lists]
    for read in (None, taught):
        found, sizes = clusters(sequences, trained, budget, read)
        assert sorted(number for members in found for number in members) == list(range(len(lists)))
        for members, size in zip(found, sizes, strict=True):
            computed = sum(merge([sequences[n] for n in members]).lengths)
            assert max(computed, sum(trained[n] for n in members)) <= size <= budget
            if read is not None:
                assert sum(merge([read[n] for n in members]).lengths) <= size
                assert sum(len(read[n]) for n in members) <= KEYS_PER_TOKEN * size


def test_keys_of_paths_are_bounded_by_the_budget() -> None:
    """A hundred short answers to one long prompt fit by their tokens, but each of them attends to all of the prompt."""
    sequences = [np.array([*range(1000), 2000 + answer, 0], np.uint64) for answer in range(100)]
    found, sizes = clusters(sequences, [2] * 100, 2000)
    most = KEYS_PER_TOKEN * 2000 // 1002
    assert [len(members) for members in found] == [most] * (100 // most) + [100 % most]
    assert max(sizes) <= 2000


def make_tree(seed: int) -> Batch:
    """Groups with prompts of many lengths, and episodes whose history was rewritten between turns."""
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(2, 128) for _ in range(rng.randint(1, most))]

    def sampled() -> Completion:
        ids = tokens(9)
        return Completion(ids, [rng.uniform(-6.0, -4.0) for _ in ids], "stop", [VersionSpan("e", 0, 0, len(ids))])

    groups = []
    for index in range(3):
        prompt, samples = tokens(40), []
        for _ in range(4):
            branches = [Branch([Given(prompt), sampled(), Given(tokens(5)), sampled()])]
            for _ in range(rng.randint(0, 2)):
                history = branches[-1].token_ids
                branches.append(Branch([Given(history[: rng.randint(1, len(history))] + tokens(5)), sampled()]))
            samples.append(Sample(branches, "stop", rng.random(), {}))
        # Two answers may be the same to the last token.
        samples[1].branches[0] = Branch([*samples[0].branches[0].segments])
        groups.append(Group(index, samples))
    return Batch(0, groups)


@pytest.mark.parametrize("seed", range(2))
def test_a_step_is_the_same_to_the_last_bit_forward_and_to_rounding_backward(
    tiny_checkpoint: Callable[..., Path], seed: int
) -> None:
    found = []
    for merged in (False, True):
        config = run_config(tiny_checkpoint())
        config.training.tokens_per_micro_batch = 4000
        config.grpo.geometric_mask = []
        config.training.max_norm = 0.0
        trainer, batch = SpiedTrainer(config, merges_prefixes=merged), make_tree(seed)
        gradients: list[torch.Tensor] = []

        def look(*_: object, into: list[torch.Tensor] = gradients, trainer: SpiedTrainer = trainer) -> None:
            into.extend(weight.grad.flatten().clone() for weight in trainer.parameters if weight.grad is not None)

        trainer.optimizer.register_step_pre_hook(look)
        metrics = trainer.train_batch(batch).metrics
        log_probs = torch.cat([branch.trainer_log_probs for sample in batch.samples for branch in sample.branches])
        found.append((log_probs, torch.cat(gradients).double(), metrics, trainer.policy))
    (apart, expected, figures, policy), (once, gradient, merged_figures, _) = found
    assert (merged_figures["computed_share"] or 1.0) < 0.6 and figures["computed_share"] == 1.0
    assert merged_figures["trained_tokens"] == figures["trained_tokens"]
    if not policy.invariant_sizes().unmet:
        assert torch.equal(once, apart)
    torch.testing.assert_close(once, apart, rtol=1e-5, atol=1e-5)
    assert ((gradient - expected).norm() / expected.norm()).item() <= 1e-6


def hidden(policy: Decoder, runs: MergedRuns, sequences: list[np.ndarray]) -> torch.Tensor:
    """The hidden states of every sequence's tokens, one sequence after the other."""
    tokens = np.concatenate([sequences[number][first:end] for number, first, end in runs.sources]).astype(np.int64)
    layout = PackedLayout(runs.lengths, parents=runs.parents)
    states = policy.hidden_states(torch.from_numpy(tokens), layout.positions, layout, None)
    return states[torch.from_numpy(np.concatenate(runs.places))]


@pytest.mark.parametrize("seed", range(2))
def test_gradients_in_float64(tiny_checkpoint: Callable[..., Path], seed: int) -> None:
    policy = load_policy(tiny_checkpoint()).double()
    branches = [branch for sample in make_tree(seed).samples for branch in sample.branches]
    sequences = [np.array(branch.token_ids, np.uint64) for branch in branches]
    gradients = []
    for runs in (merge(sequences), keep_apart(sequences)):
        policy.zero_grad()
        states = hidden(policy, runs, sequences)
        by = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        states.backward(by)
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in policy.parameters() if leaf.grad is not None]))
    assert ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item() <= 1e-12


def test_tokens_with_other_experts_are_other_tokens() -> None:
    """With routing replay a shared token has one row, and so one choice of experts."""
    args = FLAVORS["gpt_oss"]["20B"]
    assert args.experts is not None
    rows = []
    for number in range(3):
        routes = np.tile(np.arange(args.experts.per_token, dtype=np.int16), (11, args.num_hidden_layers, 1))
        # The third completion's engine has sent the sixth token of the prompt elsewhere.
        routes[5, -1, 0] += 7 * (number == 2)
        completion = Completion(
            [20 + number, 30], [-1.0, -1.0], "stop", [VersionSpan("e", 0, 0, 2)], routes=Routes(0, routes)
        )
        branch = Branch([Given(list(range(10))), completion])
        rows.append((Sample([branch], "stop", 0.0, {}), branch))
    packed = pack(rows, [1.0] * 3, 0, False, torch.device("cpu"), args, merged=True)
    # All share five tokens, the first two all of the prompt.
    assert packed.layout.lengths == [5, 5, 1, 1, 6] and packed.inputs == 33 and packed.routed == (33, 33)
    assert packed.token_ids.tolist() == [*range(10), 20, 21, *range(5, 10), 22]
    assert packed.routes is not None and (packed.routes[:, -1, 0] != 0).nonzero().flatten().tolist() == [12]
