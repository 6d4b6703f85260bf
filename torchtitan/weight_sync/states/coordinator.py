"""One decides, all obey: which actor gets which version, which attempt ends, who is evicted. Pure: events and times in,
commands out. The same class runs in the coordinator's process and in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.weight_sync.states.actor import NO_VERSION, Actor, ActorState
from torchtitan.weight_sync.states.attempt import Attempt, AttemptState
from torchtitan.weight_sync.states.version import Outcome, VersionRecord, VersionTable

Message = dict[str, Any]

# The machine's clock never jumps: a longer gap between two events was a pause of this process, and deadlines are
# extended by what exceeds this.
LONGEST_TICK_SECONDS = 0.5
MAXIMUM_FAILURES = 3
MAXIMUM_MISSED_DEADLINES = 2
ATTEMPTS_PER_TERM = 1 << 32
PROTECTED_SHARE = 0.1


@dataclass(frozen=True)
class Settings:
    """Deadlines in seconds; see [weight_sync] in the configuration."""

    world_size: int
    join_timeout_s: float = 60.0
    offer_timeout_s: float = 5.0
    progress_timeout_s: float = 5.0
    apply_timeout_s: float = 10.0
    snapshot_timeout_s: float = 60.0
    evict_after_versions: int = 16


@dataclass(frozen=True)
class ToCourier:
    """To one rank's courier, or to all (rank None)."""

    rank: int | None
    message: Message


@dataclass(frozen=True)
class ToActor:
    actor: str
    session: int
    message: Message


@dataclass(frozen=True)
class Disconnect:
    """Close the actor's connection, after what was sent before."""

    actor: str
    session: int


@dataclass(frozen=True)
class Record:
    """A line of the journal."""

    event: str
    fields: Message


Command = ToCourier | ToActor | Disconnect | Record
Digest = Callable[[list[list[str]]], str]


class CoordinatorMachine:
    """Everything the coordinator knows, and what it decides."""

    def __init__(self, settings: Settings, term: int):
        self.settings = settings
        self.term = term
        self.actors: dict[str, Actor] = {}
        self.versions = VersionTable(settings.world_size, settings.snapshot_timeout_s)
        self.layout: Message | None = None
        self.layout_id = ""
        self.content_digest: Digest | None = None
        self.pinned_version: int | None = None
        self.dropped: list[tuple[int, int]] = []
        self.published_count = 0
        self.time = 0.0
        self._last_now: float | None = None
        self._next_attempt = term * ATTEMPTS_PER_TERM + 1
        self._out: list[Command] = []

    # Events

    def layout_known(self, layout: Message, layout_id: str, content_digest: Digest, now: float) -> list[Command]:
        """All ranks have reported their shards and they fit together."""
        self._advance(now)
        self.layout, self.layout_id, self.content_digest = layout, layout_id, content_digest
        for actor in self.actors.values():
            if actor.state is ActorState.JOINING:
                self._to_actor(actor, {"type": "layout", "layout": layout})
        return self._commands()

    def courier_joined(self, rank: int, now: float) -> list[Command]:
        """A rank's courier is here (again) and will report what its slots hold."""
        self._advance(now)
        newest = self.versions.newest
        if newest is not None:
            self._to_couriers({"type": "publish", "serial": newest.serial, "version": newest.version}, rank)
        return self._commands()

    def courier_lost(self, rank: int, now: float) -> list[Command]:
        """Its attempts cannot be finished: everything it was sending starts anew when it is back."""
        self._advance(now)
        self.versions.rank_lost(rank)
        for actor in self.actors.values():
            if actor.attempt is not None and actor.attempt.leases:
                self._end_attempt(actor, f"the courier of rank {rank} is gone")
        self._record("courier_lost", rank=rank)
        return self._commands()

    def courier_message(self, rank: int, message: Message, now: float) -> list[Command]:
        """snapped, failed, need_slot, broken."""
        self._advance(now)
        kind = message["type"]
        if kind == "snapped":
            self._snapped(rank, message)
        elif kind == "failed":
            self._drop(message["serial"], message["version"], f"rank {rank} had no free slot")
        elif kind == "need_slot":
            self._need_slot()
        elif kind == "broken":
            actor = self._actor_of(message["attempt"])
            if actor is not None:
                self._attempt_failed(actor, f"rank {rank}: {message['reason']}")
        return self._commands()

    def actor_joined(self, name: str, session: int, fields: Message, now: float) -> list[Command]:
        """fields: data (host:port), served ([epoch, version, digest] or None), poisoned, epoch (already checked)."""
        self._advance(now)
        previous = self.actors.get(name)
        if previous is not None and previous.state is not ActorState.EVICTED:
            self._evict(previous, "joined anew")
        actor = Actor(name, session, fields["data"], heard_at=self.time, since=self.time)
        if previous is not None:
            actor.evictions, actor.figures = previous.evictions, previous.figures
        actor.poisoned = bool(fields.get("poisoned"))
        served = fields.get("served")
        if served is not None and served[0] == fields["epoch"]:
            actor.version, actor.digest = served[1], served[2]
        self.actors[name] = actor
        self._record("join", actor=name, served=served, poisoned=actor.poisoned)
        if self.layout is not None:
            self._to_actor(actor, {"type": "layout", "layout": self.layout})
        return self._commands()

    def actor_lost(self, name: str, session: int, reason: str, now: float) -> list[Command]:
        """Its connection is over."""
        self._advance(now)
        actor = self.actors.get(name)
        if actor is not None and actor.session == session and actor.state is not ActorState.EVICTED:
            self._evict(actor, reason)
        return self._commands()

    def actor_message(self, name: str, session: int, message: Message, now: float) -> list[Command]:
        """Whatever an actor says. Messages of an older connection or attempt are dropped."""
        self._advance(now)
        actor = self.actors.get(name)
        if actor is None or actor.session != session or actor.state is ActorState.EVICTED:
            return self._commands()
        actor.heard_at = self.time
        if actor.state is ActorState.SUSPECT:
            actor.move(actor.idle_state, self.time)
            actor.unanswered_since = None
            self._refill(actor)
        kind = message["type"]
        if kind == "ping":
            self._to_actor(actor, {"type": "pong"})
        elif kind == "ready":
            self._ready(actor, message)
        elif actor.attempt is not None and message.get("attempt") == actor.attempt.number:
            handler = {
                "accept": self._accept,
                "decline": self._decline,
                "progress": self._progress,
                "staged": self._staged,
                "refused": self._refused,
                "applied": self._applied,
                "poisoned": self._poisoned,
            }[kind]
            handler(actor, actor.attempt, message)
        return self._commands()

    def pin(self, version: int | None, now: float) -> list[Command]:
        """Actors that serve `version` keep it (evaluation): no offers, no deadlines, until pin(None)."""
        self._advance(now)
        if version != self.pinned_version:
            self._record("pin", version=version)
        self.pinned_version = version
        return self._commands()

    def tick(self, now: float) -> list[Command]:
        """Judge deadlines. Call often (ten times a second)."""
        self._advance(now)
        for serial in self.versions.overdue(self.time):
            record = self.versions.records[serial]
            self._drop(serial, record.version, "not all ranks have snapped it in time")
        for actor in list(self.actors.values()):
            self._judge(actor)
        return self._commands()

    def status(self) -> Message:
        """What the trainer may know."""
        newest = self.versions.newest
        return {
            "type": "status",
            "term": self.term,
            "newest": None if newest is None else newest.version,
            "digest": "" if newest is None else newest.digest,
            "published": self.published_count,
            "pinned": self.pinned_version,
            "dropped": [list(pair) for pair in self.dropped[-16:]],
            "actors": {name: actor.status() for name, actor in self.actors.items()},
        }

    # Versions

    def _snapped(self, rank: int, message: Message) -> None:
        serial, version = message["serial"], message["version"]
        try:
            outcome = self.versions.snapped(rank, serial, version, message["checksums"], self.time)
        except ValueError as error:
            self._record("snapshot_mismatch", rank=rank, serial=serial, version=version, reason=str(error))
            return
        if outcome is Outcome.DROPPED:
            self._to_couriers({"type": "drop", "serial": serial}, rank)
        elif outcome is Outcome.PUBLISHED:
            self._published(self.versions.records[serial])

    def _published(self, record: VersionRecord) -> None:
        assert self.content_digest is not None
        record.digest = self.content_digest(record.published_checksums)
        self.published_count += 1
        for serial in self.versions.superseded():
            self._drop(serial, self.versions.records[serial].version, f"version {record.version} came first")
        self._record("publish", version=record.version, serial=record.serial, digest=record.digest)
        self._to_couriers({"type": "publish", "serial": record.serial, "version": record.version})
        for actor in self.actors.values():
            if actor.state is not ActorState.EVICTED:
                actor.mailbox = True

    def _drop(self, serial: int, version: int, reason: str) -> None:
        record = self.versions.records.get(serial)
        if record is not None and record.outcome is Outcome.PUBLISHED:
            return
        self.versions.drop(serial)
        if (serial, version) not in self.dropped:
            self.dropped.append((serial, version))
            self._record("drop", version=version, serial=serial, reason=reason)
        self._to_couriers({"type": "drop", "serial": serial})

    # Offers

    def _refill(self, actor: Actor) -> None:
        newest = self.versions.newest
        if newest is not None and (newest.version > actor.version or actor.poisoned):
            actor.mailbox = True

    def _choose(self, actor: Actor) -> VersionRecord | None:
        """The version to offer: the newest, or, after an abort for want of slots, one whose slot is held anyway."""
        newest = self.versions.newest
        if newest is None or not self.versions.whole(newest):
            return None
        if newest.version <= actor.version and not actor.poisoned:
            actor.mailbox = False
            return None
        if actor.shortage_aborts:
            leased = {a.attempt.serial for a in self.actors.values() if a.attempt is not None and a.attempt.leases}
            shared = [self.versions.records[s] for s in sorted(leased, reverse=True) if s != newest.serial]
            for record in shared:
                if record.version > actor.version and self.versions.whole(record):
                    return record
        return newest

    def _offer_all(self) -> None:
        """Offer to every idle actor whose mailbox is full; one lease message per version, however many actors."""
        offers: dict[int, list[tuple[Actor, Attempt]]] = {}
        for actor in self.actors.values():
            actor.pinned = self.pinned_version is not None and actor.version == self.pinned_version and actor.idle
            if not actor.idle or not actor.mailbox or actor.pinned:
                continue
            record = self._choose(actor)
            if record is None:
                continue
            attempt = Attempt(self._next_attempt, actor.name, record.serial, record.version, self.time)
            self._next_attempt += 1
            actor.attempt = attempt
            actor.mailbox = record is not self.versions.newest
            if actor.unanswered_since is None:
                actor.unanswered_since = self.time
            actor.move(ActorState.OFFERED, self.time)
            offers.setdefault(record.serial, []).append((actor, attempt))
        for serial, pairs in offers.items():
            record = self.versions.records[serial]
            # Held on all ranks from the offer on; the couriers read this before anything that could free the slot.
            numbers = [[attempt.number, actor.name] for actor, attempt in pairs]
            self._to_couriers({"type": "lease", "serial": serial, "attempts": numbers})
            for actor, attempt in pairs:
                self._record("offer", actor=actor.name, attempt=attempt.number, version=record.version)
                offer = {
                    "type": "offer",
                    "attempt": attempt.number,
                    "version": record.version,
                    "layout_id": self.layout_id,
                    "checksums": record.published_checksums,
                    "digest": record.digest,
                }
                self._to_actor(actor, offer)

    # Actor messages

    def _ready(self, actor: Actor, message: Message) -> None:
        if actor.state is not ActorState.JOINING or message["layout_id"] != self.layout_id:
            return
        actor.move(actor.idle_state, self.time)
        newest = self.versions.newest
        if newest is not None and actor.version == newest.version and actor.digest != newest.digest:
            # It cannot be what was published; the next version replaces it.
            actor.version, actor.reason = NO_VERSION, "serves unknown weights"
            self._record("unknown_weights", actor=actor.name, digest=actor.digest)
        self._refill(actor)

    def _accept(self, actor: Actor, attempt: Attempt, _message: Message) -> None:
        if attempt.state is not AttemptState.OFFERED:
            return
        attempt.move(AttemptState.RECEIVING)
        attempt.progress_at = self.time
        actor.unanswered_since = None
        actor.move(ActorState.RECEIVING, self.time)
        send = {"type": "send", "attempt": attempt.number, "actor": actor.name, "data": actor.data}
        self._to_couriers({**send, "serial": attempt.serial})

    def _decline(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is AttemptState.OFFERED:
            actor.unanswered_since = None
            # Not offered again before something newer is published.
            self._end_attempt(actor, f"declined: {message['reason']}", refill=False)

    def _progress(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is AttemptState.RECEIVING and attempt.progress(message["bytes"], self.time):
            actor.missed_deadlines = 0

    def _staged(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is not AttemptState.RECEIVING:
            return
        record = self.versions.records[attempt.serial]
        if message["digest"] != record.digest:
            self._attempt_failed(actor, "staged another digest")
            return
        attempt.move(AttemptState.STAGED)
        actor.move(ActorState.STAGED, self.time)
        self._to_couriers({"type": "release", "attempt": attempt.number})
        attempt.move(AttemptState.APPLYING)
        actor.move(ActorState.APPLYING, self.time)
        self._record("apply", actor=actor.name, attempt=attempt.number, version=attempt.version)
        self._to_actor(actor, {"type": "apply", "attempt": attempt.number})

    def _refused(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is AttemptState.RECEIVING:
            self._attempt_failed(actor, f"refused: {message['reason']}")

    def _applied(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is not AttemptState.APPLYING:
            return
        attempt.move(AttemptState.DONE)
        actor.attempt = None
        actor.version, actor.digest, actor.poisoned = message["version"], message["digest"], False
        actor.figures = message["figures"]
        actor.missed_deadlines = actor.failures = actor.shortage_aborts = 0
        actor.reason = ""
        actor.move(ActorState.READY, self.time)
        self._record("applied", actor=actor.name, version=actor.version, digest=actor.digest, figures=actor.figures)

    def _poisoned(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is not AttemptState.APPLYING:
            return
        attempt.move(AttemptState.DONE)
        actor.attempt = None
        actor.poisoned, actor.reason = True, message["reason"]
        actor.failures += 1
        actor.move(ActorState.POISONED, self.time)
        self._record("poisoned", actor=actor.name, version=attempt.version, reason=message["reason"])
        if actor.failures >= MAXIMUM_FAILURES:
            self._evict(actor, f"apply failed {actor.failures} times in a row: {message['reason']}")
        else:
            self._refill(actor)

    # Ends

    def _actor_of(self, attempt: int) -> Actor | None:
        for actor in self.actors.values():
            if actor.attempt is not None and actor.attempt.number == attempt:
                return actor
        return None

    def _end_attempt(self, actor: Actor, reason: str, refill: bool = True, to: ActorState | None = None) -> None:
        """Abort for all who take part, and lead the actor back. Never after APPLY has been ordered."""
        attempt = actor.attempt
        if attempt is None or not attempt.leases:
            return
        phase = attempt.state.value
        attempt.move(AttemptState.ABORTED)
        actor.attempt = None
        abort = {"type": "abort", "attempt": attempt.number, "reason": reason}
        self._to_couriers(abort)
        self._to_actor(actor, abort)
        fields = {"actor": actor.name, "attempt": attempt.number, "version": attempt.version}
        self._record("abort", **fields, phase=phase, bytes=attempt.received_bytes, reason=reason)
        actor.move(to or actor.idle_state, self.time)
        if refill:
            self._refill(actor)

    def _attempt_failed(self, actor: Actor, reason: str) -> None:
        if actor.attempt is None or not actor.attempt.leases:
            return
        actor.failures += 1
        actor.reason = reason
        self._end_attempt(actor, reason)
        if actor.failures >= MAXIMUM_FAILURES:
            self._evict(actor, f"{actor.failures} failed attempts in a row, the last: {reason}")

    def _evict(self, actor: Actor, reason: str) -> None:
        phase = actor.state.value
        self._end_attempt(actor, reason, refill=False)
        # An attempt that is being applied holds no slot; what the actor then serves it says when it rejoins.
        actor.attempt = None
        actor.move(ActorState.EVICTED, self.time)
        actor.reason = f"{reason} (in {phase})"
        actor.evictions += 1
        actor.mailbox = actor.pinned = False
        self._to_actor(actor, {"type": "evict", "reason": reason})
        self._out.append(Disconnect(actor.name, actor.session))
        self._record("evict", actor=actor.name, phase=phase, version=actor.version, reason=reason)

    def _need_slot(self) -> None:
        """The publisher found no free slot: give up the delivery with the least progress, so that a slot comes free."""
        newest = self.versions.newest
        holders: dict[int, list[Actor]] = {}
        for actor in self.actors.values():
            if (
                actor.attempt is not None
                and actor.attempt.leases
                and actor.attempt.serial != getattr(newest, "serial", 0)
            ):
                holders.setdefault(actor.attempt.serial, []).append(actor)
        candidates = [group for group in holders.values() if not any(map(self._protected, group))]
        if not candidates:
            return

        def progress(group: list[Actor]) -> tuple[int, int]:
            attempts = [actor.attempt for actor in group if actor.attempt is not None]
            return max(a.received_bytes for a in attempts), attempts[0].serial

        for actor in min(candidates, key=progress):
            actor.shortage_aborts += 1
            self._end_attempt(actor, "its slot is needed for a newer version")

    def _protected(self, actor: Actor) -> bool:
        """An actor that answers and makes progress is aborted for want of slots at most once in a row."""
        if not actor.shortage_aborts or actor.attempt is None:
            return False
        # A frozen actor must not hold a slot for its turn until the deadline: a share of it shows enough.
        if actor.attempt.state is AttemptState.OFFERED:
            begun, patience = actor.unanswered_since, self.settings.offer_timeout_s
        else:
            begun, patience = actor.attempt.progress_at, self.settings.progress_timeout_s
        return begun is not None and self.time - begun < patience * PROTECTED_SHARE

    def _judge(self, actor: Actor) -> None:
        """Deadlines of one actor, by phase."""
        if actor.pinned:
            return
        settings, now = self.settings, self.time
        attempt = actor.attempt
        if actor.state is ActorState.JOINING:
            if self.layout is not None and now - actor.since > settings.join_timeout_s:
                self._evict(actor, f"did not join within {settings.join_timeout_s:g} s")
        elif actor.state is ActorState.OFFERED and actor.unanswered_since is not None:
            if now - actor.unanswered_since > settings.offer_timeout_s:
                self._missed(actor, f"no answer to an offer within {settings.offer_timeout_s:g} s")
        elif actor.state is ActorState.RECEIVING and attempt is not None:
            if now - attempt.progress_at > settings.progress_timeout_s:
                self._missed(actor, f"no byte within {settings.progress_timeout_s:g} s")
        elif actor.state is ActorState.APPLYING:
            if now - actor.since > settings.apply_timeout_s:
                self._evict(actor, f"no acknowledgement of apply within {settings.apply_timeout_s:g} s")
        elif actor.state is ActorState.SUSPECT:
            if now - actor.since > settings.offer_timeout_s:
                self._evict(actor, actor.reason)
        elif actor.idle and now - actor.heard_at > settings.offer_timeout_s:
            self._missed(actor, f"no heartbeat for {settings.offer_timeout_s:g} s")

    def _missed(self, actor: Actor, reason: str) -> None:
        phase = actor.state.value
        actor.missed_deadlines += 1
        actor.reason = reason
        newest = self.versions.newest
        # One that never had a version falls behind the first that it was offered.
        held = actor.attempt.version if actor.version == NO_VERSION and actor.attempt is not None else actor.version
        behind = 0 if newest is None or held == NO_VERSION else newest.version - held
        if actor.missed_deadlines >= MAXIMUM_MISSED_DEADLINES or behind >= self.settings.evict_after_versions:
            self._evict(actor, reason)
            return
        self._record("suspect", actor=actor.name, phase=phase, reason=reason)
        if actor.attempt is not None:
            self._end_attempt(actor, reason, refill=False, to=ActorState.SUSPECT)
        else:
            actor.move(ActorState.SUSPECT, self.time)

    # Plumbing

    def _advance(self, now: float) -> None:
        if self._last_now is not None:
            self.time += min(max(0.0, now - self._last_now), LONGEST_TICK_SECONDS)
        self._last_now = now

    def _to_couriers(self, message: Message, rank: int | None = None) -> None:
        self._out.append(ToCourier(rank, message))

    def _to_actor(self, actor: Actor, message: Message) -> None:
        self._out.append(ToActor(actor.name, actor.session, message))

    def _record(self, event: str, **fields: Any) -> None:
        self._out.append(Record(event, fields))

    def _commands(self) -> list[Command]:
        self._offer_all()
        in_use = {a.attempt.serial for a in self.actors.values() if a.attempt is not None}
        self.versions.forget(in_use)
        commands, self._out = self._out, []
        return commands
