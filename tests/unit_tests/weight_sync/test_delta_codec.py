"""The delta codec against what bytes are: round trips, sizes, and input that a stranger made up."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.weight_sync.delta import BITMAP, GAPS_8, GAPS_16, decode_into, element_bytes, encode
from torchtitan.weight_sync.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.manifest import Layout, RankLayout
from torchtitan.weight_sync.wire import FULL, ProtocolError

SIZES = (1, 2, 4)
GUARD = bytes(range(64))


def changed_copy(base: bytes, size: int, indices: list[int], seed: int) -> bytes:
    """`base` with other bytes in the elements of `indices`."""
    new, numbers = bytearray(base), random.Random(seed)
    for index in indices:
        new[index * size + numbers.randrange(size)] ^= numbers.randrange(1, 256)
    return bytes(new)


def decoded(base: bytes, encoding: int, payload: bytes, size: int) -> bytes:
    """What becomes of `base`, decoded in the middle of other memory, which must stay as it is."""
    memory = bytearray(GUARD + base + GUARD)
    try:
        decode_into(memoryview(memory)[64 : 64 + len(base)], encoding, memoryview(payload), size)
    except ProtocolError:
        assert bytes(memory) == GUARD + base + GUARD, "written before it was checked"
        raise
    assert bytes(memory[:64]) == bytes(memory[64 + len(base) :]) == GUARD
    return bytes(memory[64 : 64 + len(base)])


@st.composite
def changes(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """(new, base, element bytes): any density of changes, single ones far apart as well as runs."""
    size = draw(st.sampled_from(SIZES))
    length = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from([70_000, 200_000])))
    seed = draw(st.integers(0, 2**32))
    base = random.Random(seed).randbytes(length * size)
    density = draw(st.sampled_from([0.0, 0.00005, 0.003, 0.05, 0.3, 1.0]))
    numbers = random.Random(seed + 1)
    indices = [index for index in range(length) if numbers.random() < density]
    if length:
        indices += draw(st.lists(st.integers(0, length - 1), max_size=4))
    return changed_copy(base, size, sorted(set(indices)), seed), base, size


@settings(max_examples=150, deadline=None)
@given(changes())
def test_base_and_payload_make_the_new_bytes(case: tuple[bytes, bytes, int]) -> None:
    new, base, size = case
    encoding, payload = encode(memoryview(new), memoryview(base), size)
    assert len(payload) <= len(new)
    assert encoding == FULL or len(payload) < len(new)
    assert decoded(base, encoding, bytes(payload), size) == new
    # What is cut off may happen to be a payload of another bucket, and then is written, but nowhere else. (The bucket's
    # checksum tells.)
    with contextlib.suppress(ProtocolError):
        decoded(base + bytes(size), encoding, bytes(payload[:-1]), size)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_unrelated_bytes_are_never_larger_than_they_are(new: bytes, base: bytes) -> None:
    length = min(len(new), len(base)) // 4 * 4
    for size in SIZES:
        encoding, payload = encode(memoryview(new)[:length], memoryview(base)[:length], size)
        assert len(payload) <= length
        assert decoded(base[:length], encoding, bytes(payload), size) == new[:length]


@pytest.mark.parametrize(
    ("density", "size", "expected", "at_most"),
    [
        (1.0, 2, FULL, 1.0),
        (0.5, 2, BITMAP, 0.5 + 1 / 16 + 0.01),
        (0.02, 2, GAPS_8, 0.02 * 1.5 + 0.005),
        (0.02, 4, GAPS_8, 0.02 * 1.25 + 0.005),
        (0.0005, 2, GAPS_16, 0.0005 * 2 + 0.001),
    ],
)
def test_the_smallest_encoding_is_taken(density: float, size: int, expected: int, at_most: float) -> None:
    length = 100_000
    numbers = random.Random(1)
    base = numbers.randbytes(length * size)
    new = changed_copy(base, size, [index for index in range(length) if numbers.random() < density], 2)
    encoding, payload = encode(memoryview(new), memoryview(base), size)
    assert encoding == expected and len(payload) / len(new) <= at_most


def test_nothing_changed_costs_next_to_nothing() -> None:
    _, payload = encode(memoryview(bytes(1 << 20)), memoryview(bytes(1 << 20)), 2)
    assert 0 < len(payload) <= 8, "a frame is never empty"


def reference_decode(base: bytes, encoding: int, payload: bytes, size: int) -> bytes | None:
    """The format as its description says, element by element; None for what it does not allow."""
    length, target = len(base) // size, bytearray(base)
    if len(payload) >= len(base):
        return None
    if encoding == BITMAP:
        count = (len(payload) - -(-length // 8)) // size
        bits = payload[max(0, len(payload) - -(-length // 8)) :]
        chosen = [i for i in range(len(bits) * 8) if bits[i // 8] & (0x80 >> i % 8)]
        if len(payload) < -(-length // 8) or len(bits) + count * size != len(payload):
            return None
        values = payload
    else:
        wide = 1 if encoding == GAPS_8 else 2
        if len(payload) < 8:
            return None
        count = struct.unpack("<Q", payload[:8])[0]
        values, rest = payload[8:], payload[8 + count * size :] if count <= len(payload) else b""
        if 8 + count * size > len(payload) or len(rest) % wide:
            return None
        chosen, position, numbers = [], 0, struct.unpack(f"<{len(rest) // wide}{'B' if wide == 1 else 'H'}", rest)
        for number in numbers:
            position += number
            if number != 256**wide - 1:
                chosen.append(position)
                position += 1
        if numbers and numbers[-1] == 256**wide - 1:
            return None
    if len(chosen) != count or any(index >= length for index in chosen):
        return None
    for number, index in enumerate(chosen):
        target[index * size : (index + 1) * size] = values[number * size : (number + 1) * size]
    return bytes(target)


@st.composite
def forged(draw: st.DrawFn) -> tuple[bytes, int, bytes, int]:
    """(base, encoding, payload, element bytes): noise, a likely count with noise, or a real payload with a damaged
    byte, cut or extended."""
    new, base, size = draw(changes())
    new, base = new[: 400 * size], base[: 400 * size]
    encoding = draw(st.integers(0, 255) | st.sampled_from([BITMAP, GAPS_8, GAPS_16]))
    kind = draw(st.sampled_from(["noise", "count", "damaged"]))
    if kind == "noise":
        return base, encoding, draw(st.binary(max_size=len(base) + 8)), size
    if kind == "count":
        count = draw(st.integers(0, 20) | st.integers(0, 2**64 - 1))
        return base, encoding, struct.pack("<Q", count) + draw(st.binary(max_size=60)), size
    real, payload = encode(memoryview(new), memoryview(base), size)
    broken = bytearray(payload)
    if broken:
        broken[draw(st.integers(0, len(broken) - 1))] ^= draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(broken)))
    return base, real, draw(st.sampled_from([bytes(broken), bytes(broken[:cut]), bytes(broken) + b"\0"])), size


@settings(max_examples=400, deadline=None)
@given(forged())
def test_what_a_stranger_made_up_is_refused_or_stays_inside(case: tuple[bytes, int, bytes, int]) -> None:
    base, encoding, payload, size = case
    if encoding == FULL:
        expected: bytes | None = payload if len(payload) == len(base) else None
    elif encoding in (BITMAP, GAPS_8, GAPS_16):
        expected = reference_decode(base, encoding, payload, size)
    else:
        expected = None
    if expected is None:
        with pytest.raises(ProtocolError):
            decoded(base, encoding, payload, size)
    else:
        assert decoded(base, encoding, payload, size) == expected


@pytest.mark.parametrize(
    ("encoding", "payload"),
    [
        (BITMAP, b"vv" + bytes(12) + b"\x08"),  # the bit of an element behind the last
        (BITMAP, b"vv" + b"\xc0" + bytes(12)),  # two bits, one value
        (GAPS_8, struct.pack("<Q", 0) + b"\xff"),  # unchanged elements at the end are not said
        (GAPS_8, struct.pack("<Q", 1) + b"vv" + b"\x64"),  # element 100 of 100
        (GAPS_16, struct.pack("<Q", 1) + b"vv" + b"\xff\xff\x01\x00"),
        (GAPS_16, struct.pack("<Q", 1) + b"vv" + b"\x01"),
        (GAPS_8, struct.pack("<Q", 2**63) + b"vv\x00"),
        (GAPS_8, b"\0\0"),
        (BITMAP + 100, bytes(10)),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(encoding: int, payload: bytes) -> None:
    base = bytes(200)
    assert reference_decode(base, encoding, payload, 2) is None or encoding > GAPS_16
    with pytest.raises(ProtocolError):
        decoded(base, encoding, payload, 2)


@pytest.mark.parametrize(
    ("dtypes", "bucket_bytes", "slot_bytes", "expected"),
    [
        (["bfloat16"], 1 << 20, 6, 2),
        (["float32"], 1 << 20, 12, 4),
        (["float32", "bfloat16"], 1 << 20, 70, 2),
        (["float32"], 1022, 2048, 2),
        (["bfloat16"], 1025, 2048, 1),
        ([], 1024, 0, 4),
    ],
)
def test_elements_never_straddle_buckets(dtypes: list[str], bucket_bytes: int, slot_bytes: int, expected: int) -> None:
    parameters = ParameterTable.of(ParameterEntry(f"p{number}", dtype, (1,)) for number, dtype in enumerate(dtypes))
    assert element_bytes(Layout(bucket_bytes, parameters, (RankLayout(slot_bytes, ShardTable.of([])),))) == expected
