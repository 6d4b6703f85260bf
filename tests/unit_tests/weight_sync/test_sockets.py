"""The runtime of production, where only real sockets show what it does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hostile import enter, receive
from tests.patience import PATIENCE_S, until
from torchtitan.weight_sync.wire import messages, sockets
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import ACTOR, Acceptor, Dialer, Identity
from torchtitan.weight_sync.wire.sockets import SocketRuntime


def test_a_port_at_which_no_server_listens_costs_a_call_and_not_the_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    runtime, reasons = SocketRuntime(), []
    identity = Identity.of("token", ACTOR, "actor-0")

    def again(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            runtime.stop()
        else:
            Dialer(runtime, address, identity, {}, lambda _channel, _fields: None, again)

    Dialer(runtime, address, identity, {}, lambda _channel, _fields: None, again)
    runtime.call_later(60.0, runtime.stop)
    runtime.run()
    assert len(reasons) == 3 and all("cannot connect" in reason for reason in reasons)


def test_connection_that_breaks_while_it_is_made_is_one_failure() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    runtime, reasons, on = SocketRuntime(), [], threading.Event()

    def dial() -> None:
        Dialer(runtime, address, Identity(ACTOR, "a", "k"), {}, lambda *_: None, failed)
        runtime.post(listener.close)  # with the connection in its backlog: it is reset

    def failed(reason: str) -> None:
        reasons.append(reason)
        runtime.call_later(0.05, on.set)

    runtime.post(dial)
    thread = threading.Thread(target=runtime.run)
    thread.start()
    assert on.wait(PATIENCE_S), "the loop has ended"
    runtime.stop()
    thread.join(PATIENCE_S)
    assert len(reasons) == 1 and "reset" in reasons[0]


def test_payload_beyond_what_a_socket_takes_at_once_arrives_whole_and_is_counted() -> None:
    runtime, (server, client) = SocketRuntime(), socket.socketpair()
    data, sent, channels = os.urandom(5 << 20), threading.Event(), list[sockets.SocketChannel]()

    def begin() -> None:
        channels.append(sockets.SocketChannel(runtime.loop, server))
        channels[0].send({"type": "bucket", "pull": 1, "rank": 0, "bucket": 0}, memoryview(data), sent.set)

    runtime.start("server", begin)
    client.settimeout(PATIENCE_S)
    with client, client.makefile("rb") as file:
        (length,) = wire.LENGTH.unpack(file.read(wire.LENGTH.size))
        assert json.loads(file.read(length))["bytes"] == len(data) and file.read(len(data)) == data
        assert sent.wait(PATIENCE_S) and channels[0].moved == len(data)
    assert runtime.end(PATIENCE_S) and not runtime.failure


@pytest.mark.parametrize("size", [-1, 1.0, True, "8"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(wire.ProtocolError, match="needs field .bytes.|a bucket of"):
        messages.parse({"type": "bucket", "pull": 1, "rank": 0, "bucket": 0, "bytes": size})


def test_every_thread_begins_as_told() -> None:
    thread_names: list[str] = []
    runtime, done = SocketRuntime(lambda: thread_names.append(threading.current_thread().name)), threading.Semaphore(0)
    for name in ("checksums", "fetch", "checksums"):
        runtime.work(name, lambda: None, lambda _result, _error: done.release())
    thread = threading.Thread(target=runtime.run, name="loop")
    thread.start()
    assert all(done.acquire(timeout=PATIENCE_S) for _ in range(3))
    runtime.stop()
    thread.join(PATIENCE_S)
    assert sorted(thread_names) == ["checksums", "fetch", "loop"]


def test_thread_that_cannot_be_started_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, results = SocketRuntime(), list[Any]()

    def no_thread_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as now:
        now.setattr(threading.Thread, "start", no_thread_left)
        with pytest.raises(RuntimeError, match="new thread"):
            runtime.work("apply", lambda: "never", lambda result, _error: results.append(result))
    runtime.work("apply", lambda: "done", lambda result, _error: results.append(result))
    runtime.stop()
    runtime.run()
    runtime.finish_work("apply", time.monotonic() + PATIENCE_S)
    assert results == ["done"]


def test_work_that_has_begun_is_waited_for_at_the_end() -> None:
    runtime, started, results = SocketRuntime(), threading.Event(), list[Any]()

    def slow() -> str:
        started.set()
        time.sleep(0.3)
        return "done"

    runtime.work("checksums", slow, lambda result, _error: results.append(result))
    runtime.stop()
    runtime.run()
    assert started.wait(PATIENCE_S) and not results
    runtime.finish_work("checksums", time.monotonic() + PATIENCE_S)
    assert results == ["done"]


@contextlib.contextmanager
def gate_at(listener: socket.socket) -> Iterator[threading.Thread]:
    """A port that lets actors in who know their key; no one does."""
    runtime = SocketRuntime()
    acceptor = Acceptor(runtime, frozenset((ACTOR,)), "secret", lambda *_: {}, lambda *_: pytest.fail("in"))
    runtime.listen(listener, acceptor.accept)
    thread = threading.Thread(target=runtime.run)
    thread.start()
    yield thread
    runtime.stop()
    thread.join(PATIENCE_S)
    listener.close()


def test_hello_of_a_stranger_is_cut_off() -> None:
    """Before the handshake no more than a short hello is read."""
    many_digits = b'{"type": "hello", "nonce": ' + b"9" * 5000 + b"}"
    hello = {"type": "hello", "role": ACTOR, "name": "a", "nonce": "n", "proof": "p", "fields": {}}
    strangers = [
        b"GET / HTTP/1.1\r\n\r\n",
        wire.encode({"type": "ping"}),
        wire.encode({"type": "bucket", "pull": 1, "rank": 0, "bucket": 0, "bytes": 1 << 40}),
        *(wire.encode(message) for message in ({"type": "exec"}, {"type": "hello"})),
        wire.LENGTH.pack(3) + b"[1]",
        wire.LENGTH.pack(1 << 31),
        wire.LENGTH.pack(len(many_digits)) + many_digits,
        *(wire.encode({**hello, name: "\ud800"}) for name in ("role", "name", "nonce", "proof")),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    with gate_at(listener) as thread:
        for data in strangers:
            with socket.create_connection(listener.getsockname(), timeout=5) as client:
                client.sendall(data)
                while client.recv(4096):
                    pass
        assert thread.is_alive(), "one stranger ended the loop for all"


def test_server_that_has_proved_itself_may_say_more_than_a_stranger() -> None:
    runtime, ends = SocketRuntime(), list[str]()
    listener = socket.create_server(("127.0.0.1", 0))
    long: wire.Message = {"type": "layout", "layout": {"text": "x" * wire.MAXIMUM_HELLO_BYTES}}

    def ended(how: str) -> None:
        ends.append(how)
        runtime.stop()

    def ready(channel: wire.Channel, _fields: wire.Message) -> None:
        channel.on_message = lambda _channel, message: ended("heard" if message == long else "another")
        channel.on_close = lambda _channel, reason: ended(reason)

    acceptor = Acceptor(runtime, frozenset((ACTOR,)), "secret", lambda *_: {}, lambda channel, *_: channel.send(long))
    runtime.listen(listener, acceptor.accept)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    Dialer(runtime, address, Identity.of("secret", ACTOR, "a"), {}, ready, ended)
    runtime.call_later(PATIENCE_S, runtime.stop)
    runtime.run()
    listener.close()
    assert ends[:1] == ["heard"]


class Flooded:
    """A server that two actors call; what each of them has said is counted. It answers pings."""

    def __init__(self) -> None:
        self.runtime, self.listener = SocketRuntime(), socket.create_server(("127.0.0.1", 0))
        self.said, self.most, self.closed = Counter[str](), 0, list[str]()
        acceptor = Acceptor(self.runtime, frozenset((ACTOR,)), "secret", lambda *_: {}, self.enter)
        self.runtime.listen(self.listener, acceptor.accept)
        self.runtime.post(self.turn)
        self.in_turn = 0
        self.runtime.start("flooded server", lambda: None)

    def turn(self) -> None:
        self.most, self.in_turn = max(self.most, self.in_turn), 0
        self.runtime.loop.call_soon(self.turn)

    def enter(self, channel: wire.Channel, identity: Identity, _fields: wire.Message) -> None:
        def heard(channel: wire.Channel, _message: wire.Message) -> None:
            self.said[identity.name] += 1
            self.in_turn += 1
            channel.send({"type": "pong"})

        channel.on_message, channel.on_close = heard, lambda _channel, reason: self.closed.append(reason)

    def client(self, name: str, answer: str = "welcome") -> socket.socket:
        """A connection of an actor, past its handshake, which ends with this answer."""
        client = socket.create_connection(self.listener.getsockname(), timeout=PATIENCE_S)
        assert enter(client, Identity.of("secret", ACTOR, name), {})["type"] == answer
        return client


def test_a_flood_of_one_actor_waits_and_the_others_are_answered() -> None:
    server = Flooded()
    evil, good = server.client("evil"), server.client("good")
    flood = wire.encode({"type": "ping"}) * 100_000
    threading.Thread(target=_pour, args=(evil, flood), daemon=True).start()
    until(lambda: server.said["evil"] > 0)
    for _ in range(20):
        good.sendall(wire.encode({"type": "ping"}))
        assert receive(good)["type"] == "pong"
    # Its budget, and what it has earned meanwhile: far from all that it has sent.
    assert server.said["evil"] < 50_000 and server.said["good"] == 20 and not server.closed
    assert server.most <= 2 * sockets.TURN_MESSAGES + 2
    evil.close()
    good.close()
    assert server.runtime.end(PATIENCE_S)
    server.listener.close()


def _pour(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        client.sendall(data)


def test_large_messages_count_for_more_and_those_beyond_the_limit_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MESSAGES_PER_SECOND", 1e-9)
    server = Flooded()
    evil = server.client("evil")
    large = wire.encode({"type": "ping", "more": "x" * (64 << 10)})
    threading.Thread(target=_pour, args=(evil, large * 100), daemon=True).start()
    until(lambda: server.said["evil"] >= 31)
    # 31 messages of 64 KiB have used up what 2,000 small ones may; the next waits for ever.
    other = server.client("evil", "refuse")
    assert server.said["evil"] == 31
    good = server.client("good")
    good.sendall(wire.LENGTH.pack(wire.MAXIMUM_ACTOR_BYTES + 1))
    until(lambda: any("exceeds the limit" in reason for reason in server.closed))
    for client in (evil, other, good):
        client.close()
    assert server.runtime.end(PATIENCE_S)
    server.listener.close()


def test_running_out_of_files_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener(socket.socket):
        failures = 2

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr(sockets, "ACCEPT_PAUSE_SECONDS", 0.05)
    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with gate_at(listener), socket.create_connection(listener.getsockname(), timeout=5) as client:
        assert b"challenge" in client.recv(4096)
        assert listener.failures == 0


def test_a_strangers_task_does_not_end_the_loop_and_a_callback_that_fails_does() -> None:
    """Clients of HTTP libraries close themselves by a task on whatever loop runs where they are collected."""
    runtime, later = SocketRuntime(), threading.Event()

    async def close_itself() -> None:
        raise RuntimeError("Event loop is closed")

    def begin() -> None:
        asyncio.get_running_loop().create_task(close_itself())
        gc.collect()
        runtime.call_later(0.05, lambda: (gc.collect(), later.set()))
        runtime.call_later(0.1, lambda: 1 // 0)

    runtime.post(begin)
    with pytest.raises(ZeroDivisionError):
        runtime.run()
    assert later.is_set()
