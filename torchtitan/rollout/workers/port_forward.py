"""A forwarded port of an isolated process: one address outside that it can connect to.

The process listens on the loopback of its own network, and passes that socket to us: what it accepts connects its
programs with us, and we connect them with the address. So no file or other process is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

CONNECT_TIMEOUT_S = 10.0
BACKLOG = 1024
# Connections at a time; further ones are closed.
MAX_CONNECTIONS = 4096
CHUNK_BYTES = 1 << 16


class PortForward:
    """The outer side. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        """Where connections lead; None refuses them"""
        self._own_end: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def new(self) -> socket.socket:
        """Return the socket for a new process, which calls hand_over() on it."""
        if self._own_end is not None:
            self._own_end.close()
        self._own_end, program_end = socket.socketpair()
        self._own_end.setblocking(False)
        return program_end

    async def open(self) -> None:
        """Accept connections, once the process has handed its socket over. Raises OSError."""
        assert self._own_end is not None
        # The process sent it before it said that it was ready.
        _, files, _, _ = socket.recv_fds(self._own_end, 1, 1)
        if not files:
            raise ConnectionError("the worker has handed over no socket")
        self._server = await asyncio.start_server(self._accept, sock=socket.socket(fileno=files[0]), backlog=BACKLOG)

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._own_end is not None:
            self._own_end.close()
            self._own_end = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self.target is None or len(self._connections) > MAX_CONNECTIONS:
                return
            connecting = asyncio.open_connection(*self.target)
            their_reader, their_writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
            try:
                await asyncio.gather(_pass_on(reader, their_writer), _pass_on(their_reader, writer))
            finally:
                their_writer.close()
        except (TimeoutError, OSError, asyncio.CancelledError):
            pass  # one side has left, or this is the end: the program sees that its connection is closed
        finally:
            writer.close()
            self._connections.discard(task)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()


def hand_over(descriptor: int) -> int:
    """In the isolated process: listen, pass that socket to the outer side, and return the port."""
    with (
        socket.socket(fileno=descriptor) as outside,
        socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener,
    ):
        socket.send_fds(outside, [b"x"], [listener.fileno()])
        return int(listener.getsockname()[1])
