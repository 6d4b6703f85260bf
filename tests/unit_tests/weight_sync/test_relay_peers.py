"""What a peer does wrong, or at a bad moment, costs its own connection: never the loop, an attempt, or the actor."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit_tests.weight_sync.test_intake import HOST, Transfer, layout_of
from torchtitan.errors import UserError
from torchtitan.weight_sync import connection as connections
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.applying import ApplyResult, apply_on_thread
from torchtitan.weight_sync.bucket_stream import ANY_RANK, Frame
from torchtitan.weight_sync.connection import Connection, Server, dial, numeric_host
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.intake import Intake
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.manifest import LayoutError, Manifest
from torchtitan.weight_sync.needs import needed_buckets, needs_to_json
from torchtitan.weight_sync.receiver import Receiver
from torchtitan.weight_sync.relay import RelaySender
from torchtitan.weight_sync.staging import StagedVersion, Staging, WeightsRefused
from torchtitan.weight_sync.states.receiver import BeginRelay, Command, ReceiverMachine, Send, Served
from torchtitan.weight_sync.transfer_figures import TransferFigures, check_figures
from torchtitan.weight_sync.wire import FULL, ProtocolError
from torchtitan.weight_sync.workers import WorkerGroup


def meet(
    answer: dict[str, Any],
    on_ready: Callable[[EventLoop, Connection, dict[str, Any]], None],
    on_message: Callable[[Connection, dict[str, Any]], None] = lambda _connection, _message: None,
    address: str | None = None,
) -> list[str]:
    """A server that admits with `answer`, and one who dials it; returns why that failed."""
    loop, failures = EventLoop(), []
    listener = socket.create_server(("127.0.0.1", 0))

    def on_peer(peer: Connection, _role: str, _fields: dict[str, Any]) -> None:
        peer.on_message, peer.on_close = on_message, lambda *_: None

    def failed(reason: str) -> None:
        failures.append(reason)
        loop.stop()

    Server(loop, listener, "t", lambda _role, _fields: answer, on_peer)
    address = address or f"127.0.0.1:{listener.getsockname()[1]}"
    dial(loop, address, "t", "actor", {}, lambda peer, fields: on_ready(loop, peer, fields), failed, 5.0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(PATIENCE_S)
    listener.close()
    assert not thread.is_alive(), "nobody was told"
    return failures


def test_an_admission_may_be_long() -> None:
    got: list[int] = []

    def ready(loop: EventLoop, peer: Connection, fields: dict[str, Any]) -> None:
        got.append(len(fields["buckets"]))
        assert peer.detach() is peer.socket
        peer.socket.close()
        loop.stop()

    assert meet({"buckets": "x" * (8 << 20)}, ready) == [] and got == [8 << 20]


def test_a_socket_changes_its_use_when_everything_has_left() -> None:
    loop = EventLoop()
    ours, theirs = socket.socketpair()
    connection = Connection(loop, ours, lambda *_: None, lambda *_: None)
    message = {"type": "admitted", "fields": {"buckets": "x" * (4 << 20)}}
    connection.send(message)
    left: list[socket.socket] = []
    connection.when_sent(lambda: (left.append(connection.detach()), loop.stop()))
    assert left == [], "the other end has read nothing yet"
    with pytest.raises(ProtocolError, match="pending"):
        connection.detach()
    thread = threading.Thread(target=loop.run)
    thread.start()
    missing = len(wire.encode(message))
    while missing:
        missing -= len(theirs.recv(1 << 20))
    thread.join(PATIENCE_S)
    assert left == [ours]
    ours.close()
    theirs.close()


def test_needs_longer_than_a_hello_arrive() -> None:
    layout = layout_of("fsdp", [(4000, 4)], 2)
    boxes = {"p0": Box((0, 1), (4000, 1))}
    needs = needed_buckets(layout, boxes)
    assert len(wire.encode({"buckets": needs_to_json(needs)})) > wire.MAXIMUM_HELLO_BYTES
    assert list(needs_to_json(needs, 1) or {}) == ["1"]
    transfer = Transfer(layout, boxes=boxes)
    transfer.run()
    assert transfer.kinds == ["ready", "staged"] and set(transfer.ends) == {None}


@pytest.mark.parametrize("error", [KeyError("field"), AttributeError("field"), AssertionError(), IndexError()])
def test_what_a_handler_raises_ends_its_connection_only(error: Exception) -> None:
    closed: list[str] = []

    def handle(_connection: Connection, _message: dict[str, Any]) -> None:
        raise error

    def ready(loop: EventLoop, peer: Connection, _fields: dict[str, Any]) -> None:
        peer.on_message = lambda *_: None
        peer.on_close = lambda _peer, reason: (closed.append(reason), loop.stop())
        peer.send({"type": "ping"})

    assert meet({}, ready, handle) == [] and closed == ["the peer closed the connection"]


def test_an_answer_that_cannot_be_handled_is_a_failure_to_connect() -> None:
    (reason,) = meet({}, lambda _loop, _peer, fields: fields["term"])
    assert "KeyError" in reason


@pytest.mark.parametrize("address", ["a\0b:1", "no address", "\ud800:1", f"{'a' * 70}.b:1"])
def test_an_address_that_is_none_is_a_failure_to_connect(address: str) -> None:
    assert len(meet({}, lambda *_: None, address=address)) == 1


def test_only_its_own_process_looks_a_name_up() -> None:
    assert numeric_host("localhost") == "127.0.0.1" and numeric_host("::1") == "::1"
    with pytest.raises(UserError, match="no address of the host"):
        numeric_host("a\0b")
    listener, address = connections.listen("127.0.0.1", "localhost")
    listener.close()
    assert wire.parse_data_address(address)[0] == "127.0.0.1"
    with pytest.raises(ProtocolError, match="numeric"):
        wire.parse_data_address("localhost:1")


@pytest.mark.parametrize("parts", [[1], ["a", None], [["a"]], "a"])
def test_parts_are_texts(parts: Any) -> None:
    with pytest.raises(ProtocolError):
        wire.validate({"type": "ready", "layout_id": "l", "parts": parts})


def test_figures_of_a_worker_are_numbers() -> None:
    figures = TransferFigures(begin=1.0, end=2.0).to_json()
    assert check_figures(figures) is figures
    for wrong in (None, {}, {**figures, "verify_s": "1"}, {**figures, "bytes_full": None}):
        with pytest.raises(ProtocolError, match="figures"):
            check_figures(wrong)


def test_a_relay_without_an_address_for_this_worker_is_an_error() -> None:
    relays = RelaySender(EventLoop(), "t", "e", "a", 1, lambda *_: None)
    with pytest.raises(ProtocolError, match="worker 1"):
        relays.begin(BeginRelay(1, "b", ["127.0.0.1:1"]), 0, Staging(layout_of("fsdp", [(8, 8)], 100)))


class Stream:
    """As much of a stream as the intake looks at."""

    class carrier:
        inline = True
        acknowledges = False

    def __init__(self, rank: int):
        self.rank = rank
        self.frame: Frame | None = None


class Receiving:
    """An intake that waits for an attempt's buckets."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.layout = layout_of("fsdp", [(8, 8)], 16)
        self.machine = ReceiverMachine("e")
        self.intake = Intake(EventLoop(), "t", self.machine, self._execute, HOST, actor="a")
        self.machine.connected(1)
        self.intake.layout(self.layout, "l", {}, lambda: self._execute(self.machine.layout("l")))
        self.offer(7)

    def offer(self, attempt: int) -> None:
        sums = tuple(("x",) * self.layout.bucket_count(rank) for rank in range(len(self.layout.ranks)))
        self.machine.offer(attempt, attempt, "d", self.intake.awaited())
        self.intake.begin(attempt, Manifest("e", attempt, "l", sums, "d"), {}, lambda _delta: None)

    def _execute(self, commands: list[Command]) -> None:
        self.said += [command.message for command in commands if isinstance(command, Send)]

    def deliver(self, stream: Stream, bucket: int, rank: int = 0) -> None:
        assert self.intake.place(stream, Frame(7, rank, bucket, FULL, 16)) is not None  # type: ignore[arg-type]

    def lose(self, stream: Stream) -> list[str]:
        before = len(self.said)
        self.intake.lost(stream, "reset")  # type: ignore[arg-type]
        return [message["type"] for message in self.said[before:]]


@pytest.mark.parametrize("rank", [0, ANY_RANK])
def test_buckets_that_cannot_come_any_more_are_not_waited_for(rank: int) -> None:
    receiving, stream = Receiving(), Stream(rank)
    assert receiving.layout.bucket_count(0) > 1
    assert receiving.lose(Stream(rank)) == [], "it has delivered nothing yet"
    receiving.deliver(stream, 0)
    assert receiving.lose(stream) == ["refused"] and "lost: reset" in receiving.said[-1]["reason"]


def test_a_sender_that_has_sent_everything_may_go() -> None:
    receiving, stream = Receiving(), Stream(0)
    for bucket in range(receiving.layout.bucket_count(0)):
        receiving.deliver(stream, bucket)
    assert receiving.lose(stream) == []


def test_what_nobody_wants_any_more_is_not_verified() -> None:
    receiving = Receiving()
    intake = receiving.intake
    hashed: list[Any] = []
    intake._checksum = lambda area: (hashed.append(area), "x")[1]
    old, area = intake._incoming, memoryview(bytearray(16))
    frame = Frame(7, 0, 0, FULL, 16)
    intake._check(old, Stream(0), frame, area, area, "x", False)  # type: ignore[arg-type]
    assert len(hashed) == 1
    receiving.machine.abort(7)
    intake.discard(7)
    receiving.offer(8)
    intake._check(old, Stream(0), frame, area, area, "x", False)  # type: ignore[arg-type]
    assert len(hashed) == 1


def test_without_memory_a_layout_is_refused_and_the_next_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    intake = Intake(EventLoop(), "t", ReceiverMachine("e"), lambda _commands: None, HOST, actor="a")
    layout = layout_of("fsdp", [(8, 8)], 100)

    def no_memory(*_arguments: Any) -> Staging:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch, pytest.raises(LayoutError, match="no staging memory of 128 bytes"):
        patch.setattr("torchtitan.weight_sync.intake.Staging", no_memory)
        intake.layout(layout, "l", {}, lambda: pytest.fail("ready without memory"))
    assert intake.current is None
    ready: list[bool] = []
    intake.layout(layout, "l", {}, lambda: ready.append(True))
    assert ready == [True]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (1.5, None),
        ({"pause_s": 1.5, "drain_s": 2}, None),
        (None, None),
        ("fast", "ValueError"),
        ({"pause_s": object()}, "TypeError"),
        (SystemExit(3), "SystemExit"),
        (WeightsRefused("no"), "no"),
    ],
)
def test_an_engine_is_always_reported(result: Any, error: str | None) -> None:
    reports: list[ApplyResult] = []

    def apply(_staged: StagedVersion) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    def make() -> StagedVersion:
        return StagedVersion("e", 1, "d", {})

    apply_on_thread("a", 1, make, apply, lambda: None, reports.append).join(PATIENCE_S)
    (report,) = reports
    assert (report.error is None) if error is None else (error in str(report.error))
    assert report.refused == isinstance(result, WeightsRefused)
    wire.encode(report.figures)
    assert result is None or error is not None or report.figures["pause_s"] == 1.5


class Link:
    """As much of a connection as is asked of one that is closed at once."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def close(self, reason: str) -> None:
        self.closed.append(reason)


def test_a_leader_that_loses_a_worker_while_it_dials_dials_again(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Receiver("127.0.0.1:1", "a", "e", "t", lambda _staged: None, workers=1, retry_for_s=0.0)
    group = leader._data
    assert isinstance(group, WorkerGroup)
    leader._last_seen -= 100.0
    leader._dial()
    assert leader._failure is None and leader._redial is not None, "it waits for its worker, not for the coordinator"
    monkeypatch.setattr(group, "missing", lambda: "")
    for generation, joined in ((group.generation - 1, False), (group.generation, True)):
        peer = Link()
        leader._welcomed(generation, peer, {"term": 1})  # type: ignore[arg-type]
        assert bool(peer.closed) is not joined and (leader._control is peer) is joined
    leader._control = None
    leader.close()


def test_a_leader_knows_that_a_worker_does_not_hold_its_part() -> None:
    ends: list[tuple[int, str | None, bool]] = []

    class Owner:
        def relay_finished(self, attempt: int, error: str | None, shadow: bool = True) -> None:
            ends.append((attempt, error, shadow))

    served = Served("e", 3, "d")
    machine = ReceiverMachine("e", served)
    options: Any = {"actor": "a", "count": 2, "apply_timeout_s": 1.0, "trusted": True}
    group = WorkerGroup(EventLoop(), "t", machine, Owner(), HOST, **options)  # type: ignore[arg-type]
    group._relays[5] = {0, 1}
    group._relay_message(1, {"type": "broken", "attempt": 5, "reason": "none", "shadow": False})
    assert ends == [(5, "worker 1: none", False)]
    machine.connected(1)
    machine.layout("l")
    machine.shadow = served
    assert isinstance(machine.relay(5, "b", 3, "d", [])[0], BeginRelay)
    (broken,) = machine.relay_finished(*ends[0])
    assert isinstance(broken, Send) and broken.message["shadow"] is False
    assert machine.hello_fields()["shadow"] is False
