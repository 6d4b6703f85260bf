"""Memory of the embedded engine: given back asleep, and bounded awake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit_tests.inference.test_embedded_engine import PROMPTS, other_weights, request, requests
from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.cache import KeyValueCache
from torchtitan.inference.engines.embedded.engine import Engine, Poisoned
from torchtitan.inference.engines.embedded.sequences import TooLong
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.batch_invariance import InvariantSizes
from torchtitan.weight_sync.memory.staging import WeightsRefused


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
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in engine.policy.parameters())
        engine.wake(["weights", "kv_cache"])
        with pytest.raises(Poisoned):
            engine.generate([request("a", PROMPTS[0])])
        engine.abort_all()
        engine.apply_weights("e", 1, weights)
        assert engine.generate(requests()) == expected.generate(requests())


def test_the_cache_keeps_its_memory_limit(tiny_checkpoint: Callable[..., Path]) -> None:
    free = Engine(load_policy(tiny_checkpoint()), 64, 256, ())
    expected = [[completion.token_ids for completion in group] for group in free.generate(requests(40, n=4))]
    # Room for two rows of the longest request, or as many as a forward takes at least.
    limit = free._cache.bytes_of(2, 80)
    engine = Engine(load_policy(tiny_checkpoint()), 64, 256, (), cache_bytes=limit)
    assert [[completion.token_ids for completion in group] for group in engine.generate(requests(40, n=4))] == expected
    assert engine._cache.bytes_of(engine._cache.rows, engine._cache.length) <= limit
    with pytest.raises(TooLong, match="cache"):
        engine.submit(request("a", PROMPTS[0], 250))
    with pytest.raises(UserError, match="1000 bytes"):
        Engine(load_policy(tiny_checkpoint()), 1, 256, (), cache_bytes=1000)


def test_a_row_has_the_keys_that_attention_reads(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some processors compute 193 tokens like more of them with 384 keys only, and rows grow in powers of two."""
    prompt = PROMPTS[0][:1] * 150
    submitted = request("b", [*prompt, *PROMPTS[0][:1] * 48], temperature=0.0)
    expected = Engine(load_policy(tiny_checkpoint()), 4, 512, ()).generate([submitted])
    monkeypatch.setattr(
        "torchtitan.inference.engines.embedded.cache.key_length", lambda length, *_: -(-length // 192) * 192
    )
    engine = Engine(load_policy(tiny_checkpoint()), 4, 512, ())
    engine.generate([request("a", prompt)])
    assert engine.generate([submitted])[0][0].token_ids == expected[0][0].token_ids
    assert engine.statistics.reused_tokens == 150


@pytest.mark.parametrize("block", [1, 3, 8])
def test_growing_the_cache_stays_within_its_limit_and_keeps_what_it_holds(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("torchtitan.inference.engines.embedded.cache.BLOCK", block)
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
