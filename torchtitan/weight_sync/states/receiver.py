"""What an actor's receiver may do when: pure, no I/O, no clock.

DISCONNECTED → JOINING → READY → RECEIVING → STAGED → APPLYING → READY. The weights that are served are a fact of the
engine and outlive every connection; only a finished apply changes them. Staging memory is their shadow (base of a
delta, source of a relay) from the end of an apply until the next offer is accepted.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
BucketKey = tuple[int, int]


# In a message about an attempt: about what is served, which was found to be torn only now.
NO_ATTEMPT = 0


class ReceiverState(enum.Enum):
    DISCONNECTED = "DISCONNECTED"
    JOINING = "JOINING"
    READY = "READY"
    RECEIVING = "RECEIVING"
    STAGED = "STAGED"
    APPLYING = "APPLYING"


@dataclass(frozen=True)
class Served:
    """The version that an engine holds: every byte of it, checked."""

    epoch: str
    version: int
    digest: str


@dataclass(frozen=True)
class Send:
    """Send this message to the coordinator."""

    message: Message


@dataclass(frozen=True)
class BeginApply:
    """Hand the staged version to the engine; report with apply_finished."""

    attempt: int
    version: int
    digest: str


@dataclass(frozen=True)
class Discard:
    """Nothing of this attempt is wanted any more: close its data connections."""

    attempt: int


@dataclass(frozen=True)
class BeginRelay:
    """Send the shadow, in full, to another actor's workers; report with relay_finished."""

    attempt: int
    actor: str
    data: list[str]


@dataclass(frozen=True)
class EndRelay:
    """Nobody wants this relay any more: close its data connections. Nothing is reported."""

    attempt: int


Command = Send | BeginApply | Discard | BeginRelay | EndRelay


class ReceiverMachine:
    """The receiver's side of the protocol. `process` tells two processes of one actor's name apart."""

    def __init__(self, epoch: str, served: Served | None = None, process: str | None = None):
        self.epoch = epoch
        self.process = process
        self.state = ReceiverState.DISCONNECTED
        self.served = served
        self.poisoned = False
        self.layout_id: str | None = None
        self.term = 0
        self.highest_attempt = 0
        self.attempt: int | None = None
        self.version = -1
        self.digest = ""
        self.source: str | None = None
        """The actor that sends the offered version; None: the couriers do"""
        self.delta = False
        """Buckets of this attempt may be sent as what differs from the shadow of before"""
        self.missing: set[BucketKey] = set()
        self.shadow: Served | None = None
        """What staging memory holds, whole and verified"""
        self.relays: set[int] = set()
        """Attempts of other actors that the shadow is sent to"""
        self.refused_versions = 0
        self._staging_layout: str | None = None
        self._torn: tuple[int, str] | None = None
        """Said of the version that is being applied: (version, reason)"""

    @property
    def serving(self) -> Served | None:
        """What may be served: nothing after a failed apply, until another one has succeeded."""
        return None if self.poisoned else self.served

    def connected(self, term: int) -> list[Command]:
        """The coordinator of `term` has taken the hello. An older term than one seen before is refused (ValueError)."""
        if term < self.term:
            raise ValueError(f"a coordinator of term {term} answered after one of term {self.term}")
        self.term = term
        if self.state is ReceiverState.DISCONNECTED:
            self.state = ReceiverState.JOINING
        return []

    def disconnected(self) -> list[Command]:
        """The coordinator is gone. What is being applied will be applied; what is not yet is dropped."""
        self.layout_id = None
        commands = self._end_relays()
        if self.state is ReceiverState.APPLYING:
            return commands
        commands += self._drop_attempt()
        self.state = ReceiverState.DISCONNECTED
        return commands

    def hello_fields(self) -> Message:
        """What a (re)joining actor says about itself: this settles lost acknowledgements."""
        served = self.served
        return {
            "epoch": self.epoch,
            "served": None if served is None else [served.epoch, served.version, served.digest],
            "poisoned": self.poisoned,
            "shadow": self._shadow_is(served),
            "process": self.process,
        }

    def layout(self, layout_id: str) -> list[Command]:
        """Staging memory for this layout is there."""
        if self.state is not ReceiverState.JOINING:
            return []
        if layout_id != self._staging_layout:
            self.shadow, self._staging_layout = None, layout_id
        self.layout_id = layout_id
        self.state = ReceiverState.READY
        return [Send({"type": "ready", "layout_id": layout_id})]

    def acceptable(self, epoch: str, term: int) -> bool:
        """Messages of other epochs and older terms are dropped."""
        return epoch == self.epoch and term == self.term

    def offer(
        self,
        attempt: int,
        version: int,
        digest: str,
        buckets: Collection[BucketKey],
        base: tuple[int, str] | None = None,
        source: str | None = None,
    ) -> list[Command]:
        """A version is offered; `buckets` are the (rank, bucket) pairs that make it up, `base` is the (version, digest)
        that a delta may be taken against, `source` the actor that will send."""
        if attempt <= self.highest_attempt:
            return []
        self.highest_attempt = attempt
        reason = self._reason_to_decline(version)
        if reason:
            return [Send({"type": "decline", "attempt": attempt, "reason": reason})]
        commands = self._drop_attempt()
        self.attempt, self.version, self.digest, self.source = attempt, version, digest, source
        self.missing = set(buckets)
        self.delta = base is not None and self._shadow_is(Served(self.epoch, *base))
        # Invalid from before the first byte, until all resulting bytes are verified and applied.
        self.shadow = None
        self.state = ReceiverState.RECEIVING
        commands.append(Send({"type": "accept", "attempt": attempt, "base": self.delta}))
        return commands

    def _reason_to_decline(self, version: int) -> str:
        if self.state in (ReceiverState.DISCONNECTED, ReceiverState.JOINING):
            return "not joined"
        if self.state is ReceiverState.APPLYING:
            return "applying"
        if self.relays:
            return "passing on what is in staging memory"
        served = self.served
        if served is not None and served.epoch == self.epoch and not self.poisoned and version <= served.version:
            return f"version {served.version} is served already"
        return ""

    def _shadow_is(self, version: Served | None) -> bool:
        return version is not None and self.shadow == version == self.served and not self.poisoned

    def wants(self, attempt: int) -> bool:
        """Whether bytes of this attempt are to be stored (others are dropped)."""
        return self.state is ReceiverState.RECEIVING and attempt == self.attempt

    def bucket(self, attempt: int, key: BucketKey, intact: bool) -> list[Command]:
        """A whole bucket arrived, and its checksum was or was not the manifest's."""
        if not self.wants(attempt):
            return []
        if not intact or key not in self.missing:
            what = "checksum differs" if not intact else "sent twice or unknown"
            return self.refuse(attempt, f"bucket {key[1]} of rank {key[0]}: {what}")
        self.missing.discard(key)
        return []

    def staged(self, attempt: int) -> list[Command]:
        """Everything has arrived and names, shapes, sizes and checksums are verified: acknowledge."""
        if not self.wants(attempt) or self.missing:
            return []
        self.state = ReceiverState.STAGED
        return [Send({"type": "staged", "attempt": attempt, "digest": self.digest})]

    def refuse(self, attempt: int, reason: str) -> list[Command]:
        """What arrived is not the version that was offered: this attempt is over, the old weights stay."""
        if not self.wants(attempt):
            return []
        self.refused_versions += 1
        # First why: the senders only see connections that end, and the coordinator goes by what it hears first.
        return [Send({"type": "refused", "attempt": attempt, "reason": reason}), *self._drop_attempt()]

    def abort(self, attempt: int) -> list[Command]:
        """The coordinator ends the attempt. After apply has begun this does nothing."""
        if attempt > self.highest_attempt:
            self.highest_attempt = attempt
        if attempt in self.relays:
            return self._end_relay(attempt)
        if attempt != self.attempt or self.state is ReceiverState.APPLYING:
            return []
        return self._drop_attempt()

    def apply(self, attempt: int) -> list[Command]:
        """The coordinator orders the staged version to be applied."""
        if self.state is not ReceiverState.STAGED or attempt != self.attempt:
            return []
        self.state = ReceiverState.APPLYING
        return [BeginApply(attempt, self.version, self.digest)]

    def apply_finished(self, attempt: int, error: str | None, figures: Message, refused: bool = False) -> list[Command]:
        """The engine holds the new version, refused it untouched, or failed half-way (then it must not serve).

        Connected or not.
        """
        if self.state is not ReceiverState.APPLYING or attempt != self.attempt:
            return []
        joined = self.layout_id is not None
        message: Message
        if error is None:
            self.served = self.shadow = Served(self.epoch, self.version, self.digest)
            self.poisoned = False
            message = {
                "type": "applied",
                "attempt": attempt,
                "version": self.version,
                "digest": self.digest,
                "figures": figures,
            }
        elif refused:
            self.refused_versions += 1
            message = {"type": "refused", "attempt": attempt, "reason": error}
        else:
            self.poisoned = True
            message = {"type": "poisoned", "attempt": attempt, "reason": error}
        self.attempt = None
        self.state = ReceiverState.READY if joined else ReceiverState.DISCONNECTED
        torn, self._torn = self._torn, None
        later = [] if torn is None or error is not None else self.found_torn(*torn)
        return [Send(message), *later] if joined else []

    def found_torn(self, version: int, reason: str) -> list[Command]:
        """The engine turned out not to hold `version`, which it serves or is about to be said to serve."""
        if self.state is ReceiverState.APPLYING and version == self.version:
            # Who looks may be faster than who reports the apply.
            self._torn = (version, reason)
            return []
        served = self.served
        if served is None or (served.epoch, served.version) != (self.epoch, version) or self.poisoned:
            return []
        self.poisoned = True
        return [Send({"type": "poisoned", "attempt": NO_ATTEMPT, "reason": reason})]

    def relay(self, attempt: int, actor: str, version: int, digest: str, data: list[str]) -> list[Command]:
        """The coordinator orders this actor to pass the version on that it holds."""
        wanted = Served(self.epoch, version, digest)
        if self.state is not ReceiverState.READY or not self._shadow_is(wanted):
            reason = f"version {version} is not in staging memory"
            return [Send({"type": "broken", "attempt": attempt, "reason": reason, "shadow": False})]
        self.relays.add(attempt)
        return [BeginRelay(attempt, actor, data)]

    def relay_finished(self, attempt: int, error: str | None, shadow: bool = True) -> list[Command]:
        """Everything of a relay is sent and its memory not touched any more, or it has failed; without `shadow` because
        a part of what is to be passed on is not in staging memory."""
        if attempt not in self.relays:
            return []
        self.relays.discard(attempt)
        if error is None:
            return []
        if not shadow:
            self.shadow = None
        return [Send({"type": "broken", "attempt": attempt, "reason": error, "shadow": shadow})]

    def release(self, attempt: int) -> list[Command]:
        """The other actor has everything."""
        return self._end_relay(attempt) if attempt in self.relays else []

    def _end_relay(self, attempt: int) -> list[Command]:
        self.relays.discard(attempt)
        return [EndRelay(attempt)]

    def _end_relays(self) -> list[Command]:
        return [command for attempt in sorted(self.relays) for command in self._end_relay(attempt)]

    def _drop_attempt(self) -> list[Command]:
        if self.attempt is None:
            return []
        dropped, self.attempt = self.attempt, None
        self.missing = set()
        self.state = ReceiverState.READY
        return [Discard(dropped)]
