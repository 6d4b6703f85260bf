"""What became of each version on its way to each actor, from the records of the registry's journal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.utils.logs import escaped
from torchtitan.weight_sync.memory.transfer import ADDED_UP, BYTES
from torchtitan.weight_sync.wire.messages import parse_record
from torchtitan.weight_sync.wire.runtime import ProtocolError

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]

# Metrics of an applied version; null if the transport does not measure them.
SECONDS = ("transfer_s", "apply_s", "drain_s", "pause_s")
FIGURES = (*SECONDS, "gigabytes_per_s", *ADDED_UP, "source")

# Journal events that are also incidents, with the incident's name.
_INCIDENTS = {
    "poisoned": "poisoned", "lost": "evicted", "late": "late", "forged": "forged", "lost_snapshot": "lost its snapshot",
    "relay_left": "left its relay", "server_lost": "shard server lost",
}  # fmt: skip
# A delivery ends long before this many newer versions are trained.
REMEMBERED_VERSIONS = 1024
# Of a transfer that took no longer there is no rate.
SHORTEST_SECONDS = 1e-6
# An actor tries a version a few times, unless it means harm.
_REMEMBERED_ATTEMPTS = 100
# A row tells of so many failed attempts, the last ones, and so much of each.
MAX_FAILURES, MAX_FAILURE_CHARACTERS = 8, 200


Outcome = Literal["pending", "applied", "superseded", "aborted", "refused", "poisoned", "evicted"]
"""pending: the version waits for the actor or is being transferred. superseded: a newer one was published before the
actor began to pull this one. aborted: the pull ended before the actor had all of it, usually for a newer one."""


@dataclass
class Attempt:
    """One attempt to deliver a version to an actor. Times are in seconds since 1970."""

    begun_at: float
    applying_at: float | None = None
    """When all bytes had been received and verified"""
    ended_at: float | None = None
    failure: Outcome | None = None
    phase: str = ""
    """The phase in which the attempt failed"""
    reason: str = ""


@dataclass
class Delivery:
    """The delivery of one version to one actor."""

    epoch: str
    version: int
    actor: str
    published_at: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    outcome: Outcome = "pending"
    evicted_in: str = ""
    """The phase in which the actor was evicted during this delivery"""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the actor measured"""

    @property
    def queue_wait_s(self) -> float | None:
        """Seconds from the publication to the first pull."""
        if self.published_at is None or not self.attempts:
            return None
        return max(0.0, self.attempts[0].begun_at - self.published_at)

    @property
    def failed(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.failure is not None]

    def end(self, otherwise: Outcome) -> Delivery:
        """Make the delivery final: if pending, its outcome is that of its last failed attempt, else `otherwise`."""
        if self.outcome == "pending":
            self.outcome = (self.failed and self.failed[-1].failure) or otherwise
        return self

    def row(self) -> dict[str, Any]:
        """Return the delivery as an object of versions.jsonl."""
        begun_at = self.attempts[0].begun_at if self.attempts else None
        applied_at = self.attempts[-1].ended_at if self.attempts and self.outcome == "applied" else None
        failures = [f"{attempt.phase or 'apply'}: {attempt.reason}" for attempt in self.failed[-MAX_FAILURES:]]
        return {
            "epoch": self.epoch,
            "version": self.version,
            "actor": self.actor,
            "outcome": self.outcome,
            "published_at": self.published_at,
            "begun_at": begun_at,
            "applied_at": applied_at,
            "attempts": len(self.attempts),
            "queue_wait_s": self.queue_wait_s,
            # By themselves, so that nothing an actor says takes the place of what is known here.
            "figures": {**dict.fromkeys(FIGURES), **self.figures},
            "failures": [escaped(text, MAX_FAILURE_CHARACTERS) for text in failures],
            "evicted_in": self.evicted_in or None,
        }


@dataclass(frozen=True)
class Publication:
    """A version that was published or dropped."""

    time: float
    epoch: str
    version: int
    dropped: str = ""
    """Why it was not published"""


@dataclass(frozen=True)
class Incident:
    """Something that happened to an actor or a process at one point in time."""

    time: float
    kind: str
    actor: str
    text: str
    phase: str = ""


Entry = Delivery | Publication | Incident
"""What the journal records; a delivery is included once it is final"""


# Outcomes of a pull that delivers nothing.
_ENDS: dict[str, Outcome] = {"gone": "aborted", "lost": "aborted", "refused": "refused"}


class DeliveryBook:
    """Assembles deliveries, publications and incidents from the registry's records. `close` ends open deliveries."""

    def __init__(self) -> None:
        self.epoch = ""
        self.known_from: int | None = None
        """The first version that is known to be published or dropped; -1 where the journal is there from its start;
        None: nothing is known yet. The oldest part of a long journal is lost"""
        self.left_out = 0
        """Records that make no sense"""
        self._begins_whole: bool | None = None
        """Whether the first record is that of a registry's start; None: there was none yet"""
        self._entries: list[Entry] = []
        self._open: dict[str, dict[int, Delivery]] = {}
        self._live: set[str] = set()
        self._newest: Publication | None = None
        self.settled: dict[int, None] = {}
        """The last versions that were published or dropped, of whichever launch"""

    @property
    def newest_version(self) -> int:
        """The newest version that this launch has published; -1: none."""
        return -1 if self._newest is None else self._newest.version

    def feed(self, records: Iterable[Record]) -> Iterator[Entry]:
        """Process records in order. Irrelevant events are ignored, and lines that make no sense (a journal may be of
        another release): they must not end a run, nor keep it from being resumed."""
        for line in records:
            self._entries = []
            try:
                self._take(parse_record(line))
            except (ProtocolError, KeyError) as error:
                self.left_out += 1
                logger.warning("a record of the weight registry is damaged, left out (%r): %.60s", error, line)
            yield from self._entries

    def _take(self, record: Record) -> None:
        event = record["event"]
        if self.known_from is None and event in ("publish", "drop"):
            self.known_from = -1 if self._begins_whole else record["version"]
        self._begins_whole = (event == "start") if self._begins_whole is None else self._begins_whole
        if event in _INCIDENTS:
            text = record.get("reason", "") if "actor" in record else f"rank {record.get('rank')}"
            self._incident(record, _INCIDENTS[event], text)
        take = getattr(self, f"_on_{event}", None)
        if take is not None:
            take(record)

    def close(self) -> list[Entry]:
        """End all deliveries after the last record; the newest version of each live actor stays pending."""
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
            self._entries.append(delivery if actor in self._live else delivery.end("evicted"))

    def _delivery(self, actor: str, version: int) -> Delivery:
        deliveries = self._open.setdefault(actor, {})
        if len(deliveries) > REMEMBERED_VERSIONS:
            self._end(actor, min(deliveries))
        return deliveries.setdefault(version, Delivery(self.epoch, version, actor))

    def _end(self, actor: str, up_to: int) -> None:
        """End the deliveries of versions up to `up_to`, which were applied or superseded."""
        deliveries = self._open.get(actor, {})
        for version in sorted(version for version in deliveries if version <= up_to):
            self._entries.append(deliveries.pop(version).end("superseded"))

    def _attempt(self, actor: str, version: int | None = None) -> Attempt | None:
        """Return the attempt that is in progress for an actor."""
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

    # One method per journal event that is more than an incident

    def _on_start(self, record: Record) -> None:
        for actor in self._open:
            attempt = self._attempt(actor)
            self._fail(attempt, record, "aborted", "", "the registry was started again")
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
        """Handle the version that an actor already has when it joins."""
        actor, version = record["actor"], record["version"]
        found = self._open.get(actor, {}).get(version)
        if found is not None and found.outcome == "pending":
            # The actor applied it but the report was lost, or another launch of this process has it.
            found.outcome = "applied"
            if found.attempts:
                found.attempts[-1].ended_at = found.attempts[-1].ended_at or record["time"]
        self._end(actor, version)

    def _on_publish(self, record: Record) -> None:
        self._newest = Publication(record["time"], self.epoch, record["version"])
        self._remember(record["version"])
        self._entries.append(self._newest)
        for actor in self._live:
            self._delivery(actor, record["version"]).published_at = record["time"]

    def _remember(self, version: int) -> None:
        self.settled[version] = None
        if len(self.settled) > REMEMBERED_VERSIONS:
            del self.settled[next(iter(self.settled))]

    def _on_drop(self, record: Record) -> None:
        reason = str(record.get("reason") or "unknown")
        self._remember(record["version"])
        self._entries.append(Publication(record["time"], self.epoch, record["version"], reason))

    def _on_pulling(self, record: Record) -> None:
        actor = record["actor"]
        self._live.add(actor)
        attempts = self._delivery(actor, record["version"]).attempts
        del attempts[_REMEMBERED_ATTEMPTS:]
        attempts.append(Attempt(record["time"]))

    def _on_ended(self, record: Record) -> None:
        attempt, outcome = self._attempt(record["actor"], record["version"]), record["outcome"]
        if attempt is not None and outcome == "staged":
            attempt.applying_at = record["time"]
        elif attempt is not None:
            self._fail(attempt, record, _ENDS[outcome], "PULLING" if attempt.applying_at is None else "APPLYING")

    def _on_left(self, record: Record) -> None:
        actor = record["actor"]
        self._live.discard(actor)
        self._fail(self._attempt(actor), record, "aborted", "", "the actor has left")
        self._end(actor, max(self._open.get(actor, ()), default=-1))

    def _on_poisoned(self, record: Record) -> None:
        self._fail(self._attempt(record["actor"], record.get("version")), record, "poisoned", "APPLYING")

    def _on_applied(self, record: Record) -> None:
        actor, version = record["actor"], record["version"]
        delivery = self._delivery(actor, version)
        delivery.outcome, delivery.figures = "applied", dict(record.get("figures", {}))
        moved = sum(delivery.figures.get(name, 0) for name in BYTES)
        if moved and (seconds := delivery.figures.get("transfer_s", 0)) > SHORTEST_SECONDS:
            delivery.figures["gigabytes_per_s"] = moved / seconds / 1e9
        if delivery.attempts:
            delivery.attempts[-1].ended_at = record["time"]
        self._end(actor, version)

    def _on_lost(self, record: Record) -> None:
        actor, phase = record["actor"], str(record.get("phase", ""))
        self._live.discard(actor)
        self._fail(self._attempt(actor), record, "evicted", phase)
        deliveries = self._open.get(actor, {})
        tried = [delivery for delivery in deliveries.values() if delivery.attempts]
        for delivery in (tried or list(deliveries.values()))[-1:]:
            delivery.evicted_in = phase
