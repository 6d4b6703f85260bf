"""An actor's weights: a thread that pulls versions into staging memory and has the engine apply them.

    actor = Actor("10.0.0.1:5000", "actor-0", epoch, key, apply=engine_apply)
    actor.start()

`apply(staged)` is called on a thread of its own, once per version. It returns only after the engine has copied the new
weights (between two decode steps) and serves them, and may return the seconds that generation paused, or figures by
name (`pause_s`, `drain_s`). Raising WeightsRefused means that the engine is as it was; anything else that it may hold
half a version: the actor is poisoned until a version has been applied.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from torchtitan.distributed import device
from torchtitan.errors import UserError
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.bucket_server import Relay
from torchtitan.weight_sync.delta import decode_into, element_bytes
from torchtitan.weight_sync.device_slots import memory_tensor, open_device_memory
from torchtitan.weight_sync.disk import read_file
from torchtitan.weight_sync.group import ApplyFunction, Leader, LeadingEngine, LedPuller, in_figures
from torchtitan.weight_sync.handshake import ACTOR, WORKER, Identity
from torchtitan.weight_sync.manifest import BucketKey, Layout, LayoutError, Manifest, checksum_function, reads_devices
from torchtitan.weight_sync.nccl import ReceivingLink
from torchtitan.weight_sync.puller import Puller, Served
from torchtitan.weight_sync.slots import NamedMemory, open_shared
from torchtitan.weight_sync.sockets import SocketRuntime
from torchtitan.weight_sync.staging import Proof, StagedVersion, Staging
from torchtitan.weight_sync.wire import Channel, Message, ProtocolError

logger = logging.getLogger(__name__)


class StagingEngine:
    """Staging memory, what fills it, and the engine's function that takes it from there. post(): has a function run on
    the loop's thread. number: of a worker that pulls its share of every version, into memory that all workers of the
    actor share; the others are not asked for."""

    _staging: Staging
    """From prepare() on"""

    def __init__(
        self, apply: ApplyFunction, where: str, post: Callable[[Callable[[], None]], None], number: int | None = None
    ):
        self._apply, self._where, self._post, self._number = apply, where, post, number
        self._device = torch.device("cpu")
        """Of staging memory"""
        self._shared = NamedMemory(lambda memory: memoryview(open_shared(memory)))
        self._on_devices = NamedMemory(open_device_memory)
        self._links: dict[str, ReceivingLink] = {}
        self._written = 0
        """How many buckets have been begun, which tells whether staging memory is still what it was"""

    def prepare(self, layout: Layout, message: Message) -> Collection[BucketKey]:
        """See transfer.Engine."""
        # What the leader says of that memory: the reference that opens it, and how many workers there are.
        shared: Message = {} if self._number is None else message["staging"]
        try:
            # Only checksums of kind "sum" are computed on a device.
            where = self._where if reads_devices(layout.checksum) else "cpu"
            memory = open_shared(shared, writable=True) if shared else None
            self._staging, self._device = Staging(layout, where, memory), torch.device(where)
        except (OSError, RuntimeError, MemoryError) as error:
            raise LayoutError(f"no staging memory of {layout.total_bytes} bytes: {error}") from error
        if self._number is None:
            return layout.bucket_keys()
        needs, count = list[BucketKey](), shared["workers"]
        for rank in range(len(layout.ranks)):
            # Another share of the next rank, so that few buckets do not all fall to one.
            buckets, part = layout.bucket_count(rank), (self._number + rank) % count
            needs += [(rank, bucket) for bucket in range(buckets * part // count, buckets * (part + 1) // count)]
        return needs

    def bucket(self, key: BucketKey) -> memoryview:
        """See transfer.Engine."""
        self._written += 1
        return self.memory(key)

    def memory(self, key: BucketKey) -> memoryview:
        """A bucket of staging memory, to be read."""
        area = self._staging.bucket(key)
        assert isinstance(area, memoryview)
        return area

    def fetch(self, key: BucketKey, reference: Message) -> str:
        """See transfer.Engine."""
        self._written += 1
        target = self._staging.bucket(key)
        self.copy(reference, target)
        return checksum_function(self._staging.layout.checksum)(target)

    def linked(self, channel: Channel, message: Message) -> None:
        """The other end of a communicator wants to meet, over this channel: its link lives as long as that does. On the
        loop's thread. Raises ProtocolError."""
        name = message["link"]
        if name not in self._links:
            link = self._links[name] = ReceivingLink(name, self._post, channel, self._device)
            tell = channel.on_close

            def closed(channel: Channel, reason: str) -> None:
                del self._links[name]
                link.close()
                tell(channel, reason)

            channel.on_close = closed
        self._links[name].heard(message)

    def copy(self, reference: Any, target: memoryview | torch.Tensor) -> None:
        """Fill `target` with what a reference leads to. Blocks.

        Raises ConnectionError where the way is broken, and its channel is closed then; ProtocolError for what is no
        reference; whatever the system raises for memory that does not open.
        """
        if not isinstance(reference, dict):
            raise ProtocolError("a reference is an object")
        if "link" in reference:
            link = self._links.get(reference["link"])
            if link is None:
                raise ConnectionError("the channel of this reference is over")
            link.fetch(reference, memory_tensor(target))
        elif isinstance(reference.get("memory"), dict) and "storage" in reference["memory"]:
            memory = self._on_devices.part(reference, len(target))
            with device.in_background(memory.device):
                memory_tensor(target).copy_(memory, non_blocking=True)
                device.finish_background(memory.device)
        elif isinstance(target, memoryview) and "file" in reference:
            read_file(reference, target)
        elif isinstance(target, memoryview):
            target[:] = self._shared.part(reference, len(target))
        else:
            raise ProtocolError("the trainer's slots are in host memory, this actor's staging memory is not")

    def patch(self, key: BucketKey, delta: memoryview) -> str:
        """See transfer.Engine."""
        target = self.bucket(key)
        decode_into(target, delta, element_bytes(self._staging.layout))
        return checksum_function(self._staging.layout.checksum)(target)

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See transfer.Engine."""
        staging, written, begun = self._staging, self._written, time.monotonic()
        proof = Proof(staging.layout, manifest.checksums, lambda: self._written == written)
        staged = StagedVersion(manifest.epoch, manifest.version, manifest.digest, staging.tensors, proof=proof)
        return in_figures(self._apply(staged), begun)


class _Pulling:
    """A puller in a thread of its own. A subclass makes the puller."""

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

    def found_torn(self, version: int, reason: str) -> None:
        """The engine does not hold `version` after all: it serves nothing until a version has been applied."""
        self._runtime.post(lambda: self.puller.found_torn(version, reason))

    def status(self) -> dict[str, Any]:
        """What a health route shows. connected: whether the registry is in reach; failure: why nothing is pulled any
        more, if so, such as a registry that was out of reach for too long."""
        puller, served = self.puller, self.puller.serving
        return {
            "state": puller.state,
            "connected": self._runtime.runs and puller.registry.connected,
            "poisoned": puller.poisoned,
            **(dict.fromkeys(Served._fields) if served is None else served._asdict()),
            "failure": self._runtime.failure or puller.registry.failure or None,
        }

    def close(self, timeout: float = 5.0) -> None:
        """Stop pulling. Waits up to `timeout` seconds for the thread and for an apply that has begun: `served` tells
        what came of it."""
        deadline = time.monotonic() + timeout
        self._runtime.post(self.puller.close)
        if self._runtime.end(timeout):
            self._runtime.finish_work("apply", deadline)


class Actor(_Pulling):
    """registry: `host:port`; name: unique; key: role_key of the two. served: what the engine holds already.
    relay_host: address at which it passes versions on to other actors, where the trainer wants that; empty: nowhere. Of
    a wildcard, others are told the address by which the registry is reached. where: the device of staging memory (ipc,
    nccl).

    workers > 0: so many workers hold the weights, which connect to `workers_address` (see Worker).
    `apply` then calls the staged version's apply_on_workers() while the engine stands still; all have to answer within
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
        workers: int = 0,
        workers_timeout_s: float = 60.0,
    ):
        wire.parse_address(registry)
        super().__init__(name, epoch, where)
        self.registry, self.key = registry, key
        self.workers_address = ""
        names = self._runtime, registry, Identity(ACTOR, name, key), epoch
        options: dict[str, Any] = {"served": served}
        if workers:
            leading = LeadingEngine(apply, self._runtime)
            self._listener, self.workers_address = _listen("127.0.0.1", registry)
            self.puller = leading.leader = Leader(
                *names, leading, count=workers, secret=key, apply_timeout_s=workers_timeout_s, **options
            )
            return
        engine = StagingEngine(apply, where, self._runtime.post)
        if relay_host:
            self._listener, options["relay_address"] = _listen(relay_host, registry)
            options["relay"] = Relay(self._runtime, epoch, engine.memory, key)
        self.puller = Puller(*names, engine, **options)


class Worker(_Pulling):
    """Worker `number` of an actor: has `apply` called when its leader says so.

    leader: `host:port`, the actor's workers_address; name, key: of the actor. shares: every worker pulls an equal share
    of the version into host memory that all of them share, and sees the whole. Otherwise it pulls all of it into
    staging memory of its own at `where`.
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
        self.puller = LedPuller(*names, engine, served=served, puller=Identity(ACTOR, name, key))


def _listen(host: str, peer: str) -> tuple[socket.socket, str]:
    """A listener at any port, and what others are told of it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    return listener, wire.format_address(reachable_host(host, peer), listener.getsockname()[1])


def reachable_host(host: str, peer: str) -> str:
    """What to say to others of a listener on `host`: that, or where it is a wildcard, the address by which `peer`
    (host:port) is reached."""
    with contextlib.suppress(ValueError, UserError):  # a name, or there is no way to the peer
        if ipaddress.ip_address(host).is_unspecified:
            return device.address_towards(wire.parse_address(peer)[0])
    return host
