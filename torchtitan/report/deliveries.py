"""Versions on their way to actors, as the registry's journal tells it: one Delivery per version and actor."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]

# What an applied version's figures may say; null where the transport does not measure it.
SECONDS = ("transfer_s", "apply_s", "drain_s", "pause_s")
BYTES = ("bytes_full", "bytes_delta", "bytes_relayed")
FIGURES = (*SECONDS, "gigabytes_per_s", *BYTES, "source")


class Outcome(enum.Enum):
    PENDING = "pending"
    """waits for the actor, or is on its way"""
    APPLIED = "applied"
    SUPERSEDED = "superseded"
    """a newer version came before the actor began to pull this one"""
    ABORTED = "aborted"
    """a newer version came before the actor had all of this one"""
    REFUSED = "refused"
    POISONED = "poisoned"
    EVICTED = "evicted"


@dataclass
class Attempt:
    """One try to bring a version to an actor. Times in seconds since 1970."""

    begun_at: float
    applying_at: float | None = None
    """All bytes are there and checked"""
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
        """From the publication to the first pull."""
        if self.published_at is None or not self.attempts:
            return None
        return max(0.0, self.attempts[0].begun_at - self.published_at)

    @property
    def failed(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.failure is not None]

    def end(self, otherwise: Outcome) -> Delivery:
        """It cannot change any more: one that is still pending ends as its last attempt failed, or otherwise so."""
        if self.outcome is Outcome.PENDING:
            self.outcome = (self.failed and self.failed[-1].failure) or otherwise
        return self

    def row(self) -> dict[str, Any]:
        """As an object of versions.jsonl."""
        applied = self.attempts and self.outcome is Outcome.APPLIED
        return {
            "epoch": self.epoch,
            "version": self.version,
            "actor": self.actor,
            "outcome": self.outcome.value,
            "published_at": self.published_at,
            "begun_at": self.attempts[0].begun_at if self.attempts else None,
            "applied_at": self.attempts[-1].ended_at if applied else None,
            "attempts": len(self.attempts),
            **dict.fromkeys(FIGURES),
            **self.figures,
            "queue_wait_s": self.queue_wait_s,
            "failures": [f"{attempt.phase or 'apply'}: {attempt.reason}" for attempt in self.failed],
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


Entry = Delivery | Publication | Incident
"""What the journal says happened; a delivery is among it when it cannot change any more"""


# Events that are incidents as well, and what those are called.
_INCIDENTS = {
    "poisoned": "poisoned", "lost": "evicted", "lost_lane": "lost a lane", "server_lost": "shard server lost",
}  # fmt: skip
# How a pull ends that brings nothing.
_ENDS = {"gone": Outcome.ABORTED, "lost": Outcome.ABORTED, "refused": Outcome.REFUSED}


class DeliveryBook:
    """Puts the registry's records together to deliveries, publications and incidents. `close` ends what is open."""

    def __init__(self) -> None:
        self.epoch = ""
        self._entries: list[Entry] = []
        self._open: dict[str, dict[int, Delivery]] = {}
        self._live: set[str] = set()
        self._newest: Publication | None = None

    def feed(self, records: Iterable[Record]) -> Iterator[Entry]:
        """Take records in their order; events that are of no interest here are passed over."""
        for record in records:
            self._entries = []
            event = str(record.get("event"))
            if event in _INCIDENTS:
                text = str(record.get("reason", "")) if "actor" in record else f"rank {record.get('rank')}"
                self._incident(record, _INCIDENTS[event], text)
            take = getattr(self, f"_on_{event}", None)
            if take is not None:
                take(record)
            yield from self._entries

    def close(self) -> list[Entry]:
        """No more records: the newest version of each live actor stays pending, everything else is over."""
        self._entries = []
        self._end_all()
        return self._entries

    def _end_all(self) -> None:
        for actor, deliveries in self._open.items():
            if not deliveries:
                continue
            newest = max(deliveries)
            self._end(actor, newest - 1)
            delivery = deliveries.pop(newest)
            self._entries.append(delivery if actor in self._live else delivery.end(Outcome.EVICTED))

    def _delivery(self, actor: str, version: int) -> Delivery:
        deliveries = self._open.setdefault(actor, {})
        return deliveries.setdefault(version, Delivery(self.epoch, version, actor))

    def _end(self, actor: str, up_to: int) -> None:
        """Something newer than these versions has taken their place, or they were applied: they are over."""
        deliveries = self._open.get(actor, {})
        for version in sorted(version for version in deliveries if version <= up_to):
            self._entries.append(deliveries.pop(version).end(Outcome.SUPERSEDED))

    def _attempt(self, actor: str, version: int | None = None) -> Attempt | None:
        """What is under way to an actor."""
        for delivery in self._open.get(actor, {}).values():
            if version in (None, delivery.version) and delivery.attempts and delivery.attempts[-1].ended_at is None:
                return delivery.attempts[-1]
        return None

    def _fail(self, attempt: Attempt | None, record: Record, failure: Outcome, phase: str, reason: str = "") -> None:
        if attempt is not None:
            attempt.ended_at, attempt.failure, attempt.phase = record["time"], failure, phase
            attempt.reason = reason or str(record.get("reason", ""))

    def _incident(self, record: Record, kind: str, text: str) -> None:
        actor, phase = record.get("actor", ""), str(record.get("phase", ""))
        self._entries.append(Incident(record["time"], kind, actor, text, phase))

    # One method per event of the journal that is more than that

    def _on_start(self, record: Record) -> None:
        for actor in self._open:
            attempt = self._attempt(actor)
            self._fail(attempt, record, Outcome.ABORTED, "", "the registry was started again")
        epoch = record.get("epoch", self.epoch)
        if epoch != self.epoch:
            self._end_all()
            self.epoch, self._newest = epoch, None
        else:
            self._incident(record, "registry restarted", f"term {record.get('term')}")
        self._live.clear()

    def _on_join(self, record: Record) -> None:
        actor = record["actor"]
        self._live.add(actor)
        if self._newest is not None:
            delivery = self._delivery(actor, self._newest.version)
            delivery.published_at = delivery.published_at or record["time"]

    def _on_serves(self, record: Record) -> None:
        """What an actor that has joined holds already."""
        actor, version = record["actor"], record["version"]
        found = self._open.get(actor, {}).get(version)
        if found is not None and found.outcome is Outcome.PENDING:
            # It did apply, only the word of it was lost; or another launch of this process has it.
            found.outcome = Outcome.APPLIED
            if found.attempts:
                found.attempts[-1].ended_at = found.attempts[-1].ended_at or record["time"]
        self._end(actor, version)

    def _on_publish(self, record: Record) -> None:
        self._newest = Publication(record["time"], self.epoch, record["version"])
        self._entries.append(self._newest)
        for actor in self._live:
            self._delivery(actor, record["version"]).published_at = record["time"]

    def _on_drop(self, record: Record) -> None:
        reason = str(record.get("reason") or "unknown")
        self._entries.append(Publication(record["time"], self.epoch, record["version"], reason))

    def _on_pulling(self, record: Record) -> None:
        actor = record["actor"]
        self._live.add(actor)
        self._delivery(actor, record["version"]).attempts.append(Attempt(record["time"]))

    def _on_ended(self, record: Record) -> None:
        attempt, outcome = self._attempt(record["actor"], record["version"]), record["outcome"]
        if attempt is not None and outcome == "staged":
            attempt.applying_at = record["time"]
        elif attempt is not None:
            self._fail(attempt, record, _ENDS[outcome], "PULLING" if attempt.applying_at is None else "APPLYING")

    def _on_poisoned(self, record: Record) -> None:
        self._fail(self._attempt(record["actor"], record.get("version")), record, Outcome.POISONED, "APPLYING")

    def _on_applied(self, record: Record) -> None:
        actor, version = record["actor"], record["version"]
        delivery = self._delivery(actor, version)
        delivery.outcome, delivery.figures = Outcome.APPLIED, dict(record.get("figures") or {})
        moved = sum(delivery.figures.get(name) or 0 for name in BYTES)
        if moved and delivery.figures.get("transfer_s"):
            delivery.figures["gigabytes_per_s"] = moved / delivery.figures["transfer_s"] / 1e9
        if delivery.attempts:
            delivery.attempts[-1].ended_at = record["time"]
        self._end(actor, version)

    def _on_lost(self, record: Record) -> None:
        actor, phase = record["actor"], str(record.get("phase", ""))
        self._live.discard(actor)
        self._fail(self._attempt(actor), record, Outcome.EVICTED, phase)
        deliveries = self._open.get(actor, {})
        tried = [delivery for delivery in deliveries.values() if delivery.attempts]
        for delivery in (tried or list(deliveries.values()))[-1:]:
            delivery.evicted_in = phase
