"""Starts the registry (rank 0) and this rank's shard server, and starts them again when they die or freeze.

Their listening sockets belong to the rank, so that ports outlive every restart. With a fixed `port` the registry has
that one, and the shard servers of a machine the ones after it, in the order of their local ranks.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.config.derived import is_loopback
from torchtitan.errors import UserError
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.launch import SupervisedProcess
from torchtitan.weight_sync.publisher import Publisher
from torchtitan.weight_sync.registry_state import Settings
from torchtitan.weight_sync.slots import SharedSlots, SlotWords

MODULE = "torchtitan.weight_sync.main"
BACKLOG = 1024
Where = tuple[str, int, int]
"""Host and port to listen at, and how often in a row a process is started again"""
# A rank that has no connection to the registry by then has no way to it.
REACH_SECONDS = 10.0


def numeric(host: str) -> str:
    """The address that this machine resolves weight_sync.host to: what others are told, and bind to, is never a name.

    Raises UserError.
    """
    here = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(f"weight_sync.host = {host} cannot be resolved on {here}: {error}") from error
    if is_loopback(address) and not is_loopback(host):
        raise UserError(
            f"weight_sync.host = {host} is {address} on {here} (/etc/hosts?), which no other machine reaches: give the "
            "address of a network interface, or 127.0.0.1 where everything runs on this machine"
        )
    return address


def towards(registry: str) -> str:
    """The address of this machine at which rank 0's reaches it. Raises UserError where `registry` (host:port) cannot be
    reached from here."""
    try:
        with socket.create_connection(wire.parse_address(registry), REACH_SECONDS) as way:
            return str(way.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} does not reach the weight registry at {registry} ({error}): weight_sync.host has "
            "to be an address at which rank 0's machine is reached from all others, and no firewall may stand between"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"weight_sync: {socket.gethostname()} cannot listen at {wire.format_address(host, port)} "
            f"({error.strerror or error}): weight_sync.host has to be an address of rank 0's machine, and "
            "weight_sync.port and as many ports behind it as the machine has ranks must be free"
        ) from error


class ServerProcess(SupervisedProcess):
    """A supervised process of main.py that listens at `address`. part: which one; arguments: what it is told besides;
    descriptors: of open files that it is given, by name; port: 0 for any."""

    def __init__(
        self,
        part: str,
        arguments: dict[str, Any],
        descriptors: dict[str, int],
        token: str,
        log_file: Path,
        host: str,
        port: int,
        max_restarts: int,
        pulse: Callable[[], int],
    ):
        self._listener = listen(host, port)
        self.address = wire.format_address(host, self._listener.getsockname()[1])
        descriptors = {**descriptors, "listen_fd": self._listener.fileno()}
        told = {"part": part, "address": self.address, **arguments, **descriptors}
        name, given = f"weight {log_file.stem.replace('-', ' ')}", list(descriptors.values())
        make = lambda number: {**told, "term": number}  # noqa: E731
        super().__init__(name, MODULE, make, given, token, log_file, max_restarts, pulse)

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._listener.close()


class RegistryServer(ServerProcess):
    """The registry beside rank 0. where: host, port and max_restarts; disk_folder: of the disk transport, empty for
    others."""

    def __init__(self, epoch: str, token: str, settings: Settings, folder: Path, where: Where, disk_folder: str = ""):
        self._words = SlotWords(SlotWords.new_file(0), 0, 0)
        journal = str(folder / "registry.jsonl")
        told = {"epoch": epoch, "settings": asdict(settings), "journal": journal, "disk_folder": disk_folder}
        files = {"words_fd": self._words.words_fd}
        super().__init__("registry", told, files, token, folder / "registry.log", *where, lambda: self._words.pulse)

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._words.close_files()


class ShardServerProcess(ServerProcess):
    """The shard server of one rank, over the publisher's slots in host memory. facts: what the process is told as it
    is given here."""

    def __init__(self, publisher: Publisher, token: str, folder: Path, where: Where, **facts: Any):
        slots, rank = publisher.slots, publisher.rank
        assert isinstance(slots, SharedSlots)
        layout_file = folder / f"layout-rank{rank}.json"
        layout_file.write_text(json.dumps(publisher.layout.to_json()))
        told = {"rank": rank, "layout_file": str(layout_file), "num_slots": slots.count, **facts}
        files = {"words_fd": slots.words_fd, "data_fd": slots.data_fd, "bell_fd": publisher.server_bell.fileno()}
        log_file = folder / f"shard-server-rank{rank}.log"
        super().__init__("shard server", told, files, token, log_file, *where, lambda: slots.pulse)
