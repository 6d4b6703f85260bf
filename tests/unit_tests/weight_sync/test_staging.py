"""What an engine is given: parameters that came in pieces, copied to where they are used, or put together."""

from __future__ import annotations

import mmap

import torch

from tests.engines.vllm_traps import received
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
