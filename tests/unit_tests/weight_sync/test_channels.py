"""One channel on a real socket, and the loop that serves it, turn by turn: what a peer can do to them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.patience import until
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire import sockets
from torchtitan.weight_sync.wire.runtime import Message, PayloadTarget
from torchtitan.weight_sync.wire.sockets import SocketChannel, SocketRuntime

BUCKET: Message = {"type": "bucket", "pull": 1, "rank": 0, "bucket": 0}


class End:
    """A channel, the socket of its peer, and what has become of it."""

    def __init__(self, runtime: SocketRuntime, local: socket.socket | None = None, peer: socket.socket | None = None):
        if local is None or peer is None:
            local, peer = socket.socketpair()
        self.own, self.peer = local, peer
        self.channel = SocketChannel(runtime.loop, local)
        self.heard: list[Message] = []
        self.over = ""
        self.channel.on_message = lambda _channel, message: self.heard.append(message)
        self.channel.on_close = self._closed

    def _closed(self, _channel: wire.Channel, reason: str) -> None:
        self.over = reason

    def hear(self, *messages: Message | bytes) -> None:
        """The peer says all of this, and then nothing more."""
        self.peer.sendall(b"".join(item if isinstance(item, bytes) else wire.encode(item) for item in messages))
        self.peer.shutdown(socket.SHUT_WR)


@pytest.fixture
def runtime() -> Iterator[SocketRuntime]:
    """Nothing of it may end the loop."""
    runtime = SocketRuntime()
    yield runtime
    runtime.stop()
    runtime.run()


def turn(runtime: SocketRuntime) -> None:
    """One turn of the loop."""
    runtime.loop.call_soon(runtime.loop.stop)
    runtime.loop.run_forever()


def turns_until(runtime: SocketRuntime, condition: Callable[[], Any]) -> None:
    def look() -> Any:
        turn(runtime)
        return condition()

    until(look)


def test_a_stranger_may_send_a_short_hello_and_no_bytes(runtime: SocketRuntime) -> None:
    long, early = End(runtime), End(runtime)
    long.hear(wire.LENGTH.pack(wire.MAXIMUM_HELLO_BYTES + 1))
    early.channel.payload_target = lambda _channel, _message: pytest.fail("a stranger's bytes are received")
    early.hear({**BUCKET, "bytes": 8}, bytes(8))
    turns_until(runtime, lambda: long.over and early.over)
    assert "exceeds the limit" in long.over and "before the handshake" in early.over


def test_bytes_of_another_size_than_their_place_are_refused(runtime: SocketRuntime) -> None:
    short, right = End(runtime), End(runtime)
    for end, size in ((short, 4), (right, 8)):
        end.channel.trust()
        end.channel.payload_target = lambda _channel, _message: PayloadTarget(
            [memoryview(bytearray(8))], lambda _parts: None
        )
        end.hear({**BUCKET, "bytes": size}, bytes(size))
    turns_until(runtime, lambda: short.over and right.over)
    assert "4 bytes arrive where 8 belong" in short.over and not short.heard
    assert right.over == "the peer closed the connection" and len(right.heard) == 1


def test_a_channel_closed_at_the_last_byte_delivers_no_message(runtime: SocketRuntime) -> None:
    end = End(runtime)
    end.channel.trust()
    closing = lambda _parts: end.channel.close("torn")  # noqa: E731
    end.channel.payload_target = lambda _channel, _message: PayloadTarget([memoryview(bytearray(8))], closing)
    end.hear({**BUCKET, "bytes": 8}, bytes(8))
    turns_until(runtime, lambda: end.over)
    turn(runtime)
    assert end.over == "torn" and not end.heard


def test_a_message_that_nobody_foresaw_ends_its_channel_alone(runtime: SocketRuntime) -> None:
    evil, good = End(runtime), End(runtime)
    evil.channel.on_message = lambda _channel, message: message["not there"]
    for end in (evil, good):
        end.hear({"type": "ping"})
    turns_until(runtime, lambda: evil.over and good.over)
    assert "not there" in evil.over and good.heard == [{"type": "ping"}]
    # The fixture runs the loop once more: it raises what has ended it.


def test_a_peer_that_reads_nothing_is_hung_up_on(runtime: SocketRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_UNSENT_BYTES", 1 << 20)
    deaf, reads = End(runtime), End(runtime)
    reads.peer.setblocking(False)
    message, total = {"type": "refuse", "reason": "x" * 65536}, 0
    for _ in range(200):
        deaf.channel.send(message)
        reads.channel.send(message)
        turn(runtime)
        while total < 1 << 30:
            try:
                total += len(reads.peer.recv(1 << 20))
            except BlockingIOError:
                break
    assert deaf.over == "the peer does not read its messages"
    assert not reads.over and total > 100 * 65536


def test_a_message_to_many_is_encoded_once() -> None:
    message = wire.BroadcastMessage(type="ping")
    assert wire.encode(message) is wire.encode(message) and wire.encode(message) == wire.encode({"type": "ping"})


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_messages_over_a_network_do_not_wait_and_a_vanished_peer_is_found(
    host: str, family: socket.AddressFamily, runtime: SocketRuntime
) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        local = socket.create_connection(listener.getsockname()[:2])
        end = End(runtime, local, listener.accept()[0])
    assert end.own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert end.own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert end.channel.peer_host == host
    end.channel.close("the end")
    end.peer.close()


def test_a_channel_that_has_sent_everything_does_not_keep_the_loop_busy(runtime: SocketRuntime) -> None:
    end, got = End(runtime), 0
    end.channel.trust()
    end.peer.setblocking(False)
    end.channel.send(BUCKET, memoryview(bytes(4 << 20)))

    def read() -> bool:
        nonlocal got
        with contextlib.suppress(BlockingIOError):
            got += len(end.peer.recv(1 << 20))
        return got > 4 << 20

    turns_until(runtime, read)
    turn(runtime)
    assert not runtime.loop.remove_writer(end.own)


def test_only_the_last_bytes_of_what_waits_are_sent_at_once(runtime: SocketRuntime) -> None:
    """The system may wait for more before it sends the others, so a message does not need a packet of its own."""
    flags: list[int] = []

    class Recording(socket.socket):
        def send(self, data: Any, flag: int = 0, /) -> int:
            flags.append(flag)
            return super().send(data, flag)

    local, peer = socket.socketpair()
    end = End(runtime, Recording(fileno=local.detach()), peer)
    end.channel.send(BUCKET, memoryview(bytes(8)))
    turns_until(runtime, lambda: len(flags) == 2)
    assert flags == [socket.MSG_MORE, 0]


def test_a_fast_peer_has_its_share_of_a_turn(runtime: SocketRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "READ_BYTES", 32 << 10)
    monkeypatch.setattr(sockets, "PIECE_BYTES", 4 << 10)
    end, counts, size = End(runtime), list[int](), 96 << 10
    end.channel.trust()
    end.channel.payload_target = lambda _channel, _message: PayloadTarget(
        [memoryview(bytearray(size))], lambda parts: counts.extend(map(len, parts))
    )
    end.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * size)
    end.hear({**BUCKET, "bytes": size}, bytes(size))
    turn(runtime)
    assert 0 < sum(counts) <= sockets.READ_BYTES + sockets.PIECE_BYTES
    turns_until(runtime, lambda: end.over)
    assert sum(counts) == size and len(end.heard) == 1


def test_a_descriptor_is_free_for_another_connection_once_its_channel_is_closed(runtime: SocketRuntime) -> None:
    """With bytes unsent the loop watches it for writing, too."""
    first, (local, peer) = End(runtime), socket.socketpair()
    number = first.own.fileno()
    first.channel.send({"type": "pong"}, memoryview(bytearray(1 << 22)))
    turn(runtime)
    first.channel.close("over")
    assert first.own.fileno() < 0
    with local:
        second = End(runtime, socket.socket(fileno=os.dup2(local.fileno(), number)), peer)
    second.hear({"type": "ping"})
    turns_until(runtime, lambda: second.over)
    assert second.heard == [{"type": "ping"}]


def test_a_listener_without_a_descriptor_left_waits(runtime: SocketRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener(socket.socket):
        tried = 0

        def accept(self) -> Any:
            self.tried += 1
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(sockets, "ACCEPT_PAUSE_SECONDS", 1e6)
    with Listener() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        end = runtime.listen(listener, lambda _channel: pytest.fail("none was accepted"))
        client.connect(listener.getsockname())
        turns_until(runtime, lambda: listener.tried)
        for _ in range(20):
            turn(runtime)
        assert listener.tried == 1
        end()


def test_calls_under_way_end_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, calls = SocketRuntime(), list[socket.socket]()

    async def never(sock: socket.socket, _address: Any) -> None:
        calls.append(sock)
        await asyncio.Event().wait()

    monkeypatch.setattr(runtime.loop, "sock_connect", never)
    cancel = runtime.dial("127.0.0.1:1", lambda _channel: pytest.fail("open"), lambda _reason: pytest.fail("failed"))
    turns_until(runtime, lambda: calls)
    runtime.stop()
    runtime.run()
    assert calls[0].fileno() == -1
    cancel()


def test_an_exception_of_a_thread_reaches_its_callback() -> None:
    runtime, errors = SocketRuntime(), list[BaseException | None]()

    def leave() -> None:
        raise SystemExit(3)

    runtime.work("apply", leave, lambda _result, error: errors.append(error))
    turns_until(runtime, lambda: errors or not runtime._threads["apply"][0].is_alive())
    assert [type(error) for error in errors] == [SystemExit]
    runtime.stop()
    runtime.run()
