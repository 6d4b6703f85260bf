"""The actor's part: stages a version while the engine generates, verifies every byte, then lets the engine apply it.

    receiver = Receiver("127.0.0.1:5000", "actor-0", epoch, token, apply=engine_apply)
    receiver.start()

`apply(staged)` is called on a thread of its own, once per version. It returns only after the engine has copied the new
weights (between two decode steps) and serves them, and may return the seconds that generation paused. Raising
WeightsRefused means that the engine is as it was; anything else that it may hold half a version: the receiver is
poisoned until a version has been applied.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torchtitan.weight_sync import coverage, manifest, wire
from torchtitan.weight_sync.bucket_stream import BucketStream
from torchtitan.weight_sync.connection import Connection, Server, dial
from torchtitan.weight_sync.event_loop import EventLoop, Timer
from torchtitan.weight_sync.manifest import Layout, LayoutError, Manifest
from torchtitan.weight_sync.staging import StagedVersion, Staging, WeightsRefused
from torchtitan.weight_sync.states.receiver import (
    BeginApply,
    Command,
    Discard,
    ReceiverMachine,
    ReceiverState,
    Send,
    Served,
)
from torchtitan.weight_sync.wire import Message, ProtocolError

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
# A coordinator that says nothing for this long (it answers every heartbeat) is taken for dead.
SILENCE_SECONDS = 10.0
RETRY_SECONDS = 0.2
PROGRESS_SECONDS = 0.2

ApplyFunction = Callable[[StagedVersion], "float | None"]


@dataclass
class ReceiverStatus:
    """What an actor's health route can show."""

    state: str
    connected: bool
    poisoned: bool
    epoch: str | None
    version: int | None
    digest: str | None
    versions_applied: int
    versions_refused: int
    failure: str | None
    """Why the receiver has given up, if it has (the coordinator was out of reach for too long)"""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class Receiver:
    """Connects to the coordinator, receives versions into staging memory and has the engine apply them.

    coordinator: `host:port`; actor: unique name; epoch: the trainer's; token: the job's secret; host: address that the
    data port binds to (and that couriers connect to, unless advertised_host says otherwise); served: what the engine
    holds already from an earlier receiver (its `served`). The coordinator may be out of reach for `retry_for_s`.
    """

    def __init__(
        self,
        coordinator: str,
        actor: str,
        epoch: str,
        token: str,
        apply: ApplyFunction,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        served: Served | None = None,
        retry_for_s: float = 60.0,
    ):
        wire.parse_address(coordinator)
        self.coordinator, self.actor, self.epoch = coordinator, actor, epoch
        self._token, self._apply, self._retry_for_s = token, apply, retry_for_s
        self._machine = ReceiverMachine(epoch, served)
        self._loop = EventLoop()
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = self._listener.getsockname()[1]
        self._data_address = f"{advertised_host or host}:{port}"
        self._control: Connection | None = None
        self._streams: dict[int, BucketStream] = {}
        self._staging: Staging | None = None
        self._layout_id = ""
        self._manifest: Manifest | None = None
        self._begun_at = self._staged_at = self._heard_at = 0.0
        self._reported_bytes = self._received_before = 0
        self._last_seen = time.monotonic()
        self._applied = 0
        self._failure: str | None = None
        self._apply_thread: threading.Thread | None = None
        self._redial: Timer | None = None
        self._thread = threading.Thread(target=self._run, name=f"weight-receiver-{actor}", daemon=True)

    # Called from any thread

    def start(self) -> None:
        """Begin to receive in a background thread."""
        self._thread.start()

    @property
    def served(self) -> Served | None:
        """The version that the engine holds since the last apply; None after a failed one."""
        return None if self._machine.poisoned else self._machine.served

    @property
    def poisoned(self) -> bool:
        """An apply failed half-way: the engine must not serve until a version has been applied."""
        return self._machine.poisoned

    def status(self) -> ReceiverStatus:
        """A snapshot for health routes and logs."""
        machine, served = self._machine, self._machine.served
        return ReceiverStatus(
            state=machine.state.value,
            connected=self._control is not None,
            poisoned=machine.poisoned,
            epoch=None if served is None else served.epoch,
            version=None if served is None else served.version,
            digest=None if served is None else served.digest,
            versions_applied=self._applied,
            versions_refused=machine.refused_versions,
            failure=self._failure,
        )

    def close(self, timeout: float = 5.0) -> None:
        """Stop receiving. Waits up to `timeout` seconds for the thread and for an apply that has begun."""
        deadline = time.monotonic() + timeout
        self._loop.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
        apply_thread = self._apply_thread
        if apply_thread is not None and apply_thread is not threading.current_thread():
            apply_thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            # `served` has to tell about an apply that ended after the loop did.
            self._loop.run_leftover_calls()

    # Background thread

    def _run(self) -> None:
        server = Server(self._loop, self._listener, self._token, self._admit, self._on_courier)
        self._loop.call_later(PROGRESS_SECONDS, self._report_progress)
        self._loop.call_later(HEARTBEAT_SECONDS, self._heartbeat)
        self._dial()
        try:
            self._loop.run()
        except Exception as error:
            self._failure = f"the receiver's thread ended: {error!r}"
            logger.exception("%s: weight receiver failed", self.actor)
        finally:
            for stream in list(self._streams.values()):
                stream.socket.close()
            if self._control is not None:
                self._control.socket.close()
                self._control = None
            server.listener.close()

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                if self._control is not None:
                    self._control.send({**command.message, "epoch": self.epoch, "term": self._machine.term})
            elif isinstance(command, Discard):
                for stream in list(self._streams.values()):
                    if stream.frame_attempt == command.attempt:
                        stream.close("the attempt is over")
            elif isinstance(command, BeginApply):
                self._begin_apply(command)

    # Coordinator

    def _dial(self) -> None:
        self._redial = None
        fields = {**self._machine.hello_fields(), "actor": self.actor, "data": self._data_address}
        dial(self._loop, self.coordinator, self._token, "actor", fields, self._welcomed, self._out_of_reach)

    def _out_of_reach(self, reason: str) -> None:
        silent = time.monotonic() - self._last_seen
        if silent > self._retry_for_s:
            self._failure = f"no coordinator at {self.coordinator} for {silent:.0f} s: {reason}"
            logger.error("%s: weight receiver gives up: %s", self.actor, self._failure)
            return
        self._redial = self._loop.call_later(RETRY_SECONDS, self._dial)

    def _welcomed(self, connection: Connection, fields: Message) -> None:
        try:
            self._machine.connected(int(fields["term"]))
        except (KeyError, ValueError) as error:
            connection.close(str(error))
            self._out_of_reach(str(error))
            return
        self._control = connection
        self._heard_at = self._last_seen = time.monotonic()
        connection.on_message = self._on_message
        connection.on_close = self._on_control_lost

    def _on_control_lost(self, _connection: Connection, reason: str) -> None:
        self._control = None
        self._last_seen = time.monotonic()
        logger.info("%s: coordinator connection over: %s", self.actor, reason)
        self._execute(self._machine.disconnected())
        self._redial_unless_applying()

    def _redial_unless_applying(self) -> None:
        # While the engine applies, nobody can say which version it holds: join again afterwards.
        if self._machine.state is ReceiverState.DISCONNECTED and self._redial is None:
            self._redial = self._loop.call_later(RETRY_SECONDS, self._dial)

    def _heartbeat(self) -> None:
        self._loop.call_later(HEARTBEAT_SECONDS, self._heartbeat)
        if self._control is None:
            return
        # The loop reads sockets before it runs timers: after a pause of this process, waiting answers have been seen.
        if time.monotonic() - self._heard_at > SILENCE_SECONDS:
            self._control.close(f"the coordinator said nothing for {SILENCE_SECONDS:g} s")
        else:
            self._execute([Send({"type": "ping"})])

    def _on_message(self, connection: Connection, message: Message) -> None:
        self._heard_at = self._last_seen = time.monotonic()
        if not self._machine.acceptable(str(message.get("epoch")), int(message.get("term", -1))):
            logger.warning("%s: dropped a %s of another epoch or term", self.actor, message["type"])
            return
        kind = message["type"]
        if kind == "layout":
            self._on_layout(connection, message)
        elif kind == "offer":
            self._on_offer(message)
        elif kind == "abort":
            self._execute(self._machine.abort(message["attempt"]))
        elif kind == "apply":
            self._execute(self._machine.apply(message["attempt"]))
        elif kind == "evict":
            connection.close(f"evicted: {message['reason']}")
        elif kind != "pong":
            raise ProtocolError(f"a coordinator does not send {kind!r}")

    def _on_layout(self, connection: Connection, message: Message) -> None:
        try:
            layout = Layout.from_json(message["layout"])
            coverage.check_coverage(layout)
        except LayoutError as error:
            raise ProtocolError(str(error)) from error
        layout_id = layout.layout_id()
        if self._staging is None or layout_id != self._layout_id:
            for stream in list(self._streams.values()):
                stream.close("the layout changed")
            self._staging, self._layout_id = Staging(layout), layout_id
        self._execute(self._machine.layout(layout_id))

    def _on_offer(self, message: Message) -> None:
        staging = self._staging
        if staging is None:
            raise ProtocolError("an offer came before the layout")
        layout = staging.layout
        try:
            offered = Manifest.from_json(message)
            offered.check_fits(layout, self._layout_id)
        except LayoutError as error:
            raise ProtocolError(str(error)) from error
        buckets = [(rank, bucket) for rank in range(len(layout.ranks)) for bucket in range(layout.bucket_count(rank))]
        commands = self._machine.offer(message["attempt"], offered.version, offered.digest, buckets)
        if self._machine.wants(message["attempt"]):
            self._manifest = offered
            self._begun_at = time.monotonic()
            self._reported_bytes = 0
            self._received_before = sum(stream.received_bytes for stream in self._streams.values())
        self._execute(commands)

    def _report_progress(self) -> None:
        self._loop.call_later(PROGRESS_SECONDS, self._report_progress)
        if self._machine.state is not ReceiverState.RECEIVING:
            return
        received = sum(stream.received_bytes for stream in self._streams.values()) - self._received_before
        if received > self._reported_bytes:
            self._reported_bytes = received
            self._execute([Send({"type": "progress", "attempt": self._machine.attempt, "bytes": received})])

    # Couriers

    def _admit(self, role: str, fields: Message) -> Message:
        if role != "courier" or fields.get("epoch") != self.epoch or fields.get("actor") != self.actor:
            raise ProtocolError("this port takes buckets from couriers of this actor's epoch")
        rank = fields.get("rank")
        if self._staging is None or not isinstance(rank, int) or not 0 <= rank < len(self._staging.layout.ranks):
            raise ProtocolError(f"no layout yet, or no such rank: {rank!r}")
        return {}

    def _on_courier(self, connection: Connection, _role: str, fields: Message) -> None:
        rank = int(fields["rank"])
        old = self._streams.pop(rank, None)
        if old is not None:
            self._received_before -= old.received_bytes
            old.close("replaced")

        def begin() -> None:
            # The welcome has to be out before the socket changes its use.
            if not connection.closed:
                self._streams[rank] = BucketStream(self._loop, connection.detach(), rank, self)

        connection.on_message = _no_messages
        self._loop.call_from_thread(begin)

    def place(self, attempt: int, rank: int, bucket: int, length: int) -> memoryview | None:
        """Where a bucket goes (see BucketSink)."""
        if not self._machine.wants(attempt) or self._staging is None:
            if length > self._maximum_bucket():
                raise ProtocolError("a bucket is longer than any of the layout")
            return None
        if bucket >= self._staging.layout.bucket_count(rank):
            raise ProtocolError(f"rank {rank} has no bucket {bucket}")
        if (rank, bucket) not in self._machine.missing:
            # Verified bytes are never written again: what is applied is what was checked.
            raise ProtocolError(f"bucket {bucket} of rank {rank} was sent twice")
        start, end = self._staging.layout.bucket_range(rank, bucket)
        if length != end - start:
            raise ProtocolError(f"bucket {bucket} of rank {rank} has {length} bytes instead of {end - start}")
        return self._staging.memory[rank][start:end]

    def _maximum_bucket(self) -> int:
        return 0 if self._staging is None else self._staging.layout.bucket_bytes

    def arrived(self, attempt: int, rank: int, bucket: int) -> None:
        """A bucket is whole: check it (see BucketSink)."""
        staging, offered = self._staging, self._manifest
        if staging is None or offered is None or not self._machine.wants(attempt):
            return
        start, end = staging.layout.bucket_range(rank, bucket)
        intact = manifest.bucket_checksum(staging.memory[rank][start:end]) == offered.checksums[rank][bucket]
        if not intact:
            logger.error("%s: version %d: bucket %d of rank %d is corrupt", self.actor, offered.version, bucket, rank)
        self._execute(self._machine.bucket(attempt, (rank, bucket), intact))
        if self._machine.wants(attempt) and not self._machine.missing:
            self._staged_at = time.monotonic()
            for stream in self._streams.values():
                stream.drop_frame()
            self._execute(self._machine.staged(attempt))

    def lost(self, stream: BucketStream, reason: str) -> None:
        """A courier's connection is over (see BucketSink)."""
        if self._streams.get(stream.rank) is stream:
            del self._streams[stream.rank]
            self._received_before -= stream.received_bytes
        attempt = self._machine.attempt
        # Between two frames a connection may come and go; within one, its bytes are lost.
        if stream.frame_attempt is not None and stream.frame_attempt == attempt:
            stream.frame_attempt = None
            self._execute(self._machine.refuse(attempt, f"connection of rank {stream.rank} lost: {reason}"))

    # Engine

    def _begin_apply(self, command: BeginApply) -> None:
        def work() -> None:
            begun = time.monotonic()
            error: str | None = None
            refused = False
            pause: float | None = None
            try:
                assert self._staging is not None
                tensors = self._staging.assemble()
                pause = self._apply(StagedVersion(self.epoch, command.version, command.digest, tensors))
            except WeightsRefused as failure:
                logger.error("%s: version %d refused: %s", self.actor, command.version, failure)
                error, refused = str(failure), True
            except Exception as failure:
                # Half a version may be in the engine now: never served, and said so to everybody.
                logger.exception("%s: applying version %d failed", self.actor, command.version)
                error = repr(failure)
            elapsed = time.monotonic() - begun
            figures = {
                "transfer_s": self._staged_at - self._begun_at,
                "apply_s": elapsed,
                "pause_s": elapsed if pause is None else float(pause),
            }
            self._loop.call_from_thread(lambda: self._apply_finished(command.attempt, error, figures, refused))

        self._apply_thread = threading.Thread(target=work, name=f"weight-apply-{self.actor}", daemon=True)
        self._apply_thread.start()

    def _apply_finished(self, attempt: int, error: str | None, figures: Message, refused: bool) -> None:
        commands = self._machine.apply_finished(attempt, error, figures, refused)
        self._applied += error is None
        self._execute(commands)
        if self._control is None:
            self._redial_unless_applying()


def _no_messages(_connection: Connection, _message: Message) -> None:
    raise ProtocolError("a courier sends buckets, not messages")
