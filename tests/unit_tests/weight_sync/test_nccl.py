"""The two ends of nccl (over gloo), joined by hand: chunks, credits, deadlines, and what ends when something breaks."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S, until
from torchtitan.config import gpu_defaults
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import point_to_point
from torchtitan.distributed.point_to_point import Broken, PairStore, Poller
from torchtitan.weight_sync.transports import links, nccl
from torchtitan.weight_sync.transports.links import Chunks, ReceivingLink, SendingLink
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError
from torchtitan.weight_sync.wire.sockets import SocketRuntime

BUCKET = 1000
CPU = torch.device("cpu")


class Joined(Channel):
    """One end; what it sends is heard by whom `hears` names at that moment."""

    def __init__(self, hears: Callable[[Message], None]):
        super().__init__()
        self._hears = hears
        self.reasons: queue.Queue[str] = queue.Queue()

    def send(self, message: Message, *_: Any) -> None:
        if not self.closed:
            self._hears(message)

    def close(self, reason: str) -> None:
        self.closed = True
        self.reasons.put(reason)


class Pair:
    """A shard server's end and an actor's, which hears nothing where it is deaf."""

    def __init__(self, timeout_s: float = 2.0, deaf: bool = False):
        self.runtime = SocketRuntime()
        self.thread = threading.Thread(target=self.runtime.run, daemon=True)
        self.thread.start()
        self.deaf = deaf
        self.entries: list[Message] = []
        self.receiver: ReceivingLink | None = None
        self.to_actor, self.to_server = Joined(self._actor_hears), Joined(lambda message: self.sender.heard(message))
        self.sender = SendingLink(self.runtime, Chunks(256, timeout_s, CPU), self.to_actor, "a")
        if not deaf:
            first = self.entries.pop(0)
            self.receiver = ReceivingLink(first["link"], self.runtime.post, self.to_server, CPU)
            for entry in self.entries:
                self.receiver.heard(entry)

    def _actor_hears(self, message: Message) -> None:
        if self.receiver is None:
            self.entries.append(message)
        else:
            self.receiver.heard(message)

    def send(self, data: bytes) -> tuple[Message, threading.Event]:
        sent = threading.Event()
        return self.sender.send(memoryview(bytearray(data)), sent.set), sent

    def fetch(self, reference: Message, length: int = BUCKET) -> bytes:
        assert self.receiver is not None
        target = torch.zeros(length, dtype=torch.uint8)
        self.receiver.fetch(reference, target)
        return target.numpy().tobytes()

    def close(self) -> None:
        self.sender.close()
        if self.receiver is not None:
            self.receiver.close()
        time.sleep(0)
        self.runtime.stop()
        self.thread.join(PATIENCE_S)


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(**options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize(
    ("own", "engine", "python", "refused"),
    [
        ("2.27.3", "2.27.3", "python", False), ("2.27.3", "2.26.2", "python", True),
        ("2.27.3", "", "python", False), ("", "2.26.2", "python", False), ("2.27.3", "2.26.2", None, False),
    ],
    ids=["equal", "differ", "the engine has none", "the trainer has none", "no engine is started"],
)  # fmt: skip
def test_engine_of_another_nccl_is_refused_with_the_torch_that_has_it(
    own: str, engine: str, python: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(interpreter: str, package: str) -> str | None:
        if package == "torch":
            return "2.9.1+cu128"
        return (engine if interpreter == "python" else own) or None

    monkeypatch.setattr(nccl, "wheel_version", version)
    monkeypatch.setattr(gpu_defaults, "trains_on_gpu", lambda: False)
    found = list(nccl.Nccl.problems(JobConfig(), lambda: python))
    assert [key for key, _ in found] == ["weight_sync.transport"] * refused
    assert all(own in text and engine in text and "torch==2.9.1," in text for _, text in found)


def test_buckets_arrive_byte_for_byte(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    for length in (BUCKET, 1, 256, 5 * BUCKET + 7):
        data = os.urandom(length)
        reference, sent = pair.send(data)
        assert pair.fetch(reference, length) == data
        assert sent.wait(PATIENCE_S)
    assert pair.to_actor.reasons.empty() and pair.to_server.reasons.empty()


class ConnectsAtFirst(point_to_point.GlooCommunicator):
    """Connects as NCCL does: the call of the first transfer returns only once both ends have made theirs."""

    def __init__(self, both: threading.Barrier, seconds: float, store: PairStore, rank: int):
        super().__init__(store, rank)
        self._both, self._seconds, self._connected = both, seconds, False

    def _connect(self) -> None:
        if not self._connected:
            with point_to_point._broken_for():
                self._both.wait(self._seconds)  # its error is a RuntimeError, as NCCL's at the deadline is
            self._connected = True

    def send(self, tensor: torch.Tensor) -> point_to_point.Pending:
        self._connect()
        return super().send(tensor)

    def receive(self, tensor: torch.Tensor) -> point_to_point.Pending:
        self._connect()
        return super().receive(tensor)


def test_ends_that_connect_at_their_first_transfer_meet(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receive is posted before the credit that lets the other end send: neither call would ever return."""
    both = threading.Barrier(2)
    monkeypatch.setattr(point_to_point, "GlooCommunicator", functools.partial(ConnectsAtFirst, both, PATIENCE_S))
    monkeypatch.setattr(links, "CREDIT_SECONDS", 2.0)
    pair = make_pair()
    data = os.urandom(BUCKET)
    reference, sent = pair.send(data)
    assert pair.fetch(reference) == data and sent.wait(PATIENCE_S)
    assert pair.to_actor.reasons.empty() and pair.to_server.reasons.empty()


def test_peer_that_freezes_before_its_first_transfer_is_given_up(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted, abort = list[int](), point_to_point.Communicator.abort
    monkeypatch.setattr(point_to_point.Communicator, "abort", lambda end: (aborted.append(1), abort(end))[1])
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.5)
    whole = point_to_point.connect
    monkeypatch.setattr(
        links, "connect", lambda *about: whole(*about) if about[1] == 0 else point_to_point.GlooCommunicator(*about[:2])
    )
    pair = make_pair()
    _, sent = pair.send(bytes(BUCKET))
    assert "Timed out" in pair.to_actor.reasons.get(timeout=PATIENCE_S)
    assert aborted
    pair.sender.close()
    assert sent.wait(PATIENCE_S)


def test_no_send_is_launched_for_an_actor_that_posts_no_receive(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    send = point_to_point.Communicator.send

    def count(end: point_to_point.Communicator, tensor: torch.Tensor) -> point_to_point.Pending:
        if len(tensor) > 1:  # the byte that connects
            launched.append(1)
        return send(end, tensor)

    monkeypatch.setattr(point_to_point.Communicator, "send", count)
    pair = make_pair(timeout_s=0.5)
    pair.fetch(pair.send(bytes(256))[0], 256)
    assert len(launched) == 1
    _, sent = pair.send(bytes(BUCKET))  # announced, but nobody fetches it: frozen
    assert not sent.wait(1.0), "longer than a chunk's deadline"
    pair.sender.close()  # as the channel is, once the snapshot has gone
    assert sent.wait(PATIENCE_S), "the slot is held although nothing is sent"
    assert len(launched) == 1


def test_link_that_is_over_leaves_no_thread_behind(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors come and go for days, each under a name of its own; the shard server stays. Nor does it leave a
    communicator, or a thread that would still wait for the other end."""
    before = set(threading.enumerate())
    pair = make_pair()
    assert pair.fetch(pair.send(bytes(BUCKET))[0]) == bytes(BUCKET)
    serving = {pair.thread}
    pair.sender.close()
    assert pair.receiver is not None and pair.receiver._communicator is not None
    aborted, abort = threading.Event(), pair.receiver._communicator.abort
    monkeypatch.setattr(pair.receiver._communicator, "abort", lambda: (abort(), aborted.set()))
    monkeypatch.setattr(links, "CONNECT_SECONDS", 10 * PATIENCE_S)
    alone = ReceivingLink("alone", pair.runtime.post, Joined(lambda _message: None), CPU)
    for link in (pair.receiver, alone):
        link.close()
    assert aborted.wait(PATIENCE_S)
    until(lambda: set(threading.enumerate()) - before == serving, why=lambda: str(threading.enumerate()))


def test_actor_whose_machine_is_gone_without_a_word_is_not_waited_for_without_end(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket that it was to get holds a slot meanwhile."""
    monkeypatch.setattr(links, "CREDIT_SECONDS", 0.3)
    _, sent = make_pair().send(bytes(BUCKET))
    assert sent.wait(PATIENCE_S)


def test_chunk_that_is_not_taken_ends_the_channel_at_its_deadline(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted, abort = list[int](), point_to_point.Communicator.abort
    monkeypatch.setattr(point_to_point.Communicator, "abort", lambda end: (aborted.append(id(end)), abort(end))[1])
    pair = make_pair(timeout_s=0.5)
    reference, _ = pair.send(bytes(BUCKET))
    pair.fetch(reference)
    # A credit for a receive that nobody has posted: as if the actor's device had died.
    reference, sent = pair.send(bytes(BUCKET))
    pair.sender.heard({"type": "credit", "link": reference["link"]})
    assert "Timed out" in pair.to_actor.reasons.get(timeout=PATIENCE_S)
    assert sent.wait(PATIENCE_S)
    # Nothing reads the slot any more: with NCCL that takes an abort.
    assert id(pair.sender._communicator) in aborted
    # What is asked of the other end is answered, too, and its channel ends.
    with pytest.raises(ConnectionError):
        pair.fetch(reference)
    assert pair.to_server.reasons.get(timeout=PATIENCE_S)


class WaitsAsNccl(point_to_point.GlooCommunicator):
    """A transfer that never moves, whose wait give_up() ends, as it does with NCCL."""

    def __init__(self, store: PairStore, rank: int):
        super().__init__(store, rank)
        self.given_up, self.waits = threading.Event(), threading.Event()

    def _never(self, seconds: float) -> None:
        self.waits.set()
        self.given_up.wait(seconds)
        raise Broken("given up")

    def send(self, tensor: torch.Tensor) -> point_to_point.Pending:
        return self._never if len(tensor) > 1 else super().send(tensor)  # one byte connects

    def receive(self, tensor: torch.Tensor) -> point_to_point.Pending:
        return self._never if len(tensor) > 1 else super().receive(tensor)

    def give_up(self) -> None:
        self.given_up.set()


def test_transfers_under_way_end_with_their_link_and_not_at_their_deadline(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point_to_point, "GlooCommunicator", WaitsAsNccl)
    pair = make_pair(timeout_s=10 * PATIENCE_S)
    (reference, sent), failed = pair.send(bytes(BUCKET)), threading.Event()

    def fetch() -> None:
        with pytest.raises(ConnectionError):
            pair.fetch(reference)
        failed.set()

    threading.Thread(target=fetch, daemon=True).start()
    for link, over in ((pair.sender, sent), (pair.receiver, failed)):
        assert link is not None
        until(lambda link=link: link._communicator is not None and link._communicator.waits.is_set())
        assert not over.is_set()
        link.close()
        assert over.wait(PATIENCE_S)


class Link:
    """In place of an actor's end of a communicator."""

    def __init__(self, *_about: Any):
        self.values: list[str] = []
        self.over = False

    def heard(self, message: Message) -> None:
        self.values.append(message["value"])

    def close(self) -> None:
        self.over = True


def test_a_channels_entries_go_to_its_one_link_which_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, told, transport, channel = list[Link](), list[str](), nccl.Nccl(), Joined(lambda _message: None)
    monkeypatch.setattr(links, "ReceivingLink", lambda *about: made.append(Link(*about)) or made[-1])
    channel.on_close = lambda _channel, reason: told.append(reason)
    for value in ("", "00"):
        transport.linked(channel, {"type": "entry", "link": "l", "key": "k", "value": value}, None, CPU)
    (link,) = made
    assert link.values == ["", "00"] and not link.over
    channel.on_close(channel, "lost")
    assert link.over and told == ["lost"]
    with pytest.raises(ConnectionError, match="the channel of this reference is over"):
        transport.fetch({"link": "l"}, memoryview(bytearray(1)))


def test_actor_that_never_meets_is_given_up(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.3)
    pair = make_pair(deaf=True)
    _, sent = pair.send(bytes(BUCKET))
    assert pair.to_actor.reasons.get(timeout=PATIENCE_S)
    pair.sender.close()
    assert sent.wait(PATIENCE_S)


@pytest.mark.parametrize("abort_fails", [False, True])
def test_error_of_the_communicator_answers_every_fetch(
    abort_fails: bool, make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: staging memory that waits for an answer would never be quiet again."""
    connect, aborted = point_to_point.connect, threading.Event()

    class Failing:
        def __init__(self, whole: Any):
            self._whole, self.give_up = whole, whole.give_up

        def receive(self, _tensor: torch.Tensor) -> Any:
            raise RuntimeError("device-side assert")

        def abort(self) -> None:
            self._whole.abort()
            if abort_fails and not aborted.is_set():
                aborted.set()
                raise RuntimeError("nor does it end")
            aborted.set()

    def failing(store: PairStore, rank: int, where: torch.device) -> Any:
        whole = connect(store, rank, where)
        return Failing(whole) if rank == 1 else whole

    monkeypatch.setattr(links, "connect", failing)
    pair = make_pair()
    reference, _ = pair.send(bytes(BUCKET))
    with pytest.raises((ConnectionError, RuntimeError), match=r"device-side assert|nor does it end"):
        pair.fetch(reference)
    assert aborted.is_set()
    assert "device-side assert" in pair.to_server.reasons.get(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "nccl"}, {"bytes": 7}, {"bytes": None}, {"chunk_bytes": 0}, {"chunk_bytes": "x"},
        {"chunk_timeout_s": -1.0}, {"chunk_timeout_s": []},
    ],
)  # fmt: skip
def test_senseless_references_are_refused(change: Message, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    reference, _ = pair.send(bytes(BUCKET))
    with pytest.raises(ConnectionError, match="ProtocolError"):
        pair.fetch({**reference, **change})
    assert "ProtocolError" in pair.to_server.reasons.get(timeout=PATIENCE_S)


def test_senseless_entries_are_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    link = pair.send(bytes(BUCKET))[0]["link"]
    assert pair.receiver is not None
    with pytest.raises(ProtocolError, match="hexadecimal"):
        pair.receiver.heard({"type": "entry", "link": link, "key": "k", "value": "xyz"})
    for message in (
        {"type": "entry", "link": link, "key": "k", "value": "xyz"},
        {"type": "credit", "link": "another"},
        {"type": "entry", "link": "another", "key": "k", "value": "00"},
    ):
        with pytest.raises(ProtocolError):
            pair.sender.heard(message)


def test_peer_that_is_frozen_while_it_connects_is_given_up() -> None:
    for _ in range(20):  # which of the two has to dial is up to chance
        ours = PairStore(lambda key, value: None, 0.2)
        peers = PairStore(ours.heard, 60.0)  # it says where it is, and then hears nothing: it stays in its store
        ends: queue.Queue[Any] = queue.Queue()

        def meet(store: PairStore, rank: int, ends: queue.Queue[Any]) -> None:
            try:
                ends.put(point_to_point.connect(store, rank, CPU))
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
        with point_to_point._no_async_error_handling():
            inside.set()
            first_left.wait(PATIENCE_S)
            seen.append(os.environ[name])

    thread = threading.Thread(target=second)
    with point_to_point._no_async_error_handling():
        thread.start()
        assert not inside.wait(0.2), "two threads change it at a time"
    first_left.set()
    thread.join(PATIENCE_S)
    assert seen == ["0"] and os.environ[name] == before


class Work:
    """Of NCCL, as a communicator between two GPUs hands it out."""

    def __init__(self) -> None:
        self.done = False
        self.error: RuntimeError | None = None
        self.looked_at_by: set[int] = set()

    def is_completed(self) -> bool:
        self.looked_at_by.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return self.done


class Group:
    def __init__(self, work: Work):
        self.work, self.aborted = work, False

    def send(self, *_arguments: Any) -> Work:
        if self.work.error is not None:
            raise self.work.error
        return self.work

    recv = send

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def nccl_end(monkeypatch: pytest.MonkeyPatch) -> point_to_point.NcclCommunicator:
    """The class for GPUs, over a group that is made up."""
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _where: None)
    end = object.__new__(point_to_point.NcclCommunicator)
    end._group, end._stream, end._peer = Group(Work()), None, 1  # type: ignore[assignment]
    end.where, end._given_up = CPU, threading.Event()
    return end


@pytest.mark.parametrize("method", ["send", "receive"])
def test_errors_of_nccl_are_those_of_a_broken_communicator(
    method: str, nccl_end: point_to_point.NcclCommunicator
) -> None:
    nccl_end._group.work.error = RuntimeError("NCCL communicator was aborted")
    with pytest.raises(Broken, match="aborted"):
        getattr(nccl_end, method)(torch.zeros(1))


@pytest.mark.parametrize(
    ("what", "match"), [("late", "under way for 0.1 s"), ("given up", "given up"), ("error", "remote")]
)
def test_wait_for_nccl_ends_in_time(what: str, match: str, nccl_end: point_to_point.NcclCommunicator) -> None:
    pending, group = nccl_end.send(torch.zeros(1)), nccl_end._group
    if what == "given up":
        threading.Timer(0.1, nccl_end.give_up).start()
    if what == "error":
        group.work.error = RuntimeError("remote process has exited")
    with pytest.raises(Broken, match=match):
        pending(0.1 if what == "late" else PATIENCE_S)
    assert group.aborted or what == "error", "its kernels are still on the device"


def test_a_poller_polls_for_all_waiting_threads_in_one_thread() -> None:
    thread_ids: list[int] = []
    poller, works, found = (
        Poller(lambda: thread_ids.append(threading.get_ident())),
        [Work() for _ in range(16)],
        queue.Queue(),
    )

    def wait(work: Work) -> None:
        found.put(poller.wait(work.is_completed, PATIENCE_S))

    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for work in works:
        work.done = True
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [found.get_nowait() for _ in works] == [True] * 16
    assert len(thread_ids) == 1 and all(work.looked_at_by == set(thread_ids) for work in works)
    assert not poller.wait(lambda: False, 0.05)
    assert not poller._waiting
