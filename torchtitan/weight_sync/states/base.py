"""Delta: which published snapshot the couriers keep as the base, and whom a delta against it serves. Pure."""

from __future__ import annotations

from torchtitan.weight_sync.states.actor import Actor, ActorState
from torchtitan.weight_sync.states.board import Board
from torchtitan.weight_sync.states.commands import Settings
from torchtitan.weight_sync.states.version import VersionRecord


class Bases(Board):
    """One retained serial at a time: the version that most actors hold, or are about to."""

    def __init__(self, settings: Settings, term: int):
        super().__init__(settings, term)
        self.retained: int | None = None

    def _choose_retained(self, previous: VersionRecord | None) -> None:
        """A version is being published: keep the one before it, or the base of now, whichever serves more actors.

        Goes out before the publish message, which would free the slot.
        """
        if not self.settings.delta or previous is None:
            return
        serials = [serial for serial in {self.retained, previous.serial} if serial in self.versions.records]
        holders = {serial: self._holders(serial) for serial in serials}
        best = max(holders, key=lambda serial: (holders[serial], serial), default=None)
        self._retain(best if best is not None and holders[best] else None)

    def _holders(self, serial: int | None) -> int:
        """Actors to which a later version could be sent as a difference from this one."""
        record = None if serial is None else self.versions.records.get(serial)
        if record is None:
            return 0
        count = 0
        for actor in self.actors.values():
            if actor.state is ActorState.EVICTED:
                continue
            if actor.attempt is not None:
                count += actor.attempt.serial == serial
            else:
                count += actor.acknowledged and actor.holds(record)
        return count

    def _retain(self, serial: int | None) -> None:
        if serial != self.retained:
            self.retained = serial
            self._to_couriers({"type": "retain", "serial": serial})

    def _base_for(self, actor: Actor, record: VersionRecord) -> VersionRecord | None:
        """The base of a delta for this actor: acknowledged on this connection, and still in a slot of every rank."""
        if self.retained is None or not actor.acknowledged or actor.poisoned:
            return None
        base = self.versions.records.get(self.retained)
        if base is None or base is record or not self.versions.whole(base) or not actor.holds(base):
            return None
        return base if actor.deltas + 1 < self.settings.full_every else None
