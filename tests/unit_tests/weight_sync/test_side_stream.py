"""The CPU's side stream: copies beside the computation, in order, and the fence that ends them."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from tests.patience import PATIENCE_S, until
from torchtitan.distributed.device import side_stream

CPU = torch.device("cpu")


def test_work_is_beside_the_caller_and_in_order() -> None:
    stream, go = side_stream(CPU), threading.Event()
    done: list[tuple[int, int]] = []

    def work(number: int) -> None:
        assert go.wait(PATIENCE_S)
        done.append((number, threading.get_ident()))

    fences = [stream.run(lambda number=number: work(number)) for number in range(3)]  # type: ignore[misc]
    assert not done and not any(fence.done() for fence in fences)
    go.set()
    fences[-1].hold()
    assert [number for number, _ in done] == [0, 1, 2] and all(fence.done() for fence in fences)
    assert threading.get_ident() not in {thread for _, thread in done}
    fences[0].wait()


def test_a_failure_is_raised_where_the_fence_is_and_the_next_work_goes_on() -> None:
    stream = side_stream(CPU)
    failed = stream.run(lambda: torch.zeros(2).copy_(torch.zeros(3)))
    after = stream.run(lambda: None)
    after.wait()
    assert not failed.done(), "nothing may take it for a snapshot"
    for reached in (failed.wait, failed.hold):
        with pytest.raises(RuntimeError, match="has failed"):
            reached()


def test_tensors_of_finished_work_are_let_go() -> None:
    stream, source = side_stream(CPU), torch.ones(4)
    tensor = weakref.ref(source)
    stream.run(lambda source=source: source.sum()).wait()  # type: ignore[misc]
    del source
    blocker = threading.Event()
    fence = stream.run(lambda: blocker.wait(PATIENCE_S))
    until(lambda: tensor() is None)
    blocker.set()
    fence.wait()
