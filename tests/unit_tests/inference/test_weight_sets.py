"""The embedded engine's two sets of weights: what was received into the idle one is computed with after an exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.unit_tests.inference.test_embedded_engine import other_weights, request, requests
from torchtitan.distributed.boxes import Box
from torchtitan.inference.engines.embedded.engine import Engine, Poisoned
from torchtitan.models.fused_projections import separate_projections
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.memory.staging import StagedTensors, Staging, WeightsRefused, why_apart

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS = 2


def layout_of(weights: Mapping[str, torch.Tensor]) -> Layout:
    """Two ranks, each with half of the rows of every tensor: a matrix of the engine's comes in two pieces."""
    parameters = ParameterTable.of(
        ParameterEntry(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
        for name, weight in weights.items()
    )
    ranks = []
    for rank in range(RANKS):
        boxes = []
        for number, weight in enumerate(weights.values()):
            half = len(weight) // RANKS
            boxes.append((number, Box((rank * half, *[0] * (weight.dim() - 1)), (half, *weight.shape[1:]))))
        ranks.append(ShardTable.of(parameters, boxes))
    return Layout(1 << 14, parameters, tuple(ranks))


def receive(engine: Engine, weights: Mapping[str, torch.Tensor]) -> StagedTensors:
    """Put a version's bytes where they would arrive, bucket by bucket."""
    layout, sets = layout_of(weights), engine.weights.sets.sets()
    assert sets is not None and not why_apart(layout, engine.weights.sets.outlines, min_piece_bytes=1)
    received, sent = Staging(layout, engine_set=sets.idle), Staging(layout)
    for rank, table in enumerate(layout.ranks):
        (slot,) = sent.memory[rank]
        for shard in table:
            rows = weights[layout.parameters.names[shard.parameter]][shard.offset[0] :][: shard.shape[0]]
            slot[shard.byte_offset : shard.byte_end] = rows.contiguous().view(torch.uint8).numpy().tobytes()
    for key in layout.bucket_keys():
        data = bytes(sent.bucket(key))  # type: ignore[arg-type]
        for piece in received.host_pieces(key):
            piece[:], data = data[: len(piece)], data[len(piece) :]
        assert not data
    return received.tensors.offered()


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama3", True)])
def test_engine_computes_with_what_was_received_bit_by_bit_as_with_a_copy(
    tiny_checkpoint: Callable[..., Path], family: str, tied: bool
) -> None:
    engine, copying = (Engine(load_policy(tiny_checkpoint(family, tied)), 8, 64, ()) for _ in range(2))
    engine.generate(requests())
    first = other_weights(engine.policy)
    second = {name: weight * 1.5 for name, weight in first.items()}
    for version, weights in enumerate([first, second, first], 1):
        before = engine.weights.live
        tensors = receive(engine, weights)
        # What arrives changes nothing that is computed with.
        assert engine.version == version - 1 and engine.generate(requests()) == copying.generate(requests())
        engine.apply_weights("e", version, tensors)
        copying.apply_weights("e", version, weights)
        assert engine.generate(requests(24, n=2)) == copying.generate(requests(24, n=2))
        assert engine.weights.live is not before and engine.weights.sets.is_idle(before)
        for name, weight in weights.items():
            assert torch.equal(engine.weights.live[name], weight), name
    # Parameters and joint projections still share their memory.
    block = engine.policy.model.layers[0]
    for parameter in (block.self_attn.k_proj.weight, block.mlp.up_proj.weight):
        parameter.data.zero_()
    assert (
        block.self_attn.fused is None
        or not block.self_attn.fused.weight[block.self_attn.q_proj.out_features :][:4].any()
    )
    assert block.mlp.fused is None or not block.mlp.fused.weight[-4:].any()


def test_copy_that_outlasts_its_call_is_not_taken_for_the_version(tiny_checkpoint: Callable[..., Path]) -> None:
    """The next version comes into the memory that is still copied from."""
    engine = Engine(load_policy(tiny_checkpoint()), 8, 64, ())
    weights = other_weights(engine.policy)
    staging = Staging(layout_of(weights))
    tensors = staging.tensors.offered()

    def receive_all(value: float) -> None:
        for key in staging.layout.bucket_keys():
            for piece in staging.host_pieces(key):
                piece[:] = torch.full((len(piece) // 4,), value).numpy().tobytes()

    receive_all(0.5)
    engine.apply_weights("e", 1, tensors)
    assert not engine.poisoned
    copied = list[None]()

    def progress() -> None:
        copied.append(None)
        if len(copied) == 2:
            tensors.withdraw()
            receive_all(0.25)

    engine.weights._progress = progress
    with pytest.raises(WeightsRefused, match="too late"):
        engine.apply_weights("e", 2, tensors)
    # One parameter is of this version, and the others are of the next.
    assert len({float(tensor.flatten()[0]) for tensor in engine.weights.live.values()}) == 2
    assert engine.poisoned and engine.version == 1


def test_asleep_neither_set_has_memory_and_a_version_of_an_older_one_is_refused(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 8, 64, ())
    weights = other_weights(engine.policy)
    engine.apply_weights("e", 1, receive(engine, weights))
    expected = engine.generate(requests())
    late = receive(engine, {name: weight * 2 for name, weight in weights.items()})
    assert engine.sleep(2)
    assert engine.weights.sets.sets() is None and not engine.weights.live
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in engine.policy.parameters())
    engine.wake(["weights", "kv_cache"])
    with pytest.raises(WeightsRefused):
        engine.apply_weights("e", 2, late)
    with pytest.raises(Poisoned):
        engine.generate([request("a", [5, 9, 3])])
    engine.abort_all()
    engine.apply_weights("e", 1, receive(engine, weights))
    assert engine.generate(requests()) == expected


def test_idle_set_that_is_asked_for_while_the_engine_falls_asleep_keeps_no_memory(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 8, 64, ())
    sets = engine.weights.sets

    class Lock:
        """Whenever it is free, another thread asks."""

        def __init__(self) -> None:
            self._lock, self._asks = threading.Lock(), True

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()
            if self._asks:
                self._asks = False
                sets.sets()
                self._asks = True

    sets._changing = Lock()  # type: ignore[assignment]
    assert engine.sleep(2)
    assert sets._idle is None and not sets._other


def test_new_connection_receives_into_other_memory_than_the_old_one_may_still_write_to(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 8, 64, ())
    weights = other_weights(engine.policy)
    old = receive(engine, weights)
    engine.weights.sets.forget_idle()
    with pytest.raises(WeightsRefused, match="given up"):
        engine.apply_weights("e", 1, old)
    assert not engine.poisoned, "nothing has changed"
    engine.apply_weights("e", 1, receive(engine, weights))
    expected = engine.generate(requests())
    for tensor in old.values():
        tensor.fill_(float("nan"))
    assert engine.generate(requests()) == expected


def test_set_that_is_taken_while_the_engine_scores_has_joint_projections_too(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    engine, copying = (Engine(load_policy(tiny_checkpoint()), 8, 64, ()) for _ in range(2))
    weights = other_weights(engine.policy)
    # The thread that receives asks for memory while the engine's own thread has taken its projections apart.
    with separate_projections(engine.policy):
        tensors = receive(engine, weights)
    engine.apply_weights("e", 1, tensors)
    copying.apply_weights("e", 1, weights)
    assert not engine.poisoned and engine.generate(requests()) == copying.generate(requests())


def test_what_is_verified_is_read_from_the_modules_and_a_joint_projection_left_behind_is_an_error(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    engine = Engine(load_policy(tiny_checkpoint()), 8, 64, ())
    engine.apply_weights("e", 1, receive(engine, other_weights(engine.policy)))
    sets, layer = engine.weights.sets, engine.policy.model.layers[0]
    assert all(torch.equal(tensor, engine.weights.live[name]) for name, tensor in sets.computed_with().items())
    norm = layer.input_layernorm.weight
    norm.data = norm.data + 1
    name = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(sets.computed_with()[name], engine.weights.live[name])
    assert layer.mlp.fused is not None
    layer.mlp.fused.weight = layer.mlp.fused.weight.clone()
    with pytest.raises(RuntimeError, match="FusedGateUp"):
        sets.computed_with()
