"""One delivery of one version to one actor: OFFERED → RECEIVING → STAGED → APPLYING → DONE, or ABORTED. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class AttemptState(enum.Enum):
    OFFERED = "OFFERED"
    RECEIVING = "RECEIVING"
    STAGED = "STAGED"
    APPLYING = "APPLYING"
    DONE = "DONE"
    ABORTED = "ABORTED"


_NEXT = {
    AttemptState.OFFERED: {AttemptState.RECEIVING, AttemptState.ABORTED},
    AttemptState.RECEIVING: {AttemptState.STAGED, AttemptState.ABORTED},
    # After APPLY has been ordered there is no abort: the actor's own report settles what it serves.
    AttemptState.STAGED: {AttemptState.APPLYING},
    AttemptState.APPLYING: {AttemptState.DONE},
    AttemptState.DONE: set(),
    AttemptState.ABORTED: set(),
}

LEASING = (AttemptState.OFFERED, AttemptState.RECEIVING)


@dataclass
class Attempt:
    """Numbered; every message about it carries the number, and late ones are dropped."""

    number: int
    actor: str
    serial: int
    version: int
    source: str | None = None
    """The actor that passes the version on; None: the couriers send it from their slots"""
    base_serial: int | None = None
    """The slot that a delta may be taken against; held as long as the attempt's own"""
    delta: bool = False
    """The actor holds the base: buckets may be sent as what differs from it"""
    state: AttemptState = AttemptState.OFFERED
    received_bytes: int = 0
    progress_at: float = 0.0

    @property
    def leases(self) -> bool:
        """Whether somebody holds memory for it: slots of the couriers, or the source's staging memory."""
        return self.state in LEASING

    @property
    def leased_serials(self) -> tuple[int, ...]:
        """Slots that it holds on every rank."""
        if not self.leases or self.source is not None:
            return ()
        return (self.serial,) if self.base_serial is None else (self.serial, self.base_serial)

    def move(self, state: AttemptState) -> None:
        """Raises RuntimeError for a step that the protocol does not have."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"attempt {self.number} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def progress(self, received_bytes: int, now: float) -> bool:
        """Deadlines judge bytes: more than before restarts the clock."""
        if received_bytes <= self.received_bytes:
            return False
        self.received_bytes, self.progress_at = received_bytes, now
        return True
