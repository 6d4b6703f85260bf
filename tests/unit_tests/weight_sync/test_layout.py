"""Plan and layout: who sends what, every element exactly once, however many parameters and ranks there are."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.weight_sync.layout_tables import ParameterEntry, ParameterTable, ShardEntry, ShardTable
from torchtitan.weight_sync.manifest import DTYPE_BYTES, Layout, LayoutError, RankLayout, check_coverage, merge_layouts
from torchtitan.weight_sync.plan import Placed, PlacedParameter, PlanError, Sharded, local_box, plan_rank, sent_box

# (mesh, placements, how the ranks cut a tensor, outermost cut first: (mesh dimension, tensor dimension))
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...], list[tuple[int, int]]]] = {
    "fsdp": ((4,), (Sharded(0),), [(0, 0)]),
    "tp columns": ((2,), (Sharded(1),), [(0, 1)]),
    "fsdp over tp rows": ((2, 2), (Sharded(0, split_factor=2), Sharded(0)), [(1, 0), (0, 0)]),
    "fsdp over tp columns": ((2, 2), (Sharded(0), Sharded(1)), [(0, 0), (1, 1)]),
    "fsdp, replicated over tp": ((3, 2), (Sharded(0), None), [(0, 0)]),
    "hsdp": ((2, 3), (None, Sharded(0)), [(1, 0)]),
    "hsdp over tp rows": ((2, 2, 2), (None, Sharded(0, split_factor=2), Sharded(0)), [(2, 0), (1, 0)]),
    "replicated": ((2, 2), (None, None), []),
    "left to right": ((2, 2), (Sharded(0), Sharded(0)), [(0, 0), (1, 0)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
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
    assert sent_box(Placed((3,), (2,), None, (Sharded(0),)), 5) is None


def test_placement_that_fits_no_mesh_is_refused() -> None:
    placed = Placed((8,), (2, 2), (0, 0), (Sharded(0, split_factor=3), Sharded(0)))
    with pytest.raises(PlanError, match="w: split factor"):
        plan_rank([PlacedParameter("norm", Placed((3,))), PlacedParameter("w", placed)], 0, "float32", 64)


def test_ranks_layouts_merge_into_one_and_gaps_are_refused() -> None:
    def part(rank: int, of: int = 2) -> dict[str, Any]:
        sharded = Placed((5, 2), (of,), (rank,), (Sharded(0),))
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
    with pytest.raises(LayoutError, match="twice"):
        merge_layouts([part(0), part(0)])


def layout_of(parameters: list[ParameterEntry], ranks: list[list[ShardEntry]], slot_bytes: int) -> Layout:
    tables = tuple(RankLayout(slot_bytes, ShardTable.of(shards)) for shards in ranks)
    return Layout(64, ParameterTable.of(parameters), tables)


def is_covered(layout: Layout) -> bool:
    """The definition: every element of every parameter once, and every byte of a slot, in the order of the shards."""
    counts = [np.zeros(entry.shape, int) for entry in layout.parameters]
    for rank in layout.ranks:
        used, before = np.zeros(rank.slot_bytes, int), 0
        for shard in rank.shards:
            if not 0 <= shard.parameter < len(counts):
                return False
            entry = layout.parameters[shard.parameter]
            ends = [low + size for low, size in zip(shard.offset, shard.shape, strict=True)]
            if len(ends) != len(entry.shape) or any(end > full for end, full in zip(ends, entry.shape, strict=True)):
                return False
            counts[shard.parameter][tuple(map(slice, shard.offset, ends))] += 1
            end = shard.byte_offset + shard.elements * DTYPE_BYTES[entry.dtype]
            if end > rank.slot_bytes or shard.byte_offset < before:
                return False
            before = end
            used[shard.byte_offset : end] += 1
        if (used != 1).any():
            return False
    return all((count == 1).all() for count in counts)


@st.composite
def layouts(draw: st.DrawFn, mistakes: bool = True) -> Layout:
    """Parameters cut anywhere, the pieces dealt to ranks in any order, and where it is allowed up to one mistake."""
    parameters, ranks = [], [[] for _ in range(draw(st.integers(1, 3)))]
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
        for offset, size in pieces:
            ranks[draw(st.integers(0, len(ranks) - 1))].append(ShardEntry(index, offset, size, 0))
    rows, ends = [], []
    for shards in ranks:
        end, placed = 0, []
        for shard in draw(st.permutations(shards)):
            placed.append(dataclasses.replace(shard, byte_offset=end))
            end += shard.elements * DTYPE_BYTES[parameters[shard.parameter].dtype]
        rows.append(placed)
        ends.append(end)
    if mistakes and parameters and draw(st.booleans()):
        rank = draw(st.sampled_from(rows))
        if rank:
            where = draw(st.integers(0, len(rank) - 1))
            mistake = draw(st.sampled_from(["lost", "twice", "moved", "in the slot", "other parameter"]))
            shard = rank.pop(where)
            if mistake == "twice":
                rank += [shard, dataclasses.replace(shard, byte_offset=200)]
            elif mistake == "moved":
                offset = tuple(max(0, low + draw(st.integers(-2, 2))) for low in shard.offset)
                rank.append(dataclasses.replace(shard, offset=offset))
            elif mistake == "in the slot":
                rank.append(dataclasses.replace(shard, byte_offset=draw(st.integers(0, 260))))
            elif mistake == "other parameter":
                rank.append(dataclasses.replace(shard, parameter=draw(st.integers(0, len(parameters)))))
    tables = tuple(RankLayout(end, ShardTable.of(shards)) for shards, end in zip(rows, ends, strict=True))
    return Layout(64, ParameterTable.of(parameters), tables)


@settings(max_examples=400, deadline=None)
@given(layout=layouts())
def test_coverage_is_what_its_definition_says(layout: Layout) -> None:
    try:
        check_coverage(layout)
        covered = True
    except LayoutError:
        covered = False
    assert covered == is_covered(layout)


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_tables_are_their_rows_and_travel_as_json(layout: Layout) -> None:
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again.layout_id() == layout.layout_id()
    assert [again.parameters[i] for i in range(len(layout.parameters))] == list(layout.parameters)
    for one, other in zip(again.ranks, layout.ranks, strict=True):
        assert [one.shards[i] for i in range(len(one.shards))] == list(other.shards)
        rows = list(other.shards)
        assert list(ShardTable.of(rows)) == rows and list(ShardTable.of(rows[::-1])) == rows[::-1]
        assert one.shards.elements.tolist() == [shard.elements for shard in rows]


@pytest.mark.parametrize(
    "damage",
    [
        {"parameter": "AAAA"},
        {"parameter": base64.b64encode(zlib.compress(bytes(9))).decode()},
        {"parameter": base64.b64encode(zlib.compress(bytes(8))[:-2]).decode()},
        {"parameter": base64.b64encode(zlib.compress(bytes(16))).decode()},
        {"parameter": "no base64"},
        {"box": base64.b64encode(zlib.compress((7).to_bytes(8, "little"))).decode()},
        {"byte_offset": base64.b64encode(zlib.compress((-64).to_bytes(8, "little", signed=True))).decode()},
        {"byte_offset": ""},
        {"boxes": [[[0], [-4]]]},
        {"boxes": [[[0], [2.0]]]},
        {"boxes": [[[0], [1 << 62]]]},
        {"boxes": 3},
    ],
)
def test_malformed_tables_are_refused(damage: dict[str, Any]) -> None:
    layout = layout_of([ParameterEntry("w", "float32", (4,))], [[ShardEntry(0, (0,), (4,), 0)]], 16)
    data = layout.to_json()
    Layout.from_json(data)
    data["ranks"][0][1].update(damage)
    with pytest.raises(LayoutError, match="malformed"):
        Layout.from_json(data)


@pytest.mark.parametrize(("bucket_bytes", "slot_bytes"), [(0, 16), (64, -1), (64.0, 16), (64, "16")])
def test_sizes_that_are_none_are_refused(bucket_bytes: Any, slot_bytes: Any) -> None:
    layout = layout_of([ParameterEntry("w", "float32", (4,))], [[ShardEntry(0, (0,), (4,), 0)]], 16)
    data = layout.to_json()
    data["bucket_bytes"], data["ranks"][0][0] = bucket_bytes, slot_bytes
    with pytest.raises(LayoutError, match="malformed"):
        Layout.from_json(data)


def test_names_are_unique_and_texts() -> None:
    entries = [ParameterEntry("w", "float32", (1,)), ParameterEntry("w", "float32", (1,))]
    shards = [ShardEntry(0, (0,), (1,), 0), ShardEntry(1, (0,), (1,), 4)]
    layout = layout_of(entries, [shards], 16)
    with pytest.raises(LayoutError, match="same name"):
        check_coverage(layout)
    data = layout.to_json()
    data["parameters"]["names"] = "w"
    with pytest.raises(LayoutError, match="malformed"):
        Layout.from_json(data)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=10, deadline=None)
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
                expected.append(ShardEntry(index, box.offset, box.shape, end))
                end += box.elements * 2
        layout = plan_rank(parameters, rank, "bfloat16", 64)
        assert list(layout.ranks[0].shards) == expected and layout.ranks[0].slot_bytes == end
        assert list(layout.parameters) == [ParameterEntry(f"p{i}", "bfloat16", s) for i, s in enumerate(shapes)]
        parts.append(layout.to_json())
    check_coverage(merge_layouts(parts))


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        (ShardEntry(0, (3,), (2,), 0), "outside"),
        (ShardEntry(1, (0,), (4,), 0), "unknown parameter"),
        (ShardEntry(0, (0,), (4,), 4), "one behind the other in the slot, see w"),
        (ShardEntry(0, (0,), (3,), 0), "shards of 12 bytes are to fill a slot of 16"),
    ],
)
def test_impossible_shards_are_refused(shard: ShardEntry, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        check_coverage(layout_of([ParameterEntry("w", "float32", (4,))], [[shard]], 16))


def test_overlap_that_adds_up_is_refused() -> None:
    shards = (ShardEntry(0, (0, 0), (2, 2), 0), ShardEntry(0, (1, 1), (1, 1), 16), ShardEntry(0, (2, 0), (1, 3), 20))
    with pytest.raises(LayoutError):
        check_coverage(layout_of([ParameterEntry("w", "float32", (2, 4))], [list(shards[:2])], 64))
    twice = (ShardEntry(0, (0,), (2,), 0), ShardEntry(0, (1,), (2,), 8))
    with pytest.raises(LayoutError, match="twice"):
        check_coverage(layout_of([ParameterEntry("w", "float32", (4,))], [list(twice)], 16))
