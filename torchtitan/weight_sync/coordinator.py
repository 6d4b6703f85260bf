"""The coordinator's process, beside rank 0: sockets, clock and journal around states.coordinator. No torch.

python -m torchtitan.weight_sync.coordinator '{"epoch": ..., ...}'      (started by rank 0, see launch.py)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import selectors
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.weight_sync import faults, wire
from torchtitan.weight_sync.anonymous_memory import Pulse
from torchtitan.weight_sync.connection import Connection, Server
from torchtitan.weight_sync.coverage import merge_layouts
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.journal import Journal
from torchtitan.weight_sync.manifest import LayoutError, content_digest
from torchtitan.weight_sync.states.commands import (
    Command,
    Disconnect,
    HangUp,
    Record,
    Settings,
    ToActor,
    ToCourier,
)
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine
from torchtitan.weight_sync.wire import Message, ProtocolError

logger = logging.getLogger("torchtitan.weight_sync.coordinator")

TICK_SECONDS = 0.1
# What happens within this time is one status; it grows with what a status costs. A trainer that waits for its actors
# waits for this too.
STATUS_SECONDS_PER_ACTOR, STATUS_SECONDS = 0.001, 0.01
# Between two statuses that differ in figures alone.
FIGURES_SECONDS = 0.1
# At the end, for lines of the journal that still wait for the disk.
JOURNAL_SECONDS = 1.0
ACTOR_MESSAGES = frozenset(
    ("ping", "ready", "accept", "decline", "progress", "staged", "refused", "applied", "poisoned", "broken")
)


class Coordinator:
    """Maps connections to the machine's events, and its commands to messages."""

    def __init__(self, arguments: dict[str, Any], token: str):
        self.epoch: str = arguments["epoch"]
        settings = Settings(**arguments["settings"])
        self.machine = CoordinatorMachine(settings, arguments["term"])
        self._world_size = settings.world_size
        self._loop = EventLoop()
        self._bell = socket.socket(fileno=arguments["bell_fd"])
        self._bell.setblocking(False)
        self._server = Server(
            self._loop, socket.socket(fileno=arguments["listen_fd"]), token, self._admit, self._on_peer
        )
        self._journal = Journal(Path(arguments["journal"]), self.machine.term)
        self._couriers: dict[int, Connection] = {}
        self._layouts: dict[int, Message] = {}
        """Until all ranks have reported theirs"""
        self._layout_hashes: dict[int, str] = {}
        self._shared: dict[str, wire.Encoded] = {}
        """What messages to all actors have in common: the layout, and the checksums of what was offered last"""
        self._actors: dict[tuple[str, int], Connection] = {}
        self._trainer: Connection | None = None
        self._sessions = 0
        self._failure = ""
        self._last_status: Message = {}
        self._sent_figures: dict[str, Message] = {}
        self._status_at = 0.0
        self._status_due = self._figures_due = False
        self._pulse = Pulse(arguments["pulse_fd"])
        self._parent = os.getppid()

    def run(self) -> None:
        """Work until rank 0 is gone."""
        self._loop.watch(self._bell, selectors.EVENT_READ, self._bell_rung)
        self._tick()
        self._write("start", {"pid": os.getpid(), "epoch": self.epoch})
        self._loop.run()
        self._journal.close(JOURNAL_SECONDS)

    def _bell_rung(self, _events: int) -> None:
        if not self._bell.recv(4096):
            self._loop.stop()

    def _tick(self) -> None:
        self._loop.call_later(TICK_SECONDS, self._tick)
        self._pulse.beat()
        if os.getppid() != self._parent:
            self._loop.stop()
        self._execute(self.machine.tick(time.monotonic()))

    # Peers

    def _admit(self, role: str, fields: Message) -> Message:
        if fields.get("epoch") != self.epoch:
            raise ProtocolError(f"this job's epoch is {self.epoch}, not {fields.get('epoch')}")
        if role == "courier":
            if not isinstance(fields.get("rank"), int) or not 0 <= fields["rank"] < self._world_size:
                raise ProtocolError(f"no rank {fields.get('rank')!r} among {self._world_size}")
        elif role == "actor":
            served = fields.get("served")
            data = fields.get("data")
            if not isinstance(fields.get("actor"), str) or not isinstance(data, list) or set(map(type, data)) != {str}:
                raise ProtocolError("an actor says its name and its workers' data addresses")
            for address in data:
                wire.parse_data_address(address)
            if served is not None and not (isinstance(served, list) and list(map(type, served)) == [str, int, str]):
                raise ProtocolError("served is [epoch, version, digest]")
        elif role != "trainer":
            raise ProtocolError(f"unknown role {role!r}")
        return {"term": self.machine.term}

    def _on_peer(self, connection: Connection, role: str, fields: Message) -> None:
        if role == "courier":
            self._on_courier(connection, fields["rank"])
        elif role == "actor":
            self._on_actor(connection, fields)
        else:
            if self._trainer is not None:
                self._trainer.close("replaced")
            self._trainer = connection
            connection.on_message, connection.on_close = self._on_trainer_message, self._on_trainer_lost
            self._last_status, self._sent_figures = {}, {}
            self._send_status()

    def _on_courier(self, connection: Connection, rank: int) -> None:
        old = self._couriers.get(rank)
        if old is not None:
            old.close("replaced")
        self._couriers[rank] = connection
        connection.on_message = partial(self._on_courier_message, rank)
        connection.on_close = partial(self._on_courier_lost, rank)
        self._execute(self.machine.courier_joined(rank, time.monotonic()))

    def _on_courier_lost(self, rank: int, connection: Connection, reason: str) -> None:
        if self._couriers.get(rank) is connection:
            del self._couriers[rank]
            logger.warning("courier of rank %d lost: %s", rank, reason)
            self._execute(self.machine.courier_lost(rank, time.monotonic(), reason))

    def _on_courier_message(self, rank: int, connection: Connection, message: Message) -> None:
        self.machine.courier_heard(rank, time.monotonic())
        if message["type"] == "ping":
            connection.send(self._stamped({"type": "pong"}))
        elif message["type"] == "layout":
            self._on_layout(rank, message["layout"])
        elif message["type"] == "sent":
            self._write_sent(message, {"rank": rank})
        elif message["type"] in ("snapped", "failed", "need_slot", "broken"):
            self._execute(self.machine.courier_message(rank, message, time.monotonic()))
        else:
            raise ProtocolError(f"a courier does not send {message['type']!r}")

    def _on_layout(self, rank: int, layout: Message) -> None:
        found = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
        if self._layout_hashes.setdefault(rank, found) != found:
            raise ProtocolError(f"rank {rank} reports another layout than before")
        if self.machine.layout is not None:
            return
        self._layouts[rank] = layout
        if len(self._layouts) < self._world_size:
            return
        try:
            whole = merge_layouts([self._layouts[number] for number in range(self._world_size)])
        except LayoutError as error:
            self._failure = f"the ranks' shards do not fit together: {error}"
            logger.error("%s", self._failure)
            self._write("failure", {"reason": self._failure})
            self._send_status()
            return
        self._layouts.clear()
        layout_id = whole.layout_id()
        self._write("layout", {"layout_id": layout_id, "bytes": whole.total_bytes})
        digest = partial(content_digest, layout_id)
        self._execute(self.machine.layout_known(whole.to_json(), layout_id, digest, time.monotonic()))

    def _on_actor(self, connection: Connection, fields: Message) -> None:
        self._sessions += 1
        name, session = fields["actor"], self._sessions
        self._actors[name, session] = connection
        connection.on_message = partial(self._on_actor_message, name, session, fields["data"])
        connection.on_close = partial(self._on_actor_lost, name, session)
        self._execute(self.machine.actor_joined(name, session, fields, time.monotonic()))

    def _on_actor_message(
        self, name: str, session: int, data: list[str], _connection: Connection, message: Message
    ) -> None:
        if message["type"] == "sent":
            self._write_sent(message, {"source": name})
            return
        if message["type"] not in ACTOR_MESSAGES:
            raise ProtocolError(f"an actor does not send {message['type']!r}")
        parts = message.get("parts") if message["type"] == "ready" else None
        if parts is not None and len(parts) != len(data):
            raise ProtocolError(f"an actor of {len(data)} workers says {len(parts)} parts")
        if message["type"] == "ready":
            # Nothing is decided by it: a courier that does not connect now does when it is told to send.
            self._to_couriers(ToCourier(None, {"type": "connect", "actor": name, "data": data}))
        self._execute(self.machine.actor_message(name, session, message, time.monotonic()))

    def _write_sent(self, message: Message, sender: Message) -> None:
        """Egress of a courier or a relaying actor: nothing is decided by it."""
        self._write("sent", {**sender, **{key: message[key] for key in ("actor", "attempt", "version", "bytes")}})

    def _on_actor_lost(self, name: str, session: int, _connection: Connection, reason: str) -> None:
        if self._actors.pop((name, session), None) is not None:
            self._execute(self.machine.actor_lost(name, session, reason, time.monotonic()))

    def _on_trainer_message(self, _connection: Connection, message: Message) -> None:
        if message["type"] not in ("pin", "unpin"):
            raise ProtocolError(f"a trainer does not send {message['type']!r}")
        self._execute(self.machine.pin(message.get("version"), time.monotonic()))

    def _on_trainer_lost(self, connection: Connection, _reason: str) -> None:
        if self._trainer is connection:
            self._trainer = None

    # Commands

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, ToCourier):
                self._to_couriers(command)
            elif isinstance(command, ToActor):
                connection = self._actors.get((command.actor, command.session))
                if connection is not None:
                    connection.send(self._stamped(self._with_shared(command.message)))
            elif isinstance(command, HangUp):
                courier = self._couriers.pop(command.rank, None)
                if courier is not None:
                    logger.warning("hanging up on the courier of rank %d, which says nothing", command.rank)
                    courier.close("no heartbeat")
            elif isinstance(command, Disconnect):
                connection = self._actors.pop((command.actor, command.session), None)
                if connection is not None:
                    connection.close("evicted")
            elif isinstance(command, Record):
                if command.event == "publish":
                    faults.at("publish", version=command.fields["version"])
                self._write(command.event, command.fields)
        if commands and not self._status_due:
            self._status_due = True
            delay = min(STATUS_SECONDS_PER_ACTOR * len(self.machine.actors), STATUS_SECONDS)
            self._loop.call_later(delay, self._send_status)

    def _to_couriers(self, command: ToCourier) -> None:
        ranks = list(self._couriers) if command.rank is None else [command.rank]
        for rank in ranks:
            connection = self._couriers.get(rank)
            if connection is not None:
                connection.send(self._stamped(command.message))

    def _with_shared(self, message: Message) -> Message:
        """An offer or a layout, with its long part encoded once for all actors."""
        if message["type"] == "layout":
            if "layout" not in self._shared:
                self._shared["layout"] = wire.Encoded(message["layout"])
            return {**message, "layout": self._shared["layout"]}
        if message["type"] == "offer":
            key = message["digest"]
            if key not in self._shared:
                self._shared = {name: self._shared[name] for name in ("layout",) if name in self._shared}
                self._shared[key] = wire.Encoded(message["checksums"])
            return {**message, "checksums": self._shared[key]}
        return message

    def _stamped(self, message: Message) -> Message:
        return {**message, "epoch": self.epoch, "term": self.machine.term}

    def _send_status(self) -> None:
        self._status_due = False
        if self._trainer is None:
            return
        status = {**self.machine.status(), "couriers": len(self._couriers), "failure": self._failure}
        actors: dict[str, Message] = status["actors"]
        figures = {name: actor.pop("figures") for name, actor in actors.items()}
        changed = {name for name, given in figures.items() if given != self._sent_figures.get(name)}
        if status == self._last_status:
            wait = self._status_at + FIGURES_SECONDS - time.monotonic()
            if changed and wait > 0 and not self._figures_due:
                self._figures_due = True
                self._loop.call_later(wait, self._send_figures)
            if not changed or wait > 0:
                return
        told = {
            name: {**actor, "figures": figures[name]} if name in changed else actor for name, actor in actors.items()
        }
        self._trainer.send(self._stamped({**status, "actors": told}))
        self._last_status, self._sent_figures, self._status_at = status, figures, time.monotonic()

    def _send_figures(self) -> None:
        self._figures_due = False
        self._send_status()

    def _write(self, event: str, fields: Message) -> None:
        self._journal.write(event, fields)


def main() -> int:
    """Entry point; the arguments are one JSON object, the token comes by environment."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    faults.active()
    Coordinator(json.loads(sys.argv[1]), os.environ[wire.TOKEN_VARIABLE]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
