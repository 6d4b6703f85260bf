"""Which buckets a worker asks for: those with a byte of what it holds, no other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.weight_sync.test_layout import layout_of, layouts
from torchtitan.weight_sync.layout_tables import Box, ParameterEntry, ShardEntry
from torchtitan.weight_sync.manifest import DTYPE_BYTES, Layout, LayoutError
from torchtitan.weight_sync.needs import all_keys, needed_buckets


def touched_buckets(layout: Layout, boxes: dict[str, Box]) -> set[tuple[int, int]]:
    """The definition, byte by byte."""
    keys = set()
    for number, rank in enumerate(layout.ranks):
        for shard in rank.shards:
            entry = layout.parameters[shard.parameter]
            box = boxes.get(entry.name)
            if box is None:
                continue
            held = np.zeros(entry.shape, bool)
            held[tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))] = True
            place = tuple(slice(low, low + size) for low, size in zip(shard.offset, shard.shape, strict=True))
            for element in np.flatnonzero(held[place]):
                first = shard.byte_offset + int(element) * DTYPE_BYTES[entry.dtype]
                keys |= {
                    (number, byte // layout.bucket_bytes) for byte in range(first, first + DTYPE_BYTES[entry.dtype])
                }
    return keys


@st.composite
def held_boxes(draw: st.DrawFn, layout: Layout) -> dict[str, Box]:
    boxes = {}
    for entry in layout.parameters:
        if draw(st.booleans()):
            ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in entry.shape]
            boxes[entry.name] = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
    return boxes


@settings(max_examples=300, deadline=None)
@given(data=st.data(), bucket_bytes=st.integers(1, 40))
def test_needed_are_the_buckets_that_are_touched(data: st.DataObject, bucket_bytes: int) -> None:
    drawn = data.draw(layouts(mistakes=False))
    layout = Layout(bucket_bytes, drawn.parameters, drawn.ranks)
    boxes = data.draw(held_boxes(layout))
    needs = needed_buckets(layout, boxes)
    assert set(all_keys(layout, needs)) == touched_buckets(layout, boxes)
    for ranges in needs.values():
        edges = [edge for bounds in ranges for edge in bounds]
        assert edges == sorted(set(edges)), "ranges do not touch each other"


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("bucket_bytes", [4, 16, 64, 1000])
def test_a_slice_of_a_large_tensor(dim: int, bucket_bytes: int) -> None:
    shape = (5, 16, 12)
    parameters = [ParameterEntry(name, "float32", shape) for name in ("a", "b")]
    bytes_each = 4 * math.prod(shape)
    shards = [ShardEntry(0, (0, 0, 0), shape, 0), ShardEntry(1, (0, 0, 0), shape, bytes_each)]
    whole = layout_of(parameters, [shards], 2 * bytes_each)
    layout = Layout(bucket_bytes, whole.parameters, whole.ranks)
    for start in range(shape[dim]):
        offset = tuple(start if d == dim else 0 for d in range(3))
        box = Box(offset, tuple(1 if d == dim else size for d, size in enumerate(shape)))
        needs = needed_buckets(layout, {"b": box})
        assert set(all_keys(layout, needs)) == touched_buckets(layout, {"b": box})


def test_what_the_trainer_does_not_have_is_refused() -> None:
    layout = layout_of([ParameterEntry("w", "float32", (4,))], [[ShardEntry(0, (0,), (4,), 0)]], 16)
    with pytest.raises(LayoutError, match="no parameter x"):
        needed_buckets(layout, {"x": Box((0,), (1,))})
    for box in (Box((2,), (3,)), Box((0, 0), (1, 1)), Box((-1,), (2,))):
        with pytest.raises(LayoutError, match="outside"):
            needed_buckets(layout, {"w": box})
