"""Registry, shard servers and pullers in many whole runs, each with another order of events; a failing seed repeats it:

python -m tests.unit_tests.weight_sync.pull.test_whole_runs slow_fleet 1234
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import pytest

from tests.unit_tests.weight_sync.pull import runs
from tests.unit_tests.weight_sync.pull.job import Job

KINDS: dict[str, tuple[Callable[[int], Job], int]] = {
    "small": (runs.run_small, 2000),
    "slow_fleet": (runs.run_slow_fleet, 500),
    "faults": (runs.run_faults, 500),
    "relay": (runs.run_relay, 200),
    "references": (runs.run_references, 100),
    "relaunch": (runs.run_relaunch, 50),
    "without_registry": (runs.run_without_registry, 20),
}
# For a longer search: so many times as many runs, from another first seed.
TIMES = int(os.environ.get("WEIGHT_SYNC_RUNS_TIMES", "1"))
FIRST = int(os.environ.get("WEIGHT_SYNC_RUNS_FIRST", "0"))


@pytest.mark.parametrize("kind", KINDS)
def test_promises_hold_in_every_run(kind: str) -> None:
    run, count = KINDS[kind]
    logging.disable(logging.CRITICAL)
    orders = set()
    try:
        for seed in range(FIRST, FIRST + count * TIMES):
            try:
                job = run(seed)
            except Exception as error:
                raise AssertionError(f"python -m {__name__} {kind} {seed}: {error}") from error
            orders.add(job.machine.order_of_events)
    finally:
        logging.disable(logging.NOTSET)
    # No two of them are the same.
    assert len(orders) == count * TIMES


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    KINDS[sys.argv[1]][0](int(sys.argv[2]))
