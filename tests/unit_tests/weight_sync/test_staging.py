"""What an engine is given: parameters that came in pieces, copied to where they are used, or put together."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from tests.engines.vllm_traps import received
from torchtitan.distributed.pieces import PiecedTensor
from torchtitan.weight_sync.memory.staging import Staging, to_copy

SHAPES = {"embed": (5, 32), "q": (8, 32), "norm": (7,), "v": (1, 5)}
WEIGHTS = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}


def test_pieces_are_put_together() -> None:
    staged = received(WEIGHTS).tensors
    assert list(staged) == list(WEIGHTS)
    outlines = staged.outlines()
    for name, weight in WEIGHTS.items():
        assert torch.equal(staged[name], weight) and type(staged[name]) is torch.Tensor
        assert outlines[name].shape == weight.shape and outlines[name].dtype == weight.dtype


@pytest.mark.parametrize("seed", range(20))
def test_narrowed_pieces_are_copied_without_being_assembled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(self: PiecedTensor) -> None:
        raise AssertionError("it was put together")

    monkeypatch.setattr(PiecedTensor, "assembled", unexpected)
    draw = random.Random(seed)
    weight = torch.randn(12, 10).bfloat16()
    ((_, tensor),) = to_copy(received({"w": weight}, ranks=draw.randint(2, 5)).tensors)
    assert isinstance(tensor, PiecedTensor)
    for _ in range(draw.randint(0, 4)):
        dim = draw.randrange(2)
        start = draw.randrange(tensor.shape[dim])
        length = draw.randint(1, tensor.shape[dim] - start)
        tensor, weight = (value.narrow(dim, start, length) for value in (tensor, weight))
    # Into other strides, and another type.
    target = torch.zeros(weight.shape[::-1]).mT
    target.copy_(tensor.detach().data[:, :])
    assert torch.equal(target, weight.float())


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight + 1,
        lambda weight: weight.t().contiguous(),
        lambda weight: weight[3],
        lambda weight: weight[::2],
        lambda weight: weight.double(),
        lambda weight: weight.reshape(-1),
        lambda weight: torch.cat([weight, weight]),
        lambda weight: weight.chunk(2)[1].clone(),
        lambda weight: weight.to("cpu", copy=True),
        lambda weight: -weight[2:5].sum(),
    ],
)
def test_other_operations_on_pieces_act_on_the_assembled_tensor(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = torch.randn(12, 10)
    ((_, tensor),) = to_copy(received({"w": weight}).tensors)
    assert torch.equal(use(tensor), use(weight)) and type(use(tensor)) is torch.Tensor
    row, target = received({"w": weight[:2, :1]}).tensors.to_copy("w"), torch.zeros(2, 5)
    target.copy_(row)
    assert torch.equal(target, weight[:2, :1].expand(2, 5))


def test_values_that_come_later_are_seen_and_nothing_is_kept() -> None:
    staging = received(WEIGHTS)
    before = {name: tensor.clone() for name, tensor in staging.tensors.items()}
    for (area,) in staging.memory:
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


class Live(TorchDispatchMode):
    """Bytes of all storages that were made under it and are still there, at the most. others: made before."""

    def __init__(self, others: Iterable[torch.Tensor]):
        super().__init__()
        self.most, self._held = 0, WeakIdKeyDictionary()
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if type(made) is torch.Tensor and made.device.type == "cpu":
            storage = made.untyped_storage()
            if storage.data_ptr() not in self._others:
                self._held[storage] = storage.nbytes()
                self.most = max(self.most, sum(self._held.values()))
        return made


@pytest.mark.parametrize("narrows", [True, False])
def test_a_version_that_comes_sharded_is_held_once(narrows: bool) -> None:
    """Eight senders: at most 1.1 times in memory that a device has, while its engine copies all of it, whether its
    loader narrows what it copies or takes whole parameters."""
    weights = {f"layer{i}": torch.randn(256, 64).to(torch.bfloat16) for i in range(12)}
    layout = received(weights, 8, bucket_bytes=4096).layout
    targets = {name: torch.empty_like(weight) for name, weight in weights.items()}
    with Live(targets.values()) as live:
        staging = Staging(layout, "cpu:0")
        assert all(isinstance(area, torch.Tensor) for (area,) in staging.memory)
        for name, tensor in to_copy(staging.tensors) if narrows else staging.tensors.items():
            for half in range(2):
                targets[name][:, 32 * half :][:, :32].copy_(tensor[:, 32 * half :][:, :32])
            del tensor
    size = sum(weight.nbytes for weight in weights.values())
    assert size <= live.most <= (1.001 if narrows else 1.1) * size
