"""The embedded engine against transformers, the trainer's packed forward, and exact distributions."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.roundings import forward_rounding
from torchtitan.inference.engines.embedded.engine import Engine, Poisoned
from torchtitan.inference.engines.embedded.sequences import InvalidRequest, TooLong, check_request
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.logit_tiles import KeptTokens
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.shape.checkpoint_shape import find_flavor
from torchtitan.weight_sync.memory.staging import WeightsRefused

PROMPTS = [[5, 9, 3], [7] * 9, list(range(20, 37)), list(range(60, 100)), [11, 12, 99, 3, 4, 5, 6, 7, 8, 9, 10]]
pytestmark = pytest.mark.usefixtures("one_thread")


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
    policy: Decoder, submitted: list[GenerateRequest], answers: list[list[Completion]]
) -> tuple[list[torch.Tensor], float]:
    """Log-probs of all completions in one packed forward of the trainer, and the largest |logit|."""
    ids: list[int] = []
    lengths, places = [], []
    rows: list[list[int]] = []
    for request, completions in zip(submitted, answers, strict=True):
        for completion in completions:
            start = len(ids) + len(request.prompt_ids) - 1
            places.append(slice(start, start + len(completion.token_ids)))
            ids += request.prompt_ids + completion.token_ids
            lengths.append(len(request.prompt_ids) + len(completion.token_ids))
            kept = completion.kept_token_ids or [[]] * len(completion.token_ids)
            rows += [[]] * (len(request.prompt_ids) - 1) + kept + [[]]
    keep = KeptTokens(
        torch.tensor([0] + [len(row) for row in rows]).cumsum(0), torch.tensor([i for row in rows for i in row]).long()
    )
    token_ids, layout = torch.tensor(ids), PackedLayout(lengths)
    temperature = submitted[0].sampling.temperature or 1.0
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
    difference = (torch.cat([torch.tensor(reply.log_probs) for reply in got]) - torch.cat(expected)).abs().max().item()
    print(f"{torch.get_num_threads()} thread(s), {engine.sizes}: largest difference {difference:.1e}")
    assert difference <= (forward_rounding(engine.args, largest) if engine.sizes.unmet else 0.0)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}], ids=["plain", "truncated"])
@pytest.mark.parametrize(("family", "threads"), [("llama3", 1), ("qwen2", 1), ("qwen3", 1), ("qwen2", 2)])
def test_log_probs_equal_the_trainers(
    tiny_checkpoint: Callable[..., Path], family: str, sampling: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    trainer = load_policy(tiny_checkpoint(family))
    weights = scaled_weights(trainer, 6.0)
    trainer.load_state_dict(weights, strict=False)
    submitted = requests(24, n=4, **sampling)
    for exact in (False, True):
        engine = Engine(load_policy(tiny_checkpoint(family)), 12, 128, (), exact=exact)
        engine.apply_weights("e", 1, weights)
        answers = engine.generate(submitted)
        expected, largest = trainer_log_probs(trainer, submitted, answers)
        assert largest > 12
        assert_equal_where_it_can_be(engine, [sample for group in answers for sample in group], expected, largest)


@pytest.mark.slow
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
    for model in (trainer, policy):
        model.initialize_weights(seed=1, std=0.1)
    submitted = [request(str(length), [(7 * i) % 1000 for i in range(length)], 20, n=2) for length in lengths]
    engine = Engine(policy, 16, 1200, ())
    answers = engine.generate(submitted)
    expected, largest = trainer_log_probs(trainer, submitted, answers)
    assert_equal_where_it_can_be(engine, [sample for group in answers for sample in group], expected, largest)


def test_a_token_alone_has_the_log_prob_it_has_in_company(tiny_checkpoint: Callable[..., Path]) -> None:
    """In the trainer's packs as in the engine's steps, whose products would have one row instead of many."""
    trainer = load_policy(tiny_checkpoint())
    submitted = [request("short", [5], 6), *requests(6)]
    answers = [Engine(load_policy(tiny_checkpoint()), 4, 64, ()).generate([item])[0] for item in submitted]
    together, largest = trainer_log_probs(trainer, submitted, answers)
    engine = Engine(load_policy(tiny_checkpoint()), 8, 64, ())
    assert_equal_where_it_can_be(engine, [sample for group in answers for sample in group], together, largest)
    for query, group, expected in zip(submitted, answers, together, strict=True):
        for first in (1, 2, 5):
            short = Completion(group[0].token_ids[:first], group[0].log_probs[:first], "length", [])
            alone, _ = trainer_log_probs(trainer, [query], [[short]])
            assert_equal_where_it_can_be(engine, [short], alone, largest)
            assert torch.equal(alone[0], expected[:first]) or engine.sizes.unmet


def test_group_shares_one_prefill_and_gets_what_single_samples_get(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 32, 128, ())
    together = engine.generate(requests(16, n=6))
    assert engine.statistics.prefilled_tokens == sum(map(len, PROMPTS))
    # A sample's stream is (seed, index): its neighbours, the queue and the rows it gets change nothing.
    cramped = Engine(load_policy(tiny_checkpoint()), 4, 128, ())
    assert [[completion.token_ids for completion in group] for group in cramped.generate(requests(16, n=6))] == [
        [completion.token_ids for completion in group] for group in together
    ]
    for submitted, group in zip(requests(16, n=2), together, strict=True):
        (alone,) = engine.generate([submitted])
        assert [completion.token_ids for completion in alone] == [completion.token_ids for completion in group[:2]]
    assert len({tuple(completion.token_ids) for completion in together[0]}) == 6
    assert engine.generate([request("x", PROMPTS[0], 16, seed=1)])[0][0].token_ids != together[0][0].token_ids


def test_stop_tokens_and_length(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint())
    engine = Engine(policy, 8, 64, ())
    (free,) = engine.generate([request("free", PROMPTS[0], 20, n=8)])
    assert all(completion.finish_reason == "length" and len(completion.token_ids) == 20 for completion in free)
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
            spans = [(span.epoch, span.version, span.start, span.end) for span in completion.spans]
            assert spans == [("e", 3, 0, 5), ("e", 5, 5, 12)]
        assert [(span.version, span.start, span.end) for span in done["b"][0].spans] == [(5, 0, 4)]
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
        assert [sample.token_ids for sample in done["a"][2:]] == [sample.token_ids for sample in fresh[2:]]


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
    for name in ("gone", "queued", "unknown"):
        engine.abort(name)
    assert engine.statistics.aborted_requests == 2 and engine.waiting == 0
    engine.pause()
    assert engine.step() == [] and engine.running == 3
    engine.resume()
    done = {}
    while engine.busy:
        done.update(engine.step())
    assert [completion.token_ids for completion in done["kept"]] == [completion.token_ids for completion in expected]
    with pytest.raises(TooLong, match="max_length 64"):
        engine.submit(request("x", PROMPTS[0], 62))
    engine.submit(request("twice", PROMPTS[0]))
    with pytest.raises(ValueError, match="running already"):
        engine.submit(request("twice", PROMPTS[0]))


@pytest.mark.parametrize(
    ("prompt", "sampling", "problem"),
    [
        ([], {}, "prompt_ids"),
        ([1, 128], {}, "0..127"),
        ([True], {}, "prompt_ids"),
        ("text", {}, "prompt_ids"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"n": 0}, "n: it must"),
        ([1], {"n": "2"}, "n: it must"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": math.nan}, "temperature"),
        ([1], {"temperature": 1e-30}, "temperature"),
        ([1], {"temperature": 10**400}, "temperature"),
        ([1], {"n": 10**6}, "n: it must be less"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"min_p": 2.0}, "min_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"seed": 1.5}, "seed"),
        ([1], {"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
def test_invalid_requests(
    tiny_checkpoint: Callable[..., Path], prompt: Any, sampling: dict[str, Any], problem: str
) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 1, 64)
    with pytest.raises(InvalidRequest, match=problem):
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


def test_bfloat16_runs_and_roughly_agrees(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint(), torch.bfloat16)
    submitted = requests(8, n=2)
    answers = Engine(policy, 8, 64, ()).generate(submitted)
    expected, _ = trainer_log_probs(load_policy(tiny_checkpoint(), torch.bfloat16), submitted, answers)
    got = [torch.tensor(completion.log_probs) for completions in answers for completion in completions]
    assert (torch.cat(got) - torch.cat(expected)).abs().mean() < 0.1


@pytest.mark.slow
def test_an_actor_starts_without_distributed_tensors() -> None:
    """Their import takes half a second and 40 MB."""
    modules = "torchtitan.inference.engines.embedded.server, torchtitan.models.hf_checkpoint"
    code = f"import sys, {modules}; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0
