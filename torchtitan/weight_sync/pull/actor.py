"""An actor's weights: a thread that pulls versions into staging memory and has the engine apply them.

    actor = Actor("10.0.0.1:5000", "actor-0", epoch, key, apply=engine_apply)
    actor.start()

`apply(staged)` is called on a thread of its own, once per version. It returns only after the engine has copied the new
weights (between two decode steps) and serves them, and may return the seconds that generation paused, or figures by
name (`pause_s`, `drain_s`). Raising WeightsRefused means that the engine is as it was; anything else that it may hold
half a version: the actor is poisoned until a version has been applied.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from torchtitan.distributed import device
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.checksums import checksum_function, reads_devices
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.manifest import Layout, LayoutError, Manifest
from torchtitan.weight_sync.needs import Needs, needed_buckets
from torchtitan.weight_sync.pull.delta import decode_into, element_bytes
from torchtitan.weight_sync.pull.fetching import Fetcher
from torchtitan.weight_sync.pull.handshake import ACTOR, Identity
from torchtitan.weight_sync.pull.puller import Puller, Served
from torchtitan.weight_sync.pull.relay import Relay
from torchtitan.weight_sync.pull.sockets import SocketRuntime
from torchtitan.weight_sync.pull.transfer import BucketKey
from torchtitan.weight_sync.staging import Proof, StagedVersion, Staging
from torchtitan.weight_sync.wire import Message

logger = logging.getLogger(__name__)

ApplyFunction = Callable[[StagedVersion], "float | Mapping[str, float] | None"]


@dataclass
class ActorStatus:
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
    """Why nothing is pulled any more, if so (the registry was out of reach for too long)"""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class StagingEngine:
    """Staging memory, and the engine's function that takes it from there."""

    def __init__(
        self,
        apply: ApplyFunction,
        boxes: Mapping[str, Box] | None,
        where: str,
        post: Callable[[Callable[[], None]], None],
    ):
        self._apply, self._boxes, self._where = apply, boxes, where
        self._staging: Staging | None = None
        self._fetcher = Fetcher(post)
        self.linked = self._fetcher.linked
        self._written = 0
        """How many buckets have been begun, which tells whether staging memory is still what it was"""

    def prepare(self, layout: Layout) -> Needs:
        """See arrivals.Engine."""
        needs = None if self._boxes is None else needed_buckets(layout, self._boxes)
        try:
            # Only checksums of kind "sum" are computed on a device.
            where = self._where if reads_devices(layout.checksum) else "cpu"
            self._staging, self._fetcher.where = Staging(layout, self._boxes, where), torch.device(where)
        except (OSError, RuntimeError, MemoryError) as error:
            raise LayoutError(f"no staging memory of {layout.total_bytes} bytes: {error}") from error
        return needs

    def bucket(self, key: BucketKey) -> memoryview:
        """See arrivals.Engine."""
        self._written += 1
        return self.memory(key)

    def memory(self, key: BucketKey) -> memoryview:
        """A bucket of staging memory, to be read."""
        assert self._staging is not None
        area = self._staging.bucket(key)
        assert isinstance(area, memoryview)
        return area

    def fetch(self, key: BucketKey, reference: Message) -> str:
        """See arrivals.Engine."""
        assert self._staging is not None
        self._written += 1
        target = self._staging.bucket(key)
        self._fetcher.copy(reference, target)
        return checksum_function(self._staging.layout.checksum)(target)

    def patch(self, key: BucketKey, delta: memoryview) -> str:
        """See arrivals.Engine."""
        assert self._staging is not None
        target = self.bucket(key)
        decode_into(target, delta, element_bytes(self._staging.layout))
        return checksum_function(self._staging.layout.checksum)(target)

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See arrivals.Engine."""
        staging, written, begun = self._staging, self._written, time.monotonic()
        assert staging is not None
        proof = None
        if self._boxes is None:
            proof = Proof(staging.layout, manifest.checksums, lambda: self._written == written)
        staged = StagedVersion(manifest.epoch, manifest.version, manifest.digest, staging.assemble(), proof=proof)
        cost = self._apply(staged)
        named = cost if isinstance(cost, Mapping) else {} if cost is None else {"pause_s": cost}
        return {"pause_s": time.monotonic() - begun, **{str(name): float(value) for name, value in named.items()}}


class Actor:
    """registry: `host:port`; name: unique; key: role_key of the two. boxes: parameter name -> the part that is wanted
    (None: all of everything). served: what the engine holds already. The registry may be out of reach for retry_for_s.
    relay_host: address at which it passes versions on to other actors, where the trainer wants that; empty: nowhere. Of
    a wildcard, others are told the address by which the registry is reached.
    where: the device of staging memory (ipc, nccl).
    """

    def __init__(
        self,
        registry: str,
        name: str,
        epoch: str,
        key: str,
        apply: ApplyFunction,
        *,
        boxes: Mapping[str, Box] | None = None,
        served: Served | None = None,
        retry_for_s: float = 60.0,
        progress_s: float = 5.0,
        relay_host: str = "",
        where: str = "cpu",
    ):
        wire.parse_address(registry)
        self.registry, self.name, self.epoch, self.key = registry, name, epoch, key
        self._runtime = SocketRuntime(lambda: device.use(torch.device(where)))
        self._failure = ""
        engine, relay, address = StagingEngine(apply, boxes, where, self._runtime.post), None, ""
        self._listener: socket.socket | None = None
        if relay_host and boxes is None:
            family = socket.AF_INET6 if ":" in relay_host else socket.AF_INET
            self._listener = socket.create_server((relay_host, 0), family=family)
            address = wire.format_address(reachable_host(relay_host, registry), self._listener.getsockname()[1])
            relay = Relay(self._runtime, epoch, engine.memory)
        self._relay = relay
        self.puller = Puller(
            self._runtime,
            registry,
            Identity(ACTOR, name, key),
            epoch,
            engine,
            instance=secrets.token_hex(8),
            served=served,
            retry_for_s=retry_for_s,
            progress_s=progress_s,
            relay=relay,
            relay_address=address,
        )
        self._thread = threading.Thread(target=self._run, name=f"weights-{name}", daemon=True)

    def start(self) -> None:
        """Begin to pull in a background thread."""
        self._thread.start()

    @property
    def served(self) -> Served | None:
        """The version that the engine holds; None before the first and after a failed apply."""
        return self.puller.serving

    def found_torn(self, version: int, reason: str) -> None:
        """The engine does not hold `version` after all: it serves nothing until a version has been applied."""
        self._runtime.loop.call_from_thread(lambda: self.puller.found_torn(version, reason))

    @property
    def connected(self) -> bool:
        """Whether the registry is in reach."""
        return self._thread.is_alive() and self.puller.registry.connected

    def status(self) -> ActorStatus:
        """A snapshot for health routes and logs."""
        puller, served = self.puller, self.puller.serving
        return ActorStatus(
            state=puller.state,
            connected=self.connected,
            poisoned=puller.poisoned,
            epoch=None if served is None else served.epoch,
            version=None if served is None else served.version,
            digest=None if served is None else served.digest,
            versions_applied=puller.applied,
            versions_refused=puller.refused,
            failure=self._failure or puller.registry.failure or None,
        )

    def close(self, timeout: float = 5.0) -> None:
        """Stop pulling. Waits up to `timeout` seconds for the thread and for an apply that has begun: `served` tells
        what came of it."""
        deadline = time.monotonic() + timeout
        self._runtime.loop.call_from_thread(self.puller.close)
        self._runtime.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
        if not self._thread.is_alive():
            self._runtime.finish_work("apply", deadline)

    def _run(self) -> None:
        try:
            if self._relay is not None:
                self._relay.start(self._listener)
            self.puller.start()
            self._runtime.run()
        except Exception as error:
            self._failure = f"the thread that pulls weights has ended: {error!r}"
            logger.exception("%s: pulling weights has failed", self.name)


def reachable_host(host: str, peer: str) -> str:
    """What to say to others of a listener on `host`: that, or where it is a wildcard, the address by which `peer`
    (host:port) is reached."""
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
        address = wire.parse_address(peer)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # nothing is sent
            return str(probe.getsockname()[0])
    except (ValueError, OSError):
        return host
