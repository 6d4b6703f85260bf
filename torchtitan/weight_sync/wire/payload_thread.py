"""A thread that moves a channel's payloads, so that several channels use several cores. It holds the interpreter's lock
only between two pieces."""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
from collections.abc import Callable

from torchtitan.weight_sync.wire.runtime import PayloadTarget

logger = logging.getLogger(__name__)

# How often the thread checks whether its channel has been closed while nothing moves.
POLL_MILLISECONDS = 200

OnMoved = Callable[[str], None]
"""Called when a payload has been moved, with why it could not be, or an empty string"""


class PayloadThread:
    """Moves one payload at a time over a socket that does not block. post(function): runs it on the loop's thread."""

    def __init__(self, sock: socket.socket, post: Callable[[Callable[[], None]], object]):
        self._socket, self._post = sock, post
        self._descriptor = sock.fileno()
        self._moving = threading.Lock()
        self._closed = False
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"payloads of {self._descriptor}", daemon=True).start()

    def close(self) -> None:
        """End the thread. When this returns, it touches no payload's memory any more."""
        with self._moving:
            self._closed = True
        self._waiting.put(None)

    def receive(self, target: PayloadTarget, count: int, piece: int, done: OnMoved) -> None:
        """Fill `target` with the next `count` bytes, `piece` bytes at a time."""

        def step(left: int) -> int:
            received = self._socket.recvmsg_into(target.room(min(piece, left)))[0]
            if received == 0:
                raise ConnectionError("the peer closed the connection")
            target.filled(received)
            return received

        self._waiting.put(lambda: self._move(select.POLLIN, count, step, done))

    def send(self, data: memoryview, piece: int, moved: Callable[[int], None], done: OnMoved) -> None:
        """Send `data`, and call moved() with each number of bytes that has been handed to the network."""

        def step(left: int) -> int:
            begin = len(data) - left
            sent = self._socket.send(data[begin : begin + piece])
            moved(sent)
            return sent

        self._waiting.put(lambda: self._move(select.POLLOUT, len(data), step, done))

    def _work(self) -> None:
        while (move := self._waiting.get()) is not None:
            move()

    def _move(self, event: int, count: int, step: Callable[[int], int], done: OnMoved) -> None:
        poller, problem = select.poll(), ""
        poller.register(self._descriptor, event)
        while count and not problem:
            poller.poll(POLL_MILLISECONDS)
            # The channel may have been closed meanwhile, and the descriptor be another's.
            with self._moving:
                if self._closed:
                    return
                try:
                    count -= step(count)
                except BlockingIOError:
                    continue
                except OSError as error:
                    problem = f"connection lost: {error}"
                except Exception as error:
                    # The channel would wait for bytes that nobody moves.
                    logger.exception("closing a connection: its bytes could not be moved")
                    problem = f"its bytes could not be moved: {error!r}"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._post(lambda: done(problem))
