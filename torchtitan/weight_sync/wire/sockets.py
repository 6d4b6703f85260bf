"""The production runtime: sockets on an asyncio event loop, and one thread per kind of long work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan.utils.logs import RateLimit, escaped
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.messages import cost, parse, payload_bytes
from torchtitan.weight_sync.wire.payload_thread import PayloadThread
from torchtitan.weight_sync.wire.runtime import Channel, Message, OnDone, PayloadTarget, ProtocolError

logger = logging.getLogger(__name__)
# Strangers cause these lines: they must not fill a disk.
logger.addFilter(RateLimit(50, 10.0))

# A channel yields to the event loop after this many bytes, so that the others are served too.
READ_BYTES = 8 << 20
SEND_BYTES = 4 << 20
# This many bytes are read and processed at a time, while they are still in a core's cache.
PIECE_BYTES = 256 << 10
# For messages. Bytes read beyond a message are the beginning of its payload, and have to be copied.
MESSAGE_BYTES = 16 << 10
# A peer that reads nothing must not grow our memory: beyond this many bytes of unsent messages it is disconnected.
MAX_UNSENT_BYTES = 1 << 28
# So many messages of one peer are handled in one turn of the event loop.
TURN_MESSAGES = 64
# How long a listener waits when no descriptor is left for another connection.
ACCEPT_PAUSE_SECONDS = 1.0
# How often a throttled channel (fault injection) sends its share.
THROTTLE_SLICES_PER_SECOND = 50


class SocketChannel(Channel):
    """A channel over one connected socket. Each message is a length, a JSON object, and possibly a payload."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket):
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        super().__init__()
        with contextlib.suppress(OSError):  # it has closed already, as its first read will find
            self.peer_host = str(sock.getpeername()[0]) if sock.family != socket.AF_UNIX else ""
        self._loop, self._socket = loop, sock
        self._limit = wire.MAXIMUM_HELLO_BYTES
        self._buffer = bytearray()
        self._payload: Message | None = None
        """The message whose payload is arriving"""
        self._target: PayloadTarget | None = None
        self._filled = self._size = 0
        self._unsent: deque[tuple[memoryview, Callable[[], None] | None, bool]] = deque()
        """(bytes, callback for when they have been sent, whether they are a payload)"""
        self._unsent_bytes = 0
        self._waits_to_send = False
        self._pause: asyncio.TimerHandle | None = None
        self._held: asyncio.TimerHandle | None = None
        """Until then, what has arrived waits and nothing is read"""
        self._handled = 0
        """Messages in this turn of the loop"""
        self._thread: PayloadThread | None = None
        """Moves the payloads, if it is not the loop's thread"""
        self._sends = False
        """Whether it sends one now"""
        loop.add_reader(sock, self._guarded, self._read)

    def trust(self, longest: int = wire.MAXIMUM_MESSAGE_BYTES) -> None:
        self._limit = longest

    def use_thread(self) -> None:
        if self._thread is None and not self.closed:
            self._thread = PayloadThread(self._socket, self._loop.call_soon_threadsafe)

    def send(
        self, message: Message, payload: memoryview | None = None, on_sent: Callable[[], None] | None = None
    ) -> None:
        if self.closed:
            return
        if payload is not None:
            message = {**message, "bytes": len(payload)}
        data = wire.encode(message)
        self._unsent.append((memoryview(data), None if payload is not None else on_sent, False))
        self._unsent_bytes += len(data)
        if payload is not None:
            self._unsent.append((payload, on_sent, True))
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self._close_soon("the peer does not read its messages")
        elif payload is None and self._pause is None and len(self._unsent) == 1:
            self._guarded(self._flush)
        else:
            self._watch()

    def close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        for timer in filter(None, (self._pause, self._held)):
            timer.cancel()
        if self._thread is not None:
            self._thread.close()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()
        self._target = None
        self.on_close(self, reason)

    def _close_soon(self, reason: str) -> None:
        # Not immediately, because callers of send() do not expect on_close() from within it.
        self._unsent.clear()
        self._loop.call_soon(self.close, reason)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BlockingIOError:
            self._watch()
        except OSError as error:
            self._close_soon(f"connection lost: {error}")
        except ProtocolError as error:
            logger.warning("closing a connection: %s", escaped(str(error)))
            self.close(f"protocol error: {escaped(str(error))}")
        except Exception as error:
            # A message of an unforeseen shape ends its sender's connection, not the loop that serves all.
            logger.exception("closing a connection: its message could not be understood")
            self.close(f"protocol error: {escaped(repr(error))}")

    def _watch(self) -> None:
        wanted = bool(self._unsent) and self._pause is None and not self._sends
        if not self.closed and wanted != self._waits_to_send:
            self._waits_to_send = wanted
            if wanted:
                self._loop.add_writer(self._socket, self._guarded, self._flush)
            else:
                self._loop.remove_writer(self._socket)

    # Sending

    def _flush(self) -> None:
        slowest = self.throttle() if self.throttle is not None else 0
        allowance = max(1, slowest // THROTTLE_SLICES_PER_SECOND) if slowest else SEND_BYTES
        while self._unsent and allowance > 0:
            data, on_sent, is_payload = self._unsent[0]
            if is_payload and self._thread is not None and not slowest:
                self._sends = True
                self._thread.send(data, SEND_BYTES, self._count_moved, self._guard_moved(self._sent_by_thread))
                break
            flags = socket.MSG_MORE if len(self._unsent) > 1 else 0
            sent = self._socket.send(data[:allowance] if is_payload else data, flags)
            if is_payload:
                allowance -= sent
                self.moved += sent
            else:
                self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent[0] = (data[sent:], on_sent, is_payload)
                continue
            self._unsent.popleft()
            if on_sent is not None:
                on_sent()
        if slowest and allowance <= 0:
            self._pause = self._loop.call_later(1 / THROTTLE_SLICES_PER_SECOND, self._resume)
        self._watch()

    def _count_moved(self, count: int) -> None:
        self.moved += count

    def _sent_by_thread(self) -> None:
        self._sends = False
        if not self._unsent:  # it is about to be closed
            return
        _, on_sent, _ = self._unsent.popleft()
        if on_sent is not None:
            on_sent()
        self._watch()

    def _guard_moved(self, go_on: Callable[[], None]) -> Callable[[str], None]:
        def moved(problem: str) -> None:
            if problem and not self.closed:
                self.close(problem)
            elif not self.closed:
                self._guarded(go_on)

        return moved

    def _resume(self) -> None:
        self._pause = None
        self._watch()

    # Receiving

    def _read(self) -> None:
        budget, self._handled = READ_BYTES, 0
        while budget > 0 and not self.closed and self._held is None:
            if self._payload is not None and self._target is not None and self._thread is not None:
                self._loop.remove_reader(self._socket)
                left = self._size - self._filled
                self._thread.receive(self._target, left, PIECE_BYTES, self._guard_moved(self._received_by_thread))
                return
            if self._payload is not None and self._target is not None:
                count = self._socket.recvmsg_into(self._target.room(PIECE_BYTES))[0]
                if count:
                    self._target.filled(count)
                    self._arrived(count)
            else:
                data = self._socket.recv(MESSAGE_BYTES)
                count = len(data)
                # Less than asked for: there is no more for now.
                budget = budget if count == MESSAGE_BYTES else 0
                self._buffer += data
                self._handle()
            if count == 0:
                self.close("the peer closed the connection")
            budget -= count

    def _received_by_thread(self) -> None:
        self._loop.add_reader(self._socket, self._guarded, self._read)
        self._arrived(self._size - self._filled)

    def _hold(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self._held = self._loop.call_later(seconds, self._guarded, self._go_on)

    def _go_on(self) -> None:
        self._held, self._handled = None, 0
        self._loop.add_reader(self._socket, self._guarded, self._read)
        self._handle()

    def _handle(self) -> None:
        while self._buffer and not self.closed:
            if self._payload is not None:
                count = min(len(self._buffer), self._size - self._filled)
                if self._target is not None:
                    self._target.fill(memoryview(bytes(self._buffer[:count])))
                del self._buffer[:count]
                self._arrived(count)
                continue
            wait_s = 0.0 if self.limiter is None else self.limiter.wait_s(self._loop.time())
            if wait_s or self._handled >= TURN_MESSAGES:
                self._hold(wait_s)
                return
            if (message := self._next_message()) is None:
                return
            self._handled += 1
            if size := payload_bytes(message):
                if self._limit == wire.MAXIMUM_HELLO_BYTES:
                    raise ProtocolError("bytes came before the handshake was over")
                target = self.payload_target(self, message)
                if target is not None and target.size != size:
                    raise ProtocolError(f"{size} bytes arrive where {target.size} belong")
                self._payload, self._target, self._filled, self._size = message, target, 0, size
            else:
                self.on_message(self, message)

    def _arrived(self, count: int) -> None:
        message, has_target = self._payload, self._target is not None
        assert message is not None
        self._filled += count
        if self._filled == self._size and not self.closed:
            self._payload = self._target = None
            if has_target:
                self.on_message(self, message)

    def _next_message(self) -> Message | None:
        if len(self._buffer) < wire.LENGTH.size:
            return None
        (length,) = wire.LENGTH.unpack_from(self._buffer)
        if length > self._limit:
            raise ProtocolError(f"a message of {length} bytes exceeds the limit of {self._limit}")
        end = wire.LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[wire.LENGTH.size : end])
        del self._buffer[:end]
        try:
            message = parse(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        if self.limiter is not None:
            self.limiter.spend(cost(message, length))
        return message


Work = queue.SimpleQueue[tuple[Callable[[], Any], OnDone] | None]
"""Functions and the callbacks for their outcomes; None: there will be no more"""


class SocketRuntime:
    """Runs on the thread that calls run(). `stop` and `post` may be called from any thread.

    begin_thread(): called first on that thread, and on each thread for long work.
    """

    def __init__(self, begin_thread: Callable[[], None] = lambda: None) -> None:
        # Independent of asyncio's policy: the engine's process may use another kind of loop for its own work.
        self.loop = asyncio.SelectorEventLoop()
        self.loop.set_exception_handler(self._failed)
        self._error: BaseException | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._begin_thread = begin_thread
        self._threads: dict[str, tuple[threading.Thread, Work]] = {}
        self._thread: threading.Thread | None = None
        self.failure = ""

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        if self.loop.is_closed():  # code that closes channels after the end may still call this
            return asyncio.TimerHandle(0.0, callback, (), self.loop)
        return self.loop.call_later(seconds, callback)

    def run(self) -> None:
        """Run until stop(), or until a callback raises."""
        self._begin_thread()
        try:
            self.loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.stop()
            self.loop.run_forever()  # once more, so that cancelled dials close their sockets
            self.loop.close()
            for _thread, waiting in self._threads.values():
                waiting.put(None)
        if self._error is not None:
            raise self._error

    def start(self, name: str, begin: Callable[[], None]) -> None:
        """Call begin() and run() on a new thread. If that fails, `failure` says why."""

        def run() -> None:
            try:
                begin()
                self.run()
            except Exception as error:
                self.failure = f"the {name} has failed: {error!r}"
                logger.exception("%s", self.failure)

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether that thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def end(self, timeout: float) -> bool:
        """Stop, and wait at most `timeout` seconds for that thread. Returns whether it has ended."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.runs

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" not in context:
            # Not a callback of ours: garbage-collected clients of other libraries may leave tasks on this thread.
            loop.default_exception_handler(context)
            return
        self._error = self._error or context.get("exception") or RuntimeError(context["message"])
        self.loop.stop()

    def stop(self) -> None:
        self.post(self.loop.stop)

    def post(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop's thread soon, or in finish_work() if the loop has ended."""
        self._calls.append(callback)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(lambda: self._calls.popleft()())

    def work(self, name: str, function: Callable[[], Any], done: OnDone) -> None:
        if name not in self._threads:
            waiting: Work = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(waiting,), name=name, daemon=True)
            # Before it is known: where the system has no thread left now, the next call tries again.
            thread.start()
            self._threads[name] = thread, waiting
        self._threads[name][1].put((function, done))

    def end_work(self, name: str) -> None:
        """The thread of this name gets no more work, and ends once it has done what it has."""
        _thread, waiting = self._threads.pop(name)
        waiting.put(None)

    def _work(self, waiting: Work) -> None:
        self._begin_thread()
        while (item := waiting.get()) is not None:
            function, done = item
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # Whatever it is: another thread waits for the outcome.
                error = raised
            self.post(partial(done, result, error))

    def finish_work(self, name: str, deadline: float) -> None:
        """After run(): wait until `deadline` (time.monotonic()) for that thread, and run all pending callbacks."""
        if name in self._threads and self._threads[name][0] is not threading.current_thread():
            self._threads[name][0].join(max(0.0, deadline - time.monotonic()))
        while self._calls:
            self._calls.popleft()()

    def listen(self, where: socket.socket, accept: Callable[[Channel], None]) -> Callable[[], None]:
        where.setblocking(False)

        def watch() -> None:
            if where.fileno() >= 0:
                self.loop.add_reader(where, accept_one)

        def accept_one() -> None:
            try:
                sock, _ = where.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # Connections stay in the backlog, and would wake the loop endlessly.
                logger.warning("cannot accept a connection, trying again in %g s: %s", ACCEPT_PAUSE_SECONDS, error)
                self.loop.remove_reader(where)
                self.loop.call_later(ACCEPT_PAUSE_SECONDS, watch)
                return
            try:
                channel = SocketChannel(self.loop, sock)
            except OSError as error:
                logger.warning("a connection ended while it was accepted: %s", error)
                sock.close()
                return
            accept(channel)

        def end() -> None:
            self.loop.remove_reader(where)
            where.close()

        watch()
        return end

    def dial(
        self, address: str, on_open: Callable[[Channel], None], on_failure: Callable[[str], None]
    ) -> Callable[[], object]:
        async def connect() -> None:
            with contextlib.ExitStack() as unless_open:
                try:
                    host, port = wire.parse_data_address(address)
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    sock = unless_open.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    sock.setblocking(False)
                    await self.loop.sock_connect(sock, (host, port))
                    channel = SocketChannel(self.loop, sock)
                except (OSError, ProtocolError) as error:
                    number = getattr(error, "errno", None)
                    on_failure(f"cannot connect to {address}: {os.strerror(number) if number else error}")
                    return
                unless_open.pop_all()
            on_open(channel)

        def raise_failure(ended: asyncio.Task[None]) -> None:
            if not ended.cancelled():
                ended.result()

        task = self.loop.create_task(connect())
        # An exception in a callback must end the loop here, too.
        task.add_done_callback(raise_failure)
        return task.cancel
