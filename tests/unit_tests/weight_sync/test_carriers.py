"""The carriers of nccl (over gloo) and ipc: two halves joined by hand, without sockets between them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from torchtitan.weight_sync.device_slots import DeviceSlots
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.parameters import placed_parameters
from torchtitan.weight_sync.plan import plan_rank
from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.transports import collective, communicator, receive_carrier, send_carrier, shared_memory
from torchtitan.weight_sync.transports.base import Delivery, ReceiveContext, SendContext
from torchtitan.weight_sync.transports.communicator import Broken, PairStore
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
            assert self.awake.wait(PATIENCE_S), "never woken"
            payload = self.sender.payload(delivery, key)
        assert payload is not None
        return bytes(payload.data)

    def fetch(self, reference: bytes, length: int) -> tuple[str | None, bytes]:
        target, answer = bytearray(length), queue.Queue[Any]()
        self.receiver.fetch(reference, memoryview(target), answer.put)
        return answer.get(timeout=PATIENCE_S), bytes(target)

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
        assert released.wait(PATIENCE_S)
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
    assert released.wait(PATIENCE_S), "the slot was held although nothing is sent"


def test_a_chunk_that_is_not_taken_ends_the_attempt_at_its_deadline(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl", timeout_s=0.5)
    delivery = pair.delivery(0)
    assert pair.fetch(pair.reference(delivery, (0, 0)), BUCKET)[0] is None
    # Credits for receives that nobody has posted: as if the peer's device had died.
    pair.reference(delivery, (0, 1))
    pair.sender.heard(b"C")
    assert "Timed out" in pair.failures.get(timeout=PATIENCE_S)
    released = threading.Event()
    pair.sender.end(delivery, released.set)
    pair.sender.close()
    assert released.wait(PATIENCE_S)
    # The other half ends too, and what it was asked for is refused.
    assert pair.fetch(b"", BUCKET)[0]


def test_a_receiver_that_never_meets_is_given_up(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl", timeout_s=0.3, deaf=True)
    assert pair.failures.get(timeout=PATIENCE_S)


@pytest.mark.parametrize("abort_fails", [False, True])
def test_an_error_of_the_communicator_answers_every_fetch(
    abort_fails: bool, make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: staging memory that waits for an answer would never be quiet again."""
    connect, aborted = collective.connect, threading.Event()

    class Failing:
        def __init__(self, whole: Any):
            self._whole, self.send, self.give_up = whole, whole.send, whole.give_up

        def receive(self, tensor: torch.Tensor) -> Any:
            if len(tensor) > 1:
                raise RuntimeError("device-side assert")
            return self._whole.receive(tensor)

        def abort(self) -> None:
            self._whole.abort()
            if abort_fails and not aborted.is_set():
                aborted.set()
                raise RuntimeError("nor does it end")
            aborted.set()

    def failing(store: PairStore, rank: int, where: torch.device) -> Any:
        whole = connect(store, rank, where)
        return Failing(whole) if rank == 1 else whole

    monkeypatch.setattr(collective, "connect", failing)
    pair = make_pair("nccl")
    delivery = pair.delivery(0)
    error, _ = pair.fetch(pair.reference(delivery, (0, 0)), BUCKET)
    assert error and "device-side assert" in error and aborted.is_set()
    assert pair.fetch(pair.reference(delivery, (0, 1)), BUCKET)[0]


def test_a_peer_that_is_frozen_while_it_connects_is_given_up() -> None:
    for _ in range(20):  # which of the two has to dial is up to chance
        ours = PairStore(lambda key, value: None, 0.2)
        peers = PairStore(ours.heard, 60.0)  # it says where it is, and then hears nothing: it stays in its store
        ends: queue.Queue[Any] = queue.Queue()

        def meet(store: PairStore, rank: int, ends: queue.Queue[Any]) -> None:
            try:
                ends.put(communicator.connect(store, rank, torch.device("cpu")))
            except Broken as error:
                ends.put(error)

        threads = [threading.Thread(target=meet, args=(store, n, ends)) for n, store in enumerate((ours, peers))]
        for thread in threads:
            thread.start()
        end = ends.get(timeout=PATIENCE_S)
        peers.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        if isinstance(end, Broken):
            return
        end.abort()
    raise AssertionError("it was never our turn to wait for the peer")


def test_groups_made_at_the_same_time_leave_torchs_error_handling_as_it_was() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before, inside, first_left = os.environ[name], threading.Event(), threading.Event()
    seen = []

    def second() -> None:
        with communicator._errors_are_ours():
            inside.set()
            first_left.wait(PATIENCE_S)
            seen.append(os.environ[name])

    thread = threading.Thread(target=second)
    with communicator._errors_are_ours():
        thread.start()
        assert not inside.wait(0.2), "two threads change it at a time"
    first_left.set()
    thread.join(PATIENCE_S)
    assert seen == ["0"] and os.environ[name] == before


@pytest.mark.parametrize("method", ["send", "receive"])
def test_errors_of_nccl_are_those_of_a_broken_communicator(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def send(self, *_arguments: Any) -> None:
            raise RuntimeError("NCCL communicator was aborted")

        recv = send

    nccl = object.__new__(communicator.NcclCommunicator)
    nccl._group, nccl._stream, nccl._peer = Group(), None, 1  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    with pytest.raises(Broken, match="aborted"):
        getattr(nccl, method)(torch.zeros(1))


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
        {"memory": {**memory, "process": 10**400}},
        {"memory": {**memory, "device": 2**64}},
        {"memory": {**memory, "kind": ["file"]}},
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
    # What earlier tests left behind would otherwise be collected while this one counts.
    gc.collect()
    before = open_slots()
    for _ in range(20):
        assert pair.fetch(pair.reference(delivery, (0, 0)), BUCKET)[0] is None
    assert open_slots() == before


@pytest.mark.parametrize("error", [OverflowError, TypeError, ValueError, KeyError])
def test_whatever_opening_memory_raises_is_an_answer(
    error: type[Exception], make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("ipc")
    reference = pair.reference(pair.delivery(0), (0, 0))

    def fail(_fields: Any) -> None:
        raise error("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_open", fail)
        assert "on purpose" in str(pair.fetch(reference, BUCKET)[0])
    assert pair.fetch(reference, BUCKET)[0] is None, "the thread has ended"


def test_device_slots_are_exported_once_and_go_when_they_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = []

    def export(tensor: torch.Tensor, uuid: str) -> dict[str, Any]:
        exported.append(len(tensor))
        return {"kind": "cuda", "gpu": uuid, "number": len(exported)}

    monkeypatch.setattr(shared_memory, "_exported", export)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: types.SimpleNamespace(uuid="GPU-1"))
    slots = DeviceSlots.create(2, SIZE, tmp_path, torch.device("cpu"))
    memory = weakref.ref(slots.tensors[1])
    for _ in range(3):
        exports = shared_memory._cuda_exports(slots)
        assert exports.find(slots.slot(1)[7:]) == ({"kind": "cuda", "gpu": "GPU-1", "number": 2}, 7)
    assert exported == [SIZE, SIZE]
    slots.close_files()
    del slots, exports
    gc.collect()
    assert memory() is None
