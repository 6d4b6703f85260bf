"""References to buckets: what they lead to is copied, and who sends one that leads elsewhere is refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.weight_sync.actor.actor import StagingEngine
from torchtitan.weight_sync.memory import device_slots
from torchtitan.weight_sync.memory.slots import SharedSlots, file_reference, open_shared
from torchtitan.weight_sync.transports.ipc import Ipc
from torchtitan.weight_sync.wire.runtime import ProtocolError


def new_engine() -> StagingEngine:
    return StagingEngine(lambda _staged: None, "cpu", lambda function: function())


def fetched(reference: Any, size: int = 4, target: Any = None) -> bytes:
    """What an actor has of a bucket, of whose bytes it has none."""
    memory = memoryview(bytearray(size))
    new_engine().copy(reference, memory if target is None else target)
    return bytes(memory)


@pytest.fixture
def slots() -> SharedSlots:
    made = SharedSlots.create(2, 5000)
    for index in range(2):
        made.slot(index)[:] = bytes([index + 1]) * 2500 + bytes([index + 5]) * 2500
    return made


def test_a_bucket_is_read_where_its_slot_is(slots: SharedSlots) -> None:
    assert [fetched(slots.refer(slot, start, start + 4)) for slot, start in ((0, 0), (1, 2498), (1, 4996))] == [
        b"\1\1\1\1", b"\2\2\6\6", b"\6\6\6\6",
    ]  # fmt: skip
    with pytest.raises(TypeError, match="read-only"):
        memoryview(open_shared(file_reference(slots.data_fd)))[:1] = b"x"
    memoryview(open_shared(file_reference(slots.data_fd), writable=True))[:1] = b"x"
    assert slots.slot(0)[0] == ord("x")


def test_a_reference_to_no_memory_is_refused(slots: SharedSlots, tmp_path: Path) -> None:
    reference = slots.refer(0, 0, 4)
    for name in ("process", "descriptor", "device", "inode"):
        for value in (None, "1", True, -1, 1 << 64):
            with pytest.raises(ProtocolError, match=name):
                fetched({**reference, "memory": {**reference["memory"], name: value}})
    for offset in (None, -1, 1.0, 1 << 64):
        with pytest.raises(ProtocolError, match="offset"):
            fetched({**reference, "offset": offset})
    end = os.fstat(slots.data_fd).st_size
    assert len(fetched({**reference, "offset": end - 4})) == 4
    with pytest.raises(ProtocolError, match="outside"):
        fetched({**reference, "offset": end - 3})
    for wrong in ({}, {"memory": 3, "offset": 0}, {"offset": 0}):
        with pytest.raises(ProtocolError):
            fetched(wrong)
    for wrong in ([], None, "memory"):
        with pytest.raises(ProtocolError, match="object"):
            fetched(wrong)
    with pytest.raises(ConnectionError):
        fetched({"link": "of a channel that is over"})
    with pytest.raises(ProtocolError, match="host memory"):
        fetched(reference, target=torch.zeros(4, dtype=torch.uint8))
    # The number of a descriptor is another file's by now.
    with (tmp_path / "other").open("wb+") as other:
        other.write(bytes(9000))
        other.flush()
        moved = {**reference["memory"], "descriptor": other.fileno()}
        with pytest.raises(ProtocolError, match="not there any more"):
            fetched({**reference, "memory": moved})


def test_ipc_refers_to_slots_where_they_are(slots: SharedSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = device_slots.DeviceSlots(device_slots.DeviceSlots.new_file(2), [torch.zeros(8), torch.ones(8)])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="GPU-a"))
    monkeypatch.setattr(device_slots, "_exported", lambda tensor, uuid: {"gpu": uuid, "storage": int(tensor[0])})
    refer = Ipc().sending(None, on_device)["refer"]
    assert refer(1, 4, 8) == {"memory": {"gpu": "GPU-a", "storage": 1}, "offset": 4}
    assert fetched(Ipc().sending(None, slots)["refer"](1, 2498, 2502)) == b"\2\2\6\6"


HANDLE: dict[str, Any] = {"gpu": "GPU-b", "storage": ["0a0b", 64, 16, "0c", 8, "", False]}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Two GPUs that are not there: what torch is asked to open on them, where it lies in host memory."""
    storage, empty, asked = torch.arange(64, dtype=torch.uint8).untyped_storage(), torch.empty, list[tuple[Any, ...]]()
    uuids = lambda index: SimpleNamespace(uuid=("GPU-a", "GPU-b")[index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", uuids)
    monkeypatch.setattr(device_slots, "use", lambda where: asked.append(("use", str(where))))
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: empty(*shape, **options))
    monkeypatch.setattr(
        torch.UntypedStorage, "_new_shared_cuda", lambda *named: asked.append(named) or storage, raising=False
    )
    return asked


def test_memory_of_a_gpu_is_opened_once_and_as_it_was_named(opened: list[tuple[Any, ...]]) -> None:
    engine, target = new_engine(), torch.zeros(4, dtype=torch.uint8)
    for offset in (0, 60, 7):
        engine.copy({"memory": dict(HANDLE), "offset": offset}, target)
        assert target.tolist() == list(range(offset, offset + 4))
    assert opened == [("use", "cuda:1"), (1, b"\x0a\x0b", 64, 16, b"\x0c", 8, b"", False)]
    for offset in (61, -1, None):
        with pytest.raises(ProtocolError):
            engine.copy({"memory": HANDLE, "offset": offset}, target)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, "xyz"), (0, 3), (1, -1), (1, "64"), (2, 1 << 64), (3, None), (4, True), (5, 0), (6, 0), (None, []),
        (None, "0a"),
    ],
)  # fmt: skip
def test_a_reference_to_no_gpu_memory_is_refused(place: int | None, value: Any, opened: list[tuple[Any, ...]]) -> None:
    storage = list(HANDLE["storage"])
    if place is not None:
        storage[place] = value
    for wrong in ({"storage": value if place is None else storage}, {"gpu": "GPU-c"}, {"gpu": None}):
        with pytest.raises(ProtocolError):
            fetched({"memory": {**HANDLE, **wrong}, "offset": 0})
    assert all(named[0] == "use" for named in opened)
