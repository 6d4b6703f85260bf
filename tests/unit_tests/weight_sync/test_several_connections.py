"""Several connections between an actor and a shard server: each carries its share of the buckets, and a thread of its
own moves them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.deterministic.machine import Machine
from tests.deterministic.parts import BUCKET_BYTES
from tests.patience import PATIENCE_S, until
from tests.unit_tests.weight_sync.job import Job, Shape
from tests.unit_tests.weight_sync.test_puller import publish, versions
from torchtitan.weight_sync.wire.payload_thread import PayloadThread
from torchtitan.weight_sync.wire.runtime import Message, PayloadTarget, encode
from torchtitan.weight_sync.wire.sockets import SocketChannel, SocketRuntime

SIZE = 3_000_000
BUCKET: Message = {"type": "bucket", "pull": 1, "rank": 0, "bucket": 0}


def test_each_connection_carries_every_other_bucket_and_a_lost_one_takes_only_its_share_along() -> None:
    machine = Machine(0)
    job = Job(machine, Shape(actor_seconds=(0.4,), ranks=1, buckets=4, connections=2))
    machine.run(0.2)
    publish(job, 1.0)
    (actor,) = job.actors
    assert versions(actor) == [0]
    readers = [reader for reader in job.ranks[0].server.channels.values() if reader.actor == actor.name]
    assert len(readers) == 2
    job.train(1)
    first, second = (source._channel for source in actor.puller._sources)
    assert first is not None and second is not None
    while (transfer := actor.puller.transfer) is None or len(transfer.arriving) < 2:
        machine.run(machine.now + 0.01)
    # Half of a bucket has come over each, and nothing of the other connection is asked for again.
    moved = second.peer.moved  # type: ignore[attr-defined]
    first.close("lost")
    machine.run(machine.now + 1.0)
    assert versions(actor) == [0, 1] and job.actors[0].puller.corrupted == 0
    assert not second.closed and second.peer.moved - moved <= 2 * BUCKET_BYTES  # type: ignore[attr-defined]


class Pair:
    """Two channels of one connection on a runtime that runs, with a thread each."""

    def __init__(self, runtime: SocketRuntime, memory: bytearray):
        self.sender_socket, receiver_socket = socket.socketpair()
        self.received, self.closed = threading.Event(), threading.Event()
        self.filled, self.moved_by = 0, ""
        made = threading.Event()

        def make() -> None:
            self.sender, self.receiver = (SocketChannel(runtime.loop, s) for s in (self.sender_socket, receiver_socket))
            for channel in (self.sender, self.receiver):
                channel.trust()
                channel.use_thread()
            self.receiver.payload_target = lambda _channel, _message: PayloadTarget([memoryview(memory)], self._count)
            self.receiver.on_message = lambda _channel, _message: self.received.set()
            self.receiver.on_close = lambda _channel, _reason: self.closed.set()
            made.set()

        runtime.post(make)
        assert made.wait(PATIENCE_S)

    def _count(self, parts: list[memoryview]) -> None:
        self.moved_by = threading.current_thread().name
        self.filled += sum(map(len, parts))


@pytest.fixture
def runtime() -> Iterator[SocketRuntime]:
    made = SocketRuntime()
    made.start("test", lambda: None)
    yield made
    assert made.end(PATIENCE_S) and not made.failure


def on_loop(runtime: SocketRuntime, function: Callable[[], None]) -> None:
    """Run it there, and wait."""
    done = threading.Event()

    def run() -> None:
        function()
        done.set()

    runtime.post(run)
    assert done.wait(PATIENCE_S)


def test_threads_move_payloads_and_messages_in_order(runtime: SocketRuntime) -> None:
    memory, data = bytearray(SIZE), os.urandom(SIZE)
    pair, heard, sent = Pair(runtime, memory), list[Message](), list[int]()

    def send() -> None:
        pair.receiver.on_message = lambda _channel, message: heard.append(message)
        for number in range(2):
            pair.sender.send({**BUCKET, "bucket": number}, memoryview(data), lambda number=number: sent.append(number))
        pair.sender.send({**BUCKET, "bucket": 2}, memoryview(data))  # nobody wants to know when it is sent
        pair.sender.send({"type": "ping"})

    on_loop(runtime, send)
    until(lambda: len(heard) == 4)
    assert [message.get("bucket") for message in heard] == [0, 1, 2, None] and sent == [0, 1]
    assert pair.moved_by.startswith("payloads of"), "the loop has received"
    assert memory == data and pair.filled == 3 * SIZE and pair.sender.moved == 3 * SIZE
    on_loop(runtime, lambda: pair.sender.close("the end"))
    assert pair.closed.wait(PATIENCE_S)


def test_when_a_channel_is_closed_its_thread_writes_no_further(runtime: SocketRuntime) -> None:
    memory = bytearray(SIZE)
    pair = Pair(runtime, memory)
    pair.sender_socket.setblocking(True)
    pair.sender_socket.sendall(encode({**BUCKET, "bytes": SIZE}))

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while True:
                pair.sender_socket.sendall(b"\1" * 64)

    threading.Thread(target=trickle, daemon=True).start()
    until(lambda: pair.filled > 0)
    left: list[bytes] = []

    def close() -> None:
        pair.receiver.close("the pull is over")
        left.append(bytes(memory))

    on_loop(runtime, close)
    time.sleep(0.05)
    assert 0 in left[0], "all of it had come"
    assert memory == left[0] and not pair.received.is_set()


def test_thread_that_was_closed_touches_no_memory_even_if_its_socket_is_open() -> None:
    memory, (local, peer) = bytearray(SIZE), socket.socketpair()
    local.setblocking(False)
    thread, done = PayloadThread(local, lambda function: function()), list[str]()
    thread.receive(PayloadTarget([memoryview(memory)], lambda _parts: None), SIZE, SIZE, done.append)
    thread.close()
    peer.sendall(b"\1" * 64)
    time.sleep(0.05)
    assert not any(memory) and not done
    local.close()
    peer.close()


def test_thread_whose_bytes_cannot_be_taken_says_so_instead_of_ending() -> None:
    local, peer = socket.socketpair()
    local.setblocking(False)
    peer.sendall(b"\1" * 64)
    thread, problems = PayloadThread(local, lambda function: function()), list[str]()
    target = PayloadTarget([memoryview(bytearray(64))], lambda _parts: [].pop())
    thread.receive(target, 64, 64, problems.append)
    until(lambda: problems)
    assert "IndexError" in problems[0]
    thread.close()
    local.close()
    peer.close()


def test_peer_that_closes_half_way_through_a_payload_ends_the_channel(runtime: SocketRuntime) -> None:
    pair, reasons = Pair(runtime, bytearray(SIZE)), list[str]()
    pair.receiver.on_close = lambda _channel, reason: reasons.append(reason)
    pair.sender_socket.setblocking(True)
    pair.sender_socket.sendall(encode({**BUCKET, "bytes": SIZE}) + bytes(SIZE // 20))
    until(lambda: pair.filled == SIZE // 20)
    pair.sender_socket.shutdown(socket.SHUT_WR)
    until(lambda: reasons)
    assert "the peer closed the connection" in reasons[0] and not pair.received.is_set()


def test_a_connection_whose_peer_stands_still_holds_no_other_one_up(runtime: SocketRuntime) -> None:
    still, moves = (Pair(runtime, bytearray(SIZE)) for _ in range(2))
    # A part of a bucket, and nothing more.
    still.sender_socket.setblocking(True)
    still.sender_socket.sendall(encode({**BUCKET, "bytes": SIZE}) + bytes(SIZE // 20))
    until(lambda: still.filled == SIZE // 20)
    on_loop(runtime, lambda: moves.sender.send(BUCKET, memoryview(bytes(SIZE))))
    assert moves.received.wait(PATIENCE_S) and not still.received.is_set()
