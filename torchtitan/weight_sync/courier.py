"""A rank's background worker, a process of its own: takes that rank's slots to actors. No torch.

    python -m torchtitan.weight_sync.courier '{"rank": 0, ...}'      (started by the rank, see launch.py)

It computes the checksums that the trainer does not wait for, reports snapshots, streams buckets to actors that accepted
an offer, and frees slots. A slow actor only fills its own socket.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.weight_sync import faults, wire
from torchtitan.weight_sync.checksums import checksum_function
from torchtitan.weight_sync.connection import Connection, dial
from torchtitan.weight_sync.delta import element_bytes
from torchtitan.weight_sync.delta_encoder import DeltaEncoder
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.progress import Progress
from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.transports.base import Delivery
from torchtitan.weight_sync.transports.disk_store import DiskStore
from torchtitan.weight_sync.transports.link import Link, LinkSettings
from torchtitan.weight_sync.wire import Message, ProtocolError

if TYPE_CHECKING:
    from torchtitan.weight_sync.device_slots import Slots
else:
    Slots = Any

logger = logging.getLogger("torchtitan.weight_sync.courier")

RETRY_SECONDS = 0.1
PARENT_CHECK_SECONDS = 1.0
# One bucket takes a fraction of a second: a checksum thread that is at one for longer hangs, and so does the courier.
LONGEST_CHECKSUM_SECONDS = 60.0


@dataclass
class _Egress:
    """What one attempt has cost so far: told when the last of its connections is done with it."""

    going_on: int = 0
    sent_bytes: int = 0


class Courier:
    """Everything between one rank's slots, the coordinator and the actors."""

    def __init__(self, arguments: dict[str, Any], token: str):
        self.rank: int = arguments["rank"]
        self.epoch: str = arguments["epoch"]
        self.coordinator: str = arguments["coordinator"]
        self._token = token
        self._layout_json = json.loads(Path(arguments["layout_file"]).read_text())
        self.layout = Layout.from_json(self._layout_json)
        # In the trainer's process (see courier_thread.py) these are the slots and the bell themselves.
        self._slots: Slots = arguments.get("slots") or SharedSlots(
            arguments["words_fd"], arguments["data_fd"], arguments["num_slots"], self.layout.ranks[0].slot_bytes
        )
        self._keeper = self._slots.keeper()
        self._bell: socket.socket = arguments.get("bell") or socket.socket(fileno=arguments["bell_fd"])
        self._bell.setblocking(False)
        self._loop = EventLoop()
        self._settings = self._link_settings(arguments)
        self._checksum = checksum_function(self.layout.checksum)
        self._deltas = DeltaEncoder(self._loop, self._keeper, self.layout.bucket_bytes, element_bytes(self.layout))
        self._control: Connection | None = None
        self._term = 0
        self._heard_at = 0.0
        self._links: dict[tuple[str, int, int], Link] = {}
        self._open_deliveries: dict[int, _Egress] = {}
        """By attempt"""
        self._checksums: dict[int, list[str]] = {}
        self._hashing: set[int] = set()
        self._hash_progress = Progress(LONGEST_CHECKSUM_SECONDS)
        self._progress = [self._hash_progress, self._deltas.progress]
        """Of its threads"""
        if self._store is not None:
            self._progress.append(self._store.progress)
        self._to_hash: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._failed_serial = 0
        self._misses = self._slots.misses
        self._parent = os.getppid()

    def _link_settings(self, arguments: dict[str, Any]) -> LinkSettings:
        options = {
            **arguments["options"],
            "connect_timeout_s": arguments["progress_timeout_s"],
            "slots": self._slots,
        }
        self._store: DiskStore | None = None
        if arguments["transport"] == "disk":
            folder, ranks = Path(options["disk_path"]), arguments["world_size"]
            self._store = DiskStore(self._loop, self._keeper, folder, self.epoch, self.rank, ranks, self.layout)
            options["store"] = self._store
        return LinkSettings(
            role="courier",
            epoch=self.epoch,
            rank=self.rank,
            layout=self.layout,
            transport=arguments["transport"],
            options=options,
            streams=arguments["streams"],
            connect_timeout_s=arguments["progress_timeout_s"],
        )

    def run(self) -> None:
        """Work until the trainer is gone."""
        threading.Thread(target=self._hash, name="checksums", daemon=True).start()
        self._loop.watch(self._bell, selectors.EVENT_READ, self._rung)
        self._loop.call_later(PARENT_CHECK_SECONDS, self._check_parent)
        self._loop.call_later(wire.HEARTBEAT_SECONDS, self._heartbeat)
        self._dial()
        self._look()
        try:
            self._loop.run()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        # For a courier that is a thread: another one may follow, in the same process and with the same slots.
        self._to_hash.put(None)
        for link in self._links.values():
            link.disconnect()
        if self._control is not None:
            self._control.socket.close()
        self._bell.close()

    def stop(self) -> None:
        """Make run() return. Safe from every thread."""
        self._loop.stop()

    # Trainer

    def _check_parent(self) -> None:
        self._loop.call_later(PARENT_CHECK_SECONDS, self._check_parent)
        # Where one of its threads hangs, whoever supervises this courier sees no beat, and makes another one.
        if all(progress.goes_on for progress in self._progress):
            self._slots.beat()
        if os.getppid() != self._parent:
            self._loop.stop()

    def _rung(self, _events: int) -> None:
        try:
            if not self._bell.recv(4096):
                self._loop.stop()
                return
        except BlockingIOError:
            pass
        self._look()

    def _look(self) -> None:
        """Read what the trainer has done from the shared words."""
        filled = self._keeper.filled()
        for serial in list(self._checksums):
            if serial not in filled:
                del self._checksums[serial]
        for serial, (index, version) in sorted(filled.items(), reverse=True):
            if serial not in self._checksums and serial not in self._hashing:
                self._hashing.add(serial)
                self._keeper.hold(serial, "checksum")
                self._to_hash.put((serial, index, version))
        for serial, version in self._slots.failed:
            if serial > self._failed_serial and self._control is not None:
                self._failed_serial = serial
                self._tell({"type": "failed", "serial": serial, "version": version})
        if self._slots.misses != self._misses:
            self._misses = self._slots.misses
            self._tell({"type": "need_slot"})

    def _hash(self) -> None:
        try:
            while (item := self._to_hash.get()) is not None:
                serial, index, version = item
                self._hash_progress.begin()
                faults.at("checksum", version=version, rank=self.rank)
                memory, step = self._slots.slot(index), self.layout.bucket_bytes
                sums = []
                for start in range(0, len(memory), step):
                    self._hash_progress.begin()
                    sums.append(self._checksum(memory[start : start + step]))
                self._hash_progress.end()
                self._loop.call_from_thread(partial(self._hashed, serial, sums))
        except Exception as error:
            self._loop.call_from_thread(partial(self._hash_failed, error))

    def _hash_failed(self, error: Exception) -> None:
        # Ends the process: a new one computes everything anew, this one would hold the slot for ever.
        raise RuntimeError("the checksum thread has failed") from error

    def _hashed(self, serial: int, checksums: list[str]) -> None:
        self._hashing.discard(serial)
        self._checksums[serial] = checksums
        self._tell_snapped(serial)
        self._keeper.let_go(serial, "checksum")

    def _tell_snapped(self, serial: int) -> None:
        found = self._keeper.filled().get(serial)
        if found is not None:
            sums = self._checksums[serial]
            self._tell({"type": "snapped", "serial": serial, "version": found[1], "checksums": sums})

    # Coordinator

    def _tell(self, message: Message) -> None:
        if self._control is not None:
            self._control.send({**message, "epoch": self.epoch, "term": self._term})

    def _dial(self) -> None:
        fields = {"rank": self.rank, "epoch": self.epoch}
        dial(self._loop, self.coordinator, self._token, "courier", fields, self._welcomed, self._out_of_reach)

    def _out_of_reach(self, reason: str) -> None:
        # Without an end of its own: rank 0 bounds the coordinator's restarts, and this process ends with its rank.
        logger.info("coordinator out of reach: %s", reason)
        self._loop.call_later(RETRY_SECONDS, self._dial)

    def _heartbeat(self) -> None:
        self._loop.call_later(wire.HEARTBEAT_SECONDS, self._heartbeat)
        if self._control is None:
            return
        # The loop reads sockets before it runs timers: after a pause of this process, waiting answers have been seen.
        if time.monotonic() - self._heard_at > wire.SILENCE_SECONDS:
            self._control.close(f"the coordinator said nothing for {wire.SILENCE_SECONDS:g} s")
        else:
            self._tell({"type": "ping"})

    def _welcomed(self, connection: Connection, fields: Message) -> None:
        term = fields.get("term")
        if type(term) is not int or term < self._term:
            # One that was replaced, and does not know it yet.
            connection.close("an old term")
            self._out_of_reach(f"it is of term {term}, and term {self._term} has begun")
            return
        if term > self._term:
            # A new coordinator does not know whom the old one would have had forgotten.
            self._drop_links(list(self._links))
        self._term = term
        self._heard_at = time.monotonic()
        self._control = connection
        connection.on_message, connection.on_close = self._on_message, self._on_control_lost
        self._tell({"type": "layout", "layout": self._layout_json})
        # The newest first: what is published of the others is known to be older then, and dropped.
        for serial in sorted(self._checksums, reverse=True):
            self._tell_snapped(serial)
        self._failed_serial = 0
        self._look()

    def _on_control_lost(self, _connection: Connection, reason: str) -> None:
        logger.info("coordinator connection over: %s", reason)
        self._control = None
        for link in self._links.values():
            link.abort()
        self._keeper.end_all_leases()
        self._loop.call_later(RETRY_SECONDS, self._dial)

    def _on_message(self, _connection: Connection, message: Message) -> None:
        self._heard_at = time.monotonic()
        if message.get("epoch") != self.epoch or message.get("term") != self._term:
            logger.warning("dropped a %s of another epoch or term", message["type"])
            return
        kind = message["type"]
        if kind == "publish":
            self._keeper.publish(message["serial"])
            self._deltas.trim()
            self._write_file(message)
        elif kind == "retain":
            self._keeper.retain(message["serial"])
            self._deltas.trim()
        elif kind == "drop":
            self._keeper.drop(message["serial"])
        elif kind == "lease":
            for attempt, _actor in message["attempts"]:
                if not self._keeper.lease(message["serial"], attempt):
                    self._tell({"type": "broken", "attempt": attempt, "reason": "no such snapshot here"})
        elif kind == "send":
            self._send(message)
        elif kind == "abort":
            self._abort(message["attempt"])
        elif kind == "release":
            self._keeper.end_lease(message["attempt"])
        elif kind == "connect":
            self._connect_ahead(message)
        elif kind == "forget":
            self._drop_links([key for key in self._links if key[0] == message["actor"]])
        elif kind != "pong":
            raise ProtocolError(f"a coordinator does not send {kind!r} to a courier")

    def _write_file(self, message: Message) -> None:
        found = self._keeper.filled().get(message["serial"])
        if self._store is not None and found is not None:
            index, version = found
            memory = self._slots.slot(index)
            assert isinstance(memory, memoryview)
            self._store.published(message["serial"], version, message["digest"], message["layout_id"], memory)

    # Actors

    def _send(self, message: Message) -> None:
        attempt, serial, actor = message["attempt"], message["serial"], message["actor"]
        filled = self._keeper.filled()
        found = filled.get(serial)
        if found is None or attempt not in self._keeper.leases(serial):
            self._tell({"type": "broken", "attempt": attempt, "reason": "the slot is not leased"})
            return
        index, version = found
        memory = self._slots.slot(index)
        if len(memory) == 0:
            return  # this rank's parameters are all sent by others
        delivery = Delivery(attempt, serial, version, {self.rank: memory}, self.layout.bucket_bytes)
        base = message.get("base_serial")
        if isinstance(base, int) and base in filled and attempt in self._keeper.leases(base):
            # Without its base a version goes in full, whatever was ordered.
            base_memory = self._slots.slot(filled[base][0])
            assert isinstance(memory, memoryview) and isinstance(base_memory, memoryview)
            delivery.deltas, delivery.base_serial = self._deltas.version((serial, base), memory, base_memory), base
        for link in self._links_to(actor, message["data"]):
            self._hold(delivery, link.worker, link.stream)
            link.send(delivery)

    def _connect_ahead(self, message: Message) -> None:
        # A communicator takes long to make; other connections can wait for the first version. A rank whose parameters
        # are all sent by others needs none.
        if self._settings.transport == "nccl" and self.layout.ranks[0].slot_bytes:
            for link in self._links_to(message["actor"], message["data"]):
                link.connect()

    def _links_to(self, actor: str, data: list[str]) -> list[Link]:
        streams = range(self._settings.streams)
        return [self._link(actor, worker, stream, data[worker]) for worker in range(len(data)) for stream in streams]

    def _link(self, actor: str, worker: int, stream: int, address: str) -> Link:
        link = self._links.get((actor, worker, stream))
        if link is not None and link.address != address:
            link.disconnect()
            link = None
        if link is None:

            def on_end(delivery: Delivery, error: str | None) -> None:
                self._delivered(made, delivery, error)

            link = made = Link(self._loop, address, self._token, self._settings, actor, worker, stream, on_end)
            self._links[actor, worker, stream] = link
        return link

    def _drop_links(self, keys: list[tuple[str, int, int]]) -> None:
        for key in keys:
            self._links.pop(key).disconnect()

    def _hold(self, delivery: Delivery, worker: int, stream: int) -> None:
        self._open_deliveries.setdefault(delivery.attempt, _Egress()).going_on += 1
        for serial in delivery.serials:
            self._keeper.hold(serial, f"attempt {delivery.attempt} to {worker}.{stream}")
        if delivery.base_serial is not None:
            self._deltas.use((delivery.serial, delivery.base_serial))

    def _delivered(self, link: Link, delivery: Delivery, error: str | None) -> None:
        for serial in delivery.serials:
            self._keeper.let_go(serial, f"attempt {delivery.attempt} to {link.worker}.{link.stream}")
        if delivery.base_serial is not None:
            self._deltas.end_use((delivery.serial, delivery.base_serial))
        egress = self._open_deliveries[delivery.attempt]
        sent = link.sent(delivery)
        egress.going_on -= 1
        egress.sent_bytes += sent["bytes"]
        if not egress.going_on:
            del self._open_deliveries[delivery.attempt]
            self._tell({**sent, "bytes": egress.sent_bytes})
        if error:
            self._tell({"type": "broken", "attempt": delivery.attempt, "reason": error})

    def _abort(self, attempt: int) -> None:
        for link in self._links.values():
            if link.delivery is not None and link.delivery.attempt == attempt:
                link.abort()
        self._keeper.end_lease(attempt)


def main() -> int:
    """Entry point; the arguments are one JSON object, the token comes by environment."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    faults.active()
    Courier(json.loads(sys.argv[1]), os.environ[wire.TOKEN_VARIABLE]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
