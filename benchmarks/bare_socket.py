"""What a socket between two processes moves per second, with the buffers and options of the weight
synchronisation's: the reference of weight_sync_bandwidth.py. No torch."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from torchtitan.weight_sync.wire.sockets import PIECE_BYTES, SEND_BYTES


def send(arguments: dict[str, Any]) -> None:
    """Sends all of its memory whenever it is told to."""
    data = memoryview(bytearray(os.urandom(1 << 20)) * (arguments["bytes"] >> 20))
    with socket.create_connection(("127.0.0.1", arguments["port"])) as connection:
        common.say({"ready": True})
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sys.stdin.readline():
            begun = time.monotonic()
            for start in range(0, len(data), SEND_BYTES):
                connection.sendall(data[start : start + SEND_BYTES])
            common.say({"begun": begun})


def receive(arguments: dict[str, Any]) -> None:
    """Receives into memory that has been touched."""
    target = memoryview(bytearray(b"x" * arguments["bytes"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        common.say({"port": listener.getsockname()[1]})
        connection, _ = listener.accept()
        while True:
            filled = 0
            while filled < len(target):
                count = connection.recv_into(target[filled : filled + PIECE_BYTES])
                if count == 0:
                    return
                filled += count
            common.say({"end": time.monotonic()})


class BareSocket:
    """Two processes and a connection. size: whole MiB."""

    def __init__(self, size: int, stack: contextlib.ExitStack):
        self._receiver = common.Child(Path(__file__), {"role": "receive", "bytes": size})
        stack.callback(self._receiver.close)
        port = self._receiver.answer()["port"]
        self._sender = common.Child(Path(__file__), {"role": "send", "bytes": size, "port": port})
        stack.callback(self._sender.close)
        self._sender.answer()

    def turn(self) -> float:
        """Seconds from the first byte sent to the last one received."""
        self._sender.tell({})
        end: float = self._receiver.answer()["end"]
        begun: float = self._sender.answer()["begun"]
        return end - begun


if __name__ == "__main__":
    given = common.child_arguments()
    if given is None:
        sys.exit("this file is part of weight_sync_bandwidth.py")
    (send if given["role"] == "send" else receive)(given)
