"""The data port of one worker of an actor: buckets into staging memory, verified while they arrive.

What comes inline is hashed piece by piece while it is still in the cache; what is fetched or decoded is verified on a
thread, while others arrive.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import xxhash

from torchtitan.weight_sync import delta, faults
from torchtitan.weight_sync.bucket_stream import ANY_RANK, BucketStream, Frame
from torchtitan.weight_sync.checksums import checksum_function, reads_devices, streaming_checksum
from torchtitan.weight_sync.connection import listen
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.manifest import Layout, LayoutError, Manifest
from torchtitan.weight_sync.needs import Needs, all_keys, needed_buckets, needs_to_json
from torchtitan.weight_sync.relay import RelaySender
from torchtitan.weight_sync.senders import Senders
from torchtitan.weight_sync.staging import Proof, StagedVersion, Staging, copy_to_device
from torchtitan.weight_sync.states.receiver import BeginRelay, Command, ReceiverMachine, Send, Served
from torchtitan.weight_sync.transfer_figures import TransferFigures
from torchtitan.weight_sync.transports.base import Area, Delivery
from torchtitan.weight_sync.transports.link import Link
from torchtitan.weight_sync.wire import FULL, MAXIMUM_REFERENCE_BYTES, Message, ProtocolError

logger = logging.getLogger(__name__)


@dataclass
class _Incoming:
    """The attempt whose bytes are stored."""

    attempt: int
    manifest: Manifest
    placed: set[tuple[int, int]] = field(default_factory=set)
    streams: set[BucketStream] = field(default_factory=set)
    """Over which they came"""
    hashers: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Of the buckets that arrive inline"""
    figures: TransferFigures = field(default_factory=TransferFigures)


class Intake:
    """Receives what `machine` wants, and tells it about every bucket.

    execute: what to do with the machine's commands. address: (host to bind to, host to say). boxes: the parts of the
    parameters that this worker holds (None: everything). where: device of the staging memory, unless the senders' slots
    are on the host. All methods are for the loop's thread.
    """

    def __init__(
        self,
        loop: EventLoop,
        token: str,
        machine: ReceiverMachine,
        execute: Callable[[list[Command]], None],
        address: tuple[str, str],
        *,
        actor: str,
        worker: int = 0,
        boxes: Mapping[str, Box] | None = None,
        where: str = "cpu",
    ):
        self._loop = loop
        self._listener, self._address = listen(*address)
        self._senders = Senders(loop, self._listener, token, machine.epoch, actor, worker, self)
        self._relays = RelaySender(loop, token, machine.epoch, actor, worker, self._relay_finished)
        self._machine, self._execute = machine, execute
        self._actor, self._boxes, self._where = actor, boxes, where
        self._staged_on = "cpu"
        self.staging: Staging | None = None
        self.layout_id = ""
        self.needs: Needs = None
        self.element_bytes = 1
        self._checksum: Callable[[Any], str] = checksum_function("xxh3")
        self._incoming: _Incoming | None = None
        self._unfinished: Counter[int] = Counter()
        self._when_quiet: Callable[[], None] | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._verifier = threading.Thread(target=self._verify, name=f"weight-verifier-{actor}", daemon=True)

    def start(self) -> None:
        """Begin to accept connections."""
        self._senders.start()
        self._verifier.start()

    def close(self) -> None:
        """Close all sockets. The loop has ended."""
        self._senders.shut_down()
        self._relays.close()
        self._jobs.put(None)

    # What the receiver orders

    def missing(self) -> str:
        """Why the actor cannot join yet: nothing is ever missing."""
        return ""

    def addresses(self) -> list[str]:
        """Where couriers send to."""
        return [self._address]

    def parts(self) -> list[str]:
        """What is needed here: a worker may be served by another actor's whose part is equal."""
        needs = json.dumps(needs_to_json(self.needs), separators=(",", ":"))
        return [xxhash.xxh3_64_hexdigest(needs.encode())]

    def settle(self) -> None:
        """Before the actor (re)joins: there is nobody to agree with."""

    def layout(self, layout: Layout, layout_id: str, _message: Message, ready: Callable[[], None]) -> None:
        """Make staging memory for this layout, then call `ready`. Raises LayoutError for boxes that do not fit it."""
        if self.staging is None or layout_id != self.layout_id:
            self._make_staging(layout, layout_id)
        ready()

    @property
    def current(self) -> tuple[Layout, str] | None:
        """The layout that staging memory is for, and its id."""
        return None if self.staging is None else (self.staging.layout, self.layout_id)

    def _make_staging(self, layout: Layout, layout_id: str) -> None:
        self._senders.close("the layout changed")
        try:
            checksum = checksum_function(layout.checksum)
        except ValueError as error:
            raise LayoutError(str(error)) from error
        needs = None if self._boxes is None else needed_buckets(layout, self._boxes)
        staged_on = self._where if reads_devices(layout.checksum) else "cpu"
        try:
            staging = Staging(layout, self._boxes, staged_on)
        except (OSError, RuntimeError, MemoryError) as error:
            raise LayoutError(f"no staging memory of {layout.total_bytes} bytes on {staged_on}: {error}") from error
        self.staging, self.layout_id, self.needs = staging, layout_id, needs
        self._staged_on, self._checksum = staged_on, checksum
        self._senders.take(layout, self.needs, self._staged_on)
        self.element_bytes = delta.element_bytes(layout)

    def awaited(self) -> list[tuple[int, int]]:
        """The buckets that make up a version here."""
        assert self.staging is not None
        return all_keys(self.staging.layout, self.needs)

    def begin(self, attempt: int, manifest: Manifest, _message: Message, then: Callable[[bool], None]) -> None:
        """Make ready for an attempt's bytes, and call then(whether deltas can be applied): at once, or when nothing
        writes for an older one."""
        self._incoming = None

        def ready() -> None:
            if self._machine.wants(attempt):
                self._incoming = _Incoming(attempt, manifest)
                self._incoming.figures.begin = time.time()
                then(self._machine.delta)
                self._staged_if_whole()

        self._when_quiet = ready
        self._look_whether_quiet()

    def discard(self, attempt: int) -> None:
        """Nothing of this attempt is wanted any more. What fetches and verifies goes on for a moment."""
        if self._incoming is not None and self._incoming.attempt == attempt:
            self._incoming = None
        # Fetches are given up with their connection.
        self._senders.close("the attempt is over", attempt, fetching=bool(self._unfinished[attempt]))

    @property
    def generation(self) -> int:
        """Of the workers: there is one, and it stays."""
        return 0

    @property
    def progress_bytes(self) -> int:
        """Of the current attempt: those that have come and those that are verified, for either may take its time."""
        figures = TransferFigures() if self._incoming is None else self._incoming.figures
        return figures.received_bytes + figures.bytes_resulting

    def figures(self) -> Message:
        """Of the attempt that is or was received last."""
        return {} if self._incoming is None else self._incoming.figures.to_json()

    def begin_relay(self, order: BeginRelay, shadow: Served) -> None:
        """Send what is in staging memory to another actor."""
        assert self.staging is not None
        self._relays.begin(order, shadow.version, self.staging)

    def end_relay(self, attempt: int) -> None:
        """Nobody wants this relay any more."""
        self._relays.end(attempt)

    def _relay_finished(self, link: Link, delivery: Delivery, error: str | None) -> None:
        # A leader takes the second of the two for the end of this part, so why it failed goes first.
        self._execute([*self._machine.relay_finished(delivery.attempt, error), Send(link.sent(delivery))])

    def staged(self, attempt: int, epoch: str, version: int, digest: str) -> StagedVersion:
        """For the engine. May take a moment; for its thread."""
        assert self.staging is not None
        proof, incoming = None, self._incoming
        if self._boxes is None and incoming is not None and incoming.attempt == attempt:
            # A later offer that is accepted counts up before its first byte is stored.
            untouched = partial(self._is_highest, attempt)
            proof = Proof(self.staging.layout, incoming.manifest.checksums, untouched)
        return StagedVersion(epoch, version, digest, self.staging.tensors, proof=proof)

    def _is_highest(self, attempt: int) -> bool:
        return self._machine.highest_attempt == attempt

    def touched(self) -> bool:
        """Whether an engine that refuses has changed all the same: it says that it has not."""
        return False

    def check_applied(self) -> None:
        """After the engine has applied: its word is enough."""

    # Frames (see BucketSink)

    def place(self, stream: BucketStream, frame: Frame) -> memoryview | None:
        """Where a frame's payload goes: inline and whole into staging memory, anything else into memory of its own."""
        staging, incoming = self.staging, self._incoming
        if staging is None:
            raise ProtocolError("a bucket came before the layout")
        direct = stream.carrier.inline and frame.encoding == FULL
        limit = staging.layout.bucket_bytes if stream.carrier.inline else MAXIMUM_REFERENCE_BYTES
        if frame.length > limit:
            raise ProtocolError(f"a payload of {frame.length} bytes is longer than any may be")
        if incoming is None or frame.attempt != incoming.attempt or not self._machine.wants(frame.attempt):
            return None
        if frame.rank >= len(staging.layout.ranks) or frame.bucket >= staging.layout.bucket_count(frame.rank):
            raise ProtocolError(f"rank {frame.rank} has no bucket {frame.bucket}")
        if frame.key in incoming.placed or frame.key not in self._machine.missing:
            # Verified bytes are never written again: what is applied is what was checked.
            raise ProtocolError(f"bucket {frame.bucket} of rank {frame.rank} was sent twice, or not wanted")
        if frame.encoding != FULL and not (self._machine.delta and stream.carrier.inline):
            raise ProtocolError("a delta came that nobody can apply")
        area = staging.bucket(frame.key)
        if direct and frame.length != len(area):
            raise ProtocolError(
                f"bucket {frame.bucket} of rank {frame.rank} has {frame.length} bytes instead of {len(area)}"
            )
        incoming.placed.add(frame.key)
        incoming.streams.add(stream)
        if direct and isinstance(area, memoryview):
            incoming.hashers[frame.key] = streaming_checksum(staging.layout.checksum)
            return area
        return memoryview(bytearray(frame.length))

    def moved(self, frame: Frame, piece: memoryview) -> None:
        """Progress."""
        incoming = self._incoming
        if incoming is None or frame.attempt != incoming.attempt:
            return
        incoming.figures.received_bytes += len(piece)
        hasher = incoming.hashers.get(frame.key)
        if hasher is not None:
            begun = time.monotonic()
            hasher.update(piece)
            incoming.figures.verify_s += time.monotonic() - begun

    def _fetched_bytes(self, attempt: int, count: int) -> None:
        if self._incoming is not None and attempt == self._incoming.attempt:
            self._incoming.figures.received_bytes += count

    def arrived(self, stream: BucketStream, frame: Frame, payload: memoryview) -> None:
        """A payload is whole: fetch what it refers to, then have it verified."""
        staging, incoming = self.staging, self._incoming
        if staging is None or incoming is None or frame.attempt != incoming.attempt:
            return
        version = incoming.manifest.version
        asked = faults.at("receive", version=version, actor=self._actor, rank=frame.rank, bucket=frame.bucket)
        if "drop" in asked:
            return
        self._unfinished[frame.attempt] += 1
        area = staging.bucket(frame.key)
        expected = incoming.manifest.checksums[frame.rank][frame.bucket]
        hasher = incoming.hashers.pop(frame.key, None)
        if hasher is not None and not asked:
            error = "" if hasher.hexdigest() == expected else "checksum differs"
            self._loop.call_from_thread(partial(self._checked, stream, frame, error, 0.0))
            return
        check = partial(self._check, incoming, stream, frame, payload, area, expected, "corrupt" in asked)
        if stream.carrier.inline:
            self._jobs.put(check)
            return

        def fetched(error: str | None) -> None:
            if error is None:
                fetched_bytes = len(area) - frame.length  # the reference itself has been counted
                self._loop.call_from_thread(partial(self._fetched_bytes, frame.attempt, fetched_bytes))
                self._jobs.put(check)
            else:
                self._loop.call_from_thread(partial(self._checked, stream, frame, error, 0.0))

        stream.carrier.fetch(bytes(payload), area, fetched)

    def lost(self, stream: BucketStream, reason: str) -> None:
        """A sender's connection is over."""
        self._senders.gone(stream)
        frame, incoming = stream.frame, self._incoming
        stream.frame = None
        if incoming is None or (frame is not None and frame.attempt != incoming.attempt):
            return
        # A sender sends an attempt's buckets over one connection: what has not come over it does not come any more.
        never = self._machine.missing - incoming.placed
        if frame is not None or (
            stream in incoming.streams and any(stream.rank in (ANY_RANK, rank) for rank, _ in never)
        ):
            sender = "a peer" if stream.rank == ANY_RANK else f"rank {stream.rank}"
            self._execute(self._machine.refuse(incoming.attempt, f"connection of {sender} lost: {reason}"))

    # Verifying

    def _verify(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _check(
        self,
        incoming: _Incoming,
        stream: BucketStream,
        frame: Frame,
        payload: memoryview,
        area: Area,
        expected: str,
        corrupt: bool,
    ) -> None:
        """On the verifying thread."""
        if incoming is not self._incoming:
            # Its attempt is over, and the next one waits until nothing writes any more.
            self._loop.call_from_thread(partial(self._checked, stream, frame, "", 0.0))
            return
        begun = time.monotonic()
        error = ""
        try:
            if stream.carrier.inline and frame.encoding != FULL:
                assert isinstance(area, memoryview)
                delta.decode_into(area, frame.encoding, payload, self.element_bytes)
            elif stream.carrier.inline and not isinstance(area, memoryview):
                copy_to_device(area, payload)
            if corrupt:
                area[len(area) // 2] = int(area[len(area) // 2]) ^ 0x10
            if self._checksum(area) != expected:
                error = "checksum differs"
        except ProtocolError as failure:
            error = str(failure)
        except Exception as failure:
            # The attempt ends with it, and its sender is told; the thread serves the next one.
            logger.exception("%s: verifying a bucket failed", self._actor)
            error = repr(failure)
        self._loop.call_from_thread(partial(self._checked, stream, frame, error, time.monotonic() - begun))

    def _checked(self, stream: BucketStream, frame: Frame, error: str, seconds: float) -> None:
        self._unfinished[frame.attempt] -= 1
        if not self._unfinished[frame.attempt]:
            del self._unfinished[frame.attempt]
        incoming = self._incoming
        if incoming is None or incoming.attempt != frame.attempt or not self._machine.wants(frame.attempt):
            self._look_whether_quiet()
            return
        if error and error != "checksum differs":
            reason = f"bucket {frame.bucket} of {_sender(stream, frame)}: {error}"
            self._execute(self._machine.refuse(frame.attempt, reason))
            return
        commands = self._machine.bucket(frame.attempt, frame.key, not error)
        if not error:
            assert self.staging is not None
            self._count(incoming.figures, stream, frame, len(self.staging.bucket(frame.key)), seconds)
            if stream.carrier.acknowledges:
                stream.acknowledge(frame)
        self._execute(commands)
        self._staged_if_whole()

    def _count(self, figures: TransferFigures, stream: BucketStream, frame: Frame, size: int, seconds: float) -> None:
        figures.verify_s += seconds
        figures.bytes_resulting += size
        if frame.encoding != FULL:
            figures.bytes_delta += frame.length
        elif stream.rank == ANY_RANK:
            figures.bytes_relayed += size
        else:
            figures.bytes_full += size

    def _staged_if_whole(self) -> None:
        incoming = self._incoming
        if incoming is not None and self._machine.wants(incoming.attempt) and not self._machine.missing:
            incoming.figures.end = time.time()
            self._execute(self._machine.staged(incoming.attempt))

    def _look_whether_quiet(self) -> None:
        if not self._unfinished and self._when_quiet is not None:
            ready, self._when_quiet = self._when_quiet, None
            ready()


def _sender(stream: BucketStream, frame: Frame) -> str:
    return "a peer" if stream.rank == ANY_RANK else f"rank {frame.rank}"
