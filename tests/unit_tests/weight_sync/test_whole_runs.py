"""Registry, shard servers and pullers in many whole runs, each with another order of events; a failing seed repeats it:

python -m tests.unit_tests.weight_sync.test_whole_runs slow_fleet 1234
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable

import pytest

from tests.unit_tests.weight_sync import byzantine, runs
from tests.unit_tests.weight_sync.job import Job

# Twice as many as small runs: by default, and with `--all`. For a longer search, how many, and from which seed on.
RUNS, ALL_RUNS = 1600, 8000
FIRST = int(os.environ.get("WEIGHT_SYNC_RUNS_FIRST", "0"))
# Kind -> its run, and of how many runs one is of this kind. Others than small ones take up to five times as long each.
KINDS: dict[str, tuple[Callable[[int], Job], int]] = {
    "small": (runs.run_small, 2), "slow_fleet": (runs.run_slow_fleet, 50), "faults": (runs.run_faults, 50),
    "relay": (runs.run_relay, 100), "references": (runs.run_references, 200), "relaunch": (runs.run_relaunch, 400),
    "hung": (runs.run_hung, 200), "without_registry": (runs.run_without_registry, 1000),
    "byzantine": (byzantine.run_byzantine, 400), "crowd": (runs.run_crowd, 8000),
}  # fmt: skip
# Runs leave circles of objects; looking for them now and then is enough.
COLLECT_EVERY = 500


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_promises_hold_in_every_run(kind: str, pytestconfig: pytest.Config) -> None:
    run, share = KINDS[kind]
    chosen = ALL_RUNS if pytestconfig.getoption("--all") else RUNS
    count = max(1, int(os.environ.get("WEIGHT_SYNC_RUNS", chosen)) // share)
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()
    orders = set()
    try:
        for seed in range(FIRST, FIRST + count):
            try:
                job = run(seed)
            except Exception as error:
                raise AssertionError(f"python -m {__name__} {kind} {seed}: {error}") from error
            orders.add(job.machine.order_of_events)
            if seed % COLLECT_EVERY == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(logging.NOTSET)
    # No two of them are the same.
    assert len(orders) == count


def main(kind: str, first: int, count: int) -> None:
    """So many runs of a kind, from a seed on; of a single one, what is logged is shown."""
    logging.basicConfig(level=logging.INFO if count == 1 else logging.CRITICAL, format="%(name)s %(message)s")
    orders, started_at = set(), time.monotonic()
    for seed in range(first, first + count):
        try:
            orders.add(KINDS[kind][0](seed).machine.order_of_events)
        except Exception as error:
            raise SystemExit(f"{kind} {seed}: {error!r}") from error
    seconds = time.monotonic() - started_at
    print(f"{kind}: {count} runs from seed {first}, {len(orders)} orders, no broken promise, {seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or ["1"])[0]))
