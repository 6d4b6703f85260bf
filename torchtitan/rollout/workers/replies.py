"""What a worker process may reply. The user's code, which runs there, may write anything in the worker's place.

A reply is read by type, within the length that its call allows. It is long only where it has long texts: a long one is
first looked through in another process (see utils/reader_process.py), so that reading it here takes some milliseconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchtitan.utils.reader_process import read_answer
from torchtitan.utils.typed_json import IN_PLACE_BYTES, WrongForm, decode

# The most values in a reply that is too long to be read at once.
MAX_VALUES = 1 << 16


class ReplyHead(msgspec.Struct):
    """What every reply has."""

    id: int
    error: str | None = None
    killed: bool = False
    """Whether something else than the call itself ended what it ran"""


async def check_reply(data: bytes) -> None:
    """Return once it is known that reading this reply does not hold up the process. Raises WrongForm if it would."""
    if len(data) > IN_PLACE_BYTES:
        await read_answer(f"{__name__}:count_values", {"most": MAX_VALUES}, [data])


def count_values(about: dict[str, Any], data: bytes | memoryview) -> bytes:
    """The reading function that refuses JSON with more than `most` values. Raises WrongForm."""
    left, found = [decode(object, data, len(data))], 0
    while left:
        value = left.pop()
        found += 1
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        if found + len(left) > about["most"]:
            raise WrongForm(f"{len(data)} bytes with more than {about['most']} values")
    return b""
