"""A version exists once every rank has snapped it: SNAPPED by all → PUBLISHED, or dropped. Pure, no I/O, no clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Outcome(enum.Enum):
    PENDING = "pending"
    PUBLISHED = "published"
    DROPPED = "dropped"


@dataclass
class VersionRecord:
    """One snapshot order of all ranks."""

    serial: int
    version: int
    since: float
    checksums: dict[int, list[str]] = field(default_factory=dict)
    """Per rank that holds the snapshot right now"""
    outcome: Outcome = Outcome.PENDING
    published_checksums: list[list[str]] = field(default_factory=list)
    digest: str = ""


class VersionTable:
    """Which versions exist. `deadline_s`: how long after the first rank the last one may snap a version."""

    def __init__(self, world_size: int, deadline_s: float):
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.records: dict[int, VersionRecord] = {}
        self.newest: VersionRecord | None = None
        self._dropped: set[int] = set()

    def whole(self, record: VersionRecord) -> bool:
        """Every rank's courier holds it right now."""
        return record.outcome is Outcome.PUBLISHED and len(record.checksums) == self.world_size

    def snapped(self, rank: int, serial: int, version: int, checksums: list[str], now: float) -> Outcome:
        """A rank's fence has fired. PUBLISHED exactly when this report makes the version whole for the first time."""
        if serial in self._dropped or (
            serial not in self.records and self.newest is not None and serial < self.newest.serial
        ):
            return Outcome.DROPPED
        record = self.records.setdefault(serial, VersionRecord(serial, version, now))
        if record.version != version:
            raise ValueError(f"snapshot {serial} is version {record.version} on one rank and {version} on another")
        if record.outcome is Outcome.PUBLISHED:
            # A restarted courier reports what it found. Bytes that changed must never be sent under the old digest.
            if record.published_checksums[rank] != checksums:
                raise ValueError(f"rank {rank}'s bytes of published version {version} have changed")
            record.checksums[rank] = checksums
            return Outcome.PENDING
        record.checksums[rank] = checksums
        if len(record.checksums) < self.world_size:
            return Outcome.PENDING
        record.outcome = Outcome.PUBLISHED
        record.published_checksums = [record.checksums[number] for number in range(self.world_size)]
        self.newest = record
        return Outcome.PUBLISHED

    @property
    def pending(self) -> bool:
        """Whether some rank has a snapshot that others still owe."""
        return any(record.outcome is Outcome.PENDING for record in self.records.values())

    def superseded(self) -> list[int]:
        """Serials that are still pending although a newer one is published: drop them."""
        newest = self.newest
        if newest is None:
            return []
        pending = [r.serial for r in self.records.values() if r.outcome is Outcome.PENDING and r.serial < newest.serial]
        return sorted(pending)

    def overdue(self, now: float) -> list[int]:
        """Serials that some rank has not snapped in time."""
        return sorted(
            record.serial
            for record in self.records.values()
            if record.outcome is Outcome.PENDING and now - record.since > self.deadline_s
        )

    def drop(self, serial: int) -> VersionRecord | None:
        """This snapshot will never be published; its record, or None where it is published or unknown."""
        record = self.records.get(serial)
        if record is not None and record.outcome is Outcome.PUBLISHED:
            return None
        self._dropped.add(serial)
        if record is not None:
            record.outcome = Outcome.DROPPED
            del self.records[serial]
        return record

    def rank_lost(self, rank: int) -> None:
        """The rank's courier is gone; it will report anew what it holds."""
        for record in self.records.values():
            record.checksums.pop(rank, None)

    @property
    def outdated(self) -> bool:
        """Whether there is anything that forget() could drop."""
        records = self.records
        return len(records) > 1 and any(
            record.outcome is Outcome.PUBLISHED and record is not self.newest for record in records.values()
        )

    def forget(self, in_use: set[int]) -> None:
        """Drop records of published versions that are neither the newest nor in use (delivered, or a base)."""
        newest = self.newest
        for serial in list(self.records):
            record = self.records[serial]
            if record.outcome is Outcome.PUBLISHED and record is not newest and serial not in in_use:
                del self.records[serial]
        floor = newest.serial if newest is not None else 0
        self._dropped = {serial for serial in self._dropped if serial > floor}
