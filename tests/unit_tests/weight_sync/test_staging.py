"""What an engine is given: parameters that came in pieces, copied to where they are used, or put together."""

from __future__ import annotations

import mmap

import pytest
import torch

from tests.engines.vllm_traps import received
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.needs import all_keys, needed_buckets
from torchtitan.weight_sync.staging import Staging

SHAPES = {"embed": (5, 32), "q": (8, 32), "norm": (7,), "v": (1, 5)}
WEIGHTS = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}


def test_pieces_are_put_together_or_copied_to_where_they_are_used() -> None:
    staged = received(WEIGHTS).tensors
    assert list(staged) == list(WEIGHTS)
    outlines = staged.outlines()
    for name, weight in WEIGHTS.items():
        assert torch.equal(staged[name], weight)
        assert outlines[name].shape == weight.shape and outlines[name].dtype == weight.dtype
        # Into other strides, and another type.
        target = torch.zeros(weight.T.shape if weight.dim() == 2 else weight.shape).T
        staged.copy(name, target)
        assert torch.equal(target, weight.float())


def test_values_that_come_later_are_seen_and_nothing_is_kept() -> None:
    staging = received(WEIGHTS)
    before = {name: tensor.clone() for name, tensor in staging.tensors.items()}
    for area in staging.memory:
        area[:] = bytes(len(area))
    assert any(bool(tensor.any()) for tensor in before.values())
    assert not any(bool(tensor.any()) for tensor in staging.tensors.values())


def test_memory_of_others_is_used_slot_by_slot() -> None:
    first = received(WEIGHTS)
    memory = mmap.mmap(-1, first.layout.slot_starts()[-1])
    writer, reader = (Staging(first.layout, memory=memory) for _ in range(2))
    for rank in range(len(first.layout.ranks)):
        for bucket in range(first.layout.bucket_count(rank)):
            writer.bucket((rank, bucket))[:] = first.bucket((rank, bucket))
    assert all(torch.equal(reader.tensors[name], weight) for name, weight in WEIGHTS.items())


def quarter(shape: tuple[int, ...], dim: int, part: int) -> Box:
    """Of one dimension, as a tensor-parallel worker of four holds it."""
    offset, size = [0] * len(shape), list(shape)
    size[dim] //= 4
    offset[dim] = part * size[dim]
    return Box(tuple(offset), tuple(size))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("part", [0, 3])
def test_on_a_device_a_worker_holds_what_it_needs_and_little_more(ranks: int, part: int) -> None:
    """`cpu:0` is a device of its own to staging memory. Rows (as q), columns (as o), and what all workers hold."""
    shapes = {"q": (64, 48), "norm": (48,), "o": (48, 64), "v": (64, 48), "embed": (96, 48)}
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    boxes = {"q": quarter(shapes["q"], 0, part), "v": quarter(shapes["v"], 0, part), "norm": Box((0,), (48,))}
    boxes["o"] = quarter(shapes["o"], 1, part)
    sent = received(weights, ranks, bucket_bytes=500)
    staging = Staging(sent.layout, boxes, "cpu:0")
    keys = all_keys(sent.layout, needed_buckets(sent.layout, boxes))
    needed = 0
    for key in keys:
        staging.bucket(key).copy_(torch.frombuffer(bytearray(sent.bucket(key)), dtype=torch.uint8))
        needed += len(sent.bucket(key))
    for name, box in boxes.items():
        cut = tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
        assert torch.equal(staging.tensors[name], weights[name][cut]), name
    held = sum(len(area) for area in staging.memory)
    runs = sum(map(len, staging._runs))
    assert needed <= held <= needed + 64 * runs, "what is not needed has memory, too"


def test_a_version_that_comes_sharded_is_held_once() -> None:
    """Eight senders: 1.00 times on the device, beside the one parameter that is being put together."""
    weights = {f"layer{i}": torch.randn(256, 64).to(torch.bfloat16) for i in range(12)}
    staging = Staging(received(weights, 8, bucket_bytes=4096).layout, None, "cpu:0")
    size = sum(weight.nbytes for weight in weights.values())
    assert sum(len(area) for area in staging.memory) <= 1.001 * size
    assert all(tensor.device.type == "cpu" for tensor in staging.tensors.values())
