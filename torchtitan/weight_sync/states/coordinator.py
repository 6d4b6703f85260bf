"""One decides, all obey: which actor gets which version, which attempt ends, who is evicted. Pure: events and times in,
commands out. The same class runs in the coordinator's process and in tests.
"""

from __future__ import annotations

from collections.abc import Callable

from torchtitan.weight_sync.states.actor import MAXIMUM_FAILURES, NO_VERSION, Actor, ActorState, backoff_seconds
from torchtitan.weight_sync.states.attempt import Attempt, AttemptState
from torchtitan.weight_sync.states.commands import Command, Message, Settings
from torchtitan.weight_sync.states.delivery import Deliveries
from torchtitan.weight_sync.states.receiver import NO_ATTEMPT
from torchtitan.weight_sync.states.version import Outcome, VersionRecord

# The machine's clock never jumps: a longer gap between two events was a pause of this process, and deadlines are
# extended by what exceeds this.
LONGEST_TICK_SECONDS = 0.5
# An actor that has been gone for so long is forgotten, and its failures with it: names may never come back.
REMEMBERED_SECONDS = 300.0

Digest = Callable[[list[list[str]]], str]


class CoordinatorMachine(Deliveries):
    """Everything the coordinator knows, and what it decides."""

    def __init__(self, settings: Settings, term: int):
        super().__init__(settings, term)
        self.content_digest: Digest | None = None
        self.dropped: list[tuple[int, int]] = []
        self.published_count = 0
        self.forgotten_evictions = 0
        """Of actors that are not in the status any more"""
        self._last_now: float | None = None

    # Events

    def layout_known(self, layout: Message, layout_id: str, content_digest: Digest, now: float) -> list[Command]:
        """All ranks have reported their shards and they fit together."""
        self._advance(now)
        self.layout, self.layout_id, self.content_digest = layout, layout_id, content_digest
        for actor in self.actors.values():
            if actor.state is ActorState.JOINING:
                # Until now there was nothing that it could have been ready for.
                actor.since = self.time
                self._to_actor(actor, {"type": "layout", "layout": layout})
        return self._commands()

    def courier_joined(self, rank: int, now: float) -> list[Command]:
        """A rank's courier is here (again) and will report what its slots hold, the newest first: what was published in
        an earlier term is then found before anything that it superseded."""
        self._advance(now)
        self.couriers_heard_at[rank] = self.time
        newest = self.versions.newest
        if self.retained is not None:
            self._to_couriers({"type": "retain", "serial": self.retained}, rank)
        if newest is not None:
            self._to_couriers(self._publication(newest), rank)
        return self._commands()

    def courier_heard(self, rank: int, now: float) -> None:
        """It shows life; it does so at least twice a second."""
        self._advance(now)
        if rank in self.couriers_heard_at:
            self.couriers_heard_at[rank] = self.time

    def courier_lost(self, rank: int, now: float, reason: str = "") -> list[Command]:
        """Its attempts cannot be finished: everything it was sending starts anew when it is back."""
        self._advance(now)
        self._courier_lost(rank, reason)
        return self._commands()

    def courier_message(self, rank: int, message: Message, now: float) -> list[Command]:
        """snapped, failed, need_slot, broken."""
        self.courier_heard(rank, now)
        kind = message["type"]
        if kind == "snapped":
            self._snapped(rank, message)
        elif kind == "failed":
            self._drop(message["serial"], message["version"], f"rank {rank} had no free slot")
        elif kind == "need_slot":
            # All ranks miss a slot at the same boundary: one delivery gives way, not one per rank.
            if rank in self._short_of_slots or not self._short_of_slots:
                self._short_of_slots.clear()
                self._need_slot()
            self._short_of_slots.add(rank)
        elif kind == "broken":
            actor = self._actor_of(message["attempt"])
            if actor is not None and actor.attempt is not None and actor.attempt.source is None:
                self._attempt_failed(actor, f"rank {rank}: {message['reason']}")
        return self._commands()

    def actor_joined(self, name: str, session: int, fields: Message, now: float) -> list[Command]:
        """fields: data (host:port per worker), served ([epoch, version, digest] or None), poisoned, epoch (already
        checked); optional: shadow (staging memory holds what is served), process (differs between two processes)."""
        self._advance(now)
        previous = self.actors.get(name)
        if previous is not None and previous.state is not ActorState.EVICTED:
            self._evict(previous, "joined anew")
        actor = Actor(name, session, fields["data"], heard_at=self.time, since=self.time)
        actor.process = fields.get("process")
        actor.poisoned = bool(fields.get("poisoned"))
        served = fields.get("served")
        if served is not None and served[0] == fields["epoch"]:
            actor.version, actor.digest = served[1], served[2]
            actor.shadow = bool(fields.get("shadow"))
        if previous is not None:
            actor.succeed(previous)
        actor.offers_from = self.time + actor.backoff
        self.actors[name] = actor
        self._record("join", actor=name, served=served, poisoned=actor.poisoned, backoff_s=actor.backoff)
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
        returned = actor.state is ActorState.SUSPECT
        if returned:
            actor.move(actor.idle_state, self.time)
            actor.unanswered_since = None
            self._refill(actor)
        kind = message["type"]
        if kind == "ping":
            self._to_actor(actor, {"type": "pong"})
        elif kind == "ready":
            self._ready(actor, message)
        elif kind == "broken":
            self._relay_broken(actor, message)
        elif kind == "poisoned" and message["attempt"] == NO_ATTEMPT:
            # The version went through; what became of it in the engine did not stand a later look.
            actor.poisoned = True
            self._evict_late(actor, message["reason"])
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
        # The many messages that only show life give nobody a place; what time brings, the next tick sees.
        return self._gathered() if kind in ("ping", "progress") and not returned else self._commands()

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
        self._judge_couriers()
        for actor in list(self.actors.values()):
            self._judge(actor)
            if actor.state is ActorState.EVICTED and self.time - actor.since > REMEMBERED_SECONDS:
                self._forget(actor)
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
            "forgotten_evictions": self.forgotten_evictions,
            "pinned": self.pinned_version,
            "dropped": [list(pair) for pair in self.dropped],
            "actors": {name: actor.status() for name, actor in self.actors.items()},
        }

    # Versions

    def _snapped(self, rank: int, message: Message) -> None:
        serial, version = message["serial"], message["version"]
        previous = self.versions.newest
        try:
            outcome = self.versions.snapped(rank, serial, version, message["checksums"], self.time)
        except ValueError as error:
            self._record("snapshot_mismatch", rank=rank, serial=serial, version=version, reason=str(error))
            return
        if outcome is Outcome.DROPPED:
            self._to_couriers({"type": "drop", "serial": serial}, rank)
        elif outcome is Outcome.PUBLISHED:
            self._published(self.versions.records[serial], previous)

    def _published(self, record: VersionRecord, previous: VersionRecord | None) -> None:
        assert self.content_digest is not None
        record.digest = self.content_digest(record.published_checksums)
        self.published_count += 1
        self._record("publish", version=record.version, serial=record.serial, digest=record.digest)
        self._choose_retained(previous)
        self._to_couriers(self._publication(record))
        # Afterwards: a courier that was restarted has nothing pinned before it reads what is published.
        for serial in self.versions.superseded():
            self._drop(serial, self.versions.records[serial].version, f"version {record.version} came first")
        for actor in self.actors.values():
            if actor.state is not ActorState.EVICTED:
                actor.mailbox = True
                if actor.declines:
                    actor.declines, actor.offers_from = 0, self.time

    def _publication(self, record: VersionRecord) -> Message:
        identity = {"version": record.version, "digest": record.digest, "layout_id": self.layout_id}
        return {"type": "publish", "serial": record.serial, **identity}

    def _drop(self, serial: int, version: int, reason: str) -> None:
        record = self.versions.records.get(serial)
        if record is not None and record.outcome is Outcome.PUBLISHED:
            return
        self.versions.drop(serial)
        if (serial, version) not in self.dropped:
            self.dropped = [*self.dropped[-63:], (serial, version)]
            self._record("drop", version=version, serial=serial, reason=reason)
        self._to_couriers({"type": "drop", "serial": serial})

    def _forget(self, actor: Actor) -> None:
        del self.actors[actor.name]
        self.forgotten_evictions += actor.evictions
        self._to_couriers({"type": "forget", "actor": actor.name})
        self._record("forget", actor=actor.name)

    # Actor messages

    def _ready(self, actor: Actor, message: Message) -> None:
        if actor.state is not ActorState.JOINING or message["layout_id"] != self.layout_id:
            return
        actor.parts = message.get("parts") or []
        actor.move(actor.idle_state, self.time)
        newest = self.versions.newest
        if newest is not None and actor.version == newest.version and actor.digest != newest.digest:
            # It cannot be what was published; the next version replaces it.
            actor.version, actor.reason = NO_VERSION, "serves unknown weights"
            self._record("unknown_weights", actor=actor.name, digest=actor.digest)
        self._refill(actor)

    def _accept(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is not AttemptState.OFFERED:
            return
        attempt.move(AttemptState.RECEIVING)
        attempt.progress_at = self.time
        actor.unanswered_since = None
        actor.declines = 0
        actor.shadow = False
        actor.move(ActorState.RECEIVING, self.time)
        order = {"attempt": attempt.number, "actor": actor.name, "data": actor.data}
        if attempt.source is not None:
            record = self.versions.records[attempt.serial]
            self._to_senders(attempt, {"type": "relay", **order, "version": record.version, "digest": record.digest})
            return
        attempt.delta = attempt.base_serial is not None and bool(message.get("base"))
        base_serial = attempt.base_serial if attempt.delta else None
        self._to_couriers({"type": "send", **order, "serial": attempt.serial, "base_serial": base_serial})

    def _decline(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is AttemptState.OFFERED:
            actor.unanswered_since = None
            # Offered again, since nothing newer may come; later and later, since it may go on declining.
            actor.offers_from = self.time + backoff_seconds(actor.declines)
            actor.declines += 1
            self._end_attempt(actor, f"declined: {message['reason']}")

    def _relay_broken(self, source: Actor, message: Message) -> None:
        """An actor cannot pass its version on."""
        child = self._actor_of(message["attempt"])
        if child is not None and child.attempt is not None and child.attempt.source == source.name:
            source.shadow = source.shadow and bool(message.get("shadow", True))
            self._attempt_failed(child, message["reason"])

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
        self._to_senders(attempt, {"type": "release", "attempt": attempt.number})
        attempt.move(AttemptState.APPLYING)
        actor.move(ActorState.APPLYING, self.time)
        self._record("apply", actor=actor.name, attempt=attempt.number, version=attempt.version)
        self._to_actor(actor, {"type": "apply", "attempt": attempt.number})

    def _refused(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is AttemptState.RECEIVING:
            self._attempt_failed(actor, f"refused: {message['reason']}")
        elif attempt.state is AttemptState.APPLYING:
            # The engine found fault with the version before it touched its weights.
            self._not_applied(actor, attempt, "refused", message["reason"])

    def _applied(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is not AttemptState.APPLYING:
            return
        digest = self.versions.records[attempt.serial].digest
        if (message["version"], message["digest"]) != (attempt.version, digest):
            # What it serves nobody knows; it may say so when it joins anew.
            told = f"version {message['version']} with digest {message['digest']}"
            self._evict_late(actor, f"protocol error: applied {told} in place of version {attempt.version}")
            return
        attempt.move(AttemptState.DONE)
        actor.attempt = None
        actor.version, actor.digest, actor.poisoned = attempt.version, digest, False
        actor.figures = message["figures"]
        actor.acknowledged = actor.shadow = True
        actor.deltas = actor.deltas + 1 if attempt.delta else 0
        actor.fed_by_trainer = attempt.source is None
        actor.missed_deadlines = actor.failures = actor.replacements = actor.shortage_aborts = 0
        actor.reason = ""
        actor.move(ActorState.READY, self.time)
        self._record("applied", actor=actor.name, version=actor.version, digest=actor.digest, figures=actor.figures)

    def _poisoned(self, actor: Actor, attempt: Attempt, message: Message) -> None:
        if attempt.state is not AttemptState.APPLYING:
            return
        actor.poisoned = True
        self._not_applied(actor, attempt, "poisoned", message["reason"])

    def _not_applied(self, actor: Actor, attempt: Attempt, kind: str, reason: str) -> None:
        attempt.move(AttemptState.DONE)
        actor.attempt, actor.reason = None, reason
        actor.failures += 1
        actor.move(actor.idle_state, self.time)
        self._record(kind, actor=actor.name, version=attempt.version, reason=reason)
        if actor.failures >= MAXIMUM_FAILURES:
            self._evict(actor, f"apply failed {actor.failures} times in a row: {reason}")
        else:
            self._refill(actor)

    # Plumbing

    def _advance(self, now: float) -> None:
        if self._last_now is not None:
            self.time += min(max(0.0, now - self._last_now), LONGEST_TICK_SECONDS)
        self._last_now = now

    def _commands(self) -> list[Command]:
        self._offer_all()
        if self.versions.outdated:
            attempts = [actor.attempt for actor in self.actors.values() if actor.attempt is not None]
            in_use = {attempt.serial for attempt in attempts} | {s for a in attempts for s in a.leased_serials}
            if self.retained is not None:
                in_use.add(self.retained)
            self.versions.forget(in_use)
        return self._gathered()

    def _gathered(self) -> list[Command]:
        commands, self._out = self._out, []
        return commands
