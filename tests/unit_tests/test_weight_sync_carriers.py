"""The carriers of nccl (over gloo) and ipc: two halves joined by hand, without sockets between them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.parameters import placed_parameters
from torchtitan.weight_sync.plan import plan_rank
from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.transports import receive_carrier, send_carrier
from torchtitan.weight_sync.transports.base import Delivery, ReceiveContext, SendContext
from torchtitan.weight_sync.wire import ProtocolError

BUCKET = 1000
SIZE = 4321


class Pair:
    """Both halves of a transport, and what they say to whoever runs them."""

    def __init__(self, kind: str, folder: Path, timeout_s: float = 2.0, deaf: bool = False):
        self.slots = SharedSlots.create(2, SIZE, folder)
        layout = plan_rank(placed_parameters({"p": torch.zeros(SIZE // 4)}), 0, "float32", BUCKET)
        self.failures: queue.Queue[str] = queue.Queue()
        self.awake = threading.Event()
        self._deaf = deaf
        loop = EventLoop()
        options = {
            "slots": self.slots,
            "chunk_bytes": 256,
            "chunk_timeout_s": timeout_s,
            "connect_timeout_s": timeout_s,
        }
        context = SendContext(
            loop=loop, epoch="e", rank=0, actor="a", worker=0, stream=0, layout=layout, options=options,
            wake=self.awake.set, fail=self.failures.put, tell=lambda note: self.receiver.heard(note),
        )  # fmt: skip
        self.sender = send_carrier(kind, context)
        self.receiver = receive_carrier(
            kind,
            ReceiveContext(
                loop=loop, epoch="e", rank=0, actor="a", worker=0, stream=0, layout=layout,
                hello=json.loads(json.dumps(self.sender.hello())), where="cpu", tell=self._to_sender,
            ),
        )  # fmt: skip
        self.sender.connected(json.loads(json.dumps(self.receiver.welcome())))

    def _to_sender(self, note: bytes) -> None:
        if not self._deaf:
            self.sender.heard(note)

    def delivery(self, slot: int, attempt: int = 1) -> Delivery:
        return Delivery(attempt, attempt, attempt, {0: self.slots.slot(slot)}, BUCKET)

    def reference(self, delivery: Delivery, key: tuple[int, int]) -> bytes:
        payload = self.sender.payload(delivery, key)
        if payload is None:
            assert self.awake.wait(10), "never woken"
            payload = self.sender.payload(delivery, key)
        assert payload is not None
        return bytes(payload.data)

    def fetch(self, reference: bytes, length: int) -> tuple[str | None, bytes]:
        target, answer = bytearray(length), queue.Queue[Any]()
        self.receiver.fetch(reference, memoryview(target), answer.put)
        return answer.get(timeout=10), bytes(target)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.slots.close_files()


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(kind: str, **options: Any) -> Pair:
        pairs.append(Pair(kind, tmp_path, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_buckets_arrive_byte_for_byte(kind: str, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(kind)
    assert not pair.receiver.inline and pair.receiver.acknowledges and pair.sender.window
    for attempt, slot in enumerate((0, 1, 0), start=1):
        content = os.urandom(SIZE)
        pair.slots.slot(slot)[:] = content
        delivery = pair.delivery(slot, attempt)
        for key in delivery.keys():  # noqa: SIM118
            length = len(delivery.bucket(key))
            error, received = pair.fetch(pair.reference(delivery, key), length)
            assert error is None and received == content[key[1] * BUCKET :][:length]
            pair.sender.acknowledged(delivery, key)
        released = threading.Event()
        pair.sender.end(delivery, released.set)
        assert released.wait(10)
    assert pair.failures.empty()


def test_nothing_is_launched_for_a_receiver_that_posts_nothing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl", timeout_s=0.5)
    delivery = pair.delivery(0)
    assert pair.fetch(pair.reference(delivery, (0, 0)), BUCKET)[0] is None
    pair.reference(delivery, (0, 1))  # announced, but nobody fetches it: frozen
    with pytest.raises(queue.Empty):
        pair.failures.get(timeout=1.0)  # longer than a chunk's deadline: no chunk is under way
    released = threading.Event()
    pair.sender.end(delivery, released.set)
    assert released.wait(10), "the slot was held although nothing is sent"


def test_a_chunk_that_is_not_taken_ends_the_attempt_at_its_deadline(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl", timeout_s=0.5)
    delivery = pair.delivery(0)
    assert pair.fetch(pair.reference(delivery, (0, 0)), BUCKET)[0] is None
    # Credits for receives that nobody has posted: as if the peer's device had died.
    pair.reference(delivery, (0, 1))
    pair.sender.heard(b"C")
    assert "Timed out" in pair.failures.get(timeout=10)
    released = threading.Event()
    pair.sender.end(delivery, released.set)
    pair.sender.close()
    assert released.wait(10)
    # The other half ends too, and what it was asked for is refused.
    assert pair.fetch(b"", BUCKET)[0]


def test_a_receiver_that_never_meets_is_given_up(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl", timeout_s=0.3, deaf=True)
    assert pair.failures.get(timeout=10)


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"backend": "nccl"},
        {"chunk_bytes": 0},
        {"chunk_bytes": "x"},
        {"chunk_timeout_s": -1},
        {"connect_timeout_s": []},
    ],
)
def test_senseless_hellos_are_refused(hello: dict[str, Any], make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl")
    whole = {**pair.sender.hello(), **hello} if hello else {}
    context = ReceiveContext(
        loop=EventLoop(), epoch="e", rank=0, actor="a", worker=0, stream=0, hello=whole, where="cpu",
        layout=plan_rank(placed_parameters({"p": torch.zeros(3)}), 0, "float32", BUCKET), tell=lambda note: None,
    )  # fmt: skip
    with pytest.raises(ProtocolError):
        receive_carrier("nccl", context)


@pytest.mark.parametrize("note", [b"", b"X", b"S", b"S[1]", b'S["key","xyz"]', b'S{"a":1}'])
def test_senseless_notes_are_refused(note: bytes, make_pair: Callable[..., Pair]) -> None:
    for kind in ("nccl", "ipc"):
        pair = make_pair(kind)
        for half in (pair.sender, pair.receiver):
            with pytest.raises(ProtocolError):
                half.heard(note)


def test_ipc_opens_only_what_was_named_and_stays_inside(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair("ipc")
    good = json.loads(pair.reference(pair.delivery(0), (0, 0)))
    other = tmp_path / "other"
    other.write_bytes(bytes(9000))
    descriptor = os.open(other, os.O_RDONLY)
    memory = good["memory"]
    wrong = [
        {"offset": -1},
        {"offset": 2**40},
        {"offset": True},
        {"offset": len(pair.slots.map) - BUCKET + 1},
        {"memory": {**memory, "inode": memory["inode"] + 1}},
        {"memory": {**memory, "descriptor": descriptor}},
        {"memory": {**memory, "descriptor": 10**6}},
        {"memory": {**memory, "process": "1/../self"}},
        {"memory": {**memory, "kind": "pickle"}},
        {"memory": None},
        {"memory": {"kind": "cuda", "gpu": "GPU-none"}},
    ]
    for change in wrong:
        error, received = pair.fetch(json.dumps({**good, **change}).encode(), BUCKET)
        assert error and received == bytes(BUCKET), change
    for reference in (b"", b"[]", b"7", b"\x80\x04N.", b"{}"):
        assert pair.fetch(reference, BUCKET)[0]
    os.close(descriptor)
    pair.slots.slot(0)[:3] = b"abc"
    error, received = pair.fetch(json.dumps(good).encode(), BUCKET)
    assert error is None and received[:3] == b"abc"


def open_slots() -> int:
    """Descriptors of slots that this process has open; those of communicators come and go by themselves."""
    names = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(entry.path))
    return sum("weight-sync-slots" in name for name in names)


def test_ipc_leaves_no_descriptor_open(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("ipc")
    delivery = pair.delivery(0)
    pair.fetch(pair.reference(delivery, (0, 0)), BUCKET)
    before = open_slots()
    for _ in range(20):
        assert pair.fetch(pair.reference(delivery, (0, 0)), BUCKET)[0] is None
    assert open_slots() == before
