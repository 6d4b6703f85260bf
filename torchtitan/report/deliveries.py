"""Versions on their way to actors, as the coordinator's journal tells it: one Delivery per version and actor."""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20

Record = Mapping[str, Any]

# What an applied version's figures may say; null where the transport does not measure it.
SECONDS = ("transfer_s", "verify_s", "apply_s", "drain_s", "pause_s")
BYTES = ("bytes_full", "bytes_delta", "bytes_relayed")
FIGURES = (*SECONDS, "gigabytes_per_s", *BYTES, "source")


class JournalTail:
    """Reads a file of JSON lines as it grows, whole lines only and never much at a time.

    last_bytes: of what is there already, only so much (0: all).
    """

    def __init__(self, path: Path, last_bytes: int = 0):
        self._path, self._last_bytes = path, last_bytes
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> Iterator[Record]:
        """What has been written since the last call; nothing where there is no file yet."""
        if self._file is None:
            if not self._path.is_file():
                return
            self._file = self._path.open("rb")
            behind = self._path.stat().st_size - self._last_bytes
            if self._last_bytes and behind > 0:
                self._file.seek(behind)
                self._file.readline()
        while chunk := self._file.read(CHUNK_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if isinstance(record, dict):
                    yield record
                else:
                    logger.warning("%s: a line is no JSON object, left out", self._path)

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Outcome(enum.Enum):
    PENDING = "pending"
    """waits for the actor, or is on its way"""
    APPLIED = "applied"
    SUPERSEDED = "superseded"
    """a newer version came before the actor was offered this one"""
    ABORTED = "aborted"
    REFUSED = "refused"
    POISONED = "poisoned"
    EVICTED = "evicted"


@dataclass
class Attempt:
    """One try to bring a version to an actor. Times in seconds since 1970."""

    offered_at: float
    applying_at: float | None = None
    """All bytes are there and checked, and the coordinator has ordered to apply them"""
    ended_at: float | None = None
    failure: Outcome | None = None
    phase: str = ""
    """What was under way when it failed"""
    reason: str = ""


@dataclass
class Delivery:
    """One version and one actor."""

    epoch: str
    version: int
    actor: str
    published_at: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    outcome: Outcome = Outcome.PENDING
    evicted_in: str = ""
    """The phase in which the actor was evicted while this was its version"""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the actor measured"""

    @property
    def queue_wait_s(self) -> float | None:
        """From the publication to the first offer."""
        if self.published_at is None or not self.attempts:
            return None
        return max(0.0, self.attempts[0].offered_at - self.published_at)

    @property
    def last_failure(self) -> Outcome | None:
        """How its last failed attempt ended."""
        failures = [attempt.failure for attempt in self.attempts if attempt.failure is not None]
        return failures[-1] if failures else None

    def row(self) -> dict[str, Any]:
        """As an object of versions.jsonl."""
        last = self.attempts[-1] if self.attempts else None
        failed = [attempt for attempt in self.attempts if attempt.failure is not None]
        return {
            "epoch": self.epoch,
            "version": self.version,
            "actor": self.actor,
            "outcome": self.outcome.value,
            "published_at": self.published_at,
            "offered_at": self.attempts[0].offered_at if self.attempts else None,
            "applied_at": last.ended_at if last is not None and self.outcome is Outcome.APPLIED else None,
            "attempts": len(self.attempts),
            **dict.fromkeys(FIGURES),
            **self.figures,
            "queue_wait_s": self.queue_wait_s,
            "failures": [f"{attempt.phase or 'apply'}: {attempt.reason}" for attempt in failed],
            "evicted_in": self.evicted_in or None,
        }


@dataclass(frozen=True)
class Publication:
    """A version that every rank has, or that was given up."""

    time: float
    epoch: str
    version: int
    dropped: str = ""
    """Why it was not published"""


@dataclass(frozen=True)
class Incident:
    """Something that happened to an actor or a process, at one moment."""

    time: float
    kind: str
    actor: str
    text: str
    phase: str = ""


class Listener:
    """What a reader of the journal wants to know; everything else it leaves as it is here."""

    def finished(self, delivery: Delivery) -> None:
        """This delivery cannot change any more."""

    def published(self, publication: Publication) -> None:
        """A version was published, or given up."""

    def happened(self, incident: Incident) -> None:
        """Somebody was evicted, or the like."""


class DeliveryBook:
    """Reads the coordinator's journal record by record, and tells a listener. `close` ends what is open."""

    def __init__(self, listener: Listener):
        self._listener = listener
        self.epoch = ""
        self._open: dict[str, dict[int, Delivery]] = {}
        self._live: set[str] = set()
        self._newest: Publication | None = None

    def feed(self, records: Iterable[Record]) -> None:
        """Take records in their order; events that are of no interest here are passed over."""
        for record in records:
            handler = _HANDLERS.get(record.get("event", ""))
            if handler is not None:
                handler(self, record)

    def close(self) -> None:
        """No more records: the newest version of each live actor stays pending, everything else is over."""
        for actor, deliveries in list(self._open.items()):
            if not deliveries:
                continue
            newest = max(deliveries)
            self._end(actor, newest - 1)
            delivery = deliveries.pop(newest)
            if delivery.outcome is Outcome.PENDING and actor not in self._live:
                delivery.outcome = delivery.last_failure or Outcome.EVICTED
            self._listener.finished(delivery)
        self._open.clear()

    def _delivery(self, actor: str, version: int) -> Delivery:
        deliveries = self._open.setdefault(actor, {})
        if version not in deliveries:
            deliveries[version] = Delivery(self.epoch, version, actor)
        return deliveries[version]

    def _end(self, actor: str, up_to: int) -> None:
        """Something newer than these versions has taken their place, or they were applied: they are over."""
        deliveries = self._open.get(actor, {})
        for version in sorted(version for version in deliveries if version <= up_to):
            delivery = deliveries.pop(version)
            if delivery.outcome is Outcome.PENDING:
                delivery.outcome = delivery.last_failure or Outcome.SUPERSEDED
            self._listener.finished(delivery)

    def _attempt(self, actor: str, version: int | None = None) -> tuple[Delivery, Attempt] | None:
        """What is under way to an actor."""
        for delivery in self._open.get(actor, {}).values():
            if version in (None, delivery.version) and delivery.attempts and delivery.attempts[-1].ended_at is None:
                return delivery, delivery.attempts[-1]
        return None

    def _fail(self, record: Record, failure: Outcome, phase: str) -> None:
        found = self._attempt(record["actor"], record.get("version"))
        if found is not None:
            _, attempt = found
            attempt.ended_at, attempt.failure, attempt.phase = record["time"], failure, phase
            attempt.reason = str(record.get("reason", ""))

    # Events

    def _start(self, record: Record) -> None:
        for actor in list(self._open):
            found = self._attempt(actor)
            if found is not None:
                found[1].ended_at, found[1].failure = record["time"], Outcome.ABORTED
                found[1].reason = "the coordinator was started again"
        epoch = record.get("epoch", self.epoch)
        if epoch != self.epoch:
            self.close()
            self.epoch, self._newest = epoch, None
        else:
            self._incident(record, "coordinator restarted", "", f"term {record.get('term')}")
        self._live.clear()

    def _join(self, record: Record) -> None:
        actor, served = record["actor"], record.get("served")
        self._live.add(actor)
        if served and served[0] == self.epoch:
            found = self._open.get(actor, {}).get(served[1])
            if found is not None and found.outcome is Outcome.PENDING:
                # It did apply, only the acknowledgement was lost.
                found.outcome = Outcome.APPLIED
                found.attempts[-1].ended_at = found.attempts[-1].ended_at or record["time"]
            self._end(actor, served[1])
        if self._newest is not None and not (served and served[0] == self.epoch and served[1] >= self._newest.version):
            delivery = self._delivery(actor, self._newest.version)
            delivery.published_at = delivery.published_at or record["time"]

    def _publish(self, record: Record) -> None:
        self._newest = Publication(record["time"], self.epoch, record["version"])
        self._listener.published(self._newest)
        for actor in self._live:
            self._delivery(actor, record["version"]).published_at = record["time"]

    def _drop(self, record: Record) -> None:
        reason = str(record.get("reason") or "unknown")
        self._listener.published(Publication(record["time"], self.epoch, record["version"], reason))

    def _offer(self, record: Record) -> None:
        self._live.add(record["actor"])
        self._delivery(record["actor"], record["version"]).attempts.append(Attempt(record["time"]))

    def _apply(self, record: Record) -> None:
        found = self._attempt(record["actor"], record["version"])
        if found is not None:
            found[1].applying_at = record["time"]

    def _applied(self, record: Record) -> None:
        actor, version = record["actor"], record["version"]
        delivery = self._delivery(actor, version)
        delivery.outcome, delivery.figures = Outcome.APPLIED, dict(record.get("figures") or {})
        if delivery.attempts:
            delivery.attempts[-1].ended_at = record["time"]
        self._end(actor, version)

    def _abort(self, record: Record) -> None:
        self._fail(record, Outcome.ABORTED, str(record.get("phase", "")))

    def _refused(self, record: Record) -> None:
        self._fail(record, Outcome.REFUSED, "APPLYING")

    def _poisoned(self, record: Record) -> None:
        self._fail(record, Outcome.POISONED, "APPLYING")
        self._incident(record, "poisoned", record["actor"], str(record.get("reason", "")))

    def _suspect(self, record: Record) -> None:
        self._incident(record, "suspect", record["actor"], str(record.get("reason", "")))

    def _evict(self, record: Record) -> None:
        actor, phase = record["actor"], str(record.get("phase", ""))
        self._live.discard(actor)
        self._incident(record, "evicted", actor, str(record.get("reason", "")))
        found = self._attempt(actor)
        if found is not None:
            found[1].ended_at, found[1].failure, found[1].phase = record["time"], Outcome.EVICTED, phase
            found[1].reason = str(record.get("reason", ""))
        deliveries = self._open.get(actor, {})
        tried = [delivery for delivery in deliveries.values() if delivery.attempts]
        for delivery in (tried or list(deliveries.values()))[-1:]:
            delivery.evicted_in = phase

    def _courier_lost(self, record: Record) -> None:
        self._incident(record, "courier lost", "", f"rank {record.get('rank')}")

    def _incident(self, record: Record, kind: str, actor: str, text: str) -> None:
        self._listener.happened(Incident(record["time"], kind, actor, text, str(record.get("phase", ""))))


_HANDLERS: dict[str, Callable[[DeliveryBook, Record], None]] = {
    "start": DeliveryBook._start,
    "join": DeliveryBook._join,
    "publish": DeliveryBook._publish,
    "drop": DeliveryBook._drop,
    "offer": DeliveryBook._offer,
    "apply": DeliveryBook._apply,
    "applied": DeliveryBook._applied,
    "abort": DeliveryBook._abort,
    "refused": DeliveryBook._refused,
    "poisoned": DeliveryBook._poisoned,
    "suspect": DeliveryBook._suspect,
    "evict": DeliveryBook._evict,
    "courier_lost": DeliveryBook._courier_lost,
}
