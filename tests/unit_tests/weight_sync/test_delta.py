"""The delta codec against what bytes are: round trips, sizes, and input that a stranger made up."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deterministic.machine import Machine, Process
from torchtitan.weight_sync.memory.delta import Deltas, decode_into, element_bytes, encode
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.memory.slots import LiveSlots, SlotState, SlotView
from torchtitan.weight_sync.wire.runtime import ProtocolError

SIZES = (1, 2, 4)
GUARD = bytes(range(64))


def decoded(base: bytes, payload: bytes, size: int) -> bytes:
    """What becomes of `base`, decoded in two pieces in the middle of other memory, which must stay as it is."""
    cut = len(base) // size // 3 * size
    memories = [bytearray(GUARD + part + GUARD) for part in (base[:cut], base[cut:])]
    pieces = [memoryview(memory)[64:-64] for memory in memories]
    try:
        decode_into(pieces, memoryview(payload), size)
    except ProtocolError:
        assert b"".join(pieces) == base, "written before it was checked"
        raise
    assert all(memory[:64] == memory[-64:] == GUARD for memory in memories)
    return b"".join(pieces)


@st.composite
def changes(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """(new, base, element bytes): any density of changes, by a little or by anything."""
    size = draw(st.sampled_from(SIZES))
    length = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from([70_000, 200_000])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = np.frombuffer(rng.bytes(length * size), f"<u{size}")
    chosen = rng.random(length) < draw(st.sampled_from([0.0, 0.00005, 0.003, 0.05, 0.49, 0.6, 1.0]))
    most = draw(st.sampled_from([1, 3, 2 ** (8 * size - 1)]))
    moved = rng.integers(-most, most, length, endpoint=True).astype(np.int64)
    new = np.where(chosen, base.astype(np.int64) + moved, base).astype(f"<u{size}")
    if length and draw(st.booleans()):
        new[draw(st.integers(0, length - 1))] ^= 1
    return new.tobytes(), base.tobytes(), size


@pytest.mark.parametrize("size", SIZES)
def test_half_of_the_elements_may_change_and_no_more(size: int) -> None:
    base = bytes(1000 * size)
    for changed in (500, 501):
        new = (b"\1" * size) * changed + base[changed * size :]
        payload = encode(memoryview(new), memoryview(base), size)
        assert (payload is None) is (changed > 500)
        assert payload is None or decoded(base, bytes(payload), size) == new


@pytest.mark.slow
@settings(max_examples=200)
@given(changes())
def test_base_and_payload_make_the_new_bytes(case: tuple[bytes, bytes, int]) -> None:
    new, base, size = case
    payload = encode(memoryview(new), memoryview(base), size)
    changed = np.count_nonzero(np.frombuffer(new, f"<u{size}") != np.frombuffer(base, f"<u{size}"))
    if payload is None:
        # 60 bytes that begin and end blocks at most, and little for a few changes.
        assert changed > 0.5 * len(new) / size or 60 + 12 * changed >= len(new)
    else:
        assert len(payload) < len(new)
        assert decoded(base, bytes(payload), size) == new == reference_decode(base, bytes(payload), size)


@pytest.mark.parametrize(("density", "at_most"), [(0.03, 0.016), (0.1, 0.045), (0.001, 0.001), (0.0, 0.0001)])
def test_size_is_near_what_information_theory_allows(density: float, at_most: float) -> None:
    """bfloat16 that moves by its last bit. Positions take H(p) bits of 16 per element, the direction one per change."""
    rng = np.random.default_rng(1)
    base = rng.integers(0, 2**16, 1 << 20).astype("<u2")
    new = base + np.where(rng.random(len(base)) < density, rng.choice([1, 65535], len(base)), 0).astype("<u2")
    payload = encode(memoryview(new.tobytes()), memoryview(base.tobytes()), 2)
    entropy = -sum(p * np.log2(p) for p in (density, 1 - density) if p) + density
    assert payload is not None and entropy / 16 * 0.99 <= len(payload) / new.nbytes <= at_most


def reference_decode(base: bytes, payload: bytes, size: int) -> bytes | None:
    """The format as its description says, element by element; None for what it does not allow."""
    count, unpacker = int.from_bytes(payload[:4], "little"), zlib.decompressobj(-15)
    if len(payload) >= len(base) or len(payload) < 5 or count > 0.5 * len(base) / size:
        return None
    try:
        data = unpacker.decompress(payload[5:])
    except zlib.error:
        return None
    used = [payload[4] >> place & 1 for place in range(4 + size)]
    if len(data) != count * sum(used) or not unpacker.eof or unpacker.unused_data:
        return None
    starts = [sum(used[:place]) * count for place in range(4 + size)]
    planes = [data[start : start + count] if flag else bytes(count) for start, flag in zip(starts, used, strict=True)]
    columns = [
        [int.from_bytes(bytes(digits), "little") for digits in zip(*column, strict=True)]
        for column in (planes[:4], planes[4:])
    ]
    target, index = bytearray(base), -1
    for gap, number in zip(*columns, strict=True):
        index += gap + 1
        if index >= len(base) // size:
            return None
        distance = number // 2 if number % 2 == 0 else -(number + 1) // 2
        old = int.from_bytes(target[index * size : (index + 1) * size], "little")
        target[index * size : (index + 1) * size] = ((old + distance) % 256**size).to_bytes(size, "little")
    return bytes(target)


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def test_a_delta_of_a_longer_bucket_goes_beyond_a_shorter_one() -> None:
    base, new = bytes(4000), bytes(3999) + b"\1"
    payload = encode(memoryview(new), memoryview(base), 2)
    assert payload is not None and decoded(base, bytes(payload), 2) == new
    with pytest.raises(ProtocolError, match="beyond its bucket"):
        decoded(base[:-2], bytes(payload), 2)


@st.composite
def forged(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """(base, payload, element bytes): noise, any planes, or a real payload that is damaged, cut or longer."""
    new, base, size = draw(changes())
    kind = draw(st.sampled_from(["noise", "planes", "damaged"]))
    if kind == "noise":
        return base[: 400 * size], draw(st.binary(max_size=400 * size)), size
    if kind == "planes":
        count = draw(st.integers(0, 20))
        planes = [draw(st.binary(max_size=21)) if draw(st.booleans()) else bytes(count) for _ in range(4 + size)]
        return base, struct.pack("<IB", count, draw(st.integers(0, 255))) + deflated(b"".join(planes)), size
    payload = bytearray(encode(memoryview(new), memoryview(base), size) or b"")
    if payload:
        payload[draw(st.integers(0, len(payload) - 1))] ^= draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(payload)))
    return base, draw(st.sampled_from([bytes(payload), bytes(payload[:cut]), bytes(payload) + b"\0"])), size


@pytest.mark.slow
@settings(max_examples=400)
@given(forged())
def test_a_forged_delta_is_refused_or_decoded_within_bounds(case: tuple[bytes, bytes, int]) -> None:
    base, payload, size = case
    expected = reference_decode(base, payload, size)
    if expected is None:
        with pytest.raises(ProtocolError):
            decoded(base, payload, size)
    else:
        assert decoded(base, payload, size) == expected


def test_a_compression_bomb_is_refused_before_it_is_unpacked() -> None:
    payload = struct.pack("<IB", 100, 0b111111) + deflated(bytes(1 << 26))
    with pytest.raises(ProtocolError, match="a delta with 601 instead of 600 bytes"):
        decoded(bytes(1 << 20), payload, 2)


@pytest.mark.parametrize(
    ("dtypes", "bucket_bytes", "expected"),
    [
        (["bfloat16"], 1 << 20, 2), (["float32"], 1 << 20, 4), (["float32", "bfloat16"], 1 << 20, 2),
        (["float32"], 1022, 2), (["bfloat16"], 1025, 1), ([], 1024, 4),
    ],
)  # fmt: skip
def test_elements_never_straddle_buckets(dtypes: list[str], bucket_bytes: int, expected: int) -> None:
    parameters = ParameterTable.of(ParameterEntry(f"p{number}", dtype, (1,)) for number, dtype in enumerate(dtypes))
    assert element_bytes(Layout(bucket_bytes, parameters, (ShardTable.of(parameters, []),))) == expected


def test_a_delta_of_what_has_gone_meanwhile_is_not_kept_and_keeps_no_slot() -> None:
    machine = Machine(0)
    live = LiveSlots([SlotView(SlotState.READY, serial, serial).pack() for serial in (1, 2, 3)])
    live.live(2, [1], [], 0.0)
    runtime, nothing = Process(machine, "server").runtime, memoryview(bytes(8))
    told: list[bool] = []
    deltas = Deltas(runtime, live, lambda *_: nothing, lambda *_: nothing, lambda: told.append(True))
    assert not deltas.is_made(2, 1, 0)
    live.live(3, [], [], 0.0)
    deltas.forget_stale()
    assert told and deltas.is_made(2, 1, 0), "whoever waits gets the bucket itself"
    assert set(live.filled()) == {1, 2, 3}, "a thread reads them"
    machine.run(1.0)
    assert set(live.filled()) == {3} and deltas.get(2, 1, 0) is None
