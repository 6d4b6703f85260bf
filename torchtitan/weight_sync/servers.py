"""Starts the registry (rank 0) and this rank's shard server, and restarts them when they die or freeze.

The rank owns their listening sockets, so that ports survive every restart. A fixed `port` is the registry's; the shard
servers of a machine use the ports after it, in the order of their local ranks. If slots are on a device (ipc, nccl),
the shard server is a thread of the trainer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.distributed import device
from torchtitan.errors import UserError
from torchtitan.utils.addresses import listen_at
from torchtitan.utils.child_process import child_environment, end_process, start_beside
from torchtitan.weight_sync.main import serve
from torchtitan.weight_sync.memory.published import PublishedVersions
from torchtitan.weight_sync.memory.slots import SharedSlots, SlotWords
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.trainer.publisher import Publisher
from torchtitan.weight_sync.trainer.shard_server import ShardServer
from torchtitan.weight_sync.transports.transport import Transport
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.sockets import SocketRuntime

logger = logging.getLogger(__name__)

RESTART_SECONDS = 0.2
# After this much uptime, the count of restarts in a row starts again.
HEALTHY_SECONDS = 60.0
# A server without a sign of life at this many checks in a row is frozen. Checks, not seconds: a pause of this process
# counts as one check.
CHECK_SECONDS = 1.0
FROZEN_CHECKS = 3
MODULE = "torchtitan.weight_sync.main"
BACKLOG = 1024
# How often in a row a server is restarted after it died or froze.
MAX_RESTARTS = 5
ListenSpec = tuple[str, int, int]
"""Host and port to listen at, and the most restarts in a row"""
# A rank that cannot connect to the registry within this time has no route to it.
REACH_SECONDS = 10.0


class Supervised:
    """Listens at `address`, and restarts a server up to a number of times in a row. A subclass defines one life of it.

    heartbeat() returns a number that changes while the server works. If it stops changing, _end_frozen() ends the life.
    """

    starting_checks = FROZEN_CHECKS
    """How many checks without a sign of life a server may take to start"""

    def __init__(self, name: str, where: ListenSpec, heartbeat: Callable[[], int]):
        host, port, self._max_restarts = where
        self.name, self._heartbeat = name, heartbeat
        self._listener = listen(host, port)
        self.address = wire.format_address(host, self._listener.getsockname()[1])
        self.failure = ""
        """Why it is not restarted any more, else empty"""
        self.restarts = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{name}", daemon=True)

    def supervise(self) -> None:
        """Begin the first life and the supervision."""
        self._begin()
        self._thread.start()
        threading.Thread(target=self._watch, name=f"heartbeat-{self.name}", daemon=True).start()

    def close(self, deadline: float) -> None:
        """End the server. Waits until `deadline` (time.monotonic())."""
        self._closing.set()
        self._end(deadline)
        self._thread.join(max(0.1, deadline - time.monotonic()))
        self._listener.close()

    def _begin(self) -> None:
        raise NotImplementedError

    def _run(self) -> str:
        """Wait until the current life ends. Returns the reason, for messages."""
        raise NotImplementedError

    def _end_frozen(self) -> None:
        raise NotImplementedError

    def _end(self, deadline: float) -> None:
        raise NotImplementedError

    def _watch(self) -> None:
        last = self.restarts, self._heartbeat()
        starting, checks_without_change = True, 0
        while not self._closing.wait(CHECK_SECONDS):
            now = self.restarts, self._heartbeat()
            if now == last:
                checks_without_change += 1
            else:
                checks_without_change = 0
                starting = now[0] != last[0]
                last = now
            allowed = self.starting_checks if starting else FROZEN_CHECKS
            if checks_without_change >= allowed:
                self._end_frozen()
                checks_without_change = 0

    def _supervise(self) -> None:
        in_a_row = 0
        try:
            while not self._closing.is_set():
                started = time.monotonic()
                end = self._run()
                if self._closing.is_set():
                    return
                in_a_row = 0 if time.monotonic() - started > HEALTHY_SECONDS else in_a_row + 1
                if in_a_row > self._max_restarts:
                    self.failure = f"the {self.name} failed {in_a_row} times in a row, the last time: {end}"
                    logger.error("%s", self.failure)
                    return
                logger.warning("the %s has ended, starting it again: %s", self.name, end)
                if self._closing.wait(RESTART_SECONDS * in_a_row):
                    return
                self.restarts += 1
                self._begin()
        except Exception as error:
            self.failure = f"the {self.name} cannot be started again: {error!r}"
            logger.exception("%s", self.failure)


class ServerProcess(Supervised):
    """A process of main.py. part: the part it runs; arguments: its other arguments; descriptors: the open files that it
    inherits, by name."""

    # The process imports its modules first, which takes a while from a cold network disk.
    starting_checks = 60

    def __init__(
        self,
        part: str,
        arguments: dict[str, Any],
        descriptors: dict[str, int],
        token: str,
        log_file: Path,
        where: ListenSpec,
        heartbeat: Callable[[], int],
    ):
        super().__init__(f"weight {log_file.stem.replace('-', ' ')}", where, heartbeat)
        descriptors = {**descriptors, "listen_fd": self._listener.fileno()}
        self._arguments = {"part": part, "parent_pid": os.getpid(), "address": self.address, **arguments, **descriptors}
        self._descriptors, self._log_file = list(descriptors.values()), log_file
        self._keys = {wire.TOKEN_VARIABLE: token}
        if self._arguments.get("settings", {}).get("guests") and wire.ACTOR_TOKEN_VARIABLE in os.environ:
            self._keys[wire.ACTOR_TOKEN_VARIABLE] = os.environ[wire.ACTOR_TOKEN_VARIABLE]
        self.supervise()

    def _begin(self) -> None:
        arguments = {**self._arguments, "term": self.restarts + 1}
        keys = self._arguments.get("needs_keys")
        environment = child_environment(1, secrets=True if keys else (), **self._keys)
        command = [sys.executable, "-m", MODULE, json.dumps(arguments)]
        self.process = start_beside(command, environment, self._log_file, self._descriptors)
        if self._closing.is_set():
            self.process.terminate()

    def _run(self) -> str:
        return f"exit code {self.process.wait()}, see {self._log_file}"

    def _end_frozen(self) -> None:
        logger.error("the %s shows no sign of life, killing it", self.name)
        self.process.kill()

    def _end(self, deadline: float) -> None:
        """Terminate the process, and kill it if it has not ended by `deadline`."""
        end_process(self.process, max(0.1, deadline - time.monotonic()))


def local_address_towards(registry: str) -> str:
    """Return the address of this machine that rank 0's machine reaches. Raises UserError if `registry` (host:port)
    cannot be reached from here."""
    try:
        with socket.create_connection(wire.parse_address(registry), REACH_SECONDS) as way:
            return str(way.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} does not reach the weight registry at {registry} ({error}): weight_sync.host has "
            "to be an address at which rank 0's machine is reached from all others, and no firewall may stand between"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: any free port. Raises UserError."""
    try:
        return listen_at(host, port, BACKLOG)
    except OSError as error:
        raise UserError(
            f"weight_sync: {socket.gethostname()} cannot listen at {wire.format_address(host, port)} "
            f"({error.strerror or error}): weight_sync.host has to be an address of rank 0's machine, and "
            "weight_sync.port and as many ports behind it as the machine has ranks must be free"
        ) from error


class RegistryServer(ServerProcess):
    """The registry beside rank 0. where: host, port and max_restarts."""

    def __init__(
        self, epoch: str, token: str, settings: RegistrySettings, folder: Path, where: ListenSpec, transport: Transport
    ):
        self._words = SlotWords(SlotWords.new_file(0), 0, 0)
        self.published = PublishedVersions(descriptor := PublishedVersions.new_file())
        self._published_fd = descriptor
        journal = str(folder / "registry.jsonl")
        arguments = {"epoch": epoch, "settings": asdict(settings), "journal": journal, **transport.to_json()}
        files = {"words_fd": self._words.words_fd, "published_fd": descriptor}
        super().__init__(
            "registry", arguments, files, token, folder / "registry.log", where, lambda: self._words.heartbeat
        )

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._words.close_files()
        os.close(self._published_fd)


class ShardServerProcess(ServerProcess):
    """The shard server of one rank, over the publisher's slots in host memory. facts: `ranks` of the job, and arguments
    of ShardServer."""

    def __init__(
        self,
        publisher: Publisher,
        transport: Transport,
        token: str,
        folder: Path,
        where: ListenSpec,
        facts: wire.Message,
    ):
        slots, rank = publisher.slots, publisher.rank
        assert isinstance(slots, SharedSlots)
        layout_file = folder / f"layout-rank{rank}.json"
        layout_file.write_text(json.dumps(publisher.layout.to_json()))
        arguments = {"rank": rank, "layout_file": str(layout_file), "num_slots": slots.count}
        arguments |= {**transport.to_json(), **facts}
        files = {"words_fd": slots.words_fd, "data_fd": slots.data_fd, "bell_fd": publisher.server_bell.fileno()}
        log_file = folder / f"shard-server-rank{rank}.log"
        super().__init__("shard server", arguments, files, token, log_file, where, lambda: slots.heartbeat)


class ShardServerThread(Supervised):
    """The shard server of one rank as a thread. facts: see ShardServerProcess."""

    def __init__(self, publisher: Publisher, transport: Transport, token: str, where: ListenSpec, facts: wire.Message):
        super().__init__(f"weight shard server of rank {publisher.rank}", where, lambda: publisher.slots.heartbeat)
        self._publisher, self._transport, self._facts = publisher, transport, {"token": token, **facts}
        self._stopped = -1
        self.supervise()

    def _begin(self) -> None:
        self.runtime = SocketRuntime(partial(device.use, self._publisher.memory[0].device))

    def _run(self) -> str:
        publisher, runtime = self._publisher, self.runtime
        slots, layout, rank = publisher.slots, publisher.layout, publisher.rank
        ranks, facts = self._facts["ranks"], {name: fact for name, fact in self._facts.items() if name != "ranks"}
        about = {"rank": rank, "address": self.address, **facts}
        try:
            about |= self._transport.sending(runtime, slots, layout, facts["epoch"], rank, ranks)
            # Duplicates: the rank's own sockets survive every life of the server.
            with (
                publisher.server_bell.dup() as bell,
                self._listener.dup() as listener,
                contextlib.closing(ShardServer(runtime, slots, layout, **about)) as server,
            ):
                serve(runtime, server, bell, listener)
        except Exception as error:
            logger.exception("the %s failed", self.name)
            return repr(error)
        return "it hung"

    def _end_frozen(self) -> None:
        if self._stopped != self.restarts:
            logger.error("the %s shows no sign of life, starting another one", self.name)
            self._stopped = self.restarts
            self.runtime.stop()
        elif not self.failure:
            self.failure = f"the {self.name} hangs; a thread cannot be killed: the trainer has to be started again"
            logger.error("%s", self.failure)

    def _end(self, _deadline: float) -> None:
        self.runtime.stop()
