"""An actor's part: hears of the newest version, pulls its buckets, verifies them, has the engine apply the whole.

It decides for itself what to pull. One rule is shared by all: who found twice in a row that what it pulled had gone is
slow, and waits until there is room for another lane.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import xxhash

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.bucket_server import Relay
from torchtitan.weight_sync.clients import RegistryClient, Source
from torchtitan.weight_sync.handshake import PEER, Identity
from torchtitan.weight_sync.manifest import BucketKey, Layout, Manifest, WeightsRefused, check_coverage
from torchtitan.weight_sync.transfer import Engine, Transfer
from torchtitan.weight_sync.wire import Message, Place, ProtocolError, Runtime

logger = logging.getLogger("torchtitan.weight_sync.puller")

# Who found so often in a row that what it pulled had gone is slow.
SLOW_AFTER = 2
# A bucket that arrived corrupt so often ends the pull; the next one begins after a pause that grows.
MOST_CORRUPTIONS = 3
# Another actor that has not begun to pass a version on by then is not waited for.
PEER_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
# The registry may be out of reach for so long.
GIVE_UP_SECONDS = 60.0


class Served(NamedTuple):
    """What an engine holds."""

    epoch: str
    version: int
    digest: str


class Puller:
    """registry: `host:port`. served: what the engine holds already.
    relay: passes versions on to other actors, which reach it at relay_address. puller: who it is to shard servers, if
    somebody else."""

    def __init__(
        self,
        runtime: Runtime,
        registry: str,
        identity: Identity,
        epoch: str,
        engine: Engine,
        *,
        served: Served | None = None,
        relay: Relay | None = None,
        relay_address: str = "",
        puller: Identity | None = None,
    ):
        self._runtime, self.engine, self.name = runtime, engine, identity.name
        self._identity, self.epoch = puller or identity, epoch
        self._progress_s = math.inf
        """A pull that moved no byte for so long asks again over new channels"""
        self.serving = served
        self.poisoned = False
        fields = {"epoch": epoch, "instance": secrets.token_hex(8), "address": relay_address}
        ways = self._joined, self._on_message, GIVE_UP_SECONDS, self._look
        self.registry = RegistryClient(runtime, registry, identity, fields, *ways)
        self._tell = self.registry.tell
        self._layout: Layout | None = None
        self._layout_id = ""
        self._needs: Collection[BucketKey] = ()
        self._sources: list[Source] = []
        self._servers: list[str] = []
        self._relay = relay
        self.transfer: Transfer | None = None
        """The one that buckets may arrive for"""
        self._base: int | None = None
        """The snapshot that deltas may be taken against"""
        self._held: dict[BucketKey, int] = {}
        """Serial of the snapshot that a bucket's staging memory holds, verified"""
        self._writers = 0
        """Pieces of work that may still write to staging memory"""
        self.corrupted = 0
        self._peer: Message | None = None
        """The actor that this transfer comes from, None for the trainer"""
        self._newest: tuple[int, Manifest, Message | None] | None = None
        """Serial, version, and the other actor that it may be pulled from"""
        self._lanes: set[int] = set()
        self._room = True
        self._pinned: int | None = None
        self._numbers = itertools.count(1)
        self._gone_in_a_row = 0
        self._pauses = 0
        self._paused_until = 0.0
        self._staged: tuple[Manifest, Message] | None = None
        self._applying = False
        self._torn: tuple[int, str] | None = None
        """What was found of a version while one was being applied"""
        self._closed = False

    def start(self, listener: Any = None) -> None:
        """Begin to look for the registry, and to pass versions on to those who connect to this listener."""
        if self._relay is not None:
            self._relay.start(listener)
        self.registry.start()

    def close(self) -> None:
        """Close every connection. An apply that has begun goes on."""
        self._closed = True
        self.transfer = None
        for source in self._sources:
            source.drop("the actor ends")
        if self._relay is not None:
            self._relay.close("the actor ends")
        self.registry.close("the actor ends")

    @property
    def state(self) -> str:
        """For people."""
        if self.poisoned:
            return "POISONED"
        if self._applying:
            return "APPLYING"
        return "PULLING" if self.transfer is not None else "READY" if self.serving is not None else "JOINING"

    def found_torn(self, version: int, reason: str) -> None:
        """The engine does not hold `version` after all: it serves nothing until a version has been applied."""
        if self._applying:
            # The look may be over before this thread has heard of the end of the apply.
            self._torn = version, reason
        elif self.serving is not None and self.serving.version == version:
            self._poison(version, reason)
            self._consider()

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
        self._tell({"type": "ended", "version": version, "outcome": outcome, "reason": reason})

    def _tell_serving(self, served: Served, figures: Message) -> None:
        self._tell({"type": "serving", "version": served.version, "digest": served.digest, "figures": figures})

    def _look(self) -> Message:
        """Every now and then: whether the pull gets on, or a pause is over. Returns what the registry is to be told."""
        pull = self.transfer
        if pull is None:
            self._consider()
            return {}
        # A thread that fetches a bucket has deadlines of its own, and says only at the end what it has moved.
        if self._is_quiet() and self._runtime.now() - pull.moved_at > self._progress_s:
            pull.moved_at, missing = self._runtime.now(), {rank for rank, _ in pull.missing}
            for source in self._sources:
                if source.rank in missing:
                    source.drop(f"no byte for {self._progress_s:g} s")
                    source.ask()
        elif self._runtime.now() - pull.moved_at > PEER_SECONDS:
            self.leave_peer()
        return {"bytes": pull.received.total()}

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "model":
            self._on_model(message)
        elif kind == "newest":
            self._on_newest(message)
        elif kind == "live":
            self._on_live(message)
        else:
            raise ProtocolError(f"a registry does not send {kind!r} to an actor")
        self._consider()

    def _on_model(self, message: Message) -> None:
        self._servers, self._progress_s = list(map(str, message["servers"])), message["progress_s"]
        if self._layout is None:
            layout = self._read_layout(message["layout"])
            self._needs = self.engine.prepare(layout, message)
            self._layout, self._layout_id = layout, message["layout_id"]
            self._sources = self._new_sources(len(layout.ranks))
        elif message["layout_id"] != self._layout_id:
            raise ProtocolError("another layout than before, in the same epoch")
        self._move_sources()

    def _new_sources(self, ranks: int) -> list[Source]:
        return [Source(self._runtime, self._identity, self.epoch, rank, self) for rank in range(ranks)]

    def _read_layout(self, data: Message) -> Layout:
        layout = Layout.from_json(data)
        check_coverage(layout)
        return layout

    def _move_sources(self) -> None:
        peer = self._peer
        identity = self._identity if peer is None else Identity(PEER, self.name, str(peer["key"]))
        for source, address in zip(self._sources, self._servers, strict=False):
            source.move(address if peer is None else str(peer["address"]), identity)

    def leave_peer(self) -> bool:
        """Another actor does not have it, or not in time: go on at the trainer. False where none is the source."""
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
        # A new registry has not heard yet of what was published before it.
        if self._newest is None or message["newest"] >= self._newest[0]:
            self._lanes, self._room, self._base = set(message["lanes"]), message["room"], message.get("base")

    # Pulling

    def _consider(self) -> None:
        """Something has changed: end what has gone, begin what is due."""
        pull, newest = self.transfer, self._newest
        if pull is not None and newest is not None and pull.serial != newest[0] and pull.serial not in self._lanes:
            self._end_pull("gone", "superseded")
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
        """Whether nothing writes to staging memory for an older pull."""
        return self._writers == 0

    def _begin(self, serial: int, manifest: Manifest, peer: Message | None) -> None:
        assert self._layout is not None
        if not self._survives("pull", manifest.version):
            return
        now, missing = self._runtime.now(), set(self._needs)
        transfer = Transfer(next(self._numbers), serial, manifest, missing, now, moved_at=now)
        if self._relay is not None:
            self._relay.hold(self._layout, transfer)
        if self._peer != peer:
            self._peer = peer
            self._move_sources()
        transfer.source = "" if peer is None else str(peer["name"])
        self.transfer = transfer
        self._tell_pulling(transfer)
        if not missing:
            self._staged_whole(transfer)
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
        # A bucket that is half here must not be written any further.
        for rank in {rank for rank, _ in pull.placing}:
            self._sources[rank].drop("the pull is over")

    def _pause(self) -> None:
        """After a version that could not be had: it is tried again later, something newer at once."""
        self._paused_until = self._runtime.now() + min(2.0**self._pauses, LONGEST_PAUSE_SECONDS)
        self._pauses += 1

    # Buckets: what sources call

    def gone(self, message: Message) -> None:
        """The registry says the same to all; a shard server may be the first."""
        if self.is_current(message) and not self.leave_peer():
            self._end_pull("gone", "the snapshot is gone")
            # Something newer is there, and the registry will say so; should it be away, asking at once is no use.
            self._pause()

    def requests(self, rank: int) -> list[Message]:
        """What to ask this rank's shard server for."""
        return [] if self.transfer is None else self.transfer.requests(rank, self._held, self._base)

    def is_current(self, message: Message) -> bool:
        """Whether a message belongs to the transfer."""
        return self.transfer is not None and message["pull"] == self.transfer.number

    def lost(self, rank: int) -> None:
        """A channel is over: what was half here has to come again. What a thread writes is its own affair."""
        placing = {} if self.transfer is None else self.transfer.placing
        for key in [key for key, placed in placing.items() if key[0] == rank and placed is not None]:
            del placing[key]

    def place(self, source: Source, message: Message) -> Place | None:
        """Into staging memory, hashed while a piece is in the cache; a delta beside it; nowhere for a transfer that is
        over. One that ends while bytes arrive for it closes their channel."""
        transfer = self.transfer
        if transfer is None or not self.is_current(message):
            return None
        key, now = self._checked_key(source, message, transfer), self._runtime.now
        if "base" in message:
            base = self._held.get(key)
            if base is None or message["base"] != base or message["bytes"] >= self._bucket_bytes(key):
                raise ProtocolError(f"a delta of bucket {key[1]} of rank {key[0]} that was not asked for")
            delta = memoryview(bytearray(message["bytes"]))
            transfer.placing[key] = delta
            return delta, lambda piece: transfer.count(len(piece), True, now())
        # Of kind xxh3: checksums of another kind are those of memory that references lead to.
        hasher = xxhash.xxh3_128()
        transfer.placing[key] = hasher
        self._held.pop(key, None)

        def take(piece: memoryview) -> None:
            transfer.count(len(piece), False, now())
            hasher.update(piece)

        return self.engine.bucket(key), take

    def _checked_key(self, source: Source, message: Message, transfer: Transfer) -> BucketKey:
        key = message["rank"], message["bucket"]
        if message["rank"] != source.rank:
            raise ProtocolError(f"a bucket of rank {message['rank']} came from rank {source.rank}")
        if key not in transfer.missing or key in transfer.placing:
            # Verified bytes are never written again: what is applied is what was checked.
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} was sent twice, or not asked for")
        return key

    def bucket(self, source: Source, message: Message) -> None:
        """Verify it, or what becomes of the reference or the delta."""
        transfer = self.transfer
        if transfer is None or not self.is_current(message):
            if "link" in message.get("reference", ()):
                # It is on its way all the same, and would be taken for the next one.
                source.drop("a bucket of a pull that is over")
                source.ask()
            return
        key = message["rank"], message["bucket"]
        version = transfer.manifest.version
        asked = faults.at("receive", version=version, actor=self.name, rank=key[0], bucket=key[1])
        if "reference" in message:
            if "drop" in asked:
                return
            self._checked_key(source, message, transfer)
            fetch = partial(self.engine.fetch, key, message["reference"])
            self._work(transfer, source, key, fetch, self._bucket_bytes(key), asked)
        elif (placed := transfer.placing.get(key)) is None:
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} came without bytes")
        elif "base" in message:
            self._work(transfer, source, key, partial(self.engine.patch, key, placed), 0, asked)
        else:
            del transfer.placing[key]
            self._judge(source, key, placed.hexdigest(), asked)

    def _work(
        self, transfer: Transfer, source: Source, key: BucketKey, function: Callable[[], str], count: int, asked: Any
    ) -> None:
        """Have a thread write the bucket, of which `count` bytes then have come."""
        self._held.pop(key, None)
        transfer.placing[key] = None
        self._writers += 1

        def written(found: str, error: BaseException | None) -> None:
            self._writers -= 1
            if transfer is not self.transfer:
                self._consider()
                return
            del transfer.placing[key]
            if isinstance(error, ConnectionError):
                source.tell(transfer.open([key[1]], again=True))
                return
            transfer.count(count, False, self._runtime.now())
            self._judge(source, key, found if error is None else repr(error), asked)

        self._runtime.work("fetch", function, written)

    def _bucket_bytes(self, key: BucketKey) -> int:
        assert self._layout is not None
        start, end = self._layout.bucket_range(*key)
        return end - start

    def _judge(self, source: Source, key: BucketKey, found: str, asked: Any) -> None:
        pull, (rank, bucket) = self.transfer, key
        assert pull is not None
        if "drop" in asked:
            return
        if "corrupt" in asked:
            found = "corrupt"
        if found == pull.manifest.checksums[rank][bucket]:
            pull.missing.remove(key)
            self._held[key] = pull.serial
            source.succeeded()
            if self._relay is not None:
                self._relay.send_more()
            if not pull.missing:
                self._staged_whole(pull)
            return
        self.corrupted += 1
        pull.corruptions[key] += 1
        logger.warning("%s: bucket %d of rank %d is corrupt (%s)", self.name, bucket, rank, found)
        if pull.corruptions[key] >= MOST_CORRUPTIONS:
            self._end_pull("refused", f"bucket {bucket} of rank {rank} was corrupt {MOST_CORRUPTIONS} times")
            self._pause()
        elif not self.leave_peer():
            source.tell(pull.open([bucket], again=True))

    # Engine

    def _staged_whole(self, pull: Transfer) -> None:
        self.transfer = None
        self._gone_in_a_row = self._pauses = 0
        if not self._survives("staged", pull.manifest.version):
            self._consider()
            return
        self._tell_ended(pull.manifest.version, "staged")
        self._staged = pull.manifest, pull.figures(self._runtime.now())
        self._consider()

    def _survives(self, phase: str, version: int) -> bool:
        """Whether fault injection lets this pass."""
        try:
            return "drop" not in faults.at(phase, version=version, actor=self.name)
        except ConnectionResetError as error:
            self.registry.hang_up(str(error))
            return True

    def _apply_staged(self) -> None:
        if self._staged is None or self._applying or self._is_pinned() or self._closed:
            return
        (manifest, figures), self._staged, self._applying = self._staged, None, True
        work = partial(self._apply, manifest)
        self._runtime.work("apply", work, partial(self._applied, manifest, figures, self._runtime.now()))

    def _apply(self, manifest: Manifest) -> Mapping[str, float]:
        faults.at("apply", version=manifest.version, actor=self.name)
        return self.engine.apply(manifest)

    def _applied(
        self, manifest: Manifest, figures: Message, begun: float, cost: Any, error: BaseException | None
    ) -> None:
        self._applying = False
        torn, self._torn = self._torn, None
        if isinstance(error, WeightsRefused):
            logger.error("%s: version %d refused: %s", self.name, manifest.version, error)
            self._pause()
            self._tell_ended(manifest.version, "refused", str(error))
        elif error is not None:
            # Half a version may be in the engine now: never served, and said so.
            logger.error("%s: applying version %d failed", self.name, manifest.version, exc_info=error)
            self._poison(manifest.version, repr(error))
            self._pause()
        else:
            self.poisoned = False
            self.serving = Served(manifest.epoch, manifest.version, manifest.digest)
            if self._survives("applied", manifest.version):
                self._tell_serving(self.serving, {**figures, "apply_s": self._runtime.now() - begun, **(cost or {})})
            if torn is not None and torn[0] == manifest.version:
                self._poison(*torn)
        self._consider()

    def _poison(self, version: int, reason: str) -> None:
        self.poisoned, self.serving = True, None
        self._tell({"type": "poisoned", "version": version, "reason": reason})
