"""A deterministic machine for the real classes: a virtual clock, processes that freeze and die, and a network.

Everything that happens is an event of one process at one time; the seed determines the order of simultaneous events. As
with real sockets, a channel reads its sender's memory late, in two halves. The tests of the weight synchronisation and
the sizing simulator run on this machine.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE
from torchtitan.weight_sync.wire.messages import cost, parse
from torchtitan.weight_sync.wire.runtime import (
    MAXIMUM_MESSAGE_BYTES,
    Channel,
    Message,
    OnDone,
    PayloadTarget,
    ProtocolError,
    Timer,
    encode,
)

Callback = Callable[[], None]
MESSAGE, TIMER = 0, 1
PING = {"type": "ping"}


class Event(list[Any]):
    """A future event: [process, MESSAGE or TIMER, callback]. It is a list for speed, because there are many."""

    __slots__ = ()

    def cancel(self) -> None:
        """Prevent the event."""
        self[2] = None


class Violation(AssertionError):
    """The synchronisation broke a promise."""


class Machine:
    """The clock, the listeners, and how long everything takes. Subclasses may model durations differently."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self._draw = self.random.random
        self.now = 0.0
        self.processes = 0
        self._events: list[tuple[float, float, Event]] = []
        """(time, order among events of that time, event)"""
        self.listeners: dict[str, tuple[Process, Callable[[Channel], None]]] = {}
        self.check_read: Callable[[SimChannel, Message, memoryview], None] = lambda _channel, _message, _data: None
        self.protocol_errors: list[str] = []
        self.distance = 1.0
        """Factor for latencies; with 1 they are 0.5 to 2.5 ms"""
        self.corruption = 0.0
        """Probability that a payload is damaged in transit"""
        self.corrupted = 0
        self.validates = True
        """Whether messages are checked against their schema"""
        self.message_seconds = self.byte_seconds = 0.0
        """How long a process is busy with a message that it has received, and with each byte of it"""
        self.order_of_events = 0
        """A hash over the order in which processes had events"""

    def at(self, seconds: float, process: Process | None, callback: Callback, kind: int = TIMER) -> Event:
        """Run `callback` in `seconds`, unless the process is dead then; if it is frozen then, once it thaws."""
        event = Event((process, kind, callback))
        heapq.heappush(self._events, (self.now + seconds, self._draw(), event))
        return event

    def run(self, until: float) -> None:
        """Run everything that happens up to this time."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            self.now, _, event = pop(events)
            process, kind, callback = event
            if callback is None:
                continue
            if process is None:
                callback()
            elif process.frozen:
                process.parked.append(event)
            elif process.busy_until > self.now:
                process.wait(event)
            elif process.alive:
                self.order_of_events = hash((self.order_of_events, process.number, kind))
                callback()
        self.now = until

    def replay(self, event: Event) -> None:
        """Repeat an event that a frozen process has missed: it happens now, messages before timers."""
        when = self.now + (0.0 if event[1] == MESSAGE else 1e-6)
        heapq.heappush(self._events, (when, self._draw(), event))

    # What takes time

    def latency(self) -> float:
        """Return the one-way latency of a new connection in seconds."""
        return (0.0005 + self._draw() * 0.002) * self.distance

    def copy_seconds(self) -> float:
        """Return how many seconds the copy of a rank's shards into a slot takes."""
        return self._draw() * 0.02

    def begin_work(self, process: Process, thread: str, finish: Callback) -> None:
        """Call `finish` when a thread would have finished a piece of work."""
        self.at(self._draw() * process.longest_on_thread.get(thread, process.longest_work), process, finish)

    def carry(self, channel: SimChannel, message: Message, done: Callback) -> Timer:
        """Call `done` when this message's payload has been sent."""
        rate = min(channel.process.rate, channel.peer.process.rate)
        # A table of checksums is as large as a bucket here, and next to nothing beside one of megabytes.
        size = 0 if message["bucket"] == CHECKSUM_TABLE else message["bytes"]
        seconds = size / rate * (0.8 + 0.4 * self._draw())

        def end() -> None:
            if channel.peer.process.frozen and channel.peer.process.alive:
                channel.stalled = end
            else:
                done()

        return self.at(seconds, channel.process, end)


class Process:
    """A program's memory and sockets. rate: payload bytes per second that it can receive over one channel."""

    def __init__(self, machine: Machine, name: str, rate: float = 1e9):
        self.machine, self.name, self.rate = machine, name, rate
        machine.processes += 1
        self.number = machine.processes
        self.alive, self.frozen = True, False
        self.cut_off = False
        """Whether its machine has vanished from the network without closing connections"""
        self.parked: list[Event] = []
        self.channels: dict[SimChannel, None] = {}
        self.hung_threads: set[str] = set()
        self.longest_work = 0.02
        self.longest_on_thread: dict[str, float] = {}
        """Longest work by thread, for threads on which work takes longer than elsewhere"""
        self.froze_at = self.busy_until = -1.0
        self._waiting: deque[Event] = deque()
        """What has happened while it was busy"""
        self.runtime = SimRuntime(self)

    def work(self, seconds: float) -> None:
        """Be busy for so long, from the end of what it is busy with now."""
        if seconds:
            self.busy_until = max(self.busy_until, self.machine.now) + seconds

    def wait(self, event: Event) -> None:
        """Handle this event once the process is not busy any more."""
        self._waiting.append(event)
        if len(self._waiting) == 1:
            self.machine.at(self.busy_until - self.machine.now, None, self._go_on)

    def _go_on(self) -> None:
        now = self.machine.now
        while self._waiting and self.busy_until <= now + 1e-9:
            event = self._waiting.popleft()
            if self.frozen:
                self.parked.append(event)
            elif self.alive and event[2] is not None:
                event[2]()
        if self._waiting:
            self.machine.at(self.busy_until - now, None, self._go_on)

    def freeze(self) -> None:
        self.frozen, self.froze_at = True, self.machine.now

    def thaw(self) -> None:
        """Resume: messages that came meanwhile are read first, then late timers run."""
        if not self.frozen:
            return
        self.frozen = False
        parked, self.parked = self.parked, []
        for event in parked:
            self.machine.replay(event)
        for channel in list(self.channels):
            channel.resume_payload()

    def forget_connections(self) -> None:
        """Have the network lose its connections without telling either end."""
        for channel in self.channels:
            channel.break_silently()

    def kill(self) -> None:
        self.alive = self.frozen = False
        self.parked.clear()
        listeners = self.machine.listeners
        self.machine.listeners = {address: entry for address, entry in listeners.items() if entry[0] is not self}
        for channel in list(self.channels):
            channel.reset("connection reset by peer")


class SimRuntime:
    """The Runtime that a process's parts see, see wire."""

    def __init__(self, process: Process):
        self._process, self._machine = process, process.machine

    def now(self) -> float:
        return self._machine.now

    def call_later(self, seconds: float, callback: Callback) -> Event:
        return self._machine.at(seconds, self._process, callback)

    def work(self, name: str, function: Callable[[], Any], done: OnDone) -> None:
        machine, process = self._machine, self._process

        def finish() -> None:
            if name in process.hung_threads:
                return
            result, error = None, None
            try:
                result = function()
            except Violation:
                raise
            except Exception as raised:
                error = raised
            machine.at(machine.random.random() * 0.001, process, partial(done, result, error))

        if name not in process.hung_threads:
            machine.begin_work(process, name, finish)

    def listen(self, where: str, accept: Callable[[Channel], None]) -> Callable[[], None]:
        self._machine.listeners[where] = (self._process, accept)
        return lambda: self._machine.listeners.pop(where, None) and None

    def dial(
        self, address: str, on_open: Callable[[Channel], None], on_failure: Callable[[str], None]
    ) -> Callable[[], None]:
        machine, caller = self._machine, self._process
        over: list[bool] = []

        def cancel() -> None:
            over.append(True)

        def settle(callback: Callback) -> None:
            if not over:
                over.append(True)
                callback()

        latency = machine.latency()

        def arrive() -> None:
            found = machine.listeners.get(address)
            if not caller.alive:
                return
            if found is None:
                machine.at(latency, caller, lambda: settle(lambda: on_failure(f"{address} refused")), MESSAGE)
            elif not found[0].cut_off and not caller.cut_off and not over:
                server, accept = found
                caller_end, server_end = SimChannel(caller, latency), SimChannel(server, latency)
                caller_end.peer, server_end.peer = server_end, caller_end
                caller_end.peer_host, server_end.peer_host = server.name, caller.name

                def opened() -> None:
                    if over:
                        caller_end.close("cancelled")
                    else:
                        settle(lambda: on_open(caller_end))

                # These come before anything else that reaches either end.
                for end, item in ((caller_end, opened), (server_end, lambda: accept(server_end))):
                    end.inbox.append(item)
                    machine.at(0.0, end.process, end.receive, MESSAGE)

        machine.at(latency, None, arrive)
        return cancel


class SimChannel(Channel):
    """One end of a connection. Payloads take time, and delay what is sent after them."""

    def __init__(self, process: Process, latency: float):
        super().__init__()
        self.process, self.latency = process, latency
        self.machine = process.machine
        self.peer: SimChannel
        self._out: deque[tuple[Message, memoryview | None, Callback | None]] = deque()
        self.inbox: deque[Message | Callback] = deque()
        """What is in transit to this end: messages and other callbacks"""
        self._carrying: Timer | None = None
        self.stalled: Callback | None = None
        self._late = 0
        """How many messages and callbacks wait for the rate limit"""
        self._broken = False
        """Whether something was lost in transit: nothing arrives any more in either direction"""
        self._target: PayloadTarget | None = None
        self._longest = MAXIMUM_MESSAGE_BYTES
        """Bytes of a message that is not refused"""
        process.channels[self] = None

    def trust(self, longest: int = MAXIMUM_MESSAGE_BYTES) -> None:
        self._longest = longest

    def send(
        self, message: Message, payload: memoryview | None = None, on_sent: Callable[[], None] | None = None
    ) -> None:
        if self.closed:
            return
        if payload is None and on_sent is None and self._carrying is None:
            self._to_peer(message)
        else:
            self._out.append((message, payload, on_sent))
            self._transmit()

    def close(self, reason: str) -> None:
        if not self.closed:
            self._end()
            self._to_peer(lambda: self.peer._closed_by_peer("the peer closed the connection"))
            self.on_close(self, reason)

    def reset(self, reason: str) -> None:
        """Close this end because the process is dead; its kernel tells the peer."""
        if not self.closed:
            self._end()
            self._to_peer(lambda: self.peer._closed_by_peer(reason))

    def _end(self) -> None:
        self.closed = True
        self._out.clear()
        if self._carrying is not None:
            self._carrying.cancel()
        self._carrying = self.stalled = None
        self.process.channels.pop(self, None)

    def _closed_by_peer(self, reason: str) -> None:
        if not self.closed:
            self._end()
            self.on_close(self, reason)

    def _to_peer(self, item: Message | Callback) -> None:
        """Deliver in order, after the latency."""
        if self.process.cut_off or self.peer.process.cut_off:
            self.break_silently()
        if not self._broken:
            self.peer.inbox.append(item)
            self.machine.at(self.latency, self.peer.process, self.peer.receive, MESSAGE)

    def receive(self) -> None:
        """Handle the next message or callback that has arrived, or leave it until the rate limit allows it."""
        if self._late:
            self._late += 1
            return
        wait_s = 0.0 if self.limiter is None or self.closed else self.limiter.wait_s(self.machine.now)
        if wait_s:
            self._late = 1
            self.machine.at(wait_s, self.process, self._go_on, MESSAGE)
            return
        item = self.inbox.popleft()
        if self.closed:
            return
        try:
            if isinstance(item, dict):
                count = len(encode(item)) if self.limiter is not None or self.machine.byte_seconds else 0
                self.process.work(self.machine.message_seconds + min(count, self._longest) * self.machine.byte_seconds)
                if count > self._longest:
                    raise ProtocolError(f"a message of {count} bytes exceeds the limit of {self._longest}")
                message = self._parsed(item)
                self.spend(cost(message, count))
                self.on_message(self, message)
            else:
                item()
        except ProtocolError as error:
            self.machine.protocol_errors.append(f"{self.process.name}: {error}")
            self.close(f"protocol error: {error}")

    def _go_on(self) -> None:
        late, self._late = self._late, 0
        while late and not self._late:
            late -= 1
            self.receive()
        self._late += late

    def _transmit(self) -> None:
        while self._out and self._carrying is None:
            message, payload, on_sent = self._out.popleft()
            if payload is None:
                if on_sent is not None:
                    on_sent()
                self._to_peer(message)
            else:
                self._begin_payload({**message, "bytes": len(payload)}, payload, on_sent)

    def _parsed(self, message: Message) -> Message:
        """Return the message as the other end has sent it, if it is well-formed. Raises ProtocolError."""
        return message if message == PING or not self.machine.validates else parse(message)

    def _begin_payload(self, message: Message, payload: memoryview, on_sent: Callback | None) -> None:
        half = len(payload) // 2
        self.machine.check_read(self, message, payload)
        self.moved += half
        self._to_peer(partial(self.peer._begin_arrival, message, bytes(payload[:half])))

        def end() -> None:
            if self.closed:
                return
            self._carrying = None
            self.machine.check_read(self, message, payload)
            second = bytes(payload[half:])
            self.moved += len(second)
            if self.machine.corruption and self.machine.random.random() < self.machine.corruption:
                self.machine.corrupted += 1
                second = second[:-1] + bytes([second[-1] ^ 1])
            self._to_peer(partial(self.peer._end_arrival, message, second))
            if on_sent is not None:
                on_sent()
            self._transmit()

        self._carrying = self.machine.carry(self, message, end)

    def break_silently(self) -> None:
        self._broken = self.peer._broken = True

    def resume_payload(self) -> None:
        """Continue a payload that waited because this end did not read."""
        stalled, self.peer.stalled = self.peer.stalled, None
        if stalled is not None:
            self.machine.at(0.0, self.peer.process, stalled)

    def _begin_arrival(self, message: Message, piece: bytes) -> None:
        self._target = self.payload_target(self, self._parsed(message))
        if self._target is not None:
            self._target.fill(memoryview(piece))

    def _end_arrival(self, message: Message, piece: bytes) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.fill(memoryview(piece))
            self.on_message(self, message)
