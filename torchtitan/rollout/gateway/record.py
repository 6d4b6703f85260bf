"""The record of a session on its way from the gateway to the run: what a program made of it may be long.

Programs decide how many branches there are and what is in them. A long record is read in another process, and comes as
arrays (see utils/reader_process.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchtitan.inference.answers import Packed, WrittenCompletion, array, completion_of, pack, unpack, values
from torchtitan.inference.types import Branch, Given, Segment
from torchtitan.utils.reader_process import read_answer
from torchtitan.utils.typed_json import Natural, decode


@dataclass(frozen=True)
class SessionRecord:
    """The record of a session, or of all sessions of a key."""

    branches: list[Branch]
    calls: int
    failed: int
    """Calls that the system never answered; if there are any, the episode says nothing about the policy"""
    truncated: bool
    """A limit truncated the last answer of the main conversation, or left no room for one"""
    counts: Counter[str] = field(default_factory=Counter)
    """What became of its requests (exchange.py), and Session.counts"""
    side: int = 0
    """So many branches, the first ones, are of side calls; the others are of the main conversation, whose last answer
    ends the last one"""
    refusals: list[dict[str, str]] = field(default_factory=list)
    """The latest refusal of each kind: kind, path, reason"""
    ended_by: str = ""
    """The refusal on which the main conversation ended; empty if it did not"""


class _Facts(msgspec.Struct, kw_only=True):
    calls: int
    failed: int
    truncated: bool
    counts: dict[str, int]
    side: int = 0
    refusals: list[dict[str, str]] = []
    ended_by: str = ""


class _Record(_Facts, kw_only=True):
    branches: list[list[list[Natural] | WrittenCompletion]]


class _PackedRecord(_Facts, kw_only=True):
    branches: list[list[memoryview | Packed]]


def branches_to_json(branches: Sequence[Branch]) -> list[list[Any]]:
    """Return branches as a record has them."""
    return [[_segment_to_json(segment) for segment in branch.segments] for branch in branches]


def _segment_to_json(segment: Segment) -> list[int] | dict[str, Any]:
    return segment.token_ids if isinstance(segment, Given) else segment.to_json()


def pack_record(_about: dict[str, Any], data: bytes | memoryview) -> bytes:
    """The reading function for a record; null stands for a session that is not there."""
    if bytes(data) == b"null":
        return msgspec.msgpack.encode(None)
    record = decode(_Record, data, len(data))
    branches = [[_pack_segment(segment) for segment in branch] for branch in record.branches]
    facts = {name: getattr(record, name) for name in _Facts.__struct_fields__}
    return msgspec.msgpack.encode(_PackedRecord(**facts, branches=branches))


def _pack_segment(segment: list[int] | WrittenCompletion) -> memoryview | Packed:
    return array(segment, "<i8") if isinstance(segment, list) else pack(completion_of(segment))


def _unpack_segment(segment: memoryview | Packed) -> Segment:
    return unpack(segment) if isinstance(segment, Packed) else Given(values(segment, "<i8").tolist())


async def read_record(data: bytes) -> SessionRecord | None:
    """Return a record, or None where there is no such session. Raises WrongForm."""
    packed = msgspec.msgpack.decode(await read_answer(f"{__name__}:pack_record", {}, [data]), type=_PackedRecord | None)
    if packed is None:
        return None
    branches = [Branch(list(map(_unpack_segment, branch))) for branch in packed.branches]
    facts = {name: getattr(packed, name) for name in _Facts.__struct_fields__}
    return SessionRecord(branches=branches, **facts | {"counts": Counter(packed.counts)})
