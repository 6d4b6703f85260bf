"""Snapshots: what gets into a slot, when it is READY, and that the fence keeps the next step from tearing it."""

from __future__ import annotations

import math
import os
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checksums import sum_checksum_numpy
from tests.patience import PATIENCE_S, until
from tests.unit_tests.weight_sync.streams import DelayedStream
from torchtitan.distributed.boxes import cut_rows
from torchtitan.distributed.checksum import sum_checksum
from torchtitan.distributed.device import side_stream
from torchtitan.weight_sync.memory.slots import LiveSlots, SlotState
from torchtitan.weight_sync.trainer import publisher as publisher_module
from torchtitan.weight_sync.trainer.plan import placed_parameters, plan_rank
from torchtitan.weight_sync.trainer.publisher import DirectFiller, Publisher, ScratchFiller

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@given(shapes, st.integers(1, 60))
def test_pieces_are_the_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    pieces = list(cut_rows(shape, limit))
    assert torch.cat([whole[index].reshape(-1) for index, _ in pieces]).tolist() == list(range(whole.numel()))
    assert all(whole[index].shape == piece and math.prod(piece) <= limit for index, piece in pieces)


@given(
    st.lists(shapes, min_size=1, max_size=6),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_scratch_of_any_size_fills_a_slot_as_one_copy_does(
    all_shapes: list[tuple[int, ...]], dtype: str, scratch_words: int, transposed: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randn(shape, generator=generator) for shape in all_shapes]
    if transposed:
        sources = [source.T.contiguous().T if source.dim() == 2 else source for source in sources]
    layout = plan_rank(placed_parameters({str(i): source for i, source in enumerate(sources)}), 0, dtype, 1024)
    table = layout.ranks[0]
    slots = [torch.zeros(table.slot_bytes, dtype=torch.uint8) for _ in range(2)]
    DirectFiller(slots[:1], table, dtype).fill(0, sources)
    filler = ScratchFiller(slots[1:], table, dtype, torch.device("cpu"), 4 * scratch_words)
    for _ in range(2):  # a second time over what the first left in the scratch
        filler.fill(0, sources)
        assert torch.equal(slots[0], slots[1])


@pytest.mark.parametrize("with_fence", [True, False])
def test_only_the_fence_keeps_the_next_step_from_tearing_a_snapshot(with_fence: bool) -> None:
    """The optimizer runs on the compute stream, the copy on a side stream that is late."""
    stream = DelayedStream(drop_hold=not with_fence)
    parameter = torch.zeros(1000)
    publisher = Publisher({"p": parameter}, rank=0, dtype="float32", num_slots=2, bucket_bytes=1024, stream=stream)
    live = LiveSlots(publisher.slots.state_words)
    found = []
    for version in range(4):
        publisher.fence()
        stream.queue(lambda version=version: parameter.fill_(version + 1.0))  # type: ignore[misc]
        assert publisher.reserve()
        publisher.snapshot(version, version + 1)
        publisher.fence()
        stream.queue(lambda: parameter.fill_(-1.0))
        assert version + 1 not in live.filled(), "READY before its fence"
        if not with_fence:
            stream.finish()  # without a fence nothing holds the optimizer back
        stream.go.set()
        until(lambda version=version: version + 1 in live.filled())  # type: ignore[misc]
        index, _ = live.filled()[version + 1]
        held = torch.frombuffer(bytearray(publisher.slots.slot(index)), dtype=torch.float32)
        found.append(bool((held == version + 1.0).all()))
        stream.finish()
        stream.go.clear()
        live.live(version + 1, (), (), 0.0)
    publisher.close()
    assert found == [with_fence] * 4


def test_on_the_cpu_the_trainer_waits_at_the_fence_until_the_copy_is_done() -> None:
    parameter, go, past = torch.ones(1000), threading.Event(), threading.Event()
    publisher = Publisher({"p": parameter}, rank=0, dtype="float32", num_slots=2, bucket_bytes=1024)
    side_stream(torch.device("cpu")).run(lambda: go.wait(PATIENCE_S))  # the copy comes after it
    publisher.reserve()
    publisher.snapshot(0, 1)

    def step() -> None:
        publisher.fence()
        past.set()
        parameter.fill_(-1.0)

    trainer = threading.Thread(target=step)
    trainer.start()
    assert not past.wait(0.3), "parameters change before they are copied"
    go.set()
    trainer.join(PATIENCE_S)
    live = LiveSlots(publisher.slots.state_words)
    until(lambda: 1 in live.filled())
    index, _ = live.filled()[1]
    held = torch.frombuffer(bytearray(publisher.slots.slot(index)), dtype=torch.float32)
    assert bool((held == 1.0).all()) and bool((parameter == -1.0).all())
    publisher.close()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_closing_leaves_memory_that_is_still_written_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    unpinned = []
    monkeypatch.setattr(publisher_module, "unpin", unpinned.append)
    stream = DelayedStream()
    publisher = Publisher({"p": torch.ones(8)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=1024, stream=stream)
    publisher.reserve()
    publisher.snapshot(0, 1)
    publisher.close(timeout=0.05)
    assert not unpinned and not is_open(publisher.slots.words_fd)
    stream.go.set()
    until(lambda: len(publisher.snapshots) == 1)
    publisher._waiter.join(PATIENCE_S)
    assert not publisher._waiter.is_alive()
    assert publisher.failure == ""


def test_closing_closes_everything_where_unpinning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_slots: object) -> None:
        raise RuntimeError("cannot unpin")

    monkeypatch.setattr(publisher_module, "unpin", fail)
    publisher = Publisher({"p": torch.ones(8)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=64)
    with pytest.raises(RuntimeError, match="cannot unpin"):
        publisher.close()
    assert not is_open(publisher.slots.words_fd)
    assert publisher.doorbell.fileno() == publisher.server_bell.fileno() == -1


def test_a_snapshot_takes_no_trainer_time_for_its_copy() -> None:
    stream = DelayedStream()
    publisher = Publisher({"p": torch.ones(8)}, rank=0, dtype="bfloat16", num_slots=2, bucket_bytes=1024, stream=stream)
    publisher.reserve()
    publisher.snapshot(0, 1)
    # Back, although the copy cannot have begun: nothing waited for it.
    assert publisher._writer.view(0).state is SlotState.WRITING
    stream.go.set()
    until(lambda: publisher._writer.view(0).state is SlotState.READY)
    assert publisher.server_bell.recv(10) == b"!"
    publisher.close()


def test_a_failed_copy_is_told() -> None:
    class Broken:
        def run(self, work):  # type: ignore[no-untyped-def]
            return self

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            raise RuntimeError("device-side assert")

        def hold(self) -> None:
            pass

    publisher = Publisher(
        {"p": torch.ones(8)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=1024, stream=Broken()
    )
    publisher.reserve()
    publisher.snapshot(0, 1)
    until(lambda: "device-side assert" in publisher.failure)
    publisher.close()


@given(st.binary(max_size=400), st.integers(0, 3))
def test_both_checksums_agree_wherever_the_bytes_lie(data: bytes, shift: int) -> None:
    tensor = torch.frombuffer(bytearray(b"xyz"[:shift] + data + b"!"), dtype=torch.uint8)[shift:-1]
    assert sum_checksum(data) == sum_checksum(tensor) == sum_checksum_numpy(data) == sum_checksum(bytearray(data))
    assert len(sum_checksum(data)) == 32


@pytest.mark.parametrize("length", [4 * (1 << 14), 4 * (1 << 14) * 65 + 6])
def test_both_checksums_agree_over_many_rows(length: int) -> None:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert sum_checksum(data) == sum_checksum_numpy(data.numpy().tobytes())


@given(st.binary(min_size=1, max_size=400), st.data())
def test_every_flipped_bit_changes_the_checksum(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    assert sum_checksum(damaged) != sum_checksum(data)


@given(st.sampled_from([2, 4]), st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=100), st.data())
def test_every_swap_of_elements_changes_the_checksum(size: int, values: list[int], draw: st.DataObject) -> None:
    elements = [value.to_bytes(4, "little")[:size] for value in values]
    first, second = draw.draw(st.tuples(*[st.integers(0, len(elements) - 1)] * 2))
    swapped = list(elements)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert (sum_checksum(b"".join(swapped)) == sum_checksum(b"".join(elements))) is (swapped == elements)


CPU = torch.device("cpu")


def test_work_is_beside_the_caller_and_in_order() -> None:
    stream, go = side_stream(CPU), threading.Event()
    done: list[tuple[int, int]] = []

    def work(number: int) -> None:
        assert go.wait(PATIENCE_S)
        done.append((number, threading.get_ident()))

    fences = [stream.run(lambda number=number: work(number)) for number in range(3)]  # type: ignore[misc]
    assert not done and not any(fence.done() for fence in fences)
    go.set()
    fences[-1].hold()
    assert [number for number, _ in done] == [0, 1, 2] and all(fence.done() for fence in fences)
    assert threading.get_ident() not in {thread for _, thread in done}
    fences[0].wait()


def test_a_failure_is_raised_where_the_fence_is_and_the_next_work_goes_on() -> None:
    stream = side_stream(CPU)
    failed = stream.run(lambda: torch.zeros(2).copy_(torch.zeros(3)))
    after = stream.run(lambda: None)
    after.wait()
    assert not failed.done(), "nothing may take it for a snapshot"
    for reached in (failed.wait, failed.hold):
        with pytest.raises(RuntimeError, match="has failed"):
            reached()


def test_tensors_of_finished_work_are_let_go() -> None:
    stream, source = side_stream(CPU), torch.ones(4)
    tensor = weakref.ref(source)
    stream.run(lambda source=source: source.sum()).wait()  # type: ignore[misc]
    del source
    blocker = threading.Event()
    fence = stream.run(lambda: blocker.wait(PATIENCE_S))
    until(lambda: tensor() is None)
    blocker.set()
    fence.wait()
