"""The actor's part: stages a version while the engine generates, verifies every byte, then lets the engine apply it.

    receiver = Receiver("127.0.0.1:5000", "actor-0", epoch, token, apply=engine_apply)
    receiver.start()

`apply(staged)` is called on a thread of its own, once per version. It returns only after the engine has copied the new
weights (between two decode steps) and serves them, and may return the seconds that generation paused, or figures by
name (`pause_s`, `drain_s`). Raising WeightsRefused means that the engine is as it was; anything else that it may hold
half a version: the receiver is poisoned until a version has been applied.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from torchtitan.weight_sync import coverage, faults, wire
from torchtitan.weight_sync.connection import Connection, dial
from torchtitan.weight_sync.event_loop import EventLoop, Timer
from torchtitan.weight_sync.intake import Intake
from torchtitan.weight_sync.manifest import Layout, LayoutError, Manifest
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused
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

ApplyFunction = Callable[[StagedVersion], "float | Mapping[str, float] | None"]


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
    holds already from an earlier receiver (its `served`); where: device of the staging memory. The coordinator may be
    out of reach for `retry_for_s`.
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
        where: str = "cpu",
    ):
        wire.parse_address(coordinator)
        self.coordinator, self.actor, self.epoch = coordinator, actor, epoch
        self._token, self._apply, self._retry_for_s = token, apply, retry_for_s
        # A new process of the same name starts afresh with the coordinator.
        self._machine = ReceiverMachine(epoch, served, secrets.token_hex(8))
        self._loop = EventLoop()
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = self._listener.getsockname()[1]
        self._data_address = wire.format_address(advertised_host or host, port)
        self._control: Connection | None = None
        self._intake = Intake(self._loop, self._listener, token, self._machine, self._execute, actor=actor, where=where)
        self._heard_at = 0.0
        self._reported_bytes = 0
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
        self._intake.start()
        self._loop.call_later(PROGRESS_SECONDS, self._report_progress)
        self._loop.call_later(HEARTBEAT_SECONDS, self._heartbeat)
        self._dial()
        try:
            self._loop.run()
        except Exception as error:
            self._failure = f"the receiver's thread ended: {error!r}"
            logger.exception("%s: weight receiver failed", self.actor)
        finally:
            self._intake.close()
            if self._control is not None:
                self._control.socket.close()
                self._control = None

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                phase = command.message["type"]
                if phase in ("staged", "applied") and not self._survives(phase, self._machine.version):
                    continue
                if self._control is not None:
                    self._control.send({**command.message, "epoch": self.epoch, "term": self._machine.term})
            elif isinstance(command, Discard):
                self._intake.discard(command.attempt)
            elif isinstance(command, BeginApply):
                self._begin_apply(command)

    def _survives(self, phase: str, version: int) -> bool:
        """Whether fault injection lets this message pass."""
        try:
            return "drop" not in faults.at(phase, version=version, actor=self.actor)
        except ConnectionResetError as error:
            if self._control is not None:
                self._control.close(str(error))
            return False

    # Coordinator

    def _dial(self) -> None:
        self._redial = None
        fields = {**self._machine.hello_fields(), "actor": self.actor, "data": [self._data_address]}
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
        self._intake.layout(layout, layout_id)
        self._execute(self._machine.layout(layout_id))

    def _on_offer(self, message: Message) -> None:
        staging = self._intake.staging
        if staging is None:
            raise ProtocolError("an offer came before the layout")
        try:
            offered = Manifest.from_json(message)
            offered.check_fits(staging.layout, self._intake.layout_id)
        except LayoutError as error:
            raise ProtocolError(str(error)) from error
        if not self._survives("offer", offered.version):
            return
        attempt, base = message["attempt"], message.get("base")
        commands = self._machine.offer(
            attempt,
            offered.version,
            offered.digest,
            self._intake.keys(),
            None if base is None else (int(base[0]), str(base[1])),
            message.get("source"),
        )
        # What an older attempt still writes has to end before the first byte of this one may come.
        self._execute([command for command in commands if not isinstance(command, Send)])
        answer: list[Command] = [command for command in commands if isinstance(command, Send)]
        if self._machine.wants(attempt):
            self._reported_bytes = 0
            self._intake.begin(attempt, offered, lambda: self._execute(answer))
        else:
            self._execute(answer)

    def _report_progress(self) -> None:
        self._loop.call_later(PROGRESS_SECONDS, self._report_progress)
        if self._machine.state is not ReceiverState.RECEIVING:
            return
        received = self._intake.figures.received_bytes
        if received > self._reported_bytes:
            self._reported_bytes = received
            self._execute([Send({"type": "progress", "attempt": self._machine.attempt, "bytes": received})])

    # Engine

    def _begin_apply(self, command: BeginApply) -> None:
        transfer, source = self._intake.figures.to_json(), self._machine.source or "trainer"

        def work() -> None:
            faults.at("apply", version=command.version, actor=self.actor)
            begun, begun_at = time.monotonic(), time.time()
            error: str | None = None
            refused = False
            cost: float | Mapping[str, float] | None = None
            try:
                assert self._intake.staging is not None
                tensors = self._intake.staging.assemble()
                cost = self._apply(StagedVersion(self.epoch, command.version, command.digest, tensors))
            except WeightsRefused as failure:
                logger.error("%s: version %d refused: %s", self.actor, command.version, failure)
                error, refused = str(failure), True
            except Exception as failure:
                # Half a version may be in the engine now: never served, and said so to everybody.
                logger.exception("%s: applying version %d failed", self.actor, command.version)
                error = repr(failure)
            elapsed = time.monotonic() - begun
            figures = {
                **transfer,
                "source": source,
                "apply_s": elapsed,
                "apply_begin": begun_at,
                "apply_end": begun_at + elapsed,
                "pause_s": elapsed,
                **({} if cost is None else cost if isinstance(cost, Mapping) else {"pause_s": float(cost)}),
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
