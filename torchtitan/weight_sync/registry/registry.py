"""The registry, a process beside rank 0: publishes a version when all ranks have it, and says which snapshots live.

It gives no orders. Shard servers report what they hold, actors what they pull and serve; the registry tells all of them
the newest version and the retained snapshots. A restarted registry (in a new term) hears all of this again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.memory.manifest import Layout, LayoutError, Manifest, merge_layouts
from torchtitan.weight_sync.memory.published import PublishedVersions
from torchtitan.weight_sync.registry import state
from torchtitan.weight_sync.registry.deliveries import Deliveries, Outcome
from torchtitan.weight_sync.registry.guests import PONG, Guests
from torchtitan.weight_sync.registry.relays import Relays
from torchtitan.weight_sync.registry.snapshots import Snapshots
from torchtitan.weight_sync.registry.state import ActorRecord, PeerConnection, PendingVersion, RegistrySettings
from torchtitan.weight_sync.registry.trainer_view import TrainerView
from torchtitan.weight_sync.transports.disk import Catalogue
from torchtitan.weight_sync.wire import hook
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import ACTOR, GUEST, RANK, TRAINER, Acceptor, Identity
from torchtitan.weight_sync.wire.runtime import (
    SILENCE_SECONDS,
    BroadcastMessage,
    Channel,
    Message,
    ProtocolError,
    Runtime,
)

logger = logging.getLogger("torchtitan.weight_sync.registry.registry")

# How many versions that will never be published are remembered, for shard servers and the trainer.
MAX_DROPPED = 64
# An actor that does not finish in this many retained snapshots in a row is given up.
MAX_LOST_SNAPSHOTS = 3
# An actor says three things per version here, of which there may be dozens per second in small runs; a fleet of hostile
# actors must not take the registry's only thread.
ACTOR_SHARE = 0.3
# In these messages an actor names a version that it has been told of.
CLAIMS = ("pulling", "ended", "forged", "poisoned")
# What a pull that has delivered nothing comes to, by how the actor says that it ended.
ENDS: dict[str, Outcome] = {"gone": "aborted", "lost": "aborted", "refused": "refused"}
# An actor that has been away this long is no longer listed.
FORGET_SECONDS = 300.0


class Registry:
    """write(event, fields) writes a line of the journal. beat() is the sign of life for the parent. catalogue: of the
    disk transport's folder. guest_token: the keys of guests are derived from it. published: what earlier registries of
    this launch have published. clock(): the time that the journal tells; None: the runtime's."""

    def __init__(
        self,
        runtime: Runtime,
        settings: RegistrySettings,
        epoch: str,
        term: int,
        token: str,
        write: Callable[[str, Message], None],
        beat: Callable[[], None],
        catalogue: Catalogue | None = None,
        guest_token: str = "",
        published: PublishedVersions | None = None,
        clock: Callable[[], float] | None = None,
    ):
        self._catalogue = catalogue
        self._published = PublishedVersions() if published is None else published
        self._versions: dict[int, int] = {}
        """Serial -> version of each live snapshot"""
        self._runtime, self.settings, self.epoch, self.term = runtime, settings, epoch, term
        self._write, self._beat = write, beat
        roles = frozenset((RANK, ACTOR, TRAINER, *([GUEST] if settings.guests and guest_token else [])))
        self._acceptor = Acceptor(runtime, roles, token, self._admit, self._enter, ACTOR_SHARE, guest_token)
        self.snapshots = Snapshots(settings)
        self._ranks: dict[int, PeerConnection] = {}
        self.guests = Guests(runtime, settings, self._guest_changed, self._guest_leaves)
        self.actors: dict[str, ActorRecord] = {}
        self._relays = Relays(self.actors, self.snapshots, settings.relay_fanout, token, write)
        self._deliveries = Deliveries(epoch, clock or runtime.now, write)
        self._trainer = TrainerView(runtime, self.status, self.actors)
        self._layouts: dict[int, Message] = {}
        self._model: Message = {}
        """The message that tells actors the layout, once it is known"""
        self._incomplete: dict[int, PendingVersion] = {}
        self._dropped: dict[int, int] = {}
        """Serial -> version"""
        self.newest: Manifest | None = None
        self._newest_message: Message = {}
        self._pin: Message = {}
        """What actors are told of the pin. Until the trainer says, it is empty and they keep the old one."""
        self._evictions = 0
        self._failure = ""
        self._announced = self._live()
        """What shard servers and actors were last told of what lives"""

    def start(self, listener: Any) -> None:
        """Begin to accept connections."""
        self._acceptor.listen(listener)
        self._tick()

    # Peers

    def _admit(self, identity: Identity, fields: Message) -> Message:
        if identity.role == GUEST:
            self.guests.check(identity.name, fields)
            return {"term": self.term}
        if fields.get("epoch") != self.epoch:
            raise ProtocolError(f"this job's epoch is {self.epoch}, not {fields.get('epoch')}")
        if identity.role == RANK and identity.name not in map(str, range(self.settings.world_size)):
            raise ProtocolError(f"no rank {identity.name!r} among {self.settings.world_size}")
        if identity.role == RANK or fields.get("address"):
            wire.parse_data_address(str(fields.get("address")))
        if identity.role == ACTOR:
            known = self.actors.get(identity.name)
            if known is not None and known.state is ActorState.GIVEN_UP and known.instance == fields.get("instance"):
                raise ProtocolError(f"{identity.name} was given up: {known.reason}")
        return {"term": self.term}

    def _enter(self, channel: Channel, identity: Identity, fields: Message) -> None:
        # When a thousand actors come at once, a tick may take seconds to come.
        self._beat()
        if identity.role == RANK:
            self._rank_entered(channel, int(identity.name), fields)
        elif identity.role == ACTOR:
            self._actor_entered(channel, identity.name, fields)
        elif identity.role == GUEST:
            self.guests.enter(channel, identity.name, fields["url"])
        else:
            self._trainer.enter(channel)
            channel.on_message = self._on_trainer_message
            channel.on_close = lambda _channel, _reason: self._trainer.lost()

    def _tick(self) -> None:
        self._runtime.call_later(wire.TICK_SECONDS, self._tick)
        self._beat()
        now = self._runtime.now()
        # The loop reads sockets before it runs timers: after a pause of this process, waiting messages have been read.
        for server in [*self._ranks.values(), *self.guests.there.values()]:
            if now - server.heard_at > SILENCE_SECONDS:
                server.channel.close(f"said nothing for {SILENCE_SECONDS:g} s")
        for name, actor in list(self.actors.items()):
            if actor.channel is None:
                if now - actor.heard_at > FORGET_SECONDS:
                    del self.actors[name]
                    self._deliveries.forget(name)
                    self._changed(name)
            elif now - actor.heard_at > SILENCE_SECONDS:
                actor.channel.close(f"said nothing for {SILENCE_SECONDS:g} s")
            elif actor.apply_elapsed_s(now) > self.settings.apply_timeout_s:
                actor.late = f"did not apply a version within {self.settings.apply_timeout_s:g} s"
                actor.channel.close(actor.late)
            elif not actor.late and actor.take_elapsed_s(now) > self.settings.take_timeout_s:
                actor.late = f"took no version within {self.settings.take_timeout_s:g} s though one is offered"
                self._write("late", {"actor": name, "version": actor.version, "reason": actor.late})
                self._changed(name)
        for serial, incomplete in list(self._incomplete.items()):
            if now - incomplete.since > self.settings.snapshot_timeout_s:
                missing = [rank for rank in range(self.settings.world_size) if rank not in incomplete.snapped]
                self._drop(serial, incomplete.version, f"rank {missing} did not snapshot it in time")
        for name in self.snapshots.expire(now):
            self._lost_snapshot(name)

    # Ranks

    def _rank_entered(self, channel: Channel, rank: int, fields: Message) -> None:
        if rank in self._ranks:
            self._ranks[rank].channel.close("replaced")
        self._ranks[rank] = PeerConnection(channel, fields["address"], self._runtime.now())
        channel.on_message, channel.on_close = partial(self._on_rank_message, rank), partial(self._on_rank_lost, rank)
        channel.send(self._live())

    def _on_rank_lost(self, rank: int, _channel: Channel, reason: str) -> None:
        # Its address stays in use: an actor that dials it finds out for itself.
        logger.warning("shard server of rank %d lost: %s", rank, reason)
        self._write("server_lost", {"rank": rank, "reason": reason})
        self._ranks[rank].heard_at = float("inf")
        for incomplete in self._incomplete.values():
            # The next shard server computes the checksums anew, and its report replaces this one.
            incomplete.snapped.pop(rank, None)
        self._changed()

    def _on_rank_message(self, rank: int, channel: Channel, message: Message) -> None:
        self._ranks[rank].heard_at = self._runtime.now()
        kind = message["type"]
        if kind == "ping":
            channel.send(PONG)
        elif kind == "layout":
            self._on_layout(rank, message["layout"])
        elif kind == "snapped":
            self._on_snapped(rank, message)
        elif kind == "moved":
            self._relays.moved(message["moved"], self._runtime.now())
        elif kind == "failed":
            why = str(message.get("reason") or "no free slot")
            self._drop(message["serial"], message["version"], f"rank {rank}: {why}")
        else:
            raise ProtocolError(f"a shard server does not send {kind!r}")

    def _on_layout(self, rank: int, layout: Message) -> None:
        if self._layouts.setdefault(rank, layout) != layout:
            raise ProtocolError(f"rank {rank} reports another layout than before")
        if self._model or self._failure or len(self._layouts) < self.settings.world_size:
            return
        try:
            merged = self._merge([self._layouts[number] for number in range(self.settings.world_size)])
        except LayoutError as error:
            self._failure = f"the ranks' shards do not fit together: {error}"
            logger.error("%s", self._failure)
            self._changed()
            return
        self.snapshots.version_bytes = merged.total_bytes
        about: Message = {"layout_id": merged.layout_id(), "layout": merged.to_json()}
        servers = [self._ranks[number].address for number in range(self.settings.world_size)]
        about |= {"servers": servers, "progress_s": self.settings.progress_timeout_s}
        about |= {"over_channel": self.settings.over_channel, "connections": self.settings.connections}
        self._model = BroadcastMessage({"type": "model", **about})
        for channel in self._actor_channels():
            channel.send(self._model)
        self._publish_complete()

    def _merge(self, layouts: list[Message]) -> Layout:
        return merge_layouts(layouts)

    def _on_snapped(self, rank: int, message: Message) -> None:
        serial, version = message["serial"], message["version"]
        if serial in self._dropped or (self.snapshots.newest is not None and serial <= self.snapshots.newest):
            return
        incomplete = self._incomplete.setdefault(serial, PendingVersion(version, self._runtime.now()))
        if incomplete.version != version:
            raise ProtocolError(f"rank {rank} calls snapshot {serial} version {version}, not {incomplete.version}")
        incomplete.snapped[rank] = message
        self._publish_complete()

    def _publish_complete(self) -> None:
        complete = [
            serial for serial, found in self._incomplete.items() if len(found.snapped) == self.settings.world_size
        ]
        if complete and self._model:
            self._publish(max(complete))

    def _publish(self, serial: int) -> None:
        gathered = self._incomplete[serial]
        hook.at("publish", version=gathered.version)
        snapped = [gathered.snapped[rank] for rank in range(self.settings.world_size)]
        checksum_tables = [message["table"] for message in snapped]
        self.newest = Manifest.of(self.epoch, gathered.version, self._model["layout_id"], checksum_tables)
        self._published.add(gathered.version, self.newest.digest)
        self._newest_message = {"type": "newest", **self.newest.to_json()}
        self._incomplete = {later: version for later, version in self._incomplete.items() if later > serial}
        self.snapshots.publish(serial, self._runtime.now())
        self._versions[serial] = gathered.version
        live_versions = self._live_versions()
        if self._catalogue is not None:
            files = [message.get("file") or {} for message in snapped]
            self._catalogue.publish(self.newest, files, live_versions)
        self._write("publish", {"version": gathered.version, "serial": serial, "digest": self.newest.digest})
        # One message for both: the version that an actor is pulling may be retained.
        self._announced = live = self._live()
        sources = self._relays.announce(serial, self._runtime.now())
        newest = BroadcastMessage({**live, **self._newest_message})
        lacking = [name for name, actor in self.actors.items() if actor.channel and actor.version != gathered.version]
        self._deliveries.offer(gathered.version, lacking)
        for name, actor in self.actors.items():
            if actor.channel is not None:
                actor.offer(gathered.version, self._runtime.now())
                source = sources.get(name)
                actor.channel.send(newest if source is None else {**newest, "source": source})
        for server in self._ranks.values():
            server.channel.send(live)
        self._changed()

    def _drop(self, serial: int, version: int, reason: str) -> None:
        self._incomplete.pop(serial, None)
        if serial in self._dropped or (self.snapshots.newest is not None and serial <= self.snapshots.newest):
            return
        self._dropped[serial] = version
        while len(self._dropped) > MAX_DROPPED:
            del self._dropped[min(self._dropped)]
        self._write("drop", {"version": version, "serial": serial, "reason": reason})
        if self._catalogue is not None:
            self._catalogue.make_room(self._live_versions())
        self._changed()

    # What lives

    def _live_versions(self) -> list[int]:
        self._versions = {serial: version for serial, version in self._versions.items() if self.snapshots.lives(serial)}
        return list(self._versions.values())

    def _live(self) -> Message:
        snapshots = self.snapshots
        return {
            "type": "live",
            "newest": -1 if snapshots.newest is None else snapshots.newest,
            "retained": sorted(snapshots.retained),
            "room": snapshots.room,
            "base": snapshots.base,
            "dropped": sorted(self._dropped),
            **self._pin,
        }

    def _actor_channels(self) -> list[Channel]:
        return [actor.channel for actor in self.actors.values() if actor.channel is not None]

    def _channels(self) -> list[Channel]:
        return [*(server.channel for server in self._ranks.values()), *self._actor_channels()]

    def _changed(self, name: str = "", routine: bool = False) -> None:
        """Announce what lives if it has changed, and schedule a status message to the trainer. name: of the actor that
        has changed, if one has; routine: as each does with each version."""
        live = self._live()
        if live != self._announced:
            self._announced = live = BroadcastMessage(live)
            for channel in self._channels():
                channel.send(live)
        if name:
            self._trainer.actor_changed(name, routine)
        self._trainer.soon()

    # Actors

    def _guest_changed(self, event: str, fields: Message) -> None:
        self._write(event, fields)
        self._trainer.soon()

    def _guest_leaves(self, name: str) -> None:
        if name in self.actors:
            self.actors[name].leaves = True

    def _actor_entered(self, channel: Channel, name: str, fields: Message) -> None:
        instance, address = str(fields.get("instance")), str(fields.get("address", ""))
        if (before := self.actors.get(name)) is not None and before.channel is not None:
            before.channel.close("replaced by a newer connection")
        actor = self.actors.get(name)  # one that leaves is gone with its connection
        if actor is None or actor.instance != instance:
            kept: dict[str, Any] = {}
            if actor is not None:
                kept = {field: getattr(actor, field) for field in state.KEPT}
            actor = self.actors[name] = ActorRecord(None, instance, address, 0.0, **kept)
            self.snapshots.forget(name)
        actor.channel, actor.heard_at, actor.reason = channel, self._runtime.now(), ""
        actor.state, actor.version, actor.source = ActorState.JOINING, -1, ""
        if self.newest is not None:
            actor.offer(self.newest.version, actor.heard_at)
            self._deliveries.offer(self.newest.version, [name])
        channel.on_message, channel.on_close = partial(self._on_actor_message, name), partial(self._on_actor_lost, name)
        self._write("join", {"actor": name, "instance": instance})
        if self._model:
            channel.send(self._model)
        channel.send({**self._live(), **self._newest_message})
        self._changed(name)

    def _on_actor_lost(self, name: str, _channel: Channel, reason: str) -> None:
        actor = self.actors[name]
        actor.channel = actor.applies_since = None
        self._relays.lost(name)
        if actor.leaves:
            del self.actors[name]
            self.snapshots.forget(name)
            self._write("left", {"actor": name, "version": actor.version})
            self._deliveries.forget(name)
            self._changed(name)
            return
        before = actor.state
        if before is not ActorState.GIVEN_UP:
            actor.state, actor.reason = ActorState.EVICTED, f"{reason} (it was {before})"
        actor.evictions, actor.eviction = actor.evictions + 1, actor.reason
        self._evictions += 1
        self._write("evicted", {"actor": name, "version": actor.version, "state": before, "reason": actor.reason})
        self._deliveries.evict(name, actor.reason)
        self.snapshots.leave(name)
        self._changed(name)

    def _lost_snapshot(self, name: str) -> None:
        actor, count = self.actors[name], self.snapshots.lost[name]
        self._write("lost_snapshot", {"actor": name, "version": actor.version, "times": count})
        if count >= MAX_LOST_SNAPSHOTS and actor.channel is not None:
            actor.state = ActorState.GIVEN_UP
            actor.reason = f"it could not finish a version within {self.settings.lease_s:g} s, {count} times in a row"
            actor.channel.close(actor.reason)
        self._changed(name)

    def _on_actor_message(self, name: str, channel: Channel, message: Message) -> None:
        actor, now, kind = self.actors[name], self._runtime.now(), message["type"]
        actor.heard_at = now
        if kind == "ping":
            channel.send(PONG)
            self.snapshots.progress(name, message.get("bytes") or 0, now)
            return
        # One that is poisoned may not know by which version.
        if kind in CLAIMS and (kind, message["version"]) != ("poisoned", -1):
            self._check_published(name, message["version"])
        if kind == "pulling":
            if self._versions.get(message["serial"], message["version"]) != message["version"]:
                snapshot = f"snapshot {message['serial']}, which is not version {message['version']}"
                raise ProtocolError(f"{name} pulls {snapshot}")
            self.snapshots.begin(name, message["serial"], now, relayed=bool(actor.source))
            actor.enter(ActorState.PULLING)
            self._deliveries.begin(name, message["version"])
        elif kind == "ended":
            self._on_ended(name, actor, message)
        elif kind == "serving":
            self._on_serving(name, actor, message)
        elif kind == "forged":
            if actor.source and actor.source == message["source"]:
                actor.disputes = True
                if actor.source in self.actors:
                    self.actors[actor.source].disputes = True
                self._write("forged", {"actor": name, "version": message["version"], "reason": f"by {actor.source}"})
        elif kind == "poisoned":
            actor.state, actor.version, actor.applies_since = ActorState.POISONED, -1, None
            actor.reason = message["reason"]
            actor.failures += 1
            self._write("poisoned", {"actor": name, "version": message["version"], "reason": message["reason"]})
            self._deliveries.end(name, message["version"], "poisoned", message["reason"])
        else:
            raise ProtocolError(f"an actor does not send {kind!r}")
        self._changed(name, routine=kind in ("pulling", "ended", "serving") and not actor.failures)

    def _on_ended(self, name: str, actor: ActorRecord, message: Message) -> None:
        """Handle the end of an actor's pull or, if everything was staged, its engine's refusal of the version."""
        outcome = message["outcome"]
        if outcome == "staged":
            self.snapshots.finished(name)
            actor.applies_since = self._runtime.now()
            actor.enter(ActorState.APPLYING)
        else:
            self.snapshots.end(name)
            actor.applies_since = None
            actor.enter(ActorState.READY if actor.version >= 0 else ActorState.JOINING)
        if outcome == "refused":
            actor.failures, actor.reason = actor.failures + 1, message["reason"]
        if outcome == "staged":
            self._deliveries.stage(name, message["version"])
        else:
            self._deliveries.end(name, message["version"], ENDS[outcome], message["reason"])

    def _check_published(self, name: str, version: int) -> str | None:
        """Return the digest of a version that an actor names; None if that was so long ago that nobody knows it. Raises
        ProtocolError if it was never published."""
        digest = self._published.digest(version)
        if digest is None and not self._published.is_forgotten(version):
            raise ProtocolError(f"{name} names version {version}, which was not published")
        return digest

    def _on_serving(self, name: str, actor: ActorRecord, message: Message) -> None:
        newest, digest = self.newest, self._check_published(name, message["version"])
        if digest is None:
            # It has to take a version that is known before it counts as serving one.
            return
        if digest != message["digest"]:
            raise ProtocolError(f"{name} serves version {message['version']} of other bytes than were published")
        actor.state, actor.reason, actor.applies_since, actor.failures = ActorState.READY, "", None, 0
        actor.version, actor.figures = message["version"], message["figures"]
        actor.take(actor.version, None if newest is None else newest.version, self._runtime.now())
        actor.pinned = actor.version == self._pinned
        self._deliveries.serves(name, actor.version, actor.figures)

    # Trainer

    def _on_trainer_message(self, channel: Channel, message: Message) -> None:
        if message["type"] == "ping":
            channel.send(PONG)
            return
        if message["type"] == "look":
            self._trainer.all_changed()
            self._trainer.soon()
            return
        if message["type"] != "pin":
            raise ProtocolError(f"a trainer does not send {message['type']!r}")
        self._pin = {"pinned": message.get("version")}
        self._trainer.all_changed()
        for actor in self.actors.values():
            actor.pinned = self._pinned is not None and actor.serves and actor.version == self._pinned
            if actor.applies_since is not None:
                actor.applies_since = self._runtime.now()
            if actor.offered_since is not None:
                actor.offered_since = self._runtime.now()
        self._changed()

    @property
    def _pinned(self) -> int | None:
        return self._pin.get("pinned")

    def status(self, names: Iterable[str] | None = None) -> Message:
        """Return the status message for the trainer: counts, and the details of these actors (None: of all)."""
        named = self.actors if names is None else names
        return {
            "type": "status",
            "complete": names is None,
            **state.tally(self.actors.values()),
            "newest": None if self.newest is None else self.newest.version,
            "dropped": [[serial, version] for serial, version in self._dropped.items()],
            "pinned": self._pinned,
            "evictions": self._evictions,
            "failure": self._failure,
            "actors": {name: self.actors[name].status() for name in named if name in self.actors},
            "forgotten": [name for name in named if name not in self.actors],
            "guests": self.guests.news(all_guests=names is None),
        }

    def close(self) -> None:
        """Close every connection."""
        self._acceptor.close()
        guests = [guest.channel for guest in self.guests.there.values()]
        for channel in [*self._channels(), *guests, *filter(None, [self._trainer.channel])]:
            channel.close("the registry ends")
