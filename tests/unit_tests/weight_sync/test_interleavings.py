"""A hundred thousand orders of events of whole runs, each of them checked against every invariant.

    python -m tests.unit_tests.weight_sync.test_interleavings SEED

replays one run and prints its events.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from array import array
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.unit_tests.weight_sync.parts import Shape
from tests.unit_tests.weight_sync.runs import random_run

DISTINCT = 100_000
CHUNK = 1_000
CHUNKS = DISTINCT // CHUNK + 1
FIRST_SEED = int(os.environ.get("WEIGHT_SYNC_FIRST_SEED", "1"))
SHAPES = [
    Shape(buckets=1),
    Shape(buckets=1, delta=True, full_every=4),
    Shape(buckets=1, relay=True),
    Shape(buckets=1, slots=2),
    Shape(buckets=2, workers=2, delta=True, relay=True),
    Shape(buckets=1, relay=True, actors=3, slots=2),
]


def run_seed(seed: int, trace: bool = False) -> tuple[int, Counter[str]]:
    """(hash of the order of events, journal events); raises Violation."""
    order, world = random_run(seed, SHAPES[seed % len(SHAPES)], trace=trace)
    return order, Counter(world.counts, injected=world.faults)


def run_chunk(first: int) -> tuple[array[int], Counter[str], str]:
    """Orders and journal events of CHUNK seeds from `first` on, and what went wrong with the last of them, if so."""
    orders: array[int] = array("q")
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        try:
            order, events = run_seed(seed)
        except Exception as error:
            module = "tests.unit_tests.weight_sync.test_interleavings"
            return orders, counts, f"seed {seed}: {error!r}\nreplay: {sys.executable} -m {module} {seed}"
        orders.append(order)
        counts.update(events)
    return orders, counts, ""


@pytest.mark.timeout(600)
def test_a_hundred_thousand_orders_of_events(capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    distinct: set[int] = set()
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    firsts = range(FIRST_SEED, FIRST_SEED + CHUNKS * CHUNK, CHUNK)
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for orders, events, failure in pool.map(run_chunk, firsts):
            if failure:
                pool.shutdown(wait=False, cancel_futures=True)
                pytest.fail(failure)
            distinct.update(orders)
            counts.update(events)
    with capsys.disabled():
        journal = ", ".join(f"{number} {event}" for event, number in sorted(counts.items()))
        seconds = f"{time.monotonic() - begun:.0f} s on {cores} cores"
        print(f"\n{len(distinct)} distinct orders of events from seed {FIRST_SEED} on in {seconds}: {journal}")
    assert len(distinct) >= DISTINCT
    assert min(counts[event] for event in ("applied", "abort", "evict", "poisoned", "injected")) > 1000


if __name__ == "__main__":
    _, journal = run_seed(int(sys.argv[1]), trace=True)
    print(dict(journal))
