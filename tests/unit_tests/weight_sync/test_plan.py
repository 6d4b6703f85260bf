"""Manifest, slots and wire: nothing else is believed."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.bucket_stream import Frame
from torchtitan.weight_sync.checksums import bucket_checksum
from torchtitan.weight_sync.connection import Connection, Server, dial
from torchtitan.weight_sync.courier import Courier
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.intake import Intake
from torchtitan.weight_sync.launch import SupervisedProcess
from torchtitan.weight_sync.manifest import (
    Layout,
    LayoutError,
    Manifest,
    content_digest,
)
from torchtitan.weight_sync.observer import Observer
from torchtitan.weight_sync.parameters import unique_parameters
from torchtitan.weight_sync.publisher import Publisher
from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.staging import Staging
from torchtitan.weight_sync.states.receiver import ReceiverMachine
from torchtitan.weight_sync.states.slot import SlotState


def test_manifest_is_believed_only_whole() -> None:
    checksums = [["a", "b"], ["c"]]
    manifest = Manifest("e", 3, "layout", (("a", "b"), ("c",)), content_digest("layout", checksums))
    data = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(data) == manifest
    data["checksums"][0][1] = "x"
    with pytest.raises(LayoutError, match="digest"):
        Manifest.from_json(data)
    with pytest.raises(LayoutError, match="malformed"):
        Manifest.from_json({"epoch": "e"})


def test_digest_changes_with_every_bit() -> None:
    data = bytearray(1000)
    before = bucket_checksum(bytes(data))
    data[500] ^= 1
    assert bucket_checksum(bytes(data)) != before


def test_tied_parameters_go_once() -> None:
    shared = torch.nn.Parameter(torch.zeros(2))
    names = unique_parameters({"embed": shared, "norm": torch.zeros(1), "head": shared})
    assert list(names) == ["embed", "norm"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_snapshot_is_cast_fenced_and_assembled(dtype: str, tmp_path: Path) -> None:
    parameters = {f"w{n}": torch.randn(5, n) for n in range(1, 6)} | {"scalar": torch.tensor(2.5)}
    expected = {name: value.clone().to(getattr(torch, dtype)) for name, value in parameters.items()}
    publisher = Publisher(parameters, rank=0, dtype=dtype, num_slots=2, bucket_bytes=100, folder=tmp_path)
    with pytest.raises(RuntimeError, match="without a reserved slot"):
        publisher.snapshot(0, 1)
    assert publisher.reserve() and publisher.reserve(), "reserving twice is one reservation"
    publisher.snapshot(7, 1)
    publisher.fence()
    for value in parameters.values():
        value.add_(1)  # the next optimizer step
    slots = publisher.slots
    keeper = slots.keeper()
    deadline = time.monotonic() + PATIENCE_S
    while not keeper.filled() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert keeper.filled() == {1: (0, 7)}
    staging = Staging(publisher.layout)
    staging.memory[0][:] = slots.slot(0)
    for name, tensor in staging.tensors.items():
        assert torch.equal(tensor, expected[name]), name
    assert publisher.reserve()
    publisher.release()
    assert publisher.has_free_slot()
    assert publisher.courier_bell.recv(10) == b"!"
    publisher.close()


def test_publisher_never_blocks_on_a_dead_courier(tmp_path: Path) -> None:
    publisher = Publisher({"w": torch.zeros(1)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=8, folder=tmp_path)
    for serial in range(2):
        assert publisher.reserve()
        publisher.snapshot(serial, serial + 1)
    assert publisher.doorbell.gettimeout() == 0
    for _ in range(20000):
        assert not publisher.reserve()
    assert publisher.slots.misses == 20000
    # More rings than the bell holds: those that found no room are gone, and nobody waited for room.
    assert 0 < len(publisher.courier_bell.recv(20000)) < 20000
    publisher.courier_bell.close()
    assert not publisher.reserve()
    publisher.doorbell.close()
    publisher.slots.close_files()


def test_slots_are_shared_through_their_descriptors(tmp_path: Path) -> None:
    slots = SharedSlots.create(3, 5000, tmp_path)
    other = SharedSlots(slots.words_fd, slots.data_fd, 3, 5000)
    writer, keeper = slots.writer(), other.keeper()
    index = writer.reserve()
    assert index is not None
    writer.begin(index, 4, 9)
    slots.slot(index)[:3] = b"abc"
    writer.finish(index)
    assert keeper.filled() == {9: (index, 4)} and bytes(other.slot(index)[:3]) == b"abc"
    keeper.drop(9)
    assert writer.view(index).state is SlotState.FREE
    slots.set_failed(3, 2)
    slots.set_failed(4, 2)
    assert other.failed == [(3, 2), (4, 2)], "a courier that was away hears of every one"
    for serial in range(5, 200):
        slots.set_failed(serial, serial + 1)
    assert other.failed == [(serial, serial + 1) for serial in range(136, 200)] and other.misses == 0


def test_failing_checksums_end_the_courier(tmp_path: Path) -> None:
    publisher = Publisher({"w": torch.zeros(4)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=8, folder=tmp_path)
    (tmp_path / "layout.json").write_text(json.dumps(publisher.layout.to_json()))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        arguments = {
            "rank": 0,
            "epoch": "e",
            "coordinator": f"127.0.0.1:{silent.getsockname()[1]}",
            "progress_timeout_s": 5.0,
            "transport": "tcp",
            "streams": 1,
            "options": {},
            "layout_file": str(tmp_path / "layout.json"),
            "num_slots": 2,
            "words_fd": publisher.slots.words_fd,
            "data_fd": publisher.slots.data_fd,
            "bell_fd": os.dup(publisher.courier_bell.fileno()),
        }
        courier = Courier(arguments, "token")
        courier._checksum = lambda _bytes: 1 / 0  # type: ignore[assignment,return-value]
        assert publisher.reserve()
        publisher.snapshot(0, 1)
        stop = threading.Timer(10, courier._loop.stop)
        stop.start()
        with pytest.raises(RuntimeError, match="checksum thread"):
            courier.run()
        stop.cancel()
    publisher.close()


class Stream:
    """A connection that never was; a sender of everything."""

    def __init__(self) -> None:
        self.carrier = SimpleNamespace(inline=True, acknowledges=False)
        self.rank = 0
        self.frame = None


def intake_of(layout: Layout, version: int = 5) -> tuple[Intake, ReceiverMachine, EventLoop]:
    """An intake that waits for attempt 10."""
    loop = EventLoop()
    machine = ReceiverMachine("e")
    intake = Intake(loop, "token", machine, lambda _commands: None, ("127.0.0.1", "127.0.0.1"), actor="a")
    intake.layout(layout, "layout", {}, lambda: None)
    machine.connected(1)
    machine.layout("layout")
    machine.offer(10, version, "digest", intake.awaited())
    sums = tuple(tuple("0" * 32 for _ in range(layout.bucket_count(rank))) for rank in range(len(layout.ranks)))
    intake.begin(10, Manifest("e", version, "layout", sums, "digest"), {}, lambda _delta: None)
    return intake, machine, loop


def test_bytes_that_have_arrived_are_not_written_again(tmp_path: Path) -> None:
    publisher = Publisher({"w": torch.zeros(4)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=8, folder=tmp_path)
    intake, machine, _loop = intake_of(publisher.layout)
    stream: Any = Stream()
    assert intake.place(stream, Frame(10, 0, 0, wire.FULL, 8)) is not None
    for verified in (False, True):
        if verified:
            machine.bucket(10, (0, 0), True)
        with pytest.raises(wire.ProtocolError, match="twice"):
            intake.place(stream, Frame(10, 0, 0, wire.FULL, 8))
    for frame in (Frame(10, 0, 1, wire.FULL, 7), Frame(10, 0, 2, wire.FULL, 8), Frame(10, 1, 0, wire.FULL, 8)):
        with pytest.raises(wire.ProtocolError):
            intake.place(stream, frame)
    with pytest.raises(wire.ProtocolError, match="nobody can apply"):
        intake.place(stream, Frame(10, 0, 1, 1, 4))
    assert intake.place(stream, Frame(10, 0, 1, wire.FULL, 8)) is not None
    machine.abort(10)
    assert intake.place(stream, Frame(10, 0, 1, wire.FULL, 8)) is None
    intake.close()
    publisher.close()


def test_observer_that_fails_says_so() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    observer = Observer(f"127.0.0.1:{listener.getsockname()[1]}", "token", "e")

    def fail() -> None:
        raise KeyError("a bug")

    observer._loop.call_from_thread(fail)
    assert observer.wait_for(lambda _status: bool(observer.failure), 10) and "a bug" in observer.failure
    observer.close(5)
    listener.close()


def test_process_that_cannot_be_started_again_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "short_life.py").write_text("")
    started = subprocess.Popen

    def start_once(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr("torchtitan.weight_sync.launch.subprocess.Popen", no_start)
        return started(*arguments, **options)

    def no_start(*_arguments: Any, **_options: Any) -> Any:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("torchtitan.weight_sync.launch.subprocess.Popen", start_once)
    process = SupervisedProcess("helper", "short_life", lambda _number: {}, [], "token", tmp_path / "log", 3)
    process._thread.join(PATIENCE_S)
    assert not process._thread.is_alive() and "no more processes" in process.failure


# Wire


@given(st.binary(max_size=200))
def test_garbage_on_the_wire_is_a_protocol_error_or_nothing(data: bytes) -> None:
    reader = wire.MessageReader(limit=1000)
    reader.feed(data)
    try:
        message = reader.next()
    except wire.ProtocolError:
        return
    assert message is None or "type" in message


def test_messages_are_cut_from_a_stream_and_bounded() -> None:
    reader = wire.MessageReader(limit=100)
    data = wire.encode({"type": "ping"}) + wire.encode({"type": "apply", "attempt": 3})
    found = []
    for byte in data:
        reader.feed(bytes([byte]))
        if (message := reader.next()) is not None:
            found.append(message)
    assert [message["type"] for message in found] == ["ping", "apply"]
    reader.feed(wire.encode({"type": "ping", "padding": "x" * 200}))
    with pytest.raises(wire.ProtocolError, match="limit"):
        reader.next()
    for bad in ({"type": "apply"}, {"type": "apply", "attempt": "3"}, {"type": "exec"}, [1]):
        with pytest.raises(wire.ProtocolError):
            wire.validate(bad)


def handshake(server_token: str, client_token: str) -> tuple[list[str], list[str]]:
    """Roles that the server let in, and reasons why the client failed."""
    loop = EventLoop()
    peers: list[str] = []
    failures: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def on_peer(connection: Connection, role: str, fields: dict[str, Any]) -> None:
        peers.append(role)
        connection.on_message, connection.on_close = lambda *_: None, lambda *_: None

    def on_ready(connection: Connection, fields: dict[str, Any]) -> None:
        connection.on_message, connection.on_close = lambda *_: None, lambda *_: None
        loop.stop()

    def on_failure(reason: str) -> None:
        failures.append(reason)
        loop.stop()

    server = Server(loop, listener, server_token, lambda role, fields: {}, on_peer)
    dial(loop, address, client_token, "actor", {}, on_ready, on_failure, 5.0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    server.listener.close()
    return peers, failures


def test_only_who_knows_the_token_gets_in() -> None:
    assert handshake("secret", "secret") == (["actor"], [])
    peers, failures = handshake("secret", "guess")
    assert peers == [] and "wrong token" in failures[0]


def test_hello_of_a_stranger_is_cut_off() -> None:
    """Before the handshake nothing but a short hello is read."""
    loop = EventLoop()
    listener = socket.create_server(("127.0.0.1", 0))
    Server(loop, listener, "secret", lambda role, fields: {}, lambda *_: pytest.fail("a stranger was let in"))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        many_digits = b'{"type": "hello", "nonce": ' + b"9" * 5000 + b"}"
        hello = {"type": "hello", "role": "actor", "nonce": "n", "proof": "p", "fields": {}}
        strangers = [
            b"GET / HTTP/1.1\r\n\r\n",
            wire.encode({"type": "ping"}),
            wire.LENGTH.pack(1 << 31),
            wire.LENGTH.pack(len(many_digits)) + many_digits,
            *(wire.encode({**hello, name: "\ud800"}) for name in ("role", "nonce", "proof")),
        ]
        for data in strangers:
            with socket.create_connection(listener.getsockname(), timeout=5) as client:
                client.sendall(data)
                while client.recv(4096):
                    pass
        assert thread.is_alive(), "one stranger ended the loop for everybody"
    finally:
        loop.stop()
        thread.join(PATIENCE_S)
        listener.close()


def test_running_out_of_files_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener(socket.socket):
        failures = 2

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr("torchtitan.weight_sync.connection.ACCEPT_PAUSE_SECONDS", 0.05)
    loop = EventLoop()
    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    Server(loop, listener, "secret", lambda role, fields: {}, lambda *_: None)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            assert b"challenge" in client.recv(4096)
        assert listener.failures == 0
    finally:
        loop.stop()
        thread.join(PATIENCE_S)
        listener.close()


@pytest.mark.parametrize("address", ["host", ":1", "host:", "host:0", "host:65536", "host:²", "host:" + "1" * 5000])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(wire.ProtocolError, match="not an address"):
        wire.parse_address(address)
