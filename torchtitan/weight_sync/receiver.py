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
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

from torchtitan.weight_sync import coverage, faults, wire
from torchtitan.weight_sync.applying import ApplyFunction, ApplyResult, apply_on_thread
from torchtitan.weight_sync.connection import Connection, dial, reachable_host
from torchtitan.weight_sync.event_loop import EventLoop, Timer
from torchtitan.weight_sync.intake import Intake
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.manifest import Layout, LayoutError, Manifest
from torchtitan.weight_sync.staging import StagedVersion
from torchtitan.weight_sync.states.receiver import (
    BeginApply,
    BeginRelay,
    Command,
    Discard,
    EndRelay,
    ReceiverMachine,
    ReceiverState,
    Send,
    Served,
)
from torchtitan.weight_sync.wire import Message, ProtocolError
from torchtitan.weight_sync.workers import WorkerGroup

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
PROGRESS_SECONDS = 0.2


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
    data port binds to (and that couriers connect to, unless advertised_host says otherwise, or it is a wildcard and the
    address that the coordinator sees is said; a name is looked up at once); served: what the engine
    holds already from an earlier receiver (its `served`); where: device of the staging memory; boxes: parameter name ->
    the part that is wanted (None: all of everything). The coordinator may be out of reach for `retry_for_s`.

    workers > 0: this is the leader of an actor of so many workers, which connect to `workers_address` (see worker.py)
    and hold the weights. `apply` then calls the staged version's apply_on_workers() while the engine stands still; all
    workers have to answer within `workers_timeout_s`. trust_workers: where `served` is None, the engine serves what
    they say that they hold; otherwise it serves nothing before a version has been applied.
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
        boxes: Mapping[str, Box] | None = None,
        workers: int = 0,
        workers_timeout_s: float = 60.0,
        trust_workers: bool = True,
        worker: int | None = None,
    ):
        wire.parse_address(coordinator)
        self.coordinator, self.actor, self.epoch = coordinator, actor, epoch
        self._token, self._apply, self._retry_for_s = token, apply, retry_for_s
        # A new process of the same name starts afresh with the coordinator.
        self._machine = ReceiverMachine(epoch, served, secrets.token_hex(8))
        self._loop = EventLoop()
        self._worker = worker
        address = (host, advertised_host or reachable_host(host, coordinator))
        self._data: Intake | WorkerGroup
        if workers:
            self._data = WorkerGroup(
                self._loop,
                token,
                self._machine,
                self,
                address,
                actor=actor,
                count=workers,
                apply_timeout_s=workers_timeout_s,
                trusted=trust_workers,
            )
        else:
            self._data = Intake(
                self._loop,
                token,
                self._machine,
                self._execute,
                address,
                actor=actor,
                worker=worker or 0,
                boxes=boxes,
                where=where,
            )
        self._control: Connection | None = None
        self._heard_at = 0.0
        self._reported_progress = 0
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
    def workers_address(self) -> str:
        """Where this leader's workers connect to. Raises ValueError without workers."""
        if not isinstance(self._data, WorkerGroup):
            raise ValueError("a receiver of its own has no workers")
        return self._data.address

    @property
    def served(self) -> Served | None:
        """The version that the engine holds since the last apply; None after a failed one."""
        return self._machine.serving

    @property
    def poisoned(self) -> bool:
        """An apply failed half-way: the engine must not serve until a version has been applied."""
        return self._machine.poisoned

    def found_torn(self, version: int, reason: str) -> None:
        """The engine does not hold `version` after all: the coordinator evicts this actor, which joins anew and gets
        the newest version again."""
        self._loop.call_from_thread(lambda: self._execute(self._machine.found_torn(version, reason)))

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
        self._data.start()
        self._loop.call_later(PROGRESS_SECONDS, self._report_progress)
        self._loop.call_later(wire.HEARTBEAT_SECONDS, self._heartbeat)
        self._dial()
        try:
            self._loop.run()
        except Exception as error:
            self._failure = f"the receiver's thread ended: {error!r}"
            logger.exception("%s: weight receiver failed", self.actor)
        finally:
            self._data.close()
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
                    message = {**command.message, **self._more_to_say(phase)}
                    self._control.send({**message, "epoch": self.epoch, "term": self._machine.term})
            elif isinstance(command, Discard):
                self._data.discard(command.attempt)
            elif isinstance(command, BeginApply):
                self._begin_apply(command)
            elif isinstance(command, BeginRelay):
                assert self._machine.shadow is not None
                self._data.begin_relay(command, self._machine.shadow)
            elif isinstance(command, EndRelay):
                self._data.end_relay(command.attempt)

    def _more_to_say(self, kind: str) -> Message:
        if kind == "ready":
            return {"parts": self._data.parts()}
        if kind == "staged" and self._worker is not None:
            return {"figures": self._data.figures()}
        return {}

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
        if self._data.missing():
            # Nobody was asked: what `retry_for_s` bounds is the coordinator's absence.
            self._last_seen = time.monotonic()
            self._redial = self._loop.call_later(RETRY_SECONDS, self._dial)
            return
        self._data.settle()
        fields = {**self._machine.hello_fields(), "actor": self.actor, "data": self._data.addresses()}
        role = "actor"
        if self._worker is not None:
            role, fields["worker"] = "worker", self._worker
        welcomed = partial(self._welcomed, self._data.generation)
        dial(self._loop, self.coordinator, self._token, role, fields, welcomed, self._out_of_reach)

    def _out_of_reach(self, reason: str) -> None:
        silent = time.monotonic() - self._last_seen
        if silent > self._retry_for_s:
            self._failure = f"not joined at {self.coordinator} for {silent:.0f} s: {reason}"
            logger.error("%s: weight receiver gives up: %s", self.actor, self._failure)
            return
        self._redial = self._loop.call_later(RETRY_SECONDS, self._dial)

    def _welcomed(self, generation: int, connection: Connection, fields: Message) -> None:
        if self._data.missing() or self._data.generation != generation:
            # What the hello said of the workers is not so any more.
            connection.close("a worker was lost meanwhile")
            self._last_seen = time.monotonic()
            self._redial = self._loop.call_later(RETRY_SECONDS, self._dial)
            return
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
        self._loop.call_later(wire.HEARTBEAT_SECONDS, self._heartbeat)
        if self._control is None:
            return
        # The loop reads sockets before it runs timers: after a pause of this process, waiting answers have been seen.
        if time.monotonic() - self._heard_at > wire.SILENCE_SECONDS:
            self._control.close(f"the coordinator said nothing for {wire.SILENCE_SECONDS:g} s")
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
        elif kind == "relay":
            order = [message[name] for name in ("attempt", "actor", "version", "digest", "data")]
            self._execute(self._machine.relay(*order))
        elif kind == "release":
            self._execute(self._machine.release(message["attempt"]))
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
        try:
            self._data.layout(layout, layout_id, message, lambda: self._execute(self._machine.layout(layout_id)))
        except LayoutError as error:
            raise ProtocolError(str(error)) from error

    def _on_offer(self, message: Message) -> None:
        if self._data.current is None:
            raise ProtocolError("an offer came before the layout")
        try:
            offered = Manifest.from_json(message)
            offered.check_fits(*self._data.current)
        except LayoutError as error:
            raise ProtocolError(str(error)) from error
        if not self._survives("offer", offered.version):
            return
        attempt, base = message["attempt"], message.get("base")
        if self._worker is not None and message.get("poisoned"):
            # The leader's word: the actor as a whole serves nothing, whatever this part of it holds.
            self._machine.poisoned = True
        commands = self._machine.offer(
            attempt,
            offered.version,
            offered.digest,
            self._data.awaited(),
            None if base is None else (int(base[0]), str(base[1])),
            message.get("source"),
        )
        # What an older attempt still writes has to end before the first byte of this one may come.
        self._execute([command for command in commands if not isinstance(command, Send)])
        answers = [command.message for command in commands if isinstance(command, Send)]

        def answer(changes: Message) -> None:
            self._execute([Send({**one, **changes}) for one in answers])

        if self._machine.wants(attempt):
            self._reported_progress = 0
            self._data.begin(attempt, offered, message, lambda delta: answer({"base": delta}))
        else:
            answer({})

    def _report_progress(self) -> None:
        self._loop.call_later(PROGRESS_SECONDS, self._report_progress)
        if self._machine.state is not ReceiverState.RECEIVING:
            return
        received = self._data.progress_bytes
        if received > self._reported_progress:
            self._reported_progress = received
            self._execute([Send({"type": "progress", "attempt": self._machine.attempt, "bytes": received})])

    # Workers (see GroupOwner)

    def worker_lost(self, reason: str) -> None:
        """Leave; the actor joins again when all its workers are there."""
        if self._control is not None:
            self._control.close(reason)

    def part_declined(self, attempt: int, reason: str) -> None:
        """A worker cannot take the offered version now, so the actor cannot."""
        commands = self._machine.abort(attempt)
        if commands:
            self._execute([*commands, Send({"type": "decline", "attempt": attempt, "reason": reason})])

    def part_refused(self, attempt: int, reason: str) -> None:
        """What a worker received is not what was offered."""
        self._execute(self._machine.refuse(attempt, reason))

    def part_staged(self, attempt: int, worker: int) -> None:
        """A worker has everything; when all have, the actor has."""
        self._execute(self._machine.bucket(attempt, (worker, 0), True))
        self._execute(self._machine.staged(attempt))

    def relay_finished(self, attempt: int, error: str | None, shadow: bool = True) -> None:
        """All workers have sent their parts to another actor, or one cannot."""
        self._execute(self._machine.relay_finished(attempt, error, shadow))

    def tell(self, message: Message) -> None:
        """Pass a worker's message on to the coordinator."""
        self._execute([Send(message)])

    # Engine

    def _begin_apply(self, command: BeginApply) -> None:
        figures = {**self._data.figures(), "source": self._machine.source or "trainer"}

        def report(result: ApplyResult) -> None:
            self._loop.call_from_thread(
                lambda: self._apply_finished(command.attempt, result, {**figures, **result.figures})
            )

        def make() -> StagedVersion:
            return self._data.staged(command.attempt, self.epoch, command.version, command.digest)

        self._apply_thread = apply_on_thread(
            self.actor, command.version, make, self._apply, self._data.check_applied, report
        )

    def _apply_finished(self, attempt: int, result: ApplyResult, figures: Message) -> None:
        error, refused = result.error, result.refused
        if refused and self._data.touched():
            error, refused = f"refused after a part of it was applied: {error}", False
        commands = self._machine.apply_finished(attempt, error, figures, refused)
        self._applied += error is None
        self._execute(commands)
        if self._control is None:
            self._redial_unless_applying()
