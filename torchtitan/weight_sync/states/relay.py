"""Relay: actors that hold a version pass it on, so that the trainer sends it a bounded number of times. Pure."""

from __future__ import annotations

from torchtitan.weight_sync.states.actor import Actor, ActorState
from torchtitan.weight_sync.states.attempt import Attempt
from torchtitan.weight_sync.states.board import Board
from torchtitan.weight_sync.states.commands import Settings
from torchtitan.weight_sync.states.version import VersionRecord

# A source whose relay to an actor failed is not asked to serve that one for so long.
DISTRUST_SECONDS = 60.0


class Relays(Board):
    """Who may send a version to whom. A source's staging memory is what a slot is for couriers: leased to its children
    from the offer on, and written to only when none of them reads it."""

    def __init__(self, settings: Settings, term: int):
        super().__init__(settings, term)
        # Looked for once per round of offers, not once per waiting actor.
        self._sources: list[Actor] | None = None
        self._fed: dict[tuple[int, tuple[str, ...]], int] = {}
        self._taken: set[tuple[str, ...]] = set()

    def _begin_offers(self) -> None:
        self._sources = None
        self._places_changed()

    def _places_changed(self) -> None:
        """An attempt has begun or ended."""
        self._fed.clear()
        self._taken.clear()

    def _no_place(self, actor: Actor) -> bool:
        """Whether nobody was found in this round who can send to an actor like this one."""
        return bool(self._taken) and not self._special(actor) and tuple(actor.parts) in self._taken

    def _found_no_place(self, actor: Actor) -> None:
        newest = self.versions.newest
        behind = newest is not None and (actor.version < newest.version or actor.poisoned)
        if self.settings.relay and behind and not self._special(actor):
            self._taken.add(tuple(actor.parts))

    def _special(self, actor: Actor) -> bool:
        """May be sent what others may not, or by whom others may not."""
        return bool(actor.shortage_aborts or actor.distrusts)

    def _children(self) -> dict[str, list[Actor]]:
        """source -> actors that its staging memory is leased to"""
        children: dict[str, list[Actor]] = {}
        for actor, attempt in self._leasing():
            if attempt.source is not None:
                children.setdefault(attempt.source, []).append(actor)
        return children

    def _peer_for(self, actor: Actor, record: VersionRecord, children: dict[str, list[Actor]]) -> Actor | None:
        """The peer with the fewest children among those that can pass `record`, the newest, on."""
        if self._sources is None:
            self._sources = [
                peer
                for peer in self.actors.values()
                if self._can_relay(peer, record) and len(children.get(peer.name, ())) < self.settings.relay_fanout
            ]
        able = [
            peer
            for peer in self._sources
            if peer is not actor
            and self._can_relay(peer, record)
            and len(children.get(peer.name, ())) < self.settings.relay_fanout
            # Workers are served by workers that hold the same buckets.
            and peer.parts == actor.parts
            and actor.distrusts.get((peer.name, peer.session), 0.0) <= self.time
        ]
        return min(able, key=lambda peer: len(children.get(peer.name, ())), default=None)

    def _can_relay(self, peer: Actor, record: VersionRecord) -> bool:
        return (
            peer.state is ActorState.READY
            and peer.shadow
            and peer.holds(record)
            and not peer.on_probation
            and self._heard_lately(peer)
        )

    def _trainer_may_send(self, actor: Actor, record: VersionRecord) -> bool:
        """Not to more than `relay_fanout` actors per version, unless a relay to this one has failed."""
        if any(until > self.time for until in actor.distrusts.values()):
            return True
        key = (record.serial, tuple(actor.parts))
        if key not in self._fed:
            self._fed[key] = self._count_fed(record, actor.parts)
        return self._fed[key] < self.settings.relay_fanout

    def _count_fed(self, record: VersionRecord, parts: list[str]) -> int:
        """Actors that have the version from the trainer and can pass it on, or are about to."""
        fed = 0
        for other in self.actors.values():
            if other.state is ActorState.EVICTED or other.parts != parts:
                continue
            if other.attempt is not None and other.attempt.serial == record.serial:
                # Nothing is sent to one that shows no life: it does not take another's place.
                fed += other.attempt.source is None and (not other.attempt.leases or self._moves(other))
            else:
                fed += other.fed_by_trainer and self._can_relay(other, record)
        return fed

    def _heard_lately(self, actor: Actor) -> bool:
        return self.time - actor.heard_at < self.settings.offer_timeout_s / 2

    def _distrust(self, actor: Actor, attempt: Attempt) -> None:
        """The relay failed, whoever's fault it was: the next attempt comes from somebody else."""
        source = self.actors.get(attempt.source or "")
        if source is not None:
            actor.distrusts = {who: until for who, until in actor.distrusts.items() if until > self.time}
            actor.distrusts[source.name, source.session] = self.time + DISTRUST_SECONDS

    def _stuck_children(self, source: Actor, children: list[Actor]) -> list[Actor]:
        """A newer version waits for `source`: the children whose turn does not protect its memory any longer.

        A slow child is waited for as long as bytes move, but not until its source itself counts as far behind.
        """
        too_far = self._behind(source) >= self.settings.evict_after_versions
        return [child for child in children if too_far or not self._moves(child)]
