"""What an actor is doing: one word for it, in the registry, the pool, /health, events, metrics and the report.

    STARTING -> JOINING -> PULLING -> APPLYING -> READY -> PULLING -> …   each version
                              ^          |
                              +-- POISONED                                half of one was applied
    JOINING, READY <-> PAUSED, ASLEEP                                     on request
    any but the last three -> LATE -> READY                               a deadline was missed, a version taken
    any but the last three -> SUSPECT -> as before, or EVICTED            a request has failed
    any but the last three -> EVICTED -> STARTING, JOINING                gone, silent or wrong, and back
    any -> GIVEN_UP        any -> LEAVING                                 its end

Whoever knows something tells it in these words. An actor tells what it does with versions (to the registry) and whether
it is paused, asleep or leaving (in /health). The registry adds LATE, EVICTED and GIVEN_UP where a deadline has passed
or the connection was lost. The pool adds STARTING, SUSPECT, EVICTED and GIVEN_UP where the process has ended or does
not answer. Whether prompts may be sent to an actor is told beside its state, because an actor may serve one version
while it takes the next.
"""

from __future__ import annotations

import enum


class ActorState(enum.StrEnum):
    """The state of an actor. Its value is the word in JSON, logs and metrics."""

    STARTING = "starting"
    """Its process has been started and has not answered yet"""
    JOINING = "joining"
    """It is there and holds no version of this run"""
    PULLING = "pulling"
    """It receives a version"""
    APPLYING = "applying"
    """It has received a version whole, and its engine takes it"""
    READY = "ready"
    """It serves a version and takes no other one"""
    PAUSED = "paused"
    """It is there and answers no requests for now, because it was told to pause or for a reason of its engine's"""
    ASLEEP = "asleep"
    """It has given its memory back, as the trainer has asked"""
    POISONED = "poisoned"
    """Its engine may hold half of a version, so it serves nothing until it has applied a whole one"""
    LATE = "late"
    """It has missed a deadline, so nobody waits for it until it has taken a version"""
    SUSPECT = "suspect"
    """A request to it has failed, and the next sign of life from its engine decides"""
    LEAVING = "leaving"
    """It takes no new requests, and ends when it has answered those that it has"""
    EVICTED = "evicted"
    """It is out: its connection was lost, or it did not answer, or not rightly; it comes back by itself"""
    GIVEN_UP = "given_up"
    """It is out for good"""


# What an actor says of itself; the others are for those who watch it.
REPORTED = (
    ActorState.JOINING, ActorState.PULLING, ActorState.APPLYING, ActorState.READY, ActorState.PAUSED, ActorState.ASLEEP,
    ActorState.POISONED, ActorState.LEAVING,
)  # fmt: skip
# A version is on its way to the actor; the registry has deadlines for that.
UPDATING = (ActorState.PULLING, ActorState.APPLYING)
# An actor may serve in these states, if it holds a version.
SERVING = (*UPDATING, ActorState.READY)
OUT = (ActorState.EVICTED, ActorState.GIVEN_UP)
