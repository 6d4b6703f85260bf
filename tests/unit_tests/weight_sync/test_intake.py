"""Links and intake on real sockets, without processes: any layout, any part of it, any number of streams, any order."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from tests.unit_tests.weight_sync.test_layout import LAYOUTS
from torchtitan.weight_sync.checksums import bucket_checksum
from torchtitan.weight_sync.coverage import merge_layouts
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.intake import Intake
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.manifest import Layout, LayoutError, Manifest
from torchtitan.weight_sync.plan import Placed, PlacedParameter, plan_rank
from torchtitan.weight_sync.states.receiver import Command, ReceiverMachine, Send
from torchtitan.weight_sync.transports.base import Delivery
from torchtitan.weight_sync.transports.link import Link, LinkSettings

HOST = ("127.0.0.1", "127.0.0.1")


def layout_of(name: str, shapes: list[tuple[int, ...]], bucket_bytes: int) -> Layout:
    """All ranks' shards of some parameters that are placed alike."""
    mesh, placements, _ = LAYOUTS[name]
    coordinates = itertools.product(*map(range, mesh))
    parts = []
    for rank, coordinate in enumerate(coordinates):
        placed = [PlacedParameter(f"p{i}", Placed(s, mesh, coordinate, placements)) for i, s in enumerate(shapes)]
        parts.append(plan_rank(placed, rank, "bfloat16", bucket_bytes).to_json())
    return merge_layouts(parts)


def values(layout: Layout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        entry.name: torch.randint(-9999, 9999, entry.shape, generator=generator).to(torch.bfloat16)
        for entry in layout.parameters
    }


def slot_of(layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> memoryview:
    """A rank's bytes, as its publisher lays them out."""
    slot = bytearray(layout.ranks[rank].slot_bytes)
    for shard in layout.ranks[rank].shards:
        where = tuple(slice(low, low + size) for low, size in zip(shard.offset, shard.shape, strict=True))
        part = tensors[layout.parameters[shard.parameter].name][where].contiguous()
        data = part.view(-1).view(torch.uint8).numpy().tobytes()
        slot[shard.byte_offset : shard.byte_offset + len(data)] = data
    return memoryview(slot)


@dataclass
class Transfer:
    """One version from all ranks to one worker, on one loop."""

    layout: Layout
    streams: int = 1
    boxes: dict[str, Box] | None = None
    seed: int = 0
    worker: int = 0
    damage: Callable[[list[memoryview]], None] = lambda _slots: None
    said: list[dict[str, Any]] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)

    def run(self) -> Intake:
        """Until the version is staged or refused."""
        loop, machine, tensors = EventLoop(), ReceiverMachine("e"), values(self.layout)
        slots = [slot_of(self.layout, rank, tensors) for rank in range(len(self.layout.ranks))]
        sums = self._checksums(slots)
        self.damage(slots)

        def execute(commands: list[Command]) -> None:
            self.said.extend(command.message for command in commands if isinstance(command, Send))
            if any(message["type"] in ("staged", "refused") for message in self.said):
                loop.call_later(0.01, loop.stop)

        intake = Intake(loop, "t", machine, execute, HOST, actor="a", worker=self.worker, boxes=self.boxes)
        intake.start()
        machine.connected(1)
        intake.layout(self.layout, "l", {}, lambda: execute(machine.layout("l")))
        machine.offer(7, 1, "d", intake.awaited())
        intake.begin(7, Manifest("e", 1, "l", sums, "d"), {}, lambda _delta: None)
        deliveries = [
            (self._link(loop, rank, stream, intake.addresses()[0]), Delivery(7, 1, 1, {rank: slot}, layout_step))
            for rank, slot in enumerate(slots)
            for stream in range(self.streams)
            for layout_step in (self.layout.bucket_bytes,)
            if len(slot)
        ]
        random.Random(self.seed).shuffle(deliveries)
        for link, delivery in deliveries:
            link.send(delivery)
        loop.call_later(20.0, loop.stop)
        thread = threading.Thread(target=loop.run)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        intake.close()
        for link, _ in deliveries:
            link.disconnect()
        return intake

    def _checksums(self, slots: list[memoryview]) -> tuple[tuple[str, ...], ...]:
        step = self.layout.bucket_bytes
        return tuple(tuple(bucket_checksum(s[i : i + step]) for i in range(0, len(s), step)) for s in slots)

    def _link(self, loop: EventLoop, rank: int, stream: int, address: str) -> Link:
        settings = LinkSettings("courier", "e", rank, self.layout, "tcp", {}, self.streams, 5.0)
        return Link(
            loop, address, "t", settings, "a", self.worker, stream, lambda _delivery, error: self.ends.append(error)
        )

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.said]


@st.composite
def parts_of(draw: st.DrawFn, layout: Layout) -> dict[str, Box]:
    boxes = {}
    for entry in layout.parameters:
        if draw(st.booleans()):
            ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in entry.shape]
            boxes[entry.name] = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
    return boxes


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(LAYOUTS)),
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    bucket_bytes=st.sampled_from([2, 16, 50, 1000]),
    streams=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_any_part_arrives_over_any_streams_in_any_order(
    data: st.DataObject,
    name: str,
    shapes: list[tuple[int, ...]],
    bucket_bytes: int,
    streams: int,
    seed: int,
) -> None:
    layout = layout_of(name, shapes, bucket_bytes)
    boxes = data.draw(st.none() | parts_of(layout))
    transfer = Transfer(layout, streams, boxes, seed)
    intake = transfer.run()
    assert transfer.kinds == ["ready", "staged"] and set(transfer.ends) <= {None}
    staged = intake.staged(7, "e", 1, "d").tensors
    expected = values(layout)
    if boxes is not None:
        expected = {
            name: expected[name][tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))]
            for name, box in boxes.items()
        }
    assert staged.keys() == expected.keys()
    assert all(torch.equal(staged[name], value) for name, value in expected.items())
    needed = sum(len(intake.staging.bucket(key)) for key in intake.awaited()) if intake.staging is not None else 0
    received = intake.figures()["bytes_full"]
    assert intake.progress_bytes == 2 * needed == 2 * received, "a bucket came that is not needed"


@pytest.mark.parametrize("streams", [1, 3])
def test_one_wrong_bit_is_refused(streams: int) -> None:
    layout = layout_of("fsdp", [(64, 16)], 100)

    def damage(slots: list[memoryview]) -> None:
        slots[2][77] ^= 4

    transfer = Transfer(layout, streams, damage=damage)
    transfer.run()
    assert transfer.kinds == ["ready", "refused"]
    assert transfer.said[1]["reason"] == "bucket 0 of rank 2: checksum differs"


def test_another_worker_is_not_served_here() -> None:
    layout = layout_of("fsdp", [(8, 8)], 100)
    transfer = Transfer(layout)
    transfer._link = lambda loop, rank, stream, address: Link(  # type: ignore[method-assign]
        loop,
        address,
        "t",
        LinkSettings("courier", "e", rank, layout, "tcp", {}, 1, 5.0),
        "a",
        1,
        stream,
        lambda _delivery, error: (transfer.ends.append(error), loop.call_later(0.1, loop.stop)),
    )
    transfer.run()
    assert transfer.ends and all("worker 0" in str(error) for error in transfer.ends)


def test_parts_that_the_model_does_not_have_are_refused() -> None:
    layout = layout_of("fsdp", [(8, 8)], 100)
    for boxes in ({"x": Box((0,), (1,))}, {"p0": Box((0, 4), (8, 5))}):
        with pytest.raises(LayoutError):
            Transfer(layout, boxes=boxes).run()
