"""Whether the ranks' shards make up every parameter exactly once. Most parameters are cut alike: each way of cutting is
looked at once, so that four million shards take under a second. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan.weight_sync.layout_tables import Box, ParameterTable, ShardTable
from torchtitan.weight_sync.manifest import DTYPE_BYTES, Layout, LayoutError


def merge_layouts(parts: list[dict[str, Any]]) -> Layout:
    """One layout from what each rank reported (its own shards, everyone's parameters). Raises LayoutError."""
    common = {key: value for key, value in parts[0].items() if key != "ranks"}
    ranks = []
    for rank, part in enumerate(parts):
        if not _same_model({key: value for key, value in part.items() if key != "ranks"}, common):
            raise LayoutError(f"rank {rank} and rank 0 do not have the same parameters, dtypes, buckets and checksums")
        if not isinstance(part.get("ranks"), list) or len(part["ranks"]) != 1:
            raise LayoutError(f"rank {rank} did not report the shards of one rank")
        ranks += part["ranks"]
    whole = Layout.from_json({**common, "ranks": ranks})
    check_coverage(whole)
    return whole


def _same_model(part: dict[str, Any], other: dict[str, Any]) -> bool:
    if part == other:
        return True
    # Other machines may compress the same columns to other bytes.
    return Layout.from_json({**part, "ranks": []}).layout_id() == Layout.from_json({**other, "ranks": []}).layout_id()


def check_coverage(layout: Layout) -> None:
    """Raises LayoutError unless the ranks' shards cover every parameter exactly once, inside their slots."""
    parameters = layout.parameters
    if len(set(parameters.names)) != len(parameters):
        raise LayoutError("two parameters have the same name")
    for dtype, _ in parameters.kinds:
        if dtype not in DTYPE_BYTES:
            raise LayoutError(f"unknown dtype {dtype}")
    cuttings = _Cuttings(len(parameters))
    for number, rank in enumerate(layout.ranks):
        _check_slot(parameters, number, rank.shards, rank.slot_bytes)
        cuttings.add(number, rank.shards)
    # One parameter stands for all of its shape that are cut like it.
    alike = np.stack((cuttings.cutting, parameters.kind))
    _, first = np.unique(alike, axis=1, return_index=True)
    for index in sorted(first.tolist()):
        _check_parameter(parameters, index, cuttings.pieces(int(cuttings.cutting[index])))


@dataclass
class _Cuttings:
    """cutting: int64 [parameters], the same number exactly for parameters that the ranks cut into the same boxes.

    A number is a node of a tree: (the node before, the rank and box that were added to it). 0 is the root.
    """

    count: int
    cutting: np.ndarray = field(init=False)
    _nodes: list[tuple[int, int, Box] | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.cutting = np.zeros(self.count, np.int64)

    def add(self, rank: int, shards: ShardTable) -> None:
        for rows in _rounds(shards.parameter):
            chosen, box = shards.parameter[rows], shards.box[rows]
            steps = self.cutting[chosen] * len(shards.boxes) + box
            distinct, which = np.unique(steps, return_inverse=True)
            self.cutting[chosen] = len(self._nodes) + which.reshape(-1)
            for step in distinct.tolist():
                node, number = divmod(step, len(shards.boxes))
                self._nodes.append((node, rank, shards.boxes[number]))

    def pieces(self, cutting: int) -> list[tuple[int, Box]]:
        """(rank, box) of a cutting."""
        found = []
        node = self._nodes[cutting]
        while node is not None:
            found.append((node[1], node[2]))
            node = self._nodes[node[0]]
        return found[::-1]


def _rounds(column: np.ndarray) -> Iterator[np.ndarray]:
    """Row numbers in parts in which no value of `column` appears twice."""
    rows = np.arange(len(column))
    if len(column) and (np.diff(column) > 0).all():
        yield rows
        return
    while len(rows):
        _, first = np.unique(column[rows], return_index=True)
        yield rows[first]
        rows = np.delete(rows, first)


def _check_slot(parameters: ParameterTable, number: int, shards: ShardTable, slot_bytes: int) -> None:
    if len(shards) == 0:
        return
    if int(shards.parameter.max()) >= len(parameters) or int(shards.parameter.min()) < 0:
        raise LayoutError(f"rank {number} sends an unknown parameter")
    widths = np.array([DTYPE_BYTES[dtype] for dtype, _ in parameters.kinds], np.int64)
    # An empty shard takes no place, wherever it starts.
    kept = shards.elements > 0
    starts = shards.byte_offset[kept]
    ends = starts + (shards.elements * widths[parameters.kind[shards.parameter]])[kept]
    order = np.argsort(starts, kind="stable")
    clashes = np.flatnonzero(starts[order][1:] < ends[order][:-1])
    if len(clashes):
        name = parameters.names[shards.parameter[kept][order[clashes[0] + 1]]]
        raise LayoutError(f"rank {number}: shards overlap in the slot at {name}")
    end = int(ends.max(initial=0))
    if end > slot_bytes or int(starts.min(initial=0)) < 0:
        raise LayoutError(f"rank {number}: shards end at byte {end} of a slot of {slot_bytes}")


def _check_parameter(parameters: ParameterTable, index: int, pieces: list[tuple[int, Box]]) -> None:
    parameter = parameters[index]
    for rank, box in pieces:
        if not len(box.shape) == len(box.offset) == len(parameter.shape) or any(
            low < 0 or low + size > full for low, size, full in zip(box.offset, box.shape, parameter.shape, strict=True)
        ):
            raise LayoutError(f"rank {rank}: a shard of {parameter.name} lies outside of it")
    boxes = [box for _, box in pieces if box.elements]
    covered = sum(box.elements for box in boxes)
    if covered != parameter.elements or _overlap(boxes):
        raise LayoutError(
            f"{parameter.name}: the ranks send {covered} elements of {parameter.elements}, or some of them twice"
        )


def _overlap(boxes: list[Box]) -> bool:
    """Whether any two boxes (of the same number of dimensions, none of them empty) share an element."""
    if len(boxes) < 2:
        return False
    if not boxes[0].shape:
        return True  # two copies of a scalar
    ordered = sorted(boxes, key=lambda box: box.offset)
    for index, first in enumerate(ordered):
        for second in ordered[index + 1 :]:
            if second.offset[0] >= first.offset[0] + first.shape[0]:
                break
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
            ):
                return True
    return False
