"""The embedded engine's states of Gated DeltaNet layers: what it samples, continues and recomputes is the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.delta_models import DELTA_FAMILIES, make_delta
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout

# Prompts around the beginnings of chunks of 64 tokens, and one that begins like another.
PROMPTS = [[5, 9, 3], list(range(1, 64)), [7] * 64, [*range(1, 64), 3, 4], [2] * 100, [11]]


@pytest.fixture(scope="module", params=DELTA_FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_delta(tmp_path_factory.mktemp(request.param), request.param)


def _asked(name: str, prompt: list[int], max_tokens: int, n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParameters(max_tokens, n=n, seed=len(prompt)))


def _trainers(policy: Decoder, prompt: list[int], completion: Completion) -> list[float]:
    tokens = torch.tensor(prompt + completion.token_ids)
    with torch.no_grad():
        log_probs, _ = policy(tokens, PackedLayout([len(tokens)]), tokens.roll(-1))
    found: list[float] = log_probs[len(prompt) - 1 : -1].tolist()
    return found


@pytest.mark.slow
def test_log_probs_are_the_trainers_to_the_last_bit(checkpoint: Path) -> None:
    """In few rows, so that samples wait, groups share a prompt, and rows move; over several chunks of tokens."""
    trainer, engine = load_policy(checkpoint), Engine(load_policy(checkpoint), 5, 256, ())
    assert not engine.sizes.unmet
    requests = [_asked(str(i), prompt, 70 if i % 2 else 9, n=1 + i % 3) for i, prompt in enumerate(PROMPTS)]
    for prompt, group in zip(PROMPTS, engine.generate(requests), strict=True):
        for completion in group:
            assert completion.log_probs == _trainers(trainer, prompt, completion)


# Experts change nothing in what is kept of a sequence.
@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["qwen3_5_text", "qwen3_next"], indirect=True)
def test_turns_continue_from_where_a_sequence_ended(checkpoint: Path) -> None:
    trainer, engine = load_policy(checkpoint), Engine(load_policy(checkpoint), 4, 512, ())
    first = [_asked("a", PROMPTS[3], 30), _asked("b", PROMPTS[4], 61)]
    for prompt, (before,) in zip((PROMPTS[3], PROMPTS[4]), engine.generate(first), strict=True):
        reused = engine.statistics.reused_tokens
        turn = prompt + before.token_ids + [1, 2, 3]
        (after,) = engine.generate([_asked("next", turn, 20)])[0]
        assert after.log_probs == _trainers(trainer, turn, after)
        # All that was computed: every token but the last one sampled.
        assert engine.statistics.reused_tokens - reused == len(prompt) + len(before.token_ids) - 1
        # Another end after the same beginning: there is no state for it.
        reused = engine.statistics.reused_tokens
        turn = prompt + before.token_ids[:-5] + [9, 9]
        (after,) = engine.generate([_asked("other", turn, 20)])[0]
        assert after.log_probs == _trainers(trainer, turn, after)
        assert engine.statistics.reused_tokens == reused


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("checkpoint", ["qwen3_5_text", "qwen3_next"], indirect=True)
def test_states_of_older_weights_are_kept_or_computed_anew(checkpoint: Path, kept: bool) -> None:
    trainer = load_policy(checkpoint)
    engine = Engine(load_policy(checkpoint), 4, 256, (), in_flight_kv="keep" if kept else "recompute")
    prompt = list(range(40, 100))
    engine.submit(_asked("a", prompt, 40, n=2))
    for _ in range(20):
        engine.step()
    generator = torch.Generator().manual_seed(7)
    newer = {n: p.detach() + 0.02 * torch.randn(p.shape, generator=generator) for n, p in trainer.named_parameters()}
    by_file = {
        part: tensor if place is None else tensor[place]
        for name, tensor in newer.items()
        for part, place in trainer.names_in_files(name)
    }
    engine.apply_weights("", 1, by_file)
    finished = []
    while not finished:
        finished = engine.step()
    trainer.load_state_dict(newer, strict=False)
    for completion in finished[0][1]:
        recomputed = _trainers(trainer, prompt, completion)
        assert [(span.version, span.start) for span in completion.spans] == [(0, 0), (1, 21)]
        # Sampled from the states that the update found, or from new ones.
        assert (completion.log_probs[21:] == recomputed[21:]) != kept
    # Whoever begins after the update gets nothing older.
    (after,) = engine.generate([_asked("b", prompt, 8)])[0]
    assert after.log_probs == _trainers(trainer, prompt, after)
