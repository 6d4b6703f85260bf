"""Deliveries: who is offered what, how an attempt ends, and who gives way when slots are short. Pure.

The part of the coordinator's machine that knows attempts and leases; coordinator.py feeds it with events.
"""

from __future__ import annotations

from torchtitan.weight_sync.states.actor import MAXIMUM_FAILURES, Actor, ActorState
from torchtitan.weight_sync.states.attempt import Attempt, AttemptState
from torchtitan.weight_sync.states.base import Bases
from torchtitan.weight_sync.states.commands import Disconnect, HangUp, Settings
from torchtitan.weight_sync.states.relay import Relays
from torchtitan.weight_sync.states.version import VersionRecord

MAXIMUM_MISSED_DEADLINES = 2
# Two heartbeats of an actor or a courier: who has said less than that may stand still.
QUIET_SECONDS = 1.0
ATTEMPTS_PER_TERM = 1 << 32


class Deliveries(Bases, Relays):
    """Offers, ends and deadlines of attempts."""

    def __init__(self, settings: Settings, term: int):
        super().__init__(settings, term)
        self._next_attempt = term * ATTEMPTS_PER_TERM + 1
        self._short_of_slots: set[int] = set()
        """Ranks that have told of the present shortage; one that tells again has come to the next boundary"""

    # Offers

    def _refill(self, actor: Actor) -> None:
        newest = self.versions.newest
        if newest is not None and (newest.version > actor.version or actor.poisoned):
            actor.mailbox = True

    def _choose(self, actor: Actor, children: dict[str, list[Actor]]) -> tuple[VersionRecord, str | None] | None:
        """The version to offer and the actor that passes it on (None: the couriers); None while there is nobody.

        The newest, or, after an abort for want of slots, one whose slot is held anyway.
        """
        newest = self.versions.newest
        if newest is None:
            return None
        if newest.version <= actor.version and not actor.poisoned:
            actor.mailbox = False
            return None
        if actor.shortage_aborts:
            for serial in sorted(self._held_serials(), reverse=True):
                record = self.versions.records.get(serial)
                if record is not None and record.version > actor.version and self._courier_may_send(actor, record):
                    return record, None
        if self.settings.relay:
            peer = self._peer_for(actor, newest, children)
            if peer is not None:
                return newest, peer.name
        return (newest, None) if self._courier_may_send(actor, newest) else None

    def _courier_may_send(self, actor: Actor, record: VersionRecord) -> bool:
        if not self.versions.whole(record):
            return False
        return not self.settings.relay or self._trainer_may_send(actor, record)

    def _held_serials(self) -> set[int]:
        """Older snapshots whose slots are held in any case."""
        held = {serial for _, attempt in self._leasing() for serial in attempt.leased_serials}
        if self.retained is not None:
            held.add(self.retained)
        newest = self.versions.newest
        return held if newest is None else held - {newest.serial}

    def _offer_all(self) -> None:
        """Offer to every idle actor whose mailbox is full; one lease message per slot, however many actors."""
        waiting = []
        pinned = self.pinned_version
        for actor in self.actors.values():
            actor.pinned = pinned is not None and actor.version == pinned and actor.idle
            if actor.mailbox and actor.idle and not actor.pinned and self.time >= actor.offers_from:
                waiting.append(actor)
        if not waiting:
            return
        children = self._children() if self.settings.relay else {}
        self._begin_offers()
        if self.settings.relay:
            # The trainer's few places go to those that are furthest behind: nobody waits for ever.
            waiting.sort(key=lambda actor: actor.version)
        offers: list[tuple[Actor, Attempt, VersionRecord, VersionRecord | None]] = []
        for actor in waiting:
            if self._no_place(actor):
                continue
            choice = self._choose(actor, children)
            if choice is None:
                self._found_no_place(actor)
            if choice is None or not self._freed(actor, children):
                continue
            record, source = choice
            base = self._base_for(actor, record) if source is None else None
            attempt = Attempt(self._next_attempt, actor.name, record.serial, record.version, source)
            attempt.base_serial = None if base is None else base.serial
            self._next_attempt += 1
            actor.attempt = attempt
            self._places_changed()
            actor.mailbox = record is not self.versions.newest
            if actor.unanswered_since is None:
                actor.unanswered_since = self.time
            actor.move(ActorState.OFFERED, self.time)
            if source is not None:
                children.setdefault(source, []).append(actor)
            offers.append((actor, attempt, record, base))
        self._lease([attempt for _, attempt, _, _ in offers])
        for actor, attempt, record, base in offers:
            self._offer(actor, attempt, record, base)

    def _freed(self, actor: Actor, children: dict[str, list[Actor]]) -> bool:
        """Whether nobody reads the staging memory into which the offered version would be written."""
        own = children.get(actor.name, [])
        stuck = self._stuck_children(actor, own)
        for child in stuck:
            self._end_attempt(child, "its source takes a newer version")
        return len(stuck) == len(own)

    def _lease(self, attempts: list[Attempt]) -> None:
        """Held on all ranks from the offer on; the couriers read this before anything that could free the slots."""
        leases: dict[int, list[list[int | str]]] = {}
        for attempt in attempts:
            for serial in attempt.leased_serials:
                leases.setdefault(serial, []).append([attempt.number, attempt.actor])
        for serial, pairs in leases.items():
            self._to_couriers({"type": "lease", "serial": serial, "attempts": pairs})

    def _offer(self, actor: Actor, attempt: Attempt, record: VersionRecord, base: VersionRecord | None) -> None:
        fields = {"actor": actor.name, "attempt": attempt.number, "version": record.version}
        self._record("offer", **fields, source=attempt.source, base=None if base is None else base.version)
        offer = {
            "type": "offer",
            "attempt": attempt.number,
            "version": record.version,
            "layout_id": self.layout_id,
            "checksums": record.published_checksums,
            "digest": record.digest,
            "base": None if base is None else [base.version, base.digest],
            "source": attempt.source,
        }
        self._to_actor(actor, offer)

    # Ends

    def _end_attempt(self, actor: Actor, reason: str, refill: bool = True, to: ActorState | None = None) -> None:
        """Abort for all who take part, and lead the actor back. Never after APPLY has been ordered."""
        attempt = actor.attempt
        if attempt is None or not attempt.leases:
            return
        phase = attempt.state.value
        attempt.move(AttemptState.ABORTED)
        actor.attempt = None
        self._places_changed()
        abort = {"type": "abort", "attempt": attempt.number, "reason": reason}
        self._to_senders(attempt, abort)
        self._to_actor(actor, abort)
        fields = {"actor": actor.name, "attempt": attempt.number, "version": attempt.version, "source": attempt.source}
        self._record("abort", **fields, phase=phase, bytes=attempt.received_bytes, reason=reason)
        actor.move(to or actor.idle_state, self.time)
        if refill:
            self._refill(actor)

    def _attempt_failed(self, actor: Actor, reason: str) -> None:
        attempt = actor.attempt
        if attempt is None or not attempt.leases:
            return
        if attempt.source is not None:
            # Not counted against the actor: its source or the way between them may be at fault. The couriers are next.
            self._distrust(actor, attempt)
            self._end_attempt(actor, f"relay by {attempt.source}: {reason}")
            return
        actor.failures += 1
        actor.reason = reason
        self._end_attempt(actor, reason)
        if actor.failures >= MAXIMUM_FAILURES:
            self._evict(actor, f"{actor.failures} failed attempts in a row, the last: {reason}")

    def _end_children(self, source: Actor, reason: str) -> None:
        """What a lost source was passing on starts anew from somebody else."""
        for child in self._children().get(source.name, ()):
            self._end_attempt(child, f"its source {source.name} is gone: {reason}")

    def _evict_late(self, actor: Actor, reason: str) -> None:
        """Its own fault: that counts as a failure too, or an actor that always hangs would cost it every time."""
        actor.failures += 1
        self._evict(actor, reason)

    def _evict(self, actor: Actor, reason: str) -> None:
        phase = actor.state.value
        self._end_children(actor, reason)
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
        kept = {self.retained, None if newest is None else newest.serial}
        holders: dict[int, list[Actor]] = {}
        for actor, attempt in self._leasing():
            for serial in attempt.leased_serials:
                if serial not in kept:
                    holders.setdefault(serial, []).append(actor)
        candidates = [group for group in holders.values() if not any(map(self._protected, group))]
        if not candidates:
            if not holders and not self.versions.pending:
                self._retain(None)  # no delivery gives one: then the next versions go in full
            return

        def progress(group: list[Actor]) -> tuple[int, int]:
            attempts = [actor.attempt for actor in group if actor.attempt is not None]
            return max(a.received_bytes for a in attempts), attempts[0].serial

        for actor in min(candidates, key=progress):
            actor.shortage_aborts += 1
            self._end_attempt(actor, "its slot is needed for a newer version")

    def _protected(self, actor: Actor) -> bool:
        """An actor that answers and makes progress is aborted for want of slots at most once in a row."""
        return actor.shortage_aborts > 0 and self._moves(actor)

    # Deadlines

    def _courier_lost(self, rank: int, reason: str) -> None:
        """What the couriers were sending cannot be finished without it, and is nobody else's fault."""
        self.couriers_heard_at.pop(rank, None)
        self.versions.rank_lost(rank)
        self._short_of_slots.discard(rank)
        for actor, attempt in list(self._leasing()):
            if attempt.source is None:
                self._end_attempt(actor, f"the courier of rank {rank} is gone")
        self._record("courier_lost", rank=rank, reason=reason)

    def _judge_couriers(self) -> None:
        """Before the actors are judged: those that wait for a frozen courier are healthy."""
        timeout = self.settings.offer_timeout_s
        for rank, heard_at in list(self.couriers_heard_at.items()):
            if self.time - heard_at > timeout:
                self._courier_lost(rank, f"no heartbeat for {timeout:g} s")
                self._out.append(HangUp(rank))

    def _a_courier_is_quiet(self) -> bool:
        return any(self.time - heard_at > QUIET_SECONDS for heard_at in self.couriers_heard_at.values())

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
                self._no_progress(actor, attempt, f"no byte within {settings.progress_timeout_s:g} s")
        elif actor.state is ActorState.APPLYING:
            if now - actor.since > settings.apply_timeout_s:
                self._evict_late(actor, f"no acknowledgement of apply within {settings.apply_timeout_s:g} s")
        elif actor.state is ActorState.SUSPECT:
            if now - actor.since > settings.offer_timeout_s:
                self._evict_late(actor, actor.reason)
        elif actor.idle and now - actor.heard_at > settings.offer_timeout_s:
            self._missed(actor, f"no heartbeat for {settings.offer_timeout_s:g} s")

    def _no_progress(self, actor: Actor, attempt: Attempt, reason: str) -> None:
        if attempt.source is not None and self._heard_lately(actor):
            self._attempt_failed(actor, reason)  # it lives, so its source may be the frozen one
        elif attempt.source is None and self.time - actor.heard_at <= QUIET_SECONDS and self._a_courier_is_quiet():
            self._end_attempt(actor, f"{reason}, and a courier says nothing")
        else:
            self._missed(actor, reason)

    def _missed(self, actor: Actor, reason: str) -> None:
        phase = actor.state.value
        actor.missed_deadlines += 1
        actor.reason = reason
        behind = self._behind(actor)
        if actor.missed_deadlines >= MAXIMUM_MISSED_DEADLINES or behind >= self.settings.evict_after_versions:
            self._evict_late(actor, reason)
            return
        self._record("suspect", actor=actor.name, phase=phase, reason=reason)
        self._end_children(actor, reason)
        if actor.attempt is not None:
            self._end_attempt(actor, reason, refill=False, to=ActorState.SUSPECT)
        else:
            actor.move(ActorState.SUSPECT, self.time)
