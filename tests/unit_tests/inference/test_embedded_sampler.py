"""What the embedded engine draws: exact distributions, streams of random numbers, and which tokens are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.inference.test_embedded_engine import PROMPTS, request
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.forwards import draw, stream_keys, truncation_mask, uniforms
from torchtitan.models.hf_checkpoint import load_policy


def test_sampled_tokens_follow_the_exact_distribution(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint())
    with torch.no_grad():
        exact = policy.logits(torch.tensor([PROMPTS[2]]))[0, -1].double().div(1.3).softmax(-1).numpy()
    engine = Engine(policy, 512, 64, ())
    samples = 4096
    groups = engine.generate([request("a", PROMPTS[2], 1, n=samples, temperature=1.3, seed=3)])
    counts = np.bincount([completion.token_ids[0] for completion in groups[0]], minlength=len(exact))
    expected = exact * samples
    common = expected >= 5
    chi = ((counts - expected)[common] ** 2 / expected[common]).sum()
    rare, rare_expected = counts[~common].sum(), expected[~common].sum()
    chi += (rare - rare_expected) ** 2 / rare_expected
    freedom = common.sum()
    # Mean and standard deviation of chi-square; the seed is fixed, so this either holds or it does not.
    assert abs(chi - freedom) < 3 * math.sqrt(2 * freedom)


def test_streams_are_uniform_and_unrelated() -> None:
    draws = np.stack(
        [uniforms(stream_keys(seed, 64), np.full(64, position)) for seed in range(8) for position in range(64)]
    )
    flat = draws.reshape(-1)
    assert flat.min() >= 0.0 and flat.max() < 1.0 and len(np.unique(flat)) == flat.size
    histogram = np.bincount((flat * 64).astype(int), minlength=64)
    assert abs(((histogram - flat.size / 64) ** 2 / (flat.size / 64)).sum() - 63) < 4 * math.sqrt(126)
    neighbours = np.corrcoef(draws.reshape(8, 64, 64)[:, :-1].ravel(), draws.reshape(8, 64, 64)[:, 1:].ravel())[0, 1]
    samples = np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 0.02 and abs(samples) < 0.02
    assert (stream_keys(-1, 3) == stream_keys(2**64 - 1, 3)).all()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.sampled_from([5, 64, 3000]),
    top_k=st.sampled_from([0, 1, 3, 40, 2000]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    spread=st.sampled_from([0.1, 3.0]),
)
def test_kept_tokens_are_those_of_the_definition(
    seed: int, vocabulary: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    mask = truncation_mask(
        torch.stack([logits, torch.zeros(vocabulary)]),
        torch.tensor([top_k, 0]),
        torch.tensor([top_p, 1.0]),
        torch.tensor([min_p, 0.0]),
    )
    order = logits.argsort(descending=True).tolist()
    allowed = order[:top_k] if top_k else order
    weights = logits.double().exp()
    total = sum(weights[token].item() for token in allowed)
    kept, reached, doubtful = set(), 0.0, set()
    for token in allowed:
        if not kept or reached < top_p or top_p == 1.0:
            kept.add(token)
        if abs(reached - top_p) < 1e-5:
            doubtful.add(token)  # decided by rounding
        reached += weights[token].item() / total
    kept = {token for token in kept if weights[token] >= min_p * weights[order[0]]} | {order[0]}
    assert set(mask[0].nonzero().flatten().tolist()) ^ kept <= doubtful
    assert mask[1].all()


def test_kept_sets_equal_transformers_warpers() -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)) * 2
    reference = logits
    for warper in (process.TopKLogitsWarper(30), process.TopPLogitsWarper(0.8), process.MinPLogitsWarper(0.05)):
        reference = warper(None, reference)
    mask = truncation_mask(logits, torch.full((20,), 30), torch.full((20,), 0.8), torch.full((20,), 0.05))
    assert torch.equal(mask, reference.isfinite())


def test_kept_tokens_are_recorded(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 16, 64, ())
    (top, plain, greedy) = engine.generate(
        [
            request("top", PROMPTS[0], 6, top_k=3, n=2),
            request("plain", PROMPTS[1], 6),
            request("greedy", PROMPTS[2], 6, temperature=0.0, top_k=3),
        ]
    )
    for completion in top:
        assert completion.kept_token_ids is not None
        assert all(len(ids) == 3 for ids in completion.kept_token_ids)
        assert all(token in ids for token, ids in zip(completion.token_ids, completion.kept_token_ids, strict=True))
    assert plain[0].kept_token_ids is None and greedy[0].kept_token_ids is None
    (all_kept,) = engine.generate([request("all", PROMPTS[0], 3, top_k=10_000)])
    assert all_kept[0].kept_token_ids == [[], [], []]


@pytest.mark.parametrize("vocabulary", [5, 256, 49_153])
def test_draws_in_two_steps_invert_the_whole_cumulative_distribution(vocabulary: int) -> None:
    weights = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0)).mul(4).exp()
    weights[:, 1::3] = 0.0
    weights[:, -1] = 0.0
    shares = torch.from_numpy(uniforms(stream_keys(1, 64), np.zeros(64, int)))[:, None]
    ends = weights.double().cumsum(-1)
    assert torch.equal(draw(weights, shares), torch.searchsorted(ends, shares * ends[:, -1:], right=True))
    # Neither end of the unit interval gives a token that cannot be.
    for share in (0.0, 1 - 2.0**-53):
        assert (weights.gather(-1, draw(weights, torch.full_like(shares, share))) > 0).all()


def test_draws_from_a_large_vocabulary_follow_the_exact_distribution() -> None:
    vocabulary, samples = 3000, 1 << 16
    weights = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)).mul(2).exp()
    keys = stream_keys(7, samples)
    counts = np.zeros(vocabulary)
    for part in np.split(keys, 16):
        shares = torch.from_numpy(uniforms(part, np.zeros(len(part), int)))[:, None]
        tokens = draw(weights.expand(len(part), -1), shares).flatten().numpy()
        counts += np.bincount(tokens, minlength=vocabulary)
    expected = (weights.double() / weights.double().sum()).numpy() * samples
    common = expected >= 5
    chi = ((counts - expected)[common] ** 2 / expected[common]).sum()
    chi += (counts[~common].sum() - expected[~common].sum()) ** 2 / expected[~common].sum()
    assert abs(chi - common.sum()) < 3 * math.sqrt(2 * common.sum())
