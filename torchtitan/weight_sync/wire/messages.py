"""Every message by its fields: what arrives is parsed into values of these types, or refused at the door.

Nothing else of a message goes further, to the registry's state, the journal or the trainer. Of the messages that only
the trainer's own processes send, layouts and checksum tables are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan.utils.logs import escaped
from torchtitan.weight_sync.wire.runtime import BYTES_PER_MESSAGE, Message, ProtocolError

MAX_NAME, MAX_VALUE, MAX_FIGURES = 256, 65536, 64
MAX_FIGURE = 1e18
# What an actor says of one version: at most a hundred days, and a petabyte.
MAX_SECONDS, MAX_COUNT = 1e7, 1e15
OUTCOMES = ("staged", "gone", "lost", "refused")


def _is(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"not {kind.__name__}")
        return value

    return read


boolean, anything, listed = _is(bool), _is(dict), _is(list)


def integer(value: Any) -> int:
    """-1 stands for none."""
    if type(value) is not int or not -1 <= value < 2**63:
        raise ValueError("not a number from -1 to 2^63")
    return value


def maybe(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """None is allowed, too."""
    return lambda value: None if value is None else convert(value)


def number(value: Any) -> float:
    """A finite number, small enough to be added and divided."""
    if type(value) not in (int, float) or not -MAX_FIGURE <= value <= MAX_FIGURE:
        raise ValueError("not a finite number")
    return value


def name(value: Any, longest: int = MAX_NAME) -> str:
    """A short text without control characters."""
    if type(value) is not str or len(value) > longest or not value.isprintable():
        raise ValueError(f"not a text of at most {longest} characters that print")
    return value


def _value(value: Any) -> str:
    return name(value, MAX_VALUE)


def prose(value: Any) -> str:
    """A text for people: what is too long or does not print is not refused."""
    return escaped(_is(str)(value))


def outcome(value: Any) -> str:
    """How a pull ended."""
    if value not in OUTCOMES:
        raise ValueError(f"not one of {', '.join(OUTCOMES)}")
    return value


def integers(value: Any) -> list[int]:
    return [integer(element) for element in listed(value)]


def facts(value: Any) -> dict[str, Any]:
    """Numbers and short texts by name."""
    if len(anything(value)) > MAX_FIGURES:
        raise ValueError(f"more than {MAX_FIGURES} of them")
    checked: dict[str, Any] = {}
    for key, fact in value.items():
        checked[name(key, 64)] = name(fact) if type(fact) is str else number(fact)
    return checked


def between(value: Any, most: float) -> float:
    """A number from 0 to `most`."""
    if not 0 <= number(value) <= most:
        raise ValueError(f"not a number from 0 to {most:g}")
    return value


_seconds, _count, _norm = (partial(between, most=most) for most in (MAX_SECONDS, MAX_COUNT, MAX_FIGURE))
Fields = dict[str, Callable[[Any], Any]]
# What an actor measures while it takes a version. worker_bytes: of the worker that received the most. The norms are of
# low-rank adapters: as sent, and of what they changed.
FIGURES: Fields = {
    "transfer_s": _seconds, "apply_s": _seconds, "drain_s": _seconds, "pause_s": _seconds,
    "bytes_full": _count, "bytes_delta": _count, "bytes_relayed": _count, "corrupt_buckets": _count,
    "worker_bytes": _count, "adapter_norm": _norm, "adapter_applied_norm": _norm, "source": name,
}  # fmt: skip


def figures(value: Any) -> dict[str, Any]:
    """The figures that are known here; others, perhaps of another release, are left out."""
    found = {}
    for key, convert in FIGURES.items():
        if key in anything(value):
            try:
                found[key] = convert(value[key])
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    return found


def read(kind: str, fields: Fields, message: Any) -> Message:
    """Return the fields of a message; one whose name ends with "?" may be missing. Raises ProtocolError."""
    found: Message = {}
    for field, convert in fields.items():
        key = field.removesuffix("?")
        if key is field or key in message:
            try:
                found[key] = convert(message.get(key))
            except (ValueError, TypeError) as error:
                raise ProtocolError(f"message {kind!r} needs field {key!r}: {error}") from None
    return found


# What a client and a server say of themselves in their handshake.
_ABOUT: Fields = {
    "epoch?": name, "address?": name, "instance?": name, "rank?": integer, "term?": integer, "url?": name,
    "offers?": facts,
}  # fmt: skip


def _about(value: Any) -> Message:
    return read("hello", _ABOUT, anything(value))


# newest: serial of the last published snapshot; retained: older serials that are still being pulled; room: whether
# another one may be retained; base: a serial that is kept for deltas; dropped: serials that will never be published.
# Once the trainer has said so, there is also `pinned`: the version that actors keep, if any.
_LIVE: Fields = {
    "newest": integer, "retained": integers, "room": boolean, "base?": maybe(integer), "dropped": integers,
    "pinned?": maybe(integer),
}  # fmt: skip
SCHEMA: dict[str, Fields] = {
    # Handshake
    "challenge": {"nonce": name},
    "hello": {"role": name, "name": name, "nonce": name, "proof": name, "fields": _about},
    "welcome": {"proof": name, "fields": _about},
    "refuse": {"reason": prose},
    # Any client -> registry, and the answer. bytes: how many a pulling actor has received
    "ping": {"bytes?": integer},
    "pong": {},
    # Shard server -> registry. table: what the snapshot's table of checksums hashes to; file: the one that holds it;
    # failed may say why there is none; moved: of each actor [name, serial, bytes of this snapshot that it has got since
    # the last such message]
    "layout": {"layout": anything},
    "snapped": {"serial": integer, "version": integer, "table": name, "file?": anything},
    "failed": {"serial": integer, "version": integer, "reason?": prose},
    "moved": {"moved": listed},
    # Registry -> shard servers and actors
    "live": _LIVE,
    # Registry -> actor. servers: one address per rank; progress_s: [weight_sync] progress_timeout_s; staging: of a
    # leader's workers. newest is also sent to an actor that joins; it may name another actor to pull from, as `source`
    "model": {
        "layout_id": name, "layout": anything, "servers": listed, "progress_s": number, "staging?": anything,
        "over_channel?": boolean, "connections?": integer,
    },
    "newest": {
        **_LIVE, "epoch": name, "version": integer, "layout_id": name, "digest": name,
        "table_digests": listed, "source?": maybe(anything),
    },
    # Actor -> registry. ended: how a pull ended, or that its version was refused, and why
    "pulling": {"serial": integer, "version": integer},
    "ended": {"version": integer, "outcome": outcome, "reason": prose},
    "serving": {"version": integer, "digest": name, "figures": figures},
    "poisoned": {"version": integer, "reason": prose},
    # Worker -> leader: what it has found of the versions that it has looked at in use. version: the last whole one, -1
    # for none; unfinished: how many it could not look at in time
    "verified": {"version": integer, "matched": integer, "mismatched": integer, "unfinished": integer},
    # Actor -> registry: a bucket that the actor `source` relayed is not what the trainer sent
    "forged": {"version": integer, "source": name},
    # Guest -> registry: it has finished its requests and ends
    "leave": {},
    # Actor -> shard server. buckets: ranges [first, end) of the rank's buckets, in which -1 stands for its table of
    # checksums; base: the snapshot that deltas may be taken against; again: an earlier copy was damaged or lost, and
    # the bytes themselves are wanted
    "open": {"pull": integer, "serial": integer, "buckets": listed, "base?": integer, "again?": boolean},
    # Shard server -> actor. A bucket carries its bytes or a delta against the snapshot `base`, or says in `reference`
    # where the bytes are
    "gone": {"pull": integer},
    "bucket": {
        "pull": integer, "rank": integer, "bucket": integer, "base?": integer, "reference?": anything,
        "bytes?": integer,
    },
    # Shard server <-> actor, for nccl. entry: what the two ends of a communicator need in order to connect (value in
    # hexadecimal); credit: the actor has posted the receive of another chunk. link: names the communicator
    "entry": {"link": name, "key": name, "value": _value},
    "credit": {"link": name},
    # Leader -> worker: apply the version that all have staged
    "apply": {"version": integer},
    # Trainer (rank 0) <-> registry. status: how many actors are in which state and serve which version (see
    # state.tally), and details of those that have changed, or, if `complete`, as after a look, of all. guests: where
    # the guests are that have changed or, if `complete`, all; empty: it is gone
    "pin": {"version?": maybe(integer)},
    "look": {},
    "status": {
        "complete": boolean, "guests": anything, "states": anything, "serving": listed, "awaited": listed,
        "actors": anything, "forgotten": listed, "newest": maybe(integer), "dropped": listed, "pinned?": maybe(integer),
        "evictions": integer, "failure": prose,
    },
}  # fmt: skip
# A line of the registry's journal, as far as others read it.
_RECORD: Fields = {
    "time": number, "term?": integer, "event": name, "epoch?": name, "actor?": name, "rank?": integer,
    "version?": integer, "reason?": prose, "state?": name, "figures?": figures,
    # Of a delivery (registry/deliveries.py)
    "outcome?": name, "attempt?": integer, "offered_at?": maybe(number), "begun_at?": maybe(number),
    "staged_at?": maybe(number), "ended_at?": number,
}  # fmt: skip


def parse(message: Any) -> Message:
    """Return the message with the fields of its type, and no others. Raises ProtocolError."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a message is not an object with a type")
    kind = message["type"]
    fields = SCHEMA.get(kind)
    if fields is None:
        raise ProtocolError(f"unknown message type {kind[:32]!r}")
    found = read(kind, fields, message)
    found["type"] = kind
    if found.get("bytes", 0) < 0:
        raise ProtocolError(f"a {kind} of {found['bytes']} bytes")
    return found


def parse_record(line: Any) -> Message:
    """Return a line of the registry's journal in the same way. Raises ProtocolError."""
    return read("of the journal", _RECORD, line if isinstance(line, dict) else {})


def cost(message: Message, count: int) -> float:
    """Return what handling a message of `count` bytes counts for (see utils/rate_limiter.py). A credit is next to
    nothing, and an actor sends one per chunk."""
    return (0.01 if message["type"] == "credit" else 1.0) + count / BYTES_PER_MESSAGE


def payload_bytes(message: Message) -> int:
    """Return how many bytes follow this message."""
    return message.get("bytes", 0) if message["type"] == "bucket" else 0
