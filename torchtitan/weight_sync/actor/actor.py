"""An actor's weights: a thread pulls versions into staging memory and has the engine apply them.

    actor = SyncActor("10.0.0.1:5000", "actor-0", epoch, key, apply=engine_apply)
    actor.start()

`apply(staged)` is called once per version, on its own thread. It returns only after the engine has copied the new
weights (between two decode steps) and serves them. It may return the seconds for which generation paused, or figures by
name (`pause_s`, `drain_s`). WeightsRefused means that the engine is unchanged. After any other exception the engine may
hold half a version: the actor is poisoned until a version has been applied.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import xxhash

from torchtitan.config.transports import TRANSPORTS
from torchtitan.distributed import device
from torchtitan.utils.addresses import listen_at, reachable_host
from torchtitan.weight_sync.actor.group import NOTHING, ApplyFunction, Leader, LeadingEngine, WorkerPuller, as_figures
from torchtitan.weight_sync.actor.puller import Puller, Served
from torchtitan.weight_sync.memory.delta import decode_into, element_bytes
from torchtitan.weight_sync.memory.manifest import (
    BucketKey,
    Layout,
    LayoutError,
    Manifest,
    WeightsRefused,
    checksum_function,
)
from torchtitan.weight_sync.memory.slots import open_shared
from torchtitan.weight_sync.memory.staging import EngineSets, ExpectedChecksums, StagedVersion, Staging, why_apart
from torchtitan.weight_sync.transports.bucket_server import Relay
from torchtitan.weight_sync.transports.transport import Transport, load_transport
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import ACTOR, WORKER, Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError
from torchtitan.weight_sync.wire.sockets import SocketRuntime

logger = logging.getLogger(__name__)


class StagingEngine:
    """Fills staging memory, and calls the engine's function that takes weights from it. post(function): runs it on the
    loop's thread. number: of a worker that pulls only its share of every version, into memory that all workers of the
    actor share. engine: its sets of tensors are received into if the layout and the transport allow it."""

    min_piece_bytes = 8192
    """The engine's tensors are received into if a version's pieces in them have so many bytes on average: receiving and
    hashing a GB took .28 s of a processor in pieces of 16 kB and more, .34 in pieces of 4 kB, and .63 of 1 kB"""

    _layout: Layout
    """Set by prepare()"""

    def __init__(
        self,
        apply: ApplyFunction,
        where: str,
        post: Callable[[Callable[[], None]], None],
        number: int | None = None,
        engine: EngineSets | None = None,
    ):
        self._apply, self._where, self._post, self._number = apply, where, post, number
        self._engine = engine
        self._staging: Staging | None = None
        """What is being filled"""
        self._stagings: list[Staging] = []
        """Those of the engine's sets that versions were received into"""
        self._live: Staging | None = None
        """Of the set that the engine computes with, if a version was received into it"""
        self._device = torch.device("cpu")
        """The device of staging memory"""
        self._transports = [load_transport(name)() for name in TRANSPORTS]
        self._written = 0
        """How many bucket writes have begun. If it has not changed, neither has staging memory."""

    @property
    def held(self) -> dict[BucketKey, int]:
        """See transfer.TransferTarget."""
        return self._filled.held

    @property
    def _filled(self) -> Staging:
        if self._staging is None:
            raise WeightsRefused("the engine has given its memory back")
        return self._staging

    @property
    def held_live(self) -> Mapping[BucketKey, int]:
        """See transfer.TransferTarget."""
        return {} if self._live is None else self._live.held

    def prepare(self, layout: Layout, message: Message) -> Collection[BucketKey]:
        """See transfer.TransferTarget."""
        self._layout = layout
        if self._engine is not None and (reason := self._why_apart(self._engine, message)):
            logger.info("versions are received into memory of their own and copied: %s", reason)
            self._engine = None
        if self._engine is not None:
            return layout.bucket_keys()
        # The leader says how to open the shared memory, and how many workers there are.
        shared: Message = {} if self._number is None else message["staging"]
        try:
            where = self._where if layout.reads_devices else "cpu"
            memory = open_shared(shared, writable=True) if shared else None
            self._staging, self._device = Staging(layout, where, memory), torch.device(where)
        except (OSError, RuntimeError, MemoryError) as error:
            raise LayoutError(f"no staging memory of {layout.total_bytes} bytes: {error}") from error
        if self._number is None:
            return layout.bucket_keys()
        needs, count = list[BucketKey](), shared["workers"]
        for rank in range(len(layout.ranks)):
            # The shares rotate with the rank, so that even a few buckets per rank spread over the workers.
            buckets, part = layout.bucket_count(rank), (self._number + rank) % count
            needs += [(rank, bucket) for bucket in range(buckets * part // count, buckets * (part + 1) // count)]
        return needs

    def _why_apart(self, engine: EngineSets, message: Message) -> str:
        if not message.get("over_channel", False):
            return "the transport fills whole buckets"
        return why_apart(self._layout, engine.outlines, self.min_piece_bytes)

    def choose_memory(self) -> bool:
        """See transfer.TransferTarget."""
        if self._engine is None:
            return True
        sets = self._engine.sets()
        if sets is None:
            return False
        self._stagings = [known for known in self._stagings if any(known.engine_set is held for held in sets)]
        by_set = {id(known.engine_set): known for known in self._stagings}
        if id(sets.idle) not in by_set:
            self._stagings.append(Staging(self._layout, engine_set=sets.idle))
            by_set[id(sets.idle)] = self._stagings[-1]
        self._staging, self._live = by_set[id(sets.idle)], by_set.get(id(sets.live))
        return True

    def release(self) -> None:
        """See transfer.TransferTarget."""
        if self._engine is not None:
            self._staging, self._stagings, self._live = None, [], None

    def pieces(self, key: BucketKey) -> list[memoryview]:
        """See transfer.TransferTarget."""
        self._written += 1
        return self._filled.host_pieces(key)

    def memory(self, key: BucketKey) -> memoryview:
        """Return a bucket of staging memory, for reading."""
        area = self._filled.bucket(key)
        assert isinstance(area, memoryview)
        return area

    def fetch(self, key: BucketKey, reference: Message) -> str:
        """See transfer.TransferTarget."""
        self._written += 1
        target = self._filled.bucket(key)
        self.copy(reference, target)
        return checksum_function(self._layout.checksum)(target)

    def linked(self, channel: Channel, message: Message) -> None:
        """See transfer.TransferTarget."""
        self._transport_of(message).linked(channel, message, self._post, self._device)

    def _transport_of(self, message: Message) -> Transport:
        for transport in self._transports:
            if transport.reference and transport.reference in message:
                return transport
        raise ProtocolError(f"no transport here knows what has the fields {', '.join(sorted(message)) or 'none'}")

    def copy(self, reference: Any, target: memoryview | torch.Tensor) -> None:
        """See Transport.fetch."""
        if not isinstance(reference, dict):
            raise ProtocolError("a reference is an object")
        self._transport_of(reference).fetch(reference, target)

    def patch(self, key: BucketKey, delta: memoryview, in_place: bool) -> str:
        """See transfer.TransferTarget."""
        pieces = self.pieces(key)
        if not in_place:
            assert self._live is not None
            for target, source in zip(pieces, self._live.host_pieces(key), strict=True):
                target[:] = source
        decode_into(pieces, delta, element_bytes(self._layout))
        # The kind is xxh3, see Puller.payload_target().
        hasher = xxhash.xxh3_128()
        for piece in pieces:
            hasher.update(piece)
        return hasher.hexdigest()

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See transfer.TransferTarget."""
        staging, written, started = self._filled, self._written, time.monotonic()
        proof = ExpectedChecksums(staging.layout, manifest.checksum_tables, lambda: self._written == written)
        tensors = staging.tensors.offered()
        staged = StagedVersion(manifest.epoch, manifest.version, manifest.digest, tensors, proof=proof)
        try:
            return as_figures(self._apply(staged), started)
        finally:
            # A call that has failed may go on in the engine's thread, and the memory takes the next version.
            tensors.withdraw()


class _PullerThread:
    """Runs a puller in its own thread. A subclass makes the puller."""

    puller: Puller

    def __init__(self, name: str, epoch: str, where: str):
        self.name, self.epoch = name, epoch
        self._runtime = SocketRuntime(lambda: device.use(torch.device(where)))
        self._listener: socket.socket | None = None
        """Where others connect to the puller"""

    def start(self) -> None:
        """Begin to pull in a background thread."""
        self._runtime.start(f"puller of {self.name}", lambda: self.puller.start(self._listener))

    @property
    def served(self) -> Served | None:
        """The version that the engine holds; None before the first and after a failed apply."""
        return self.puller.serving

    def poison_version(self, version: int, reason: str) -> None:
        """Poison the actor if it serves or applies `version`: it serves nothing until a version has been applied."""
        self._runtime.post(lambda: self.puller.poison_version(version, reason))

    def release_memory(self) -> None:
        """Let go of the engine's memory soon, because the engine gives it back."""
        self._runtime.post(self.puller.release)

    def status(self) -> dict[str, Any]:
        """Return what a health route shows. connected: whether the registry is connected; failure: why pulling has
        stopped for good, if it has, for example because the registry was unreachable for too long."""
        puller, served = self.puller, self.puller.serving
        return {
            "state": puller.state,
            "connected": self._runtime.runs and puller.registry.connected,
            **(dict.fromkeys(Served._fields) if served is None else served._asdict()),
            "failure": self._runtime.failure or puller.registry.failure or None,
        }

    def close(self, timeout: float = 5.0) -> None:
        """Stop pulling. Waits up to `timeout` seconds for the thread and for an apply that has begun; `served` holds
        the outcome."""
        deadline = time.monotonic() + timeout
        # At once, even if the thread is busy for longer: the memory that it would choose is the next connection's then.
        self.puller.begin_no_more()
        self._runtime.post(self.puller.close)
        if self._runtime.end(timeout):
            self._runtime.finish_work("apply", deadline)


class SyncActor(_PullerThread):
    """An actor that pulls versions.

    registry: `host:port`; name: unique; key: role_key of the actor's role and name. served: what the engine already
    holds. relay_host: the address on which it relays versions to other actors, if the trainer wants that; empty: it
    relays nothing. For a wildcard, others are told the local address that reaches the registry. where: the device of
    staging memory (ipc, nccl). sets: versions are received into the idle one of the engine's sets of tensors, if the
    layout and the transport allow it and nothing is relayed.

    workers > 0: the number of workers that hold the weights; they connect to `workers_address` (see Worker). `apply`
    then calls the staged version's apply_on_workers() while the engine is paused. All workers must answer within
    workers_timeout_s.
    """

    def __init__(
        self,
        registry: str,
        name: str,
        epoch: str,
        key: str,
        apply: ApplyFunction,
        *,
        served: Served | None = None,
        relay_host: str = "",
        where: str = "cpu",
        sets: EngineSets | None = None,
        workers: int = 0,
        workers_timeout_s: float = 60.0,
    ):
        wire.parse_address(registry)
        super().__init__(name, epoch, where)
        self.registry, self.key = registry, key
        self.workers_address = ""
        self._leader: Leader | None = None
        names = self._runtime, registry, Identity(ACTOR, name, key), epoch
        options: dict[str, Any] = {"served": served}
        if workers:
            leading = LeadingEngine(apply, self._runtime)
            self._listener, self.workers_address = _listen("127.0.0.1", registry)
            self.puller = self._leader = leading.leader = Leader(
                *names, leading, count=workers, secret=key, apply_timeout_s=workers_timeout_s, **options
            )
            return
        if relay_host and sets is not None:
            logger.info("versions are received into memory of their own and copied: relays read whole buckets")
            sets = None
        engine = StagingEngine(apply, where, self._runtime.post, engine=sets)
        if relay_host:
            self._listener, options["relay_address"] = _listen(relay_host, registry)
            options["relay"] = Relay(self._runtime, epoch, engine.memory, key)
        self.puller = Puller(*names, engine, **options)

    def verified(self) -> dict[str, Any] | None:
        """What all workers have found of the versions in use: the last whole one, and how many were found whole; None
        where not all have told."""
        return None if self._leader is None else self._leader.verified()


class Worker(_PullerThread):
    """Worker `number` of an actor. It calls `apply` when its leader says so.

    leader: `host:port`, the actor's workers_address; name, key: the actor's. shares: every worker pulls an equal share
    of the version into host memory that all workers share, and reads the whole version there. Otherwise it pulls the
    whole version into its own staging memory at `where`.
    """

    def __init__(
        self,
        leader: str,
        name: str,
        number: int,
        epoch: str,
        key: str,
        apply: ApplyFunction,
        *,
        shares: bool = True,
        served: Served | None = None,
        where: str = "cpu",
    ):
        super().__init__(f"{name}-worker-{number}", epoch, where)
        engine = StagingEngine(apply, where, self._runtime.post, number if shares else None)
        names = self._runtime, leader, Identity.of(key, WORKER, str(number)), epoch
        self.puller = self._worker = WorkerPuller(*names, engine, served=served, puller=Identity(ACTOR, name, key))

    def tell_verified(self, version: int | None, matched: int, mismatched: int, unfinished: int) -> None:
        """Tell the leader how many versions were found whole in use, and which one was the last; see
        inference/serving/weight_verification.py."""
        found = {"version": NOTHING if version is None else version, "matched": matched}
        found |= {"mismatched": mismatched, "unfinished": unfinished}
        self._runtime.post(lambda: self._worker.tell_verified(found))


def _listen(host: str, peer: str) -> tuple[socket.socket, str]:
    """Return a listener on any free port, and the address that others are told."""
    listener = listen_at(host, 0)
    reachable = reachable_host(host, wire.parse_address(peer)[0])
    return listener, wire.format_address(reachable, listener.getsockname()[1])
