"""What a socket between two processes moves per second, with the buffers and options of the weight
synchronisation's: the reference of the scenario `bandwidth`. No torch."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import Any

from benchmarks.weight_sync.processes import Child, say
from torchtitan.weight_sync.wire.sockets import PIECE_BYTES, SEND_BYTES


def send(arguments: dict[str, Any]) -> None:
    """In a child: sends all of its memory whenever it is told to."""
    data = memoryview(bytearray(os.urandom(1 << 20)) * (arguments["bytes"] >> 20))
    with socket.create_connection(("127.0.0.1", arguments["port"])) as connection:
        say({"ready": True})
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sys.stdin.readline():
            start = time.monotonic()
            for position in range(0, len(data), SEND_BYTES):
                connection.sendall(data[position : position + SEND_BYTES])
            say({"start": start})


def receive(arguments: dict[str, Any]) -> None:
    """In a child: receives into memory that has been touched."""
    target = memoryview(bytearray(b"x" * arguments["bytes"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        say({"port": listener.getsockname()[1]})
        connection, _ = listener.accept()
        while True:
            filled = 0
            while filled < len(target):
                count = connection.recv_into(target[filled : filled + PIECE_BYTES])
                if count == 0:
                    return
                filled += count
            say({"end": time.monotonic()})


class BareSocket:
    """Two processes and a connection. size: whole MiB."""

    def __init__(self, size: int, closing: contextlib.ExitStack):
        self._receiver = Child(receive, {"bytes": size})
        closing.callback(self._receiver.close)
        port = self._receiver.answer()["port"]
        self._sender = Child(send, {"bytes": size, "port": port})
        closing.callback(self._sender.close)
        self._sender.answer()

    def turn(self) -> float:
        """Seconds from the first byte sent to the last one received."""
        self._sender.tell({})
        end: float = self._receiver.answer()["end"]
        start: float = self._sender.answer()["start"]
        return end - start
