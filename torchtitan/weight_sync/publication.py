"""A rank's whole side of the weight synchronisation: its publisher, its shard server, and on rank 0 the registry and
the view of the actors that it gives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from torchtitan.config.derived import ON_DEVICE
from torchtitan.config.job_config import WeightSync
from torchtitan.distributed.placement import StackPart
from torchtitan.errors import UserError
from torchtitan.weight_sync.boundary import Boundary
from torchtitan.weight_sync.catalogue import FolderOwner
from torchtitan.weight_sync.device_slots import DeviceSlots
from torchtitan.weight_sync.handshake import TRAINER, Identity
from torchtitan.weight_sync.publisher import Publisher
from torchtitan.weight_sync.registry_client import RegistryClient
from torchtitan.weight_sync.registry_state import Settings
from torchtitan.weight_sync.server_thread import ShardServerThread
from torchtitan.weight_sync.servers import RegistryServer, ShardServerProcess, numeric, towards
from torchtitan.weight_sync.sockets import SocketRuntime
from torchtitan.weight_sync.weight_files import PackedRank
from torchtitan.weight_sync.wire import Message

logger = logging.getLogger(__name__)
# A condition may look at more than the status, such as whether the registry was given up.
LOOK_SECONDS = 1.0


class Publication:
    """parameters: checkpoint name -> parameter, in the same order on every rank. config: where and how it is sent;
    other ranks listen where they reach rank 0's machine. folder: of the run folder, for logs and the journal. registry:
    what rank 0's `registry_address` says; None on rank 0, which starts it. Raises UserError for an address that cannot
    be used, a folder that another job writes to, and shards that files cannot hold."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor | StackPart],
        settings: Settings,
        config: WeightSync,
        *,
        epoch: str,
        token: str,
        folder: Path,
        rank: int = 0,
        local_rank: int = 0,
        registry: str | None = None,
        dtype: str = "float32",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        host = numeric(config.host) if registry is None else towards(registry)
        self._owner: FolderOwner | None = None
        files = ""
        if config.transport == "disk":
            disk_folder = Path(config.disk_path or folder.parent / "weights")
            files = str(disk_folder.resolve())
            self._owner = FolderOwner(disk_folder, epoch) if registry is None else None
        # One slot is written, one holds the newest version, one the base of deltas, the others are lanes.
        slots = 2 + settings.lanes + settings.delta
        self.publisher = Publisher(
            parameters,
            rank=rank,
            dtype=dtype,
            num_slots=slots,
            bucket_bytes=config.bucket_bytes,
            on_device=config.transport in ON_DEVICE,
        )
        if files:
            try:
                PackedRank(self.publisher.layout, 0)
            except ValueError as error:
                raise UserError(f'weight_sync.transport = "disk": {error}; take "tcp"') from error
        self.boundary = Boundary(self.publisher)
        self.registry: RegistryServer | None = None
        self.watcher: Watcher | None = None
        if registry is None:
            where = host, config.port, config.max_restarts
            self.registry = RegistryServer(epoch, token, settings, folder, where, files)
            registry = self.registry.address
            self.watcher = Watcher(registry, token, epoch)
        self.registry_address = registry
        self.shard_server: ShardServerProcess | ShardServerThread
        where = host, config.port + 1 + local_rank if config.port else 0, config.max_restarts
        facts = {"epoch": epoch, "registry": registry, "lease_s": settings.lease_s}
        if isinstance(self.publisher.slots, DeviceSlots) or config.transport == "nccl":
            chunks = (config.chunk_bytes, config.chunk_timeout_s) if config.transport == "nccl" else None
            self.shard_server = ShardServerThread(self.publisher, token, chunks, where, **facts)
        else:
            facts |= {"transport": config.transport, "world_size": settings.world_size, "disk_folder": files}
            self.shard_server = ShardServerProcess(self.publisher, token, folder, where, **facts)

    @property
    def failure(self) -> str:
        """Why no further version will be published, or nothing."""
        failures = [self.publisher.failure, self.shard_server.failure]
        if self.registry is not None and self.watcher is not None:
            failures += [self.registry.failure, self.watcher.failure, self.watcher.status()["failure"]]
        return "; ".join(filter(None, failures))

    def close(self, timeout: float = 5.0) -> None:
        """End everything within about `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if self.watcher is not None:
            self.watcher.close(timeout)
        self.shard_server.close(deadline)
        if self.registry is not None:
            self.registry.close(deadline)
        self.publisher.close()
        if self._owner is not None:
            self._owner.close()


class Watcher:
    """Holds the newest status message and passes pins on."""

    def __init__(self, registry: str, token: str, epoch: str):
        self._epoch = epoch
        self._runtime = SocketRuntime()
        identity, fields = Identity.of(token, TRAINER, "0"), {"epoch": epoch}
        # Looked for as long as the job lives: the registry's restarts are bounded where it is started.
        self._registry = RegistryClient(self._runtime, registry, identity, fields, self._send_pin, self._on_message)
        self._changed = threading.Condition()
        self._status: Message = {"newest": None, "actors": {}, "dropped": [], "evictions": 0, "failure": ""}
        self._pin: int | None = None
        self._closed = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="weight-sync-watcher", daemon=True)
        self._thread.start()

    def status(self) -> Message:
        """The latest status; treat it as read-only."""
        return self._status

    def wait_for(self, condition: Callable[[Message], bool], timeout: float) -> None:
        """Wait until `condition(status)` holds, at most `timeout` seconds and not beyond close().

        It is asked whenever a status arrives, and once per LOOK_SECONDS without one.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition(self._status) and (left := deadline - time.monotonic()) > 0 and not self._closed:
                self._changed.wait(min(left, LOOK_SECONDS))

    def pin(self, version: int | None) -> None:
        """Actors that serve `version` keep it (None: no longer)."""
        self._pin = version
        self._runtime.post(self._send_pin)

    def close(self, timeout: float) -> None:
        """Stop the thread, and whatever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._runtime.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._registry.start()
            self._runtime.run()
        except Exception as error:
            logger.exception("the watcher of the actors has failed")
            with self._changed:
                self.failure = f"the watcher of the actors has failed: {error!r}"
                self._changed.notify_all()

    def _send_pin(self) -> None:
        self._registry.tell({"type": "pin", "version": self._pin})

    def _on_message(self, message: Message) -> None:
        if message["type"] == "status" and message.get("epoch") == self._epoch:
            with self._changed:
                self._status = message
                self._changed.notify_all()
