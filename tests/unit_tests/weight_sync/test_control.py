"""The control connections of couriers and the trainer, and the journal: one end real, the other driven by hand."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.anonymous_memory import Pulse
from torchtitan.weight_sync.connection import Connection, Server
from torchtitan.weight_sync.coordinator import Coordinator
from torchtitan.weight_sync.courier import Courier
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.journal import Journal
from torchtitan.weight_sync.observer import Observer
from torchtitan.weight_sync.publisher import Publisher
from torchtitan.weight_sync.wire import Message, ProtocolError


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher({"p": torch.zeros(64)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=1024, folder=tmp_path)
    yield made
    made.close()


def test_a_long_value_is_encoded_once_and_reads_the_same() -> None:
    reader = wire.MessageReader(1 << 20)
    message = {"type": "layout", "layout": {"ä": [1, None, "x"]}, "epoch": "e"}
    reader.feed(wire.encode({**message, "layout": wire.Encoded(message["layout"])}))
    reader.feed(wire.encode(message))
    assert reader.next() == message == reader.next()


# Couriers


class Coordinators:
    """Stands in for one coordinator after the other, of these terms; `answers`: whether pings are."""

    def __init__(self, terms: list[int]):
        self.loop = EventLoop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = wire.format_address(*listener.getsockname()[:2])
        self._terms = terms
        self.admitted: list[int] = []
        self.heard: list[tuple[int, str]] = []
        """(number of the connection, type of a message)"""
        self.ended: list[int] = []
        self.connections: list[Connection] = []
        self.answers = True
        Server(self.loop, listener, "token", self._admit, self._on_peer)
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def _admit(self, _role: str, _fields: Message) -> Message:
        self.admitted.append(self._terms.pop(0) if len(self._terms) > 1 else self._terms[0])
        return {"term": self.admitted[-1]}

    def _on_peer(self, connection: Connection, _role: str, _fields: Message) -> None:
        number, term = len(self.connections), self.admitted[-1]
        self.connections.append(connection)

        def on_message(peer: Connection, message: Message) -> None:
            self.heard.append((number, message["type"]))
            if message["type"] == "ping" and self.answers:
                peer.send({"type": "pong", "epoch": "e", "term": term})

        connection.on_message = on_message
        connection.on_close = lambda _connection, _reason: self.ended.append(number)

    def cut(self, number: int) -> None:
        self.loop.call_from_thread(lambda: self.connections[number].close("cut"))

    def close(self) -> None:
        self.loop.stop()
        self._thread.join(PATIENCE_S)


def test_a_courier_refuses_old_terms_and_leaves_a_silent_coordinator(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 1.0)
    layout_file = tmp_path / "layout.json"
    layout_file.write_text(json.dumps(publisher.layout.to_json()))
    coordinators = Coordinators([2, 1, 2])
    arguments = {
        "rank": 0,
        "world_size": 1,
        "epoch": "e",
        "coordinator": coordinators.address,
        "progress_timeout_s": 5.0,
        "transport": "tcp",
        "streams": 1,
        "options": {},
        "layout_file": str(layout_file),
        "slots": publisher.slots,
        "bell": publisher.courier_bell.dup(),
    }
    courier = Courier(arguments, "token")
    thread = threading.Thread(target=courier.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: coordinators.heard.count((0, "ping")) > 2)
        coordinators.cut(0)
        # The next one is of an older term, the one after it is not.
        wait_for(lambda: (2, "layout") in coordinators.heard)
        assert coordinators.admitted == [2, 1, 2] and 1 in coordinators.ended
        assert not [kind for number, kind in coordinators.heard if number == 1]
        # It answers while others would have long been silent, and then no more.
        wait_for(lambda: coordinators.heard.count((2, "ping")) > 60)
        assert 2 not in coordinators.ended
        coordinators.answers = False
        wait_for(lambda: 2 in coordinators.ended and (3, "layout") in coordinators.heard)
    finally:
        courier.stop()
        thread.join(PATIENCE_S)
        coordinators.close()


# The coordinator


class Trainer:
    """What the coordinator takes for the connection of rank 0."""

    def __init__(self) -> None:
        self.statuses: list[Message] = []

    def send(self, message: Message) -> None:
        self.statuses.append(message)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    listener, (ours, theirs) = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
    pulse = Pulse.create("pulse", tmp_path)
    arguments = {
        "epoch": "e",
        "term": 1,
        "settings": {"world_size": 1},
        "listen_fd": listener.detach(),
        "bell_fd": theirs.detach(),
        "pulse_fd": os.dup(pulse.descriptor),
        "journal": str(tmp_path / "journal.jsonl"),
    }
    made = Coordinator(arguments, "token")
    yield made
    ours.close()
    made._server.close()
    made._bell.close()
    made._journal.close(5)


def test_statuses_have_the_figures_that_changed(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    coordinator._trainer = trainer  # type: ignore[assignment]
    machine = coordinator.machine
    for session, name in enumerate(("a", "b")):
        machine.actor_joined(name, session, {"data": ["127.0.0.1:1"], "epoch": "e"}, 0.0)
        machine.actors[name].figures = {"pause_s": 0.5}
    coordinator._send_status()
    coordinator._send_status()
    assert len(trainer.statuses) == 1, "nothing has changed"
    machine.actors["a"].version, machine.actors["a"].figures = 3, {"pause_s": 0.25}
    coordinator._send_status()
    machine.actors["b"].figures = {"pause_s": 0.125}
    for _ in range(3):
        coordinator._send_status()
    assert len(trainer.statuses) == 2, "figures alone are sent later"
    coordinator._status_at -= 1.0
    coordinator._send_figures()
    told = [{name: actor.get("figures") for name, actor in sent["actors"].items()} for sent in trainer.statuses]
    assert told[1:] == [{"a": {"pause_s": 0.25}, "b": None}, {"a": None, "b": {"pause_s": 0.125}}]

    monkeypatch.setattr(Observer, "_dial", lambda self: None)
    observer = Observer("127.0.0.1:1", "token", "e")
    try:
        for sent in trainer.statuses:
            observer._on_message(None, json.loads(json.dumps(sent)))  # type: ignore[arg-type]
        actors = observer.status()["actors"]
        assert [actors[name]["figures"]["pause_s"] for name in ("a", "b")] == [0.25, 0.125]
        assert actors["a"]["version"] == 3
    finally:
        observer.close(10)


def test_a_rank_that_reports_another_layout_is_refused(coordinator: Coordinator, publisher: Publisher) -> None:
    layout: dict[str, Any] = json.loads(json.dumps(publisher.layout.to_json()))
    for _ in range(2):
        coordinator._on_layout(0, layout)
        assert coordinator.machine.layout is not None and not coordinator._layouts, "it is kept once"
    with pytest.raises(ProtocolError, match="another layout"):
        coordinator._on_layout(0, {**layout, "bucket_bytes": 2048})


# The journal


def test_a_disk_that_hangs_costs_lines_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.jsonl", term=1, maximum_waiting=3)
    works, hangs = threading.Event(), threading.Event()
    write = journal._file.write

    def slow_write(line: str) -> int:
        hangs.set()
        assert works.wait(PATIENCE_S)
        return write(line)

    monkeypatch.setattr(journal, "_file", SimpleNamespace(write=slow_write, close=journal._file.close))
    journal.write("line", {"number": 0})
    assert hangs.wait(PATIENCE_S)
    for number in range(1, 10):
        journal.write("line", {"number": number})
    works.set()
    wait_for(journal._lines.empty)
    journal.write("line", {"number": 10})
    journal.close(20)
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [record["number"] for record in records if record["event"] == "line"] == [0, 1, 2, 3, 10]
    assert [record["count"] for record in records if record["event"] == "lost_lines"] == [6]
