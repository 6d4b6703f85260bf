"""What a program made of its session comes whole, however long it is; what is no record is refused."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from torchtitan.inference.types import Branch, Completion, Given, Routes, VersionSpan
from torchtitan.rollout.gateway.record import branches_to_json, read_record
from torchtitan.utils import reader_process
from torchtitan.utils.typed_json import WrongForm


def branch(begin: int) -> Branch:
    sampled = Completion(
        [begin, 131071], [-0.5, -1 / 3], "length", [VersionSpan("e", 3, 0, 1), VersionSpan("e", 4, 1, 2)], [[begin], []]
    )
    routes = Routes(1, np.array([[[3, 300]], [[1, 2]]], np.uint16))
    last = Completion([9], [-2.0], "stop", [VersionSpan("e", 4, 0, 1)], None, routes)
    return Branch([Given([begin, 2, 3]), sampled, Given([]), Given([7]), last])


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_record_comes_whole(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0 if where == "elsewhere" else 1 << 20)
    made = [branch(number) for number in range(3)]
    sent = {"branches": branches_to_json(made), "calls": 7, "failed": 1, "truncated": True, "counts": {"stops_cut": 2}}
    record = asyncio.run(read_record(msgspec.json.encode(sent)))
    assert record is not None
    assert (record.calls, record.failed, record.truncated, record.counts) == (7, 1, True, {"stops_cut": 2})
    for got, expected in zip(record.branches, made, strict=True):
        for segment, other in zip(got.segments, expected.segments, strict=True):
            if isinstance(segment, Completion) and segment.routes is not None:
                assert isinstance(other, Completion) and other.routes is not None
                assert segment.routes.first == other.routes.first
                assert np.array_equal(segment.routes.experts, other.routes.experts)
                segment.routes = other.routes = None
            assert segment == other
    assert asyncio.run(read_record(b"null")) is None
    with pytest.raises(WrongForm, match="branches"):
        asyncio.run(read_record(b'{"calls":1,"failed":0,"truncated":false,"counts":{},"branches":[[{"x":1}]]}'))
