"""The process of a parser of tool calls that the user has written: it can neither hold up nor end the gateway.

    python -m torchtitan.rollout.gateway.parser_process NAME DESCRIPTOR

Over the socket go frames of JSON, each behind its length. The first one from the process says whether the parser could
be loaded; then each text is answered with {"calls": [[name, arguments], …]} or {"error": …}.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.conversation.tool_formats.own import SETTING, ParserUnavailable, load_parser
from torchtitan.utils.socket_child import SocketChild

LENGTH = struct.Struct("!Q")
# What a parser may take for one text: processor time, which a busy machine does not prolong, and time altogether.
PROCESSOR_S, ALTOGETHER_S = 5.0, 60.0
START_S = 60.0
MEMORY_BYTES, MAX_FRAME_BYTES = 2 << 30, 1 << 24
MAX_REASON_CHARACTERS = 2000


class ParserProcess:
    """Has a parser read texts in a process, which is started again after it has ended. One thread uses it."""

    def __init__(self, name: str):
        """name: the parser, as `package.module:function`."""
        self._child = SocketChild(__spec__.name, name)
        self._stopped = False

    def start(self) -> None:
        """Start the process. Raises UserError if the parser cannot be loaded, ParserUnavailable if no process can be
        started for it."""
        try:
            loaded = _receive(self._child.start(), time.monotonic() + START_S)
        except OSError as error:
            self.close()
            raise ParserUnavailable(f"the process of {SETTING} does not start: {error}") from error
        if "error" in loaded:
            self.close()
            raise UserError(loaded["error"])

    def parse(self, text: str) -> list[Any]:
        """Return what the parser finds.

        Raises ValueError if it fails, takes too much, or ends its process; ParserUnavailable if there is no process.
        """
        if self._stopped:
            raise ParserUnavailable("the gateway ends")
        if self._child.connection is None:
            try:
                self.start()
            except UserError as error:  # it could be loaded before
                raise ParserUnavailable(str(error)) from error
        connection = self._child.connection
        assert connection is not None
        try:
            _send(connection, _encoded(text))
            found = _receive(connection, time.monotonic() + ALTOGETHER_S)
        except TimeoutError:
            self.close()
            raise ValueError(f"the parser of tool calls gave no answer within {ALTOGETHER_S:g} s") from None
        except OSError:
            raise ValueError(f"the parser of tool calls {self._describe_end()}") from None
        if "error" in found:
            raise ValueError(found["error"])
        calls: list[Any] = found["calls"]
        return calls

    def _describe_end(self) -> str:
        code = self._child.wait(1.0)
        self.close()
        if code == -signal.SIGPROF:
            return f"took more than {PROCESSOR_S:g} s of processor time"
        return f"has ended its process (exit code {code})"

    def stop(self) -> None:
        """End the process for good, from any thread; whoever waits for it hears that it has ended."""
        self._stopped = True
        self._child.kill()

    def close(self) -> None:
        """End the process, and forget it."""
        self._child.close()


def _encoded(data: Any) -> bytes:
    """Return a frame. Raises ValueError or TypeError for what is no JSON, and for too much of it."""
    body = json.dumps(data, allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"the parser of tool calls was given, or has found, more than {MAX_FRAME_BYTES} bytes")
    return LENGTH.pack(len(body)) + body


def _send(connection: socket.socket, frame: bytes) -> None:
    connection.settimeout(ALTOGETHER_S)
    connection.sendall(frame)


def _receive(connection: socket.socket, deadline: float | None) -> Any:
    """Return the next frame. Raises OSError: there is none, or none until the deadline (time.monotonic)."""
    (length,) = LENGTH.unpack(_receive_bytes(connection, LENGTH.size, deadline))
    if length > MAX_FRAME_BYTES:
        raise ConnectionError("a frame is too long")
    return json.loads(_receive_bytes(connection, length, deadline))


def _receive_bytes(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < length:
        connection.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the other process has ended")
        data += part
    return bytes(data)


def _serve(name: str, connection: socket.socket) -> None:
    """Load the parser, and answer texts until the gateway has gone."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        parser = load_parser(name)
    except UserError as error:
        _send(connection, _encoded({"error": str(error)}))
        return
    _send(connection, _encoded({}))
    while True:
        text = _receive(connection, None)
        # The signal ends this process, also inside a regular expression and after the gateway has gone.
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        try:
            answer = _encoded({"calls": [[name, arguments] for name, arguments in parser(text)]})
        except Exception as error:  # raised by user code; the policy is told of it
            answer = _encoded({"error": (str(error) or type(error).__name__)[:MAX_REASON_CHARACTERS]})
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(connection, answer)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
