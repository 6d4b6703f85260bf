"""The records of the registry's journal that metrics, time line and report are made from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.weight_sync.memory.transfer import BYTES
from torchtitan.weight_sync.wire.messages import parse_record
from torchtitan.weight_sync.wire.runtime import ProtocolError

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]

# Journal events that are also incidents, with the incident's name.
_INCIDENTS = {
    "poisoned": "poisoned", "evicted": "evicted", "late": "late", "forged": "forged",
    "lost_snapshot": "lost its snapshot", "relay_left": "left its relay", "server_lost": "shard server lost",
}  # fmt: skip
# So many of the last versions are remembered.
REMEMBERED_VERSIONS = 1024
# Of a transfer that took no longer there is no rate.
SHORTEST_SECONDS = 1e-6


@dataclass(frozen=True)
class Delivery:
    """One pull that has ended, or a version that an actor never asked for: see weight_sync/registry/deliveries.py.

    Times are in seconds since 1970.
    """

    epoch: str
    version: int
    actor: str
    outcome: str
    ended_at: float
    offered_at: float | None = None
    attempt: int = 0
    """The how-manieth pull of this version it was"""
    begun_at: float | None = None
    staged_at: float | None = None
    state: str = ""
    """What the actor did when a pull ended that delivered nothing"""
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the actor measured"""

    @property
    def queue_wait_s(self) -> float | None:
        """Seconds from the offer to the begin of the pull."""
        if self.offered_at is None or self.begun_at is None:
            return None
        return max(0.0, self.begun_at - self.offered_at)


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
    state: str = ""
    """What the actor did before, where it was evicted"""


Entry = Delivery | Publication | Incident


class JournalReader:
    """Turns the lines of the registry's journal into entries, in order."""

    def __init__(self) -> None:
        self.epoch = ""
        self.known_from: int | None = None
        """The first version that is known to be published or dropped; -1 where the journal is there from its start;
        None: nothing is known yet. The oldest part of a long journal is lost"""
        self.newest_version = -1
        """The newest version that this launch has published; -1: none"""
        self.settled: dict[int, None] = {}
        """The last versions that were published or dropped, of whichever launch"""
        self.left_out = 0
        """Lines that make no sense"""
        self._served: dict[str, int] = {}
        """Actor -> the last version that it has applied in this launch"""
        self._begins_whole: bool | None = None
        """Whether the first record is that of a registry's start; None: there was none yet"""

    def feed(self, lines: Iterable[Record]) -> Iterator[Entry]:
        """Yield what these lines say. Irrelevant events are ignored, and lines that make no sense (a journal may be of
        another release): they must not end a run, nor keep it from being resumed."""
        for line in lines:
            try:
                entry = self._read(parse_record(line))
            except (ProtocolError, KeyError) as error:
                self.left_out += 1
                logger.warning("a record of the weight registry is damaged, left out (%r): %.60s", error, line)
                continue
            if entry is not None:
                yield entry

    def _read(self, record: Record) -> Entry | None:
        event, time = record["event"], record["time"]
        if self._begins_whole is None:
            self._begins_whole = event == "start"
        if event == "delivery":
            return self._delivery(record)
        if event in ("publish", "drop"):
            return self._decision(record)
        if event == "start":
            return self._start(record)
        if event in _INCIDENTS:
            text = record.get("reason", "") if "actor" in record else f"rank {record.get('rank')}"
            return Incident(time, _INCIDENTS[event], record.get("actor", ""), text, record.get("state", ""))
        return None

    def _start(self, record: Record) -> Incident | None:
        epoch = record.get("epoch", self.epoch)
        if epoch == self.epoch:
            return Incident(record["time"], "registry restarted", "", f"term {record.get('term')}")
        self.epoch, self.newest_version, self._served = epoch, -1, {}
        return None

    def _delivery(self, record: Record) -> Delivery | None:
        delivery = _read_delivery(record)
        if delivery.outcome != "applied":
            return delivery
        is_repeated = self._served.get(delivery.actor) == delivery.version and not delivery.figures
        self._served[delivery.actor] = delivery.version
        # An actor tells what it serves whenever it joins, also where its connection or the registry was lost.
        return None if is_repeated else delivery

    def _decision(self, record: Record) -> Publication:
        """A version has been published or dropped."""
        version, dropped = record["version"], ""
        if self.known_from is None:
            self.known_from = -1 if self._begins_whole else version
        self.settled[version] = None
        if len(self.settled) > REMEMBERED_VERSIONS:
            del self.settled[next(iter(self.settled))]
        if record["event"] == "publish":
            self.newest_version = version
        else:
            dropped = record.get("reason") or "unknown"
        return Publication(record["time"], self.epoch, version, dropped)


def _read_delivery(record: Record) -> Delivery:
    figures = dict(record.get("figures", {}))
    moved, seconds = sum(figures.get(name, 0) for name in BYTES), figures.get("transfer_s", 0)
    if moved and seconds > SHORTEST_SECONDS:
        figures["gigabytes_per_s"] = moved / seconds / 1e9
    names = ("epoch", "version", "actor", "outcome", "ended_at")
    optional = ("offered_at", "attempt", "begun_at", "staged_at", "state", "reason")
    given = {name: record[name] for name in optional if name in record}
    return Delivery(**{name: record[name] for name in names}, **given, figures=figures)
