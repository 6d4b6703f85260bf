"""What an engine is given: parameters that came in parts, put together in one piece of memory."""

from __future__ import annotations

import torch

from tests.engines.vllm_traps import received
from torchtitan.inference.vllm.adopting import in_one_piece
from torchtitan.weight_sync.manifest import SHARD_ALIGNMENT


def test_what_an_engine_stacks_is_adjacent_in_the_order_of_the_layout() -> None:
    shapes = {"embed": (5, 32), "q": (8, 32), "k": (4, 32), "v": (4, 32), "o": (32, 8)}
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    staged = received(weights).assemble()
    assert list(staged) == list(weights)
    assert all(torch.equal(staged[name], weights[name]) for name in weights)
    stacked = in_one_piece([staged[name] for name in "qkv"])
    assert stacked is not None and torch.equal(stacked, torch.cat([weights[name] for name in "qkv"]))
    assert in_one_piece([staged[name] for name in "kqv"]) is None, "another order is another matrix"


def test_odd_sizes_are_aligned() -> None:
    weights = {"norm": torch.randn(7), "q": torch.randn(3, 5), "k": torch.randn(2, 5), "v": torch.randn(1, 5)}
    staged = received(weights).assemble()
    assert all(torch.equal(staged[name], weights[name]) for name in weights)
    # (v has one row, so that it lies where one rank sent it.)
    start, *later = (staged[name].data_ptr() for name in ("norm", "q", "k"))
    assert [address - start for address in later] == [SHARD_ALIGNMENT, 2 * SHARD_ALIGNMENT]
    assert in_one_piece([staged[name] for name in ("q", "k")]) is None, "the gap between them is no row"


def test_values_that_come_later_are_put_where_the_earlier_ones_were() -> None:
    staging = received({"q": torch.zeros(4, 8), "k": torch.zeros(4, 8)})
    first = staging.assemble()
    for area in staging.memory:
        area[:] = torch.ones(len(area) // 4).numpy().tobytes()
    second = staging.assemble()
    assert all(bool((second[name] == 1).all()) for name in second)
    assert [tensor.data_ptr() for tensor in first.values()] == [tensor.data_ptr() for tensor in second.values()]
