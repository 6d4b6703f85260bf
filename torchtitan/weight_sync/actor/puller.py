"""An actor's part: learns of the newest version, pulls its buckets, verifies them, has the engine apply the version."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torchtitan.weight_sync.actor.shard_connection import ShardServerConnection
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.memory.manifest import BucketKey, Layout, Manifest, WeightsRefused, check_coverage
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE, Transfer, TransferTarget
from torchtitan.weight_sync.transports.bucket_server import Relay
from torchtitan.weight_sync.wire import hook
from torchtitan.weight_sync.wire.clients import RegistryClient
from torchtitan.weight_sync.wire.handshake import PEER, Identity
from torchtitan.weight_sync.wire.runtime import Message, PayloadTarget, ProtocolError, Runtime

logger = logging.getLogger("torchtitan.weight_sync.actor.puller")

# After this many pulls in a row that ended as gone, an actor is slow, and waits until another snapshot may be retained.
SLOW_AFTER = 2
# A bucket that arrives corrupt this often ends the pull; the next pull begins after a pause that grows.
MAX_CORRUPTIONS = 3
# If a relaying actor sends nothing for this long, the puller continues with the trainer.
PEER_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
# Characters of a reason: a longer message would be refused.
MAX_REASON = 1000
# The puller gives up if the registry is unreachable for longer than this.
GIVE_UP_SECONDS = 60.0


class Served(NamedTuple):
    """What an engine holds."""

    epoch: str
    version: int
    digest: str


class Puller:
    """Pulls versions. registry: `host:port`. served: what the engine already holds. relay: relays versions to other
    actors, which reach it at relay_address. puller: the identity to show to shard servers, if it is another one."""

    def __init__(
        self,
        runtime: Runtime,
        registry: str,
        identity: Identity,
        epoch: str,
        engine: TransferTarget,
        *,
        served: Served | None = None,
        relay: Relay | None = None,
        relay_address: str = "",
        puller: Identity | None = None,
    ):
        self._runtime, self.engine, self.name = runtime, engine, identity.name
        self._identity, self.epoch = puller or identity, epoch
        self._progress_s = math.inf
        """A pull that receives no byte for this long asks again over new channels"""
        self.serving = served
        self.poisoned = False
        fields = {"epoch": epoch, "instance": secrets.token_hex(8), "address": relay_address}
        ways = self._joined, self._on_message, GIVE_UP_SECONDS, self._tick
        self.registry = RegistryClient(runtime, registry, identity, fields, *ways)
        self._tell = self.registry.tell
        self._layout: Layout | None = None
        self._layout_id = ""
        self._needs: dict[int, set[int]] = {}
        """Rank -> its checksum table, and the buckets that this actor needs"""
        self._sources: list[ShardServerConnection] = []
        self._servers: list[str] = []
        self._relay = relay
        self.transfer: Transfer | None = None
        """The transfer that arriving buckets belong to"""
        self._base: int | None = None
        """Serial of the snapshot that deltas may be taken against"""
        self._writers = 0
        """How many threads' tasks may still write to staging memory"""
        self.corrupted = 0
        self._peer: Message | None = None
        """The actor that relays this transfer; None: the trainer sends it"""
        self._direct_rate = 0.0
        """Bytes per second of the last version that came from the trainer alone"""
        self._newest: tuple[int, Manifest, Message | None] | None = None
        """Serial, version, and the actor to pull it from, if any"""
        self._retained: set[int] = set()
        self._room = True
        self._pinned: int | None = None
        self._numbers = itertools.count(1)
        self._gone_in_a_row = 0
        self._pauses = 0
        self._paused_until = 0.0
        self._staged: tuple[Manifest, Message] | None = None
        self._applying = False
        self._pending_poison: tuple[int, str] | None = None
        """The version and the reason of a poison_version() call that came during an apply"""
        self._closed = False

    def start(self, listener: Any = None) -> None:
        """Begin to look for the registry, and to relay versions to actors that connect to this listener."""
        if self._relay is not None:
            self._relay.start(listener)
        self.registry.start()

    def begin_no_more(self) -> None:
        """Begin no other pull. Any thread may call it, before close()."""
        self._closed = True

    def close(self) -> None:
        """Close every connection. An apply that has begun continues."""
        self._closed = True
        self.transfer = None
        for source in self._sources:
            source.drop("the actor ends")
        if self._relay is not None:
            self._relay.close("the actor ends")
        self.registry.close("the actor ends")

    @property
    def state(self) -> ActorState:
        """What it does with versions."""
        if self.poisoned:
            return ActorState.POISONED
        if self._applying:
            return ActorState.APPLYING
        if self.transfer is not None:
            return ActorState.PULLING
        return ActorState.JOINING if self.serving is None else ActorState.READY

    def poison_version(self, version: int, reason: str) -> None:
        """Poison the actor if it serves or applies `version`: it serves nothing until a version has been applied."""
        if self._applying:
            # The engine's check may finish before this thread has heard that the apply has.
            self._pending_poison = version, reason
        elif self.serving is not None and self.serving.version == version:
            self._poison(version, reason)
            self._react()

    # Registry

    def _joined(self) -> None:
        if self.poisoned:
            self._tell({"type": "poisoned", "version": -1, "reason": "a version could not be applied whole"})
        elif self.serving is not None and self.serving.epoch == self.epoch:
            self._tell_serving(self.serving, {})
        if self.transfer is not None:
            self._tell_pulling(self.transfer)

    def _tell_pulling(self, pull: Transfer) -> None:
        self._tell({"type": "pulling", "serial": pull.serial, "version": pull.manifest.version})

    def _tell_ended(self, version: int, outcome: str, reason: str = "") -> None:
        self._tell({"type": "ended", "version": version, "outcome": outcome, "reason": reason[:MAX_REASON]})

    def _tell_serving(self, served: Served, figures: Message) -> None:
        self._tell({"type": "serving", "version": served.version, "digest": served.digest, "figures": figures})

    def _tick(self) -> Message:
        """Periodically check whether the pull progresses or a pause has ended. Returns what to tell the registry."""
        pull = self.transfer
        if pull is None:
            self._react()
            return {}
        # A thread that fetches a bucket has its own deadlines, and reports the bytes only at the end.
        if self._is_quiet() and self._runtime.now() - pull.moved_at > self._progress_s:
            pull.moved_at = self._runtime.now()
            for source in self._sources:
                if source.rank in pull.missing:
                    source.drop(f"no byte for {self._progress_s:g} s")
                    source.ask()
        elif pull.lags(self._direct_rate, self._runtime.now()) or self._runtime.now() - pull.moved_at > PEER_SECONDS:
            self.leave_peer()
        return {"bytes": pull.received.total()}

    def _on_message(self, message: Message) -> None:
        take = {"model": self._on_model, "newest": self._on_newest, "live": self._on_live}.get(message["type"])
        if take is None:
            raise ProtocolError(f"a registry does not send {message['type']!r} to an actor")
        take(message)
        self._react()

    def _on_model(self, message: Message) -> None:
        self._servers, self._progress_s = list(map(str, message["servers"])), message["progress_s"]
        if self._layout is None:
            layout = self._read_layout(message["layout"])
            self._needs = {rank: {CHECKSUM_TABLE} for rank in range(len(layout.ranks)) if layout.bucket_count(rank)}
            for rank, bucket in self.engine.prepare(layout, message):
                self._needs[rank].add(bucket)
            self._layout, self._layout_id = layout, message["layout_id"]
            self._sources = self._new_sources(len(layout.ranks), max(1, message.get("connections", 1)))
        elif message["layout_id"] != self._layout_id:
            raise ProtocolError("another layout than before, in the same epoch")
        self._move_sources()

    def _new_sources(self, ranks: int, count: int) -> list[ShardServerConnection]:
        names = self._runtime, self._identity, self.epoch
        places = itertools.product(range(ranks), range(count))
        return [ShardServerConnection(*names, rank, self, number, count) for rank, number in places]

    def _read_layout(self, data: Message) -> Layout:
        layout = Layout.from_json(data)
        check_coverage(layout)
        return layout

    def _move_sources(self) -> None:
        peer = self._peer
        identity = self._identity if peer is None else Identity(PEER, self.name, str(peer["key"]))
        for source in self._sources:
            source.move(self._servers[source.rank] if peer is None else str(peer["address"]), identity)

    def leave_peer(self) -> bool:
        """If another actor is the source, switch to the trainer. Returns False if the trainer was the source
        already."""
        if self._peer is None:
            return False
        self._peer = None
        if self.transfer is not None:
            self.transfer.source = ""
        self._move_sources()
        return True

    def _on_newest(self, message: Message) -> None:
        if self._layout is None:
            raise ProtocolError("a version came before the layout")
        manifest = Manifest.from_json(message)
        manifest.check_fits(self._layout, self._layout_id)
        if manifest.epoch != self.epoch:
            raise ProtocolError(f"a version of epoch {manifest.epoch}")
        if self._newest is None or self._newest[0] != message["newest"]:
            self._paused_until = 0.0
        self._newest = message["newest"], manifest, message.get("source")
        self._on_live(message)

    def _on_live(self, message: Message) -> None:
        self._pinned = message.get("pinned", self._pinned)
        # A new registry may not have heard yet of what was published before it started.
        if self._newest is None or message["newest"] >= self._newest[0]:
            self._retained, self._room, self._base = set(message["retained"]), message["room"], message.get("base")

    # Pulling

    def _react(self) -> None:
        """React to a change: end a pull whose snapshot is gone, and begin what is due."""
        pull, newest = self.transfer, self._newest
        if pull is not None and newest is not None and pull.serial != newest[0] and pull.serial not in self._retained:
            self._end_pull("gone", "a newer version was published")
        if self._staged is not None:
            self._apply_staged()
        elif newest is not None and self._may_begin(newest[1]):
            self._begin(*newest)

    def _may_begin(self, manifest: Manifest) -> bool:
        busy = self._closed or self.transfer is not None or self._applying or not self._is_quiet()
        if busy or self._is_pinned() or self._runtime.now() < self._paused_until:
            return False
        served = Served(manifest.epoch, manifest.version, manifest.digest)
        return served != self.serving and (self._gone_in_a_row < SLOW_AFTER or self._room)

    def _is_pinned(self) -> bool:
        return self._pinned is not None and self.serving is not None and self.serving.version == self._pinned

    def _is_quiet(self) -> bool:
        """Return whether nothing still writes to staging memory for an older pull."""
        return self._writers == 0

    def _begin(self, serial: int, manifest: Manifest, peer: Message | None) -> None:
        assert self._layout is not None
        if not self._passes("pull", manifest.version):
            return
        now = self._runtime.now()
        missing: dict[int, set[int]] = {}
        for rank, needs in self._needs.items():
            has_table = rank in manifest.checksum_tables
            left = needs - {CHECKSUM_TABLE} if has_table else set(needs)
            if left:
                missing[rank] = left
        # A slow actor needs a snapshot of the trainer's.
        peer = peer if self._gone_in_a_row < SLOW_AFTER else None
        if not self.engine.choose_memory():
            return
        transfer = Transfer(next(self._numbers), serial, manifest, self._layout, missing, now, moved_at=now)
        if self._relay is not None:
            self._relay.hold(self._layout, transfer)
        if self._peer != peer:
            self._peer = peer
            self._move_sources()
        if peer is not None:
            transfer.source, transfer.fanout = str(peer["name"]), max(1, int(peer["fanout"]))
        self.transfer = transfer
        self._tell_pulling(transfer)
        if not missing:
            self._finish_transfer(transfer)
        for source in self._sources:
            source.ask()

    def _end_pull(self, outcome: str, reason: str) -> None:
        pull, self.transfer = self.transfer, None
        if pull is None:
            return
        self._gone_in_a_row = self._gone_in_a_row + 1 if outcome == "gone" else 0
        self._tell_ended(pull.manifest.version, outcome, reason)
        if self._relay is not None:
            self._relay.hold(self._layout, None)
        # Nothing may continue to write a half-arrived bucket.
        for source in self._sources:
            if any(map(source.carries, pull.arriving)):
                source.drop("the pull is over")

    def release(self) -> None:
        """Let go of the engine's memory, because the engine gives it back. What is being pulled, or staged, is pulled
        again once there is memory."""
        self._end_pull("lost", "the engine gives its memory back")
        if self._staged is not None:
            self._tell_ended(self._staged[0].version, "refused", "the engine gives its memory back")
            self._staged = None
        self.engine.release()

    def _pause(self) -> None:
        """After a failed version, wait before trying it again. A newer version is tried at once."""
        self._paused_until = self._runtime.now() + min(2.0**self._pauses, MAX_PAUSE_SECONDS)
        self._pauses += 1

    # Buckets: what sources call

    def gone(self, message: Message) -> None:
        """Handle a shard server's "gone". The registry tells everybody the same, but may do so later."""
        if self.is_current(message) and not self.leave_peer():
            self._end_pull("gone", "the snapshot is gone")
            # The registry will announce the newer version; if the registry is away, asking at once would not help.
            self._pause()

    def requests(self, source: ShardServerConnection) -> list[Message]:
        """Return what to request over this connection."""
        if self.transfer is None:
            return []
        return self.transfer.requests(source.rank, source.carries, self._has, self._base)

    def _has(self, key: BucketKey, serial: int) -> bool:
        """Return whether a delta against this snapshot can be applied to a bucket."""
        return serial in (self.engine.held.get(key), self.engine.held_live.get(key))

    def is_current(self, message: Message) -> bool:
        """Return whether a message belongs to the current transfer."""
        return self.transfer is not None and message["pull"] == self.transfer.number

    def lost(self, source: ShardServerConnection) -> None:
        """Handle a closed channel: half-arrived buckets are requested again, except those that a thread writes."""
        arriving = {} if self.transfer is None else self.transfer.arriving
        for key in [key for key, placed in arriving.items() if source.carries(key) and placed is not None]:
            del arriving[key]

    def payload_target(self, source: ShardServerConnection, message: Message) -> PayloadTarget | None:
        """Return where the bytes go: a bucket's into staging memory, hashed while in the cache; a delta's into a
        buffer; None if the transfer has ended. A transfer that ends while a bucket arrives closes that channel."""
        transfer = self.transfer
        if transfer is None or not self.is_current(message):
            return None
        key, now = transfer.checked_key(source.rank, message), self._runtime.now
        if not source.carries(key):
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} came over another connection than it was asked over")
        if "base" in message:
            if not self._has(key, message["base"]) or message["bytes"] >= transfer.bucket_bytes(key):
                raise ProtocolError(f"a delta of bucket {key[1]} of rank {key[0]} that was not asked for")
            delta = memoryview(bytearray(message["bytes"]))
            transfer.arriving[key] = delta
            return PayloadTarget([delta], lambda parts: transfer.count(sum(map(len, parts)), True, now()))
        # The kind is xxh3: checksums of the other kind are only used for memory that references point to.
        hasher = transfer.hasher(key[1])
        transfer.arriving[key] = hasher
        is_table = key[1] == CHECKSUM_TABLE
        if is_table:
            pieces: Sequence[memoryview] = [transfer.table_memory(key[0], message["bytes"])]
        else:
            self.engine.held.pop(key, None)
            pieces = self.engine.pieces(key)

        def take(parts: list[memoryview]) -> None:
            transfer.count(0 if is_table else sum(map(len, parts)), False, now())
            for part in parts:
                hasher.update(part)

        return PayloadTarget(pieces, take)

    def bucket(self, source: ShardServerConnection, message: Message) -> None:
        """Verify a bucket that has arrived, or start a thread for its reference or delta."""
        transfer = self.transfer
        if transfer is None or not self.is_current(message):
            if "link" in message.get("reference", ()):
                # The link delivers its bytes anyway, and they would be taken for the next bucket's.
                source.drop("a bucket of a pull that is over")
                source.ask()
            return
        key = message["rank"], message["bucket"]
        version = transfer.manifest.version
        asked = hook.at("receive", version=version, actor=self.name, rank=key[0], bucket=key[1])
        if "reference" in message:
            if "drop" in asked:
                return
            transfer.checked_key(source.rank, message)
            reference, count, is_delta, thread = transfer.plan(key, message["reference"], self.engine.held.get(key))
            fetch = partial(self.engine.fetch, key, reference)
            self._work(transfer, source, key, fetch, asked, count, is_delta, thread)
        elif (placed := transfer.arriving.get(key)) is None:
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} came without bytes")
        elif "base" in message:
            in_place = self.engine.held.get(key) == message["base"]
            self._work(transfer, source, key, partial(self.engine.patch, key, placed, in_place), asked)
        else:
            del transfer.arriving[key]
            self._verify(source, key, placed.hexdigest(), asked)

    def _work(
        self, transfer: Transfer, source: ShardServerConnection, key: BucketKey,
        function: Callable[[], str], asked: Any, count: int = 0, is_delta: bool = False, thread: str = "fetch",
    ) -> None:  # fmt: skip
        """Have the thread of this name write the bucket, and then count `count` bytes as received."""

        def written(found: str, error: BaseException | None) -> None:
            self._writers -= 1
            if transfer is not self.transfer:
                self._react()
                return
            del transfer.arriving[key]
            if isinstance(error, ConnectionError):
                source.tell(transfer.request([key[1]], again=True))
                return
            transfer.count(count, is_delta, self._runtime.now())
            self._verify(source, key, found if error is None else repr(error), asked)

        self._runtime.work(thread, function, written)
        # Not before there is a thread that ends this.
        self.engine.held.pop(key, None)
        transfer.arriving[key] = None
        self._writers += 1

    def _verify(self, source: ShardServerConnection, key: BucketKey, found: str, asked: Any) -> None:
        pull, (rank, bucket) = self.transfer, key
        assert pull is not None
        if "drop" in asked:
            return
        if "corrupt" in asked:
            found = "corrupt"
        if found == pull.expected(key):
            pull.done(*key)
            if bucket == CHECKSUM_TABLE:
                pull.take_table(rank)
                for other in self._sources:
                    if other.rank == rank and other is not source:
                        other.ask()
            else:
                self.engine.held[key] = pull.serial
            source.succeeded()
            if self._relay is not None:
                self._relay.send_more()
            if not pull.missing:
                self._finish_transfer(pull)
            return
        self.corrupted += 1
        pull.corruptions[key] += 1
        logger.warning("%s: bucket %d of rank %d did not come whole (%s)", self.name, bucket, rank, found)
        if pull.source:
            self._tell({"type": "forged", "version": pull.manifest.version, "source": pull.source})
        if pull.corruptions[key] >= MAX_CORRUPTIONS:
            self._end_pull("refused", f"bucket {bucket} of rank {rank} was corrupt {MAX_CORRUPTIONS} times")
            self._pause()
        elif not self.leave_peer():
            if bucket != CHECKSUM_TABLE:
                source.tell(pull.request([bucket], again=True))
                return
            # Without it the buckets that follow cannot be verified.
            source.drop("its checksums are corrupt")
            source.ask()

    # Engine

    def _finish_transfer(self, pull: Transfer) -> None:
        self.transfer = None
        self._gone_in_a_row = 0
        self._direct_rate = pull.bytes_per_s or self._direct_rate
        if not self._passes("staged", pull.manifest.version):
            self._react()
            return
        self._tell_ended(pull.manifest.version, "staged")
        self._staged = pull.manifest, pull.figures(self._runtime.now())
        self._react()

    def _passes(self, phase: str, version: int) -> bool:
        """Return whether fault injection lets this pass."""
        try:
            return "drop" not in hook.at(phase, version=version, actor=self.name)
        except ConnectionResetError as error:
            self.registry.hang_up(str(error))
            return True

    def _apply_staged(self) -> None:
        if self._staged is None or self._applying or self._is_pinned() or self._closed:
            return
        manifest, figures = self._staged
        work = partial(self._apply, manifest)
        self._runtime.work("apply", work, partial(self._applied, manifest, figures, self._runtime.now()))
        # Not before there is a thread that ends this.
        self._staged, self._applying = None, True

    def _apply(self, manifest: Manifest) -> Mapping[str, float]:
        hook.at("apply", version=manifest.version, actor=self.name)
        return self.engine.apply(manifest)

    def _applied(
        self, manifest: Manifest, figures: Message, started: float, cost: Any, error: BaseException | None
    ) -> None:
        self._applying = False
        poison, self._pending_poison = self._pending_poison, None
        if isinstance(error, WeightsRefused):
            logger.error("%s: version %d refused: %s", self.name, manifest.version, error)
            self._pause()
            self._tell_ended(manifest.version, "refused", str(error))
        elif error is not None:
            # The engine may hold half a version now: it must not be served, and the registry is told.
            logger.error("%s: applying version %d failed", self.name, manifest.version, exc_info=error)
            self._poison(manifest.version, repr(error))
            self._pause()
        else:
            # Not as soon as it is staged: all bytes of a version that the engine refuses would come every second.
            self.poisoned, self._pauses = False, 0
            self.serving = Served(manifest.epoch, manifest.version, manifest.digest)
            if self._passes("applied", manifest.version):
                self._tell_serving(self.serving, {**figures, "apply_s": self._runtime.now() - started, **(cost or {})})
            if poison is not None and poison[0] == manifest.version:
                self._poison(*poison)
        self._react()

    def _poison(self, version: int, reason: str) -> None:
        self.poisoned, self.serving = True, None
        self._tell({"type": "poisoned", "version": version, "reason": reason[:MAX_REASON]})
