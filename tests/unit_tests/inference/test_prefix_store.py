"""Beginnings that are computed once: what is sampled behind them is what the trainer computes, and none is stale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.mixtures import make_mixture
from tests.roundings import forward_rounding
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.prefixes import PrefixStore
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.shape.checkpoint_shape import find_flavor

TURNS, EPISODES, GROUPS = 5, 4, 3
Turn = tuple[list[int], Completion]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def play(engine: Engine, vocabulary: int, prompt: int = 40, turns: int = TURNS) -> list[Turn]:
    """Episodes of several turns, all of a turn at the same time, each turn its own request."""
    generator = np.random.default_rng(0)
    starts = [generator.integers(2, vocabulary, prompt + 7 * group).tolist() for group in range(GROUPS)]
    histories = [list(start) for start in starts for _ in range(EPISODES)]
    played: list[Turn] = []
    for turn in range(turns):
        submitted = [
            GenerateRequest(f"{turn}/{i}", list(history), SamplingParameters(5 + i % 3, seed=100 * turn + i))
            for i, history in enumerate(histories)
        ]
        for i, (done,) in enumerate(engine.generate(submitted)):
            played.append((submitted[i].prompt_ids, done))
            observation = generator.integers(2, vocabulary, 3 + 9 * (i % 2)).tolist()
            histories[i] = submitted[i].prompt_ids + done.token_ids + observation
    return played


@torch.no_grad()
def check_log_probs(engine: Engine, trainer: Decoder, played: list[Turn]) -> None:
    for prompt, done in played:
        token_ids = torch.tensor(prompt + done.token_ids)
        log_probs, _ = trainer(token_ids, PackedLayout([len(token_ids)]), token_ids.roll(-1), 1.0)
        expected = log_probs[len(prompt) - 1 : -1]
        if engine.sizes.unmet:
            largest = float(trainer(token_ids, PackedLayout([len(token_ids)])).abs().max())
            assert float((expected - torch.tensor(done.log_probs)).abs().max()) <= forward_rounding(
                trainer.args, largest
            )
        else:
            assert done.log_probs == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "prompt", "turns"),
    [(4, 2, 16, 40, TURNS), (14, 2, 22, 33, TURNS), (4, 4, 32, 530, 2)],
)
def test_turns_compute_what_is_new_and_are_what_the_trainer_computes(
    heads: int, key_heads: int, head_dim: int, prompt: int, turns: int
) -> None:
    args = dataclasses.replace(
        find_flavor("qwen3", "debug"),
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head_dim, vocab_size=300,
    )  # fmt: skip
    trainer, policy = Decoder(args), Decoder(args)
    for model in (trainer, policy):
        model.initialize_weights(seed=1, std=0.1)
    engine = Engine(policy, 16, 1024, ())
    played = play(engine, args.vocab_size, prompt, turns)
    check_log_probs(engine, trainer, played)
    computed, prompt_tokens = engine.statistics.prefilled_tokens, sum(len(ids) for ids, _ in played)
    assert computed + engine.statistics.reused_tokens == prompt_tokens
    # A group's prompt once; of a later turn the observation and the token before it, which had not been computed.
    observed = sum((3 + 9 * (i % 2) + 1) for i in range(GROUPS * EPISODES)) * (turns - 1)
    prompts = sum(prompt + 7 * group for group in range(GROUPS))
    assert computed <= observed + prompts + GROUPS * EPISODES


def test_turns_of_latent_attention_and_experts(tmp_path: Path) -> None:
    directory = make_mixture(tmp_path, "deepseek_v3")
    engine = Engine(load_policy(directory), 16, 1024, ())
    check_log_probs(engine, load_policy(directory), play(engine, 128, turns=2))
    assert engine.statistics.reused_tokens > 0


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_prefixes_of_older_weights_are_not_reused(
    tiny_checkpoint: Callable[..., Path], in_flight: Literal["keep", "recompute"]
) -> None:
    trainer = load_policy(tiny_checkpoint())
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in trainer.named_parameters()
    }
    engine = Engine(load_policy(tiny_checkpoint()), 16, 1024, (), in_flight_kv=in_flight)
    prompt = list(range(10, 60))
    before = play(engine, 90, turns=2)
    check_log_probs(engine, trainer, before)
    # One is under way and one waits when the weights change; both end, and others begin with what they leave.
    engine.submit(GenerateRequest("running", prompt, SamplingParameters(30)))
    for _ in range(10):
        engine.step()
    engine.apply_weights("e", 1, weights)
    trainer.load_state_dict(weights, strict=False)
    finished: dict[str, list[Completion]] = {}
    while "running" not in finished:
        finished.update(engine.step())
    history = prompt + finished["running"][0].token_ids + [7]
    reused = engine.statistics.reused_tokens
    (after,) = engine.generate([GenerateRequest("next", history, SamplingParameters(8))])
    assert (engine.statistics.reused_tokens > reused) == (in_flight == "recompute")
    check_log_probs(engine, trainer, [(history, after[0]), *play(engine, 90, turns=2)])


def test_memory_stays_within_the_limit_and_rows_come_first(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = load_policy(tiny_checkpoint())
    unlimited = Engine(load_policy(tiny_checkpoint()), 8, 256, ())
    expected = play(unlimited, 90)
    limit = unlimited._cache.bytes_of(8, 144)
    engine = Engine(policy, 8, 256, (), cache_bytes=limit)
    most = 0

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(
            most, engine._rows.prefixes._bytes + engine._cache.bytes_of(engine._cache.rows, engine._cache.length)
        )

    policy.model.register_forward_pre_hook(watch)
    played = play(engine, 90)
    assert [completion.token_ids for _, completion in played] == [completion.token_ids for _, completion in expected]
    assert 0 < most <= limit
    engine.sleep(1)
    assert engine._rows.prefixes._bytes == 0 and engine._rows.prefixes.find(np.array(played[0][0]))[0] is None


def test_single_turns_leave_little_behind_and_still_share_instructions(tiny_checkpoint: Callable[..., Path]) -> None:
    def kept(single_turn: bool) -> tuple[int, int, int]:
        engine = Engine(load_policy(tiny_checkpoint()), 64, 128, ())
        generator, most = np.random.default_rng(0), 0
        instructions = list(range(2, 50))
        for number in range(12):
            prompt = [*instructions, *generator.integers(2, 90, 12).tolist()]
            sampling = SamplingParameters(8, n=16, seed=number)
            engine.generate([GenerateRequest(f"{number}", prompt, sampling, single_turn=single_turn)])
            most = max(most, engine._rows.prefixes._bytes)
        return most, engine._cache.bytes_of(engine._cache.rows, engine._cache.length), engine.statistics.reused_tokens

    (most, cache, reused), (more, _, reused_by_turns) = kept(single_turn=True), kept(single_turn=False)
    assert 0 < most <= cache / 8 < more <= cache
    assert reused >= 11 * 48 and reused == reused_by_turns


def test_unequal_tokens_of_equal_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.inference.engines.embedded.prefixes.hash", lambda _: 5, raising=False)
    store = PrefixStore()
    store.keep(np.arange(40), [torch.zeros(2)])
    assert store.find(np.arange(40))[1] == 40
    assert store.find(np.array([*range(20), *range(30, 50)]))[1] == 20
