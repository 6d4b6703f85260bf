"""Do live tensors hold a version? Against slots filled and hashed here, byte by byte, without the code under test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from tests.checksums import sum_checksum_numpy
from tests.patience import PATIENCE_S, until
from torchtitan.inference.engines.embedded.weights import Verifier
from torchtitan.inference.serving.weight_digest import CheckStopped, Unverifiable, differing_parameters
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry
from torchtitan.weight_sync.memory.manifest import ChecksumTable, Layout, merge_layouts
from torchtitan.weight_sync.memory.staging import ExpectedChecksums, StagedVersion
from torchtitan.weight_sync.trainer.plan import Placed, PlacedParameter, plan_rank

SHAPES = {"embed": (37, 8), "norm": (9,), "up": (16, 5), "scalar": (1,)}
BUCKET_BYTES = 128


def layout_over(ranks: int, dim: int, dtype: str, kind: str = "xxh3") -> Layout:
    """Rows or columns over the ranks; vectors are sent by rank 0."""
    parts = []
    for rank in range(ranks):
        placed = []
        for name, shape in SHAPES.items():
            sharded = Placed(shape, (ranks,), (rank,), (Shard(dim if len(shape) > 1 else 0),))
            placed.append(PlacedParameter(name, sharded if name != "norm" else Placed(shape)))
        parts.append(plan_rank(placed, rank, dtype, BUCKET_BYTES).to_json())
    merged = merge_layouts(parts)
    return Layout(merged.bucket_bytes, merged.parameters, merged.ranks, kind)


def hashed(layout: Layout, values: dict[str, torch.Tensor]) -> dict[int, ChecksumTable]:
    checksum_tables = {}
    for number, rank in enumerate(layout.ranks):
        slot = np.zeros(rank.slot_bytes, np.uint8)
        for shard in rank:
            entry = layout.parameters[shard.parameter]
            where = tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.shape, strict=True))
            kind = getattr(torch, entry.dtype)
            data = values[entry.name][where].to(kind).contiguous().view(-1).view(torch.uint8).numpy()
            slot[shard.byte_offset : shard.byte_offset + len(data)] = data
        function = {"xxh3": xxhash.xxh3_128_hexdigest, "sum": sum_checksum_numpy}[layout.checksum]
        starts = range(0, rank.slot_bytes, layout.bucket_bytes)
        checksum_tables[number] = ChecksumTable.of(
            [function(slot[start : start + layout.bucket_bytes].tobytes()) for start in starts]
        )
    return checksum_tables


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def as_held(version: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in version.items()}


@pytest.mark.parametrize(
    ("ranks", "dim", "dtype", "kind"),
    [(1, 0, "float32", "xxh3"), (3, 0, "bfloat16", "xxh3"), (2, 1, "float32", "sum"), (2, 1, "bfloat16", "xxh3")],
)
@settings(max_examples=30)
@given(data=st.data())
def test_one_flipped_bit_of_one_element_is_found_and_named(
    ranks: int, dim: int, dtype: str, kind: str, data: st.DataObject
) -> None:
    layout = layout_over(ranks, dim, dtype, kind)
    live = as_held(values(), getattr(torch, dtype))
    staged = {name: tensor.clone() for name, tensor in live.items()}
    proof = ExpectedChecksums(layout, hashed(layout, live), lambda: True)
    assert differing_parameters(proof, live, staged) == ""
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    integers = live[name].view(-1).view(torch.int32 if dtype == "float32" else torch.int16)
    bits = 31 if dtype == "float32" else 15
    integers[data.draw(st.integers(0, len(integers) - 1))] ^= 1 << data.draw(st.integers(0, bits - 1))
    assert differing_parameters(proof, live, staged) == name
    # Once staging memory is another version's, it is narrowed down to a bucket.
    gone = ExpectedChecksums(layout, proof.checksum_tables, lambda: False)
    difference = differing_parameters(gone, live, values(seed=5))
    assert "bucket" in difference and name in difference


def test_values_that_compare_equal_or_never_are_compared_by_their_bits() -> None:
    layout = layout_over(1, 0, "float32")
    version = values()
    version["norm"][3], version["norm"][4] = float("nan"), 0.0
    proof = ExpectedChecksums(layout, hashed(layout, version), lambda: True)
    live = {name: tensor.clone() for name, tensor in version.items()}
    assert differing_parameters(proof, live, version) == ""
    live["norm"][4] = -0.0
    assert differing_parameters(proof, live, version) == "norm"


def test_a_wider_engine_is_verified_and_a_narrower_one_says_that_it_cannot_be() -> None:
    wire = layout_over(2, 0, "bfloat16")
    rounded = as_held(as_held(values(), torch.bfloat16), torch.float32)
    assert differing_parameters(ExpectedChecksums(wire, hashed(wire, rounded), lambda: True), rounded, rounded) == ""
    exact = layout_over(1, 0, "float32")
    proof = ExpectedChecksums(exact, hashed(exact, values()), lambda: True)
    with pytest.raises(Unverifiable, match="embed is sent as float32 and rounded to torch.bfloat16"):
        differing_parameters(proof, as_held(values(), torch.bfloat16), values())
    with pytest.raises(Unverifiable, match="the engine has no up of shape"):
        differing_parameters(proof, {name: tensor for name, tensor in values().items() if name != "up"}, values())
    with pytest.raises(CheckStopped):
        differing_parameters(proof, values(), values(), lambda: True)


def staged_version(version: int, tensors: dict[str, torch.Tensor]) -> StagedVersion:
    layout = layout_over(1, 0, "float32")
    proof = ExpectedChecksums(layout, hashed(layout, tensors), lambda: True)
    return StagedVersion("e", version, "digest", tensors, proof=proof)


def test_the_next_update_waits_for_the_look_and_never_spoils_it() -> None:
    """Updates as fast as they can be made, each in place and torn while it goes on: no look ever sees one half-way."""
    live, found = values(), []
    verifier = Verifier(1, lambda: live, lambda *torn: found.append(torn))
    for version in range(60):
        incoming = values(seed=version)
        verifier.finish()
        for name, tensor in incoming.items():
            live[name].fill_(float("nan"))  # what a look during an update would see
            time.sleep(0.0002)
            live[name].copy_(tensor)
        verifier.applied(staged_version(version, incoming))
    verifier.finish()
    assert found == [] and verifier.status.mismatched == 0
    assert verifier.status.matched == 60 and verifier.status.version == 59


def test_a_look_that_takes_too_long_is_given_up_for_the_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()

    def slow(_proof: Any, _live: Any, _staged: Any, stop: Callable[[], bool]) -> str:
        event.set()
        until(stop)
        raise CheckStopped

    monkeypatch.setattr("torchtitan.inference.engines.embedded.weights.differing_parameters", slow)
    verifier = Verifier(1, values, lambda *_: pytest.fail("nothing is torn"))
    verifier.applied(staged_version(0, values()))
    assert event.wait(PATIENCE_S)
    started = time.monotonic()
    verifier.finish(0.2)
    assert time.monotonic() - started >= 0.2
    assert (verifier.status.unfinished, verifier.status.matched) == (1, 0)


def test_every_so_many_versions_and_none_at_all() -> None:
    for interval, expected in ((0, 0), (1, 6), (3, 2)):
        verifier = Verifier(interval, values, lambda *_: None)
        for version in range(6):
            verifier.applied(staged_version(version, values()))
            verifier.finish()
        assert verifier.status.matched == expected and verifier.verifies is (interval > 0)


def test_torn_versions_are_counted_until_one_is_whole() -> None:
    live, rows = values(), []
    verifier = Verifier(1, lambda: live, lambda *row: rows.append(row))
    for version, torn in enumerate([True, True, False, True]):
        live["up"].copy_(values()["up"])
        if torn:
            live["up"][2, 3] += 1
        verifier.applied(staged_version(version, values()))
        verifier.finish()
    assert [(row[1], row[3]) for row in rows] == [(0, 1), (1, 2), (3, 1)]
    assert rows[0][2] == "the engine does not hold version 0 as it was sent: up"


def test_a_look_that_fails_is_no_proof_of_anything_good(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[Any]()
    verifier = Verifier(2, values, lambda *row: rows.append(row))
    monkeypatch.setattr("torchtitan.inference.engines.embedded.weights.finish_compute", lambda _device: 1 // 0)
    for version in range(2):  # what was torn is looked at again, whatever is due
        verifier.applied(staged_version(version, values()))
        verifier.finish()
    assert [row[1::2] for row in rows] == [(0, 1), (1, 2)] and "could not be looked at: ZeroDiv" in rows[0][2]


def test_the_layout_that_these_tests_make_has_whole_shapes_and_the_type_that_is_sent() -> None:
    layout = layout_over(3, 0, "bfloat16")
    assert next(iter(layout.parameters)) == ParameterEntry("embed", "bfloat16", (37, 8))
    buckets = [layout.bucket_count(rank) for rank in range(3)]
    assert buckets[0] > 1 and sum(buckets) > 3
