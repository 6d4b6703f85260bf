"""What a trainer rank does at a step boundary: snapshot or skip, like all other ranks. Pure, and none of it waits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class SlotPort(Protocol):
    """This rank's slots, as the boundary uses them."""

    def reserve(self) -> bool:
        """Take a slot for the next snapshot. False when none is free; a reservation that is there already is kept."""

    def release(self) -> None:
        """Give the reservation back, if there is one."""

    def snapshot(self, version: int, serial: int) -> None:
        """Fill the reserved slot."""

    def fail(self, version: int, serial: int) -> None:
        """This rank cannot take a snapshot that all were told to take."""


class Boundary:
    """One rank's side of the vote, and what it owes. All ranks call it in the same order with the same arguments."""

    def __init__(self, slots: SlotPort):
        self._slots = slots
        self.serial = 0
        self.published = self.skipped = 0
        self._owed: int | None = None
        self._last_snapshot = (0, -1)

    def reserve(self) -> bool:
        """False is this rank's no to the coming version."""
        return self._slots.reserve()

    def commit(self, version: int, noes: int) -> bool:
        """Snapshot `version`, or, if any rank voted no, skip it: then it is owed. Whether it was snapshotted."""
        self.serial += 1
        if noes:
            self._slots.release()
            self.skipped += 1
            self._owed = version
            return False
        self._snapshot(version)
        return True

    def snapshot_owed(self, version: int) -> bool:
        """Snapshot the owed version. Without a slot here it is dropped on all ranks, and stays owed: False."""
        self.serial += 1
        if self._slots.reserve():
            self._snapshot(version)
            return True
        self._slots.fail(version, self.serial)
        self._owed = version
        return False

    def _snapshot(self, version: int) -> None:
        self._slots.snapshot(version, self.serial)
        self.published += 1
        self._owed = None
        self._last_snapshot = (self.serial, version)

    def owed(self, newest: int | None, dropped: Collection[Sequence[int]]) -> int | None:
        """The version that was skipped, or dropped because another rank could not snapshot it.

        newest: the newest published version; dropped: (serial, version) of the last dropped snapshots.
        """
        if self._owed is None and any(tuple(pair) == self._last_snapshot for pair in dropped):
            version = self._last_snapshot[1]
            return version if newest is None or newest < version else None
        return self._owed
