"""The embedded engine against transformers, the trainer's packed forward, and exact distributions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.roundings import forward_rounding
from torchtitan.errors import UserError
from torchtitan.inference.embedded.cache import KeyValueCache
from torchtitan.inference.embedded.engine import Engine, Poisoned
from torchtitan.inference.embedded.requests import InvalidRequest, TooLong, check_request
from torchtitan.inference.embedded.sampler import stream_keys, truncation_mask, uniforms
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.models import load_policy
from torchtitan.models.attention import PackedLayout
from torchtitan.models.batch_invariance import InvariantSizes
from torchtitan.models.decoder import Decoder
from torchtitan.models.flavors import find_flavor
from torchtitan.models.kept_tokens import KeptTokens
from torchtitan.weight_sync.staging import WeightsRefused

PROMPTS = [[5, 9, 3], [7] * 9, list(range(20, 37)), list(range(60, 100)), [11, 12, 99, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(name: str, prompt: list[int], max_tokens: int = 12, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParameters(max_tokens, **sampling))


def requests(max_tokens: int = 12, **sampling: Any) -> list[GenerateRequest]:
    return [request(str(i), prompt, max_tokens, seed=i, **sampling) for i, prompt in enumerate(PROMPTS)]


def scaled_weights(policy: Decoder, factor: float) -> dict[str, torch.Tensor]:
    """Weights whose logits are `factor` times as large."""
    return {
        name: parameter.detach() * (factor if name == "model.norm.weight" else 1)
        for name, parameter in policy.named_parameters()
    }


def other_weights(policy: Decoder) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in policy.named_parameters()
    }


@torch.no_grad()
def trainer_log_probs(
    policy: Decoder, asked: list[GenerateRequest], answers: list[list[Completion]]
) -> tuple[list[torch.Tensor], float]:
    """Log-probs of all completions in one packed forward of the trainer, and the largest |logit|."""
    ids: list[int] = []
    lengths, places = [], []
    rows: list[list[int]] = []
    for one, completions in zip(asked, answers, strict=True):
        for completion in completions:
            start = len(ids) + len(one.prompt_ids) - 1
            places.append(slice(start, start + len(completion.token_ids)))
            ids += one.prompt_ids + completion.token_ids
            lengths.append(len(one.prompt_ids) + len(completion.token_ids))
            kept = completion.kept_token_ids or [[]] * len(completion.token_ids)
            rows += [[]] * (len(one.prompt_ids) - 1) + kept + [[]]
    keep = KeptTokens(
        torch.tensor([0] + [len(row) for row in rows]).cumsum(0), torch.tensor([i for row in rows for i in row]).long()
    )
    token_ids, layout = torch.tensor(ids), PackedLayout(lengths)
    temperature = asked[0].sampling.temperature or 1.0
    log_probs, _ = policy(token_ids, layout, token_ids.roll(-1), temperature, keep)
    return [log_probs[place] for place in places], float(policy(token_ids, layout).abs().max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_greedy_equals_transformers(tiny_checkpoint: Callable[..., Path], family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    directory = tiny_checkpoint(family, tied)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    answers = Engine(load_policy(directory), 4, 128).generate(requests(24, temperature=0.0))
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )
        assert completions[0].token_ids == expected[0, len(prompt) :].tolist()


def assert_equal_where_it_can_be(
    engine: Engine, got: list[Completion], expected: list[torch.Tensor], largest: float
) -> None:
    """Log-probs equal to the last bit where the processor allows it, else as far apart as roundings bring them."""
    difference = (torch.cat([torch.tensor(one.log_probs) for one in got]) - torch.cat(expected)).abs().max().item()
    print(f"{torch.get_num_threads()} thread(s), {engine.sizes}: largest difference {difference:.1e}")
    assert difference <= (forward_rounding(engine.args, largest) if engine.sizes.unmet else 0.0)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}], ids=["plain", "truncated"])
@pytest.mark.parametrize(
    ("family", "factor", "threads"),
    [(family, factor, 1) for family in ("llama3", "qwen2", "qwen3") for factor in (1.0, 6.0)] + [("qwen2", 6.0, 2)],
)
def test_log_probs_equal_the_trainers(
    tiny_checkpoint: Callable[..., Path], family: str, factor: float, sampling: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    trainer = load_policy(tiny_checkpoint(family))
    weights = scaled_weights(trainer, factor)
    trainer.load_state_dict(weights, strict=False)
    asked = requests(24, n=4, **sampling)
    for exact in (False, True):
        engine = Engine(load_policy(tiny_checkpoint(family)), 12, 128, (), exact=exact)
        engine.apply_weights("e", 1, weights)
        answers = engine.generate(asked)
        expected, largest = trainer_log_probs(trainer, asked, answers)
        assert factor == 1.0 or largest > 12
        assert_equal_where_it_can_be(engine, [one for group in answers for one in group], expected, largest)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("hidden", "wide", "heads", "key_heads", "head_dim", "lengths"),
    [
        (896, 4864, 14, 2, 64, [3, 60]),
        (64, 96, 4, 2, 16, [1, 180, 250, 370, 500, 1050]),
        (96, 100, 14, 2, 22, [5, 40]),
    ],
    ids=["as wide as Qwen2.5-0.5B", "long", "odd"],
)
def test_log_probs_of_other_shapes_equal_the_trainers(
    hidden: int, wide: int, heads: int, key_heads: int, head_dim: int, lengths: list[int], threads: int
) -> None:
    torch.set_num_threads(threads)
    args = dataclasses.replace(
        find_flavor("qwen2", "debug"),
        hidden_size=hidden,
        intermediate_size=wide,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        num_hidden_layers=1,
        vocab_size=1000,
    )
    trainer, policy = Decoder(args), Decoder(args)
    for one in (trainer, policy):
        one.initialize_weights(seed=1, std=0.1)
    asked = [request(str(length), [(7 * i) % 1000 for i in range(length)], 20, n=2) for length in lengths]
    engine = Engine(policy, 16, 1200, ())
    answers = engine.generate(asked)
    expected, largest = trainer_log_probs(trainer, asked, answers)
    assert_equal_where_it_can_be(engine, [one for group in answers for one in group], expected, largest)


def test_a_token_alone_has_the_log_prob_it_has_in_company(tiny_checkpoint: Callable[..., Path]) -> None:
    """In the trainer's packs as in the engine's steps, whose products would have one row instead of many."""
    trainer = load_policy(tiny_checkpoint())
    asked = [request("short", [5], 6), *requests(6)]
    answers = [Engine(load_policy(tiny_checkpoint()), 4, 64, ()).generate([one])[0] for one in asked]
    together, largest = trainer_log_probs(trainer, asked, answers)
    engine = Engine(load_policy(tiny_checkpoint()), 8, 64, ())
    assert_equal_where_it_can_be(engine, [one for group in answers for one in group], together, largest)
    for one, group, expected in zip(asked, answers, together, strict=True):
        for first in (1, 2, 5):
            short = Completion(group[0].token_ids[:first], group[0].log_probs[:first], "length", [])
            alone, _ = trainer_log_probs(trainer, [one], [[short]])
            assert_equal_where_it_can_be(engine, [short], alone, largest)
            assert torch.equal(alone[0], expected[:first]) or engine.sizes.unmet


def test_group_shares_one_prefill_and_gets_what_single_samples_get(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 32, 128, ())
    together = engine.generate(requests(16, n=6))
    assert engine.statistics.prefilled_tokens == sum(map(len, PROMPTS))
    # A sample's stream is (seed, index): its neighbours, the queue and the rows it gets change nothing.
    cramped = Engine(load_policy(tiny_checkpoint()), 4, 128, ())
    assert [[one.token_ids for one in group] for group in cramped.generate(requests(16, n=6))] == [
        [one.token_ids for one in group] for group in together
    ]
    for asked, group in zip(requests(16, n=2), together, strict=True):
        (alone,) = engine.generate([asked])
        assert [one.token_ids for one in alone] == [one.token_ids for one in group[:2]]
    assert len({tuple(one.token_ids) for one in together[0]}) == 6
    assert engine.generate([request("x", PROMPTS[0], 16, seed=1)])[0][0].token_ids != together[0][0].token_ids


def test_sampled_tokens_follow_the_exact_distribution(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint())
    with torch.no_grad():
        exact = policy.logits(torch.tensor([PROMPTS[2]]))[0, -1].double().div(1.3).softmax(-1).numpy()
    engine = Engine(policy, 512, 64, ())
    samples = 4096
    groups = engine.generate([request("a", PROMPTS[2], 1, n=samples, temperature=1.3, seed=3)])
    counts = np.bincount([one.token_ids[0] for one in groups[0]], minlength=len(exact))
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


@settings(max_examples=60, deadline=None)
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


def test_stop_tokens_and_length(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint())
    engine = Engine(policy, 8, 64, ())
    (free,) = engine.generate([request("free", PROMPTS[0], 20, n=8)])
    assert all(one.finish_reason == "length" and len(one.token_ids) == 20 for one in free)
    stop = free[0].token_ids[5]
    for ending in ({"stop_token_ids": [stop]}, {}):
        other = engine if ending else Engine(policy, 8, 64, (stop,))
        (stopped,) = other.generate([request("stop", PROMPTS[0], 20, n=8, **ending)])
        for before, after in zip(free, stopped, strict=True):
            place = before.token_ids.index(stop) if stop in before.token_ids else None
            assert after.token_ids == before.token_ids[: None if place is None else place + 1]
            assert after.finish_reason == ("length" if place is None else "stop")
    assert Engine(policy, 8, 64).eos_token_ids == {1}
    assert engine.running == engine.waiting == 0 and not engine.busy


def test_weights_change_in_flight(tiny_checkpoint: Callable[..., Path]) -> None:
    old, new = load_policy(tiny_checkpoint()), load_policy(tiny_checkpoint())
    new.load_state_dict(other_weights(old), strict=False)
    tokens: dict[str, list[int]] = {}
    for kv in ("keep", "recompute"):
        engine = Engine(load_policy(tiny_checkpoint()), 8, 64, (), in_flight_kv=kv)  # type: ignore[arg-type]
        engine.apply_weights("e", 3, dict(old.named_parameters()))
        engine.submit(request("a", PROMPTS[2], 12, n=2))
        done = {}
        for _ in range(4):
            done.update(engine.step())
        assert not done
        engine.apply_weights("e", 4, dict(new.named_parameters()))
        engine.apply_weights("e", 5, dict(new.named_parameters()))
        engine.submit(request("b", PROMPTS[2], 4))
        while engine.busy:
            done.update(engine.step())
        for completion in done["a"]:
            # A step at admission gives two tokens, every later one gives one.
            spans = [(one.epoch, one.version, one.start, one.end) for one in completion.spans]
            assert spans == [("e", 3, 0, 5), ("e", 5, 5, 12)]
        assert [(one.version, one.start, one.end) for one in done["b"][0].spans] == [(5, 0, 4)]
        first = done["a"][0]
        ids = torch.tensor([PROMPTS[2] + first.token_ids])
        with torch.no_grad():
            under = [
                policy.logits(ids)[0, len(PROMPTS[2]) - 1 : -1].log_softmax(-1).gather(-1, ids[0, -12:, None])[:, 0]
                for policy in (old, new)
            ]
        got = torch.tensor(first.log_probs)
        assert (got[:5] - under[0][:5]).abs().max() < 1e-5
        off = (got[5:] - under[1][5:]).abs().max()
        assert off < 1e-5 if kv == "recompute" else off > 1e-3
        # Whoever begins after the update never sees older weights.
        ids = torch.tensor([PROMPTS[2] + done["b"][0].token_ids])
        with torch.no_grad():
            expected = new.logits(ids)[0, len(PROMPTS[2]) - 1 : -1].log_softmax(-1).gather(-1, ids[0, -4:, None])[:, 0]
        assert (torch.tensor(done["b"][0].log_probs) - expected).abs().max() < 1e-5
        tokens[kv] = first.token_ids
    assert tokens["keep"][:5] == tokens["recompute"][:5]


def test_waiting_samples_never_reuse_an_older_prompt(tiny_checkpoint: Callable[..., Path]) -> None:
    old, new = load_policy(tiny_checkpoint()), load_policy(tiny_checkpoint())
    new.load_state_dict(other_weights(old), strict=False)
    for update in (False, True):
        engine = Engine(load_policy(tiny_checkpoint()), 3, 64, ())
        engine.submit(request("short", PROMPTS[0], 6))
        engine.submit(request("a", PROMPTS[1], 12, n=5))
        engine.step()
        assert (engine.running, engine.waiting) == (3, 3)
        if update:
            engine.apply_weights("e", 1, dict(new.named_parameters()))
        done = {}
        while engine.busy:
            done.update(engine.step())
            if engine.waiting == 2:
                # The third sample began beside the first two: it shares their prompt unless that is an older version's.
                prompts = len(PROMPTS[0]) + len(PROMPTS[1])
                assert engine.statistics.prefilled_tokens == prompts + (len(PROMPTS[1]) if update else 0)
        (fresh,) = Engine(new if update else old, 8, 64, ()).generate([request("a", PROMPTS[1], 12, n=5)])
        assert [one.token_ids for one in done["a"][2:]] == [one.token_ids for one in fresh[2:]]


def test_bad_versions_are_refused_and_half_applied_ones_poison(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint())
    weights = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    engine = Engine(load_policy(tiny_checkpoint()), 2, 64, ())
    before = engine.generate([request("a", PROMPTS[0])])
    name = "model.layers.1.mlp.up_proj.weight"
    for bad in (
        {key: value for key, value in weights.items() if key != name},
        {**weights, "model.extra": torch.zeros(1)},
        {**weights, name: torch.zeros(2, 2)},
    ):
        with pytest.raises(WeightsRefused, match="does not fit the model"):
            engine.apply_weights("e", 1, bad)
    assert engine.generate([request("a", PROMPTS[0])]) == before and engine.version == 0

    half = {**weights, name: torch.zeros(weights[name].shape, device="meta")}
    with pytest.raises((RuntimeError, NotImplementedError)):
        engine.apply_weights("e", 2, half)
    with pytest.raises(Poisoned):
        engine.generate([request("b", PROMPTS[0])])
    engine.abort_all()
    # Tied weights may come under both of their names.
    engine.apply_weights("e", 3, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    (after,) = engine.generate([request("c", PROMPTS[0])])
    assert after[0].token_ids == before[0][0].token_ids and after[0].spans[0].version == 3


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_asleep_it_has_no_cache_and_serves_nothing_and_awake_it_is_as_before(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    engine = Engine(load_policy(tiny_checkpoint(family)), 8, 64, ())
    before = engine.generate(requests())
    engine.submit(request("late", PROMPTS[0]))
    assert engine.sleep(1) is False and not engine.asleep, "something runs"
    engine.abort_all()
    assert engine.sleep(1) and engine.sleep(1) and engine.asleep == {"weights", "kv_cache"}
    assert not engine._cache.keys and engine._cache.visible.numel() == 0
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate([request("a", PROMPTS[0])])
    made = engine.statistics.generated_tokens
    assert engine.step() == [] and engine.busy
    assert engine.statistics.generated_tokens == made and not engine._cache.keys
    with pytest.raises(WeightsRefused, match="asleep"):
        engine.apply_weights("e", 1, other_weights(engine.policy))
    engine.wake(["weights"])
    assert engine.asleep == {"kv_cache"} and engine.step() == []
    engine.wake(["kv_cache"])
    assert not engine.asleep and dict(engine.step()).keys() <= {"a"}
    engine.abort_all()
    assert engine.generate(requests()) == before


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama3", False)])
def test_dropped_weights_serve_nothing_before_a_version_has_come(
    tiny_checkpoint: Callable[..., Path], family: str, tied: bool
) -> None:
    engine = Engine(load_policy(tiny_checkpoint(family, tied)), 8, 64, ())
    weights = other_weights(engine.policy)
    expected = Engine(load_policy(tiny_checkpoint(family, tied)), 8, 64, ())
    expected.apply_weights("e", 1, weights)
    for _ in range(2):
        for parameter in engine.policy.parameters():
            # As the verification of versions does, which then cannot be resized any more.
            parameter.numpy()
        assert engine.sleep(2)
        assert all(one.untyped_storage().nbytes() == 0 for one in engine.policy.parameters())
        engine.wake(["weights", "kv_cache"])
        with pytest.raises(Poisoned):
            engine.generate([request("a", PROMPTS[0])])
        engine.abort_all()
        engine.apply_weights("e", 1, weights)
        assert engine.generate(requests()) == expected.generate(requests())


def test_not_a_number_fails_its_requests_and_leaves_no_trace(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint())
    weights = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    engine = Engine(load_policy(tiny_checkpoint()), 4, 64, ())
    before = engine.generate([request("a", PROMPTS[2])])
    nan = {
        **weights,
        "model.layers.0.self_attn.v_proj.weight": weights["model.layers.0.self_attn.v_proj.weight"] * math.nan,
    }
    engine.apply_weights("e", 1, nan)
    engine.submit(request("b", PROMPTS[3], n=3))
    assert engine.step() == [] and list(engine.take_failures()) == ["b"] and not engine.busy
    engine.apply_weights("e", 2, weights)
    assert engine.generate([request("a", PROMPTS[2])])[0][0].log_probs == before[0][0].log_probs


def test_a_failure_during_admission_spares_the_limits_of_its_neighbours(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 4, 64, ())
    engine.submit(request("first", PROMPTS[1], 2, n=2))
    engine.submit(request("fails", PROMPTS[0], 20, n=3))
    engine.submit(request("short", PROMPTS[2], 1))
    assert [name for name, _ in engine.step()] == ["first"] and engine.waiting == 2
    # The third sample of "fails" is admitted together with "short", and takes older rows down with it.
    engine._requests["fails"].prompt_logits = torch.full((128,), math.nan)
    (finished,) = engine.step()
    assert finished[0] == "short" and len(finished[1][0].token_ids) == 1
    assert list(engine.take_failures()) == ["fails"] and not engine.busy


def test_abort_pause_and_refusals(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 6, 64, ())
    expected = engine.generate([request("kept", PROMPTS[1], 20, n=3)])[0]
    engine.submit(request("gone", PROMPTS[0], 20, n=2))
    engine.submit(request("kept", PROMPTS[1], 20, n=3))
    engine.submit(request("queued", PROMPTS[1], 20, n=3))
    engine.step()
    partial = engine.abort("gone")
    assert [(len(one.token_ids), one.finish_reason) for one in partial] == [(2, "abort")] * 2
    assert engine.abort("queued") != [] and engine.abort("unknown") == []
    engine.pause()
    assert engine.step() == [] and engine.running == 3
    engine.resume()
    done = {}
    while engine.busy:
        done.update(engine.step())
    assert [one.token_ids for one in done["kept"]] == [one.token_ids for one in expected]
    with pytest.raises(TooLong, match="max_length 64"):
        engine.submit(request("x", PROMPTS[0], 62))
    engine.submit(request("twice", PROMPTS[0]))
    with pytest.raises(ValueError, match="running already"):
        engine.submit(request("twice", PROMPTS[0]))


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "prompt_ids"),
        ([1, 128], {}, "0..127"),
        ([True], {}, "prompt_ids"),
        ("text", {}, "prompt_ids"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"n": 0}, "n must"),
        ([1], {"n": "2"}, "n must"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": math.nan}, "temperature"),
        ([1], {"temperature": 1e-30}, "temperature"),
        ([1], {"temperature": 10**400}, "temperature"),
        ([1], {"n": 10**6}, "n must be at most"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"min_p": 2.0}, "min_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"seed": 1.5}, "seed"),
        ([1], {"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
def test_invalid_requests(
    tiny_checkpoint: Callable[..., Path], prompt: Any, sampling: dict[str, Any], said: str
) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 1, 64)
    with pytest.raises(InvalidRequest, match=said):
        engine.submit(GenerateRequest("a", prompt, SamplingParameters(**{"max_tokens": 4, **sampling})))


@pytest.mark.parametrize("exact", [False, True])
def test_progress_is_told_layer_by_layer(tiny_checkpoint: Callable[..., Path], exact: bool) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 4, 64, (), exact=exact)
    seen = []
    for layer in engine.policy.model.layers:
        layer.register_forward_hook(lambda *_: seen.append(engine.progressed_at))
    engine.generate([request("a", PROMPTS[0], 3)])
    # Prompt, two more tokens, and where it is exact the trainer's forward.
    assert len(seen) == (3 + exact) * len(engine.policy.model.layers)
    assert seen == sorted(set(seen))


def test_extreme_but_valid_requests_do_not_harm_the_engine(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 4, 64, ())
    for seed, other in ((2**64 + 5, 5), (-1, 2**64 - 1), (-(10**30), -(10**30) % 2**64)):
        extreme = request("a", PROMPTS[0], seed=seed, top_k=2**70, temperature=1)
        check_request(extreme, 128, 64)
        plain = engine.generate([request("b", PROMPTS[0], seed=other)])
        assert engine.generate([extreme])[0][0].token_ids == plain[0][0].token_ids
    for temperature in (1e-4, 1e4):
        (completions,) = engine.generate([request("c", PROMPTS[0], temperature=temperature, stop_token_ids=[-(2**80)])])
        assert all(math.isfinite(value) for value in completions[0].log_probs)


def test_the_cache_keeps_its_memory_limit(tiny_checkpoint: Callable[..., Path]) -> None:
    free = Engine(load_policy(tiny_checkpoint()), 64, 256, ())
    expected = [[one.token_ids for one in group] for group in free.generate(requests(40, n=4))]
    # Room for two rows of the longest request, or as many as a forward takes at least.
    limit = free._cache.bytes_of(2, 80)
    engine = Engine(load_policy(tiny_checkpoint()), 64, 256, (), cache_bytes=limit)
    assert [[one.token_ids for one in group] for group in engine.generate(requests(40, n=4))] == expected
    assert engine._cache.bytes_of(engine._cache.rows, engine._cache.length) <= limit
    with pytest.raises(TooLong, match="cache"):
        engine.submit(request("a", PROMPTS[0], 250))
    with pytest.raises(UserError, match="1000 bytes"):
        Engine(load_policy(tiny_checkpoint()), 1, 256, (), cache_bytes=1000)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_growing_the_cache_stays_within_its_limit_and_keeps_what_it_holds(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("torchtitan.inference.embedded.cache.BLOCK", block)
    args = load_policy(tiny_checkpoint()).args
    cpu, sizes = torch.device("cpu"), InvariantSizes(rows=16, queries=8)
    free = KeyValueCache(args, 256, 512, 0, torch.bfloat16, cpu, sizes)
    assert free.room(512, 0) == 256
    limit = free.bytes_of(48, 128)
    cache = KeyValueCache(args, 256, 512, limit, torch.bfloat16, cpu, sizes)
    # A forward takes sixteen rows at least: where those do not fit, nothing does.
    assert cache.room(512, 0) == 0 and cache.room(128, 0) == 48
    for layer in range(args.num_hidden_layers):
        cache.keys[layer][:, 3] = 7.0 + layer
    held = [cache.keys[layer][: 2 * cache.heads].clone() for layer in range(args.num_hidden_layers)]
    rows = cache.room(128, 2)
    assert 16 < rows < 48  # while a block is copied there are two of it
    before = cache._blocks[0].nbytes
    cache.reserve(rows, 128, 2)
    assert cache.bytes_of(cache.rows, cache.length) + before <= limit
    for layer, old in enumerate(held):
        assert torch.equal(cache.keys[layer][: 2 * cache.heads, :64], old)
        assert not cache.keys[layer][2 * cache.heads :].any() and not cache.keys[layer][:, 64:].any()
    # What is there already needs no growth.
    assert cache.room(128, rows) == rows
    assert cache.room(128, 0) == 48


def test_bfloat16_runs_and_roughly_agrees(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint(), torch.bfloat16)
    asked = requests(8, n=2)
    answers = Engine(policy, 8, 64, ()).generate(asked)
    expected, _ = trainer_log_probs(load_policy(tiny_checkpoint(), torch.bfloat16), asked, answers)
    got = [torch.tensor(one.log_probs) for completions in answers for one in completions]
    assert (torch.cat(got) - torch.cat(expected)).abs().mean() < 0.1
