"""What another process wrote, read by type: nothing is built behind the first element that has another type.

`decode` is for what fits into IN_PLACE_BYTES, which takes some milliseconds whatever is in it. Longer answers are read
in another process: see reader_process.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec

# Parsing holds the interpreter's lock. So many bytes of the costliest JSON (empty lists) hold it for some 4 ms.
IN_PLACE_BYTES = 1 << 18

Kind = TypeVar("Kind")

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that fits a tensor: of a token, a version or a place"""
Object = dict[str, Any]
"""A JSON object whose fields the caller checks"""


class WrongForm(ValueError):
    """The data are not what they should be. The message says where and why, in one line."""


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """For making many objects at once: looking for garbage among them again and again takes longer than making them,
    and holds the interpreter's lock while it looks through all objects of the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(kind: type[Kind], data: bytes | bytearray | memoryview, most_bytes: int = IN_PLACE_BYTES) -> Kind:
    """Return JSON as a value of this type. Fields that a msgspec.Struct does not have are passed over, not built.

    Raises WrongForm: more than `most_bytes`, no JSON, or another type.
    """
    if len(data) > most_bytes:
        raise WrongForm(f"there are {len(data)} bytes, {most_bytes} are allowed")
    try:
        with without_collection():
            value: Kind = _decoder(kind).decode(data)  # type: ignore[arg-type] # a type is hashable
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WrongForm(str(error)) from None
    return value
