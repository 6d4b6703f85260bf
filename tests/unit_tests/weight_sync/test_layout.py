"""Plan and layout: who sends what, every element exactly once, however many parameters and ranks there are."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from tests.deterministic.parts import whole_layout
from torchtitan.distributed.boxes import Box
from torchtitan.utils import columns
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardEntry, ShardTable
from torchtitan.weight_sync.memory.manifest import (
    ChecksumTable,
    Layout,
    LayoutError,
    Manifest,
    check_coverage,
    merge_layouts,
)
from torchtitan.weight_sync.trainer.plan import Placed, PlacedParameter, local_box, plan_rank, sent_box

# (mesh, placements, how the ranks cut a tensor, outermost cut first: (mesh dimension, tensor dimension))
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...], list[tuple[int, int]]]] = {
    "fsdp": ((4,), (Shard(0),), [(0, 0)]),
    "tp columns": ((2,), (Shard(1),), [(0, 1)]),
    "fsdp over tp rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), [(1, 0), (0, 0)]),
    "fsdp over tp columns": ((2, 2), (Shard(0), Shard(1)), [(0, 0), (1, 1)]),
    "fsdp, replicated over tp": ((3, 2), (Shard(0), Replicate()), [(0, 0)]),
    "hsdp": ((2, 3), (Replicate(), Shard(0)), [(1, 0)]),
    "hsdp over tp rows": ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0)), [(2, 0), (1, 0)]),
    "replicated": ((2, 2), (Replicate(), Replicate()), []),
    "left to right": ((2, 2), (Shard(0), Shard(0)), [(0, 0), (1, 0)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25)
@given(shape=st.tuples(st.integers(1, 11), st.integers(1, 9)))
def test_shards_of_all_ranks_make_up_the_tensor_once(name: str, shape: tuple[int, int]) -> None:
    mesh, placements, cuts = LAYOUTS[name]
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    sent = np.zeros(shape, dtype=int)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        parameter = Placed(shape, mesh, coordinate, placements)
        expected = whole
        for mesh_dim, dim in cuts:
            chunks = expected.chunk(mesh[mesh_dim], dim)
            index = coordinate[mesh_dim]
            expected = chunks[index] if index < len(chunks) else expected.narrow(dim, 0, 0)
        box = local_box(parameter)
        assert box is not None and box.shape == tuple(expected.shape)
        where = tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
        assert torch.equal(whole[where], expected)
        if sent_box(parameter, rank) is not None:
            sent[where] += 1
    assert (sent == 1).all()


def test_parameter_without_a_mesh_is_sent_by_the_lowest_rank() -> None:
    parameter = Placed((3,))
    assert sent_box(parameter, 0) is not None and sent_box(parameter, 1) is None
    assert sent_box(Placed((3,), (2,), None, (Shard(0),)), 5) is None


def test_ranks_layouts_merge_into_one_and_gaps_are_refused() -> None:
    def part(rank: int, of: int = 2) -> dict[str, Any]:
        sharded = Placed((5, 2), (of,), (rank,), (Shard(0),))
        placed = [PlacedParameter("w", sharded), PlacedParameter("n", Placed((3,)))]
        return json.loads(json.dumps(plan_rank(placed, rank, "bfloat16", 64).to_json()))

    layout = merge_layouts([part(0), part(1)])
    assert layout.ranks[0].slot_bytes == 3 * 2 * 2 + 3 * 2
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))).layout_id() == layout.layout_id()
    assert [layout.bucket_range(0, bucket) for bucket in range(layout.bucket_count(0))] == [(0, 18)]
    elsewhere = part(1)
    kind = zlib.decompress(base64.b64decode(elsewhere["parameters"]["kind"]))
    elsewhere["parameters"]["kind"] = base64.b64encode(zlib.compress(kind, 0)).decode()
    assert elsewhere != part(1) and merge_layouts([part(0), elsewhere]).layout_id() == layout.layout_id()
    with pytest.raises(LayoutError, match="the same parameters"):
        merge_layouts([part(0), {**part(1), "bucket_bytes": 128}])
    with pytest.raises(LayoutError, match="elements of 10"):
        merge_layouts([part(0)])
    with pytest.raises(LayoutError, match="rank 0 did not report the shards of one rank"):
        merge_layouts([{**part(0), "ranks": part(0)["ranks"] + part(1)["ranks"]}])
    with pytest.raises(LayoutError, match="twice"):
        merge_layouts([part(0), part(0)])


def layout_of(parameters: list[ParameterEntry], ranks: list[list[tuple[int, Box]]]) -> Layout:
    table = ParameterTable.of(parameters)
    return Layout(64, table, tuple(ShardTable.of(table, shards) for shards in ranks))


def is_covered(layout: Layout) -> bool:
    """The definition: every element of every parameter once."""
    counts = [np.zeros(entry.shape, int) for entry in layout.parameters]
    for rank in layout.ranks:
        for shard in rank:
            entry = layout.parameters[shard.parameter]
            ends = [low + size for low, size in zip(shard.offset, shard.shape, strict=True)]
            if len(ends) != len(entry.shape) or any(end > full for end, full in zip(ends, entry.shape, strict=True)):
                return False
            counts[shard.parameter][tuple(map(slice, shard.offset, ends))] += 1
    return all((count == 1).all() for count in counts)


@st.composite
def layouts(draw: st.DrawFn, mistakes: bool = True) -> Layout:
    """Parameters cut anywhere, the pieces dealt to ranks in any order, and where it is allowed up to one mistake."""
    parameters, ranks = [], [[] for _ in range(4)]
    for index in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
        parameters.append(ParameterEntry(f"p{index}", draw(st.sampled_from(["float32", "bfloat16"])), shape))
        pieces = [((0,) * len(shape), shape)]
        for _ in range(draw(st.integers(0, 3)) if shape else 0):
            offset, size = pieces.pop(0)
            dim = draw(st.integers(0, len(shape) - 1))
            cut = draw(st.integers(0, size[dim]))
            for low, high in ((0, cut), (cut, size[dim])):
                if low < high:
                    moved = tuple(o + low * (d == dim) for d, o in enumerate(offset))
                    pieces.append((moved, tuple(high - low if d == dim else s for d, s in enumerate(size))))
        for piece, rank in zip(pieces, draw(st.permutations(range(4))), strict=False):
            ranks[rank].append((index, Box(*piece)))
    rows = [list(draw(st.permutations(shards))) for shards in ranks]
    if mistakes and parameters and draw(st.booleans()):
        rank = draw(st.sampled_from(rows))
        if rank:
            parameter, box = rank.pop(draw(st.integers(0, len(rank) - 1)))
            mistake = draw(st.sampled_from(["lost", "twice", "moved", "other parameter"]))
            if mistake == "twice":
                for other in (rank, draw(st.sampled_from(rows))):
                    other.append((parameter, box))
            elif mistake == "moved":
                offset = tuple(max(0, low + draw(st.integers(-2, 2))) for low in box.offset)
                rank.append((parameter, Box(offset, box.shape)))
            elif mistake == "other parameter":
                rank.append((draw(st.integers(0, len(parameters) - 1)), box))
    return layout_of(parameters, rows)


@pytest.mark.slow
@settings(max_examples=400)
@given(layout=layouts())
def test_coverage_is_what_its_definition_says(layout: Layout) -> None:
    try:
        check_coverage(layout)
        covered = True
    except LayoutError:
        covered = False
    assert covered == is_covered(layout)


@settings(max_examples=100)
@given(layout=layouts())
def test_tables_are_their_rows_and_travel_as_json(layout: Layout) -> None:
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again.layout_id() == layout.layout_id()
    assert [again.parameters[i] for i in range(len(layout.parameters))] == list(layout.parameters)
    for table, other in zip(again.ranks, layout.ranks, strict=True):
        assert list(table) == list(other) and len(table) == len(list(table)) and table.slot_bytes == other.slot_bytes
        end = 0
        for shard in table:
            assert shard.byte_offset == end
            end += math.prod(shard.shape) * {"float32": 4, "bfloat16": 2}[layout.parameters[shard.parameter].dtype]
            assert shard.byte_end == end
        assert table.slot_bytes == end
        rows = [(shard.parameter, Box(shard.offset, shard.shape)) for shard in other]
        assert list(ShardTable.of(layout.parameters, rows)) == list(other)


def packed(column: bytes) -> str:
    return base64.b64encode(zlib.compress(column)).decode()


@pytest.mark.parametrize(
    "damage",
    [
        {"parameter": "AAAA"}, {"parameter": "no base64"}, {"parameter": packed(bytes(9))},
        {"parameter": base64.b64encode(zlib.compress(bytes(8))[:-2]).decode()}, {"parameter": packed(bytes(16))},
        {"parameter": packed(b"\xff" * 8)}, {"parameter": packed(b"\1" + bytes(7))}, {"box": packed(b"\7" + bytes(7))},
        {"box": ""}, {"boxes": [[[0], [-4]]]}, {"boxes": [[[0], [2.0]]]}, {"boxes": [[[0], [1 << 62]]]}, {"boxes": 3},
    ],
)  # fmt: skip
def test_malformed_tables_are_refused(damage: dict[str, Any]) -> None:
    layout = layout_of([ParameterEntry("w", "float32", (4,))], [[(0, Box((0,), (4,)))]])
    data = layout.to_json()
    Layout.from_json(data)
    data["ranks"][0].update(damage)
    with pytest.raises(LayoutError, match="malformed"):
        Layout.from_json(data)


def test_column_of_too_many_rows_is_not_even_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed, a billion of them is a megabyte."""
    data = layout_of([ParameterEntry("w", "float32", (4,))], [[(0, Box((i,), (1,))) for i in range(4)]]).to_json()
    monkeypatch.setattr(columns, "_MAX_ROWS", 4)
    Layout.from_json(data)
    monkeypatch.setattr(columns, "_MAX_ROWS", 3)
    with pytest.raises(LayoutError, match="cut off or too long"):
        Layout.from_json(data)


@pytest.mark.parametrize("bucket_bytes", [0, 64.0, True])
def test_sizes_that_are_none_are_refused(bucket_bytes: Any) -> None:
    data = layout_of([ParameterEntry("w", "float32", (4,))], [[(0, Box((0,), (4,)))]]).to_json()
    with pytest.raises(LayoutError, match="malformed"):
        Layout.from_json({**data, "bucket_bytes": bucket_bytes})
    data["parameters"]["kinds"] = [["int8", [4]]]
    with pytest.raises(LayoutError, match="unknown dtype"):
        Layout.from_json(data)


def test_names_are_unique_and_texts() -> None:
    entries = [ParameterEntry("w", "float32", (1,)), ParameterEntry("w", "float32", (1,))]
    layout = layout_of(entries, [[(0, Box((0,), (1,))), (1, Box((0,), (1,)))]])
    with pytest.raises(LayoutError, match="same name"):
        check_coverage(layout)
    data = layout.to_json()
    data["parameters"]["names"] = "w"
    with pytest.raises(LayoutError, match="malformed"):
        Layout.from_json(data)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=10)
@given(shapes=st.lists(st.tuples(st.integers(1, 11), st.integers(1, 9)), max_size=5), shared=st.booleans())
def test_plan_is_one_shard_after_the_other(name: str, shapes: list[tuple[int, int]], shared: bool) -> None:
    mesh, placements, _ = LAYOUTS[name]
    parts = []
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        seen: dict[tuple[int, int], Placed] = {}
        parameters, expected, end = [], [], 0
        for index, shape in enumerate(shapes):
            placed = Placed(shape, mesh, coordinate, placements)
            parameters.append(PlacedParameter(f"p{index}", seen.setdefault(shape, placed) if shared else placed))
            box = sent_box(placed, rank)
            if box is not None:
                start, end = end, end + box.elements * 2
                expected.append(ShardEntry(index, *box, start, end))
        layout = plan_rank(parameters, rank, "bfloat16", 64)
        assert list(layout.ranks[0]) == expected and layout.ranks[0].slot_bytes == end
        assert list(layout.parameters) == [ParameterEntry(f"p{i}", "bfloat16", s) for i, s in enumerate(shapes)]
        parts.append(layout.to_json())
    check_coverage(merge_layouts(parts))


TWICE = "elements of .*, or some of them twice"


@pytest.mark.parametrize(
    ("message", "shape", "ranks"),
    [
        ("rank 1 sends two shards of one parameter", (4,), [[], [((0,), (2,)), ((2,), (2,))]]),
        ("outside", (4,), [[((3,), (2,))]]),
        # Overlaps that add up: two boxes that share something, and a third where elements are too many for two.
        (TWICE, (2, 4), [[((0, 0), (2, 2))], [((0, 1), (2, 2))]]),
        (TWICE, (4,), [[((0,), (2,))], [((1,), (2,))]]),
        (TWICE, (2, 4), [[((0, 0), (1, 4))], [((0, 2), (1, 2))], [((1, 0), (1, 2))]]),
        (TWICE, (2, 4), [[((1, 0), (1, 4))], [((1, 2), (1, 2))], [((0, 0), (1, 2))]]),
        (TWICE, (4, 1), [[((0, 0), (3, 1))], [((2, 0), (1, 1))]]),
    ],
)
def test_shards_that_do_not_make_up_a_parameter_are_refused(message: str, shape: Any, ranks: list[list[Any]]) -> None:
    shards = [[(0, Box(*box)) for box in boxes] for boxes in ranks]
    with pytest.raises(LayoutError, match=message):
        check_coverage(layout_of([ParameterEntry("w", "float32", shape)], shards))


@pytest.mark.parametrize(
    ("ranks", "layout_id", "fits"), [(2, "", True), (1, "", False), (3, "", False), (2, "x", False)]
)
def test_manifest_fits_the_layout_with_as_many_ranks(ranks: int, layout_id: str, fits: bool) -> None:
    layout = whole_layout(2, 3)
    tables = [ChecksumTable.of([bytes(16).hex()] * 3).digest()] * ranks
    manifest = Manifest.of("e", 1, layout_id or layout.layout_id(), tables)
    with contextlib.nullcontext() if (ranks, layout_id) == (2, "") else pytest.raises(LayoutError):
        manifest.check_fits(layout, layout.layout_id())
