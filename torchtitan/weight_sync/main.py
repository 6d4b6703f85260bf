"""The registry process, with its journal, and the process of a rank's shard server. No torch.

python -m torchtitan.weight_sync.main '{"part": "registry", ...}'      (started by a rank, see servers.py)
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan.utils.json_lines import cut_torn_line, older_file
from torchtitan.utils.logs import log_to
from torchtitan.utils.machine import raise_descriptor_limit
from torchtitan.utils.rate_limiter import RateLimiters
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.memory.published import PublishedVersions
from torchtitan.weight_sync.memory.slots import SharedSlots, SlotWords
from torchtitan.weight_sync.registry.registry import Registry
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.trainer.shard_server import ShardServer
from torchtitan.weight_sync.transports.transport import Transport, load_transport
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import OWN
from torchtitan.weight_sync.wire.sockets import SocketRuntime

# At most this many lines wait for a slow disk; further ones are lost, and counted.
MAXIMUM_WAITING = 10_000
# An actor may cause lines of so many bytes at once, and per second from then on. A version takes some 1,000.
BYTES_AT_ONCE, BYTES_PER_SECOND = float(1 << 19), float(1 << 13)
# A longer journal is set aside, in place of the one that was before.
JOURNAL_BYTES = 1 << 28

logger = logging.getLogger("torchtitan.weight_sync.main")
PARENT_CHECK_SECONDS = 0.5
# Lines that come within this time are written together: of a thousand actors, each wakes the thread otherwise.
GATHER_SECONDS = 0.02
# How long the process waits at its end for journal lines that are not on the disk yet.
JOURNAL_SECONDS = 1.0


class SyncJournal:
    """Appends to `path`, and to a new file there when that is full (see older_file). write() never waits: a full disk,
    or an actor that causes too many lines, costs lines, but does not stop the synchronisation."""

    def __init__(self, runtime: SocketRuntime, path: Path, term: int):
        self._runtime, self._term, self._path = runtime, term, path
        self._file = path.open("a", buffering=1)
        # The registry before this one may have been killed while it wrote: the first line here is no part of its last.
        cut_torn_line(path)
        self._bytes = path.stat().st_size
        self._lines: list[str] = []
        """What no thread writes yet"""
        self._waiting = self._lost = 0
        self._closing = False
        self._limiters = RateLimiters(BYTES_AT_ONCE, BYTES_PER_SECOND, OWN)
        """What each actor may still cause"""

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Queue one line. Runs on the loop's thread."""
        limiter = self._limiters.of(fields.get("actor", OWN))
        if self._waiting >= MAXIMUM_WAITING or ("actor" in fields and limiter.wait_s(self._runtime.now())):
            self._lost += 1
            return
        about = {"time": time.time(), "term": self._term, "event": event, **fields}
        lost, self._lost = {"lost_lines": self._lost} if self._lost else {}, 0
        line = json.dumps({**about, **lost}) + "\n"
        limiter.spend(len(line))
        self._lines.append(line)
        self._waiting += 1
        if self._waiting == len(self._lines):
            self._write_lines()

    def _write_lines(self) -> None:
        lines, self._lines = self._lines, []

        def write() -> None:
            text = "".join(lines)
            if self._bytes and self._bytes + len(text) > JOURNAL_BYTES:
                self._begin_another()
            self._file.write(text)
            self._bytes += len(text)
            time.sleep(GATHER_SECONDS)

        def written(_result: Any, error: BaseException | None) -> None:
            self._waiting -= len(lines)
            if error is not None:
                logger.error("the journal lacks %d lines: %s", len(lines), error)
            if self._lines and not self._closing:
                self._write_lines()

        self._runtime.work("journal", write, written)

    def _begin_another(self) -> None:
        try:
            self._path.replace(older_file(self._path))
            full, self._file, self._bytes = self._file, self._path.open("a", buffering=1), 0
            full.close()
        except OSError as error:
            logger.error("the journal grows beyond %d bytes: %s", JOURNAL_BYTES, error)

    def close(self, deadline: float) -> None:
        """After the runtime's end: write what is left, unless the disk hangs until `deadline` (time.monotonic())."""
        self._closing = True
        self._runtime.finish_work("journal", deadline)
        if self._waiting == len(self._lines):
            self._file.write("".join(self._lines))


def run_registry(runtime: SocketRuntime, arguments: dict[str, Any], token: str) -> None:
    """Run the registry until the parent ends."""
    journal = SyncJournal(runtime, Path(arguments["journal"]), arguments["term"])
    words = SlotWords(arguments["words_fd"], 0, 0)
    settings = RegistrySettings(**arguments["settings"])
    epoch, term = arguments["epoch"], arguments["term"]
    catalogue = _transport(arguments).catalogue(runtime, epoch)
    guests = os.environ.get(wire.ACTOR_TOKEN_VARIABLE, "")
    published = PublishedVersions(arguments["published_fd"])
    facts = runtime, settings, epoch, term, token
    registry = Registry(*facts, journal.write, words.beat, catalogue, guests, published, clock=time.time)
    journal.write("start", {"pid": os.getpid(), "epoch": epoch})
    registry.start(socket.socket(fileno=arguments["listen_fd"]))
    runtime.run()
    journal.close(time.monotonic() + JOURNAL_SECONDS)


def run_shard_server(runtime: SocketRuntime, arguments: dict[str, Any], token: str) -> None:
    """Run a shard server until the parent ends."""
    rank = arguments["rank"]
    layout = Layout.from_json(json.loads(Path(arguments["layout_file"]).read_text()))
    slots = SharedSlots(arguments["words_fd"], arguments["data_fd"], arguments["num_slots"], layout.ranks[0].slot_bytes)
    sending = _transport(arguments).sending(runtime, slots, layout, arguments["epoch"], rank, arguments["ranks"])
    facts = {name: arguments[name] for name in ("rank", "epoch", "registry", "address", "lease_s", "relay")}
    server = ShardServer(runtime, slots, layout, token=token, connections=arguments["connections"], **sending, **facts)
    bell, listener = (socket.socket(fileno=arguments[name]) for name in ("bell_fd", "listen_fd"))
    serve(runtime, server, bell, listener)


def _transport(arguments: dict[str, Any]) -> Transport:
    return load_transport(arguments["transport"])(arguments["options"])


def serve(runtime: SocketRuntime, server: ShardServer, bell: socket.socket, listener: socket.socket) -> None:
    """Run a shard server until the runtime is stopped or the trainer closes its end of the bell."""
    bell.setblocking(False)

    def rung() -> None:
        try:
            if not bell.recv(4096):
                runtime.stop()
        except BlockingIOError:
            return
        server.read_slots()

    runtime.loop.add_reader(bell, rung)
    server.start(listener)
    runtime.run()


PARTS = {"registry": run_registry, "shard server": run_shard_server}


def main() -> int:
    """Entry point. The argument is one JSON object; the token is in the environment."""
    log_to()
    # So that a flood of connections does not use up those that the job needs.
    raise_descriptor_limit()
    arguments = json.loads(sys.argv[1])
    runtime = SocketRuntime()

    def check_parent() -> None:
        runtime.call_later(PARENT_CHECK_SECONDS, check_parent)
        # The parent says its number itself, because it may have been killed while this process imported its modules.
        if os.getppid() != arguments["parent_pid"]:
            logger.info("the parent has ended, and so does this process")
            runtime.stop()

    check_parent()
    PARTS[arguments["part"]](runtime, arguments, os.environ[wire.TOKEN_VARIABLE])
    return 0


if __name__ == "__main__":
    sys.exit(main())
