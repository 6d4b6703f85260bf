"""Deliveries: who is offered what, how an attempt ends, and who gives way when slots are short. Pure.

The part of the coordinator's machine that knows attempts and leases; coordinator.py feeds it with events.
"""

from __future__ import annotations

from typing import Any

from torchtitan.weight_sync.states.actor import MAXIMUM_FAILURES, NO_VERSION, Actor, ActorState
from torchtitan.weight_sync.states.attempt import Attempt, AttemptState
from torchtitan.weight_sync.states.commands import Command, Disconnect, Message, Record, Settings, ToActor, ToCourier
from torchtitan.weight_sync.states.version import VersionRecord, VersionTable

MAXIMUM_MISSED_DEADLINES = 2
ATTEMPTS_PER_TERM = 1 << 32
PROTECTED_SHARE = 0.1


class Deliveries:
    """Actors, versions and the attempts between them. `time` is the machine's own clock."""

    def __init__(self, settings: Settings, term: int):
        self.settings = settings
        self.actors: dict[str, Actor] = {}
        self.versions = VersionTable(settings.world_size, settings.snapshot_timeout_s)
        self.layout: Message | None = None
        self.layout_id = ""
        self.pinned_version: int | None = None
        self.time = 0.0
        self._next_attempt = term * ATTEMPTS_PER_TERM + 1
        self._out: list[Command] = []

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
            if not actor.idle or not actor.mailbox or actor.pinned or self.time < actor.offers_from:
                continue
            record = self._choose(actor)
            if record is None:
                continue
            attempt = Attempt(self._next_attempt, actor.name, record.serial, record.version)
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

    def _evict_late(self, actor: Actor, reason: str) -> None:
        """A deadline passed: that counts as a failure too, or an actor that always hangs would cost it every time."""
        actor.failures += 1
        self._evict(actor, reason)

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

    # Deadlines

    def _judge(self, actor: Actor) -> None:
        """Deadlines of one actor, by phase."""
        if actor.pinned:
            return
        settings, now = self.settings, self.time
        attempt = actor.attempt
        if actor.state is ActorState.JOINING:
            if self.layout is not None and now - actor.since > settings.join_timeout_s:
                self._evict_late(actor, f"did not join within {settings.join_timeout_s:g} s")
        elif actor.state is ActorState.OFFERED and actor.unanswered_since is not None:
            if now - actor.unanswered_since > settings.offer_timeout_s:
                self._missed(actor, f"no answer to an offer within {settings.offer_timeout_s:g} s")
        elif actor.state is ActorState.RECEIVING and attempt is not None:
            if now - attempt.progress_at > settings.progress_timeout_s:
                self._missed(actor, f"no byte within {settings.progress_timeout_s:g} s")
        elif actor.state is ActorState.APPLYING:
            if now - actor.since > settings.apply_timeout_s:
                self._evict_late(actor, f"no acknowledgement of apply within {settings.apply_timeout_s:g} s")
        elif actor.state is ActorState.SUSPECT:
            if now - actor.since > settings.offer_timeout_s:
                self._evict_late(actor, actor.reason)
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
            self._evict_late(actor, reason)
            return
        self._record("suspect", actor=actor.name, phase=phase, reason=reason)
        if actor.attempt is not None:
            self._end_attempt(actor, reason, refill=False, to=ActorState.SUSPECT)
        else:
            actor.move(ActorState.SUSPECT, self.time)

    def _to_couriers(self, message: Message, rank: int | None = None) -> None:
        self._out.append(ToCourier(rank, message))

    def _to_actor(self, actor: Actor, message: Message) -> None:
        self._out.append(ToActor(actor.name, actor.session, message))

    def _record(self, event: str, **fields: Any) -> None:
        self._out.append(Record(event, fields))
