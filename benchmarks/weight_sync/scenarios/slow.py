"""What slow actors cost the trainer and the other actors.

A trainer without a model publishes a version per step to one healthy actor and to slow ones, all real processes over
loopback; what the shard server sends to a slow actor is throttled. Three worlds: two slow actors with three slots, the
same with four, and ten slow ones with three.

    skipped_share            steps whose version found no slot
    healthy_gap_versions     the most versions from one that the healthy actor served to the next that it served
    slow_served_share        versions that a slow actor got ÷ what its link could carry; the smallest one's
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import Job, start_actors
from tests import faults
from torchtitan.config.job_config import WeightSync as WeightSyncConfig

BARS = {
    "skipped_share": ("<=", 0.0),
    "healthy_gap_versions": ("<=", 2.0),
    "slow_served_share": (">=", 0.55),
    "skipped_share_four_slots": ("<=", 0.0),
    "healthy_gap_versions_four_slots": ("<=", 2.0),
    "slow_served_share_four_slots": (">=", 0.85),
    "skipped_share_ten": ("<=", 0.0),
    "healthy_gap_versions_ten": ("<=", 2.0),
}
OPTIONS = {
    "megabytes": Option(24.0, "size of a version", quick=2.4),
    "step": Option(0.5, "seconds", quick=0.3),
    "seconds": Option(120.0, "of each world", quick=3.0),
}


class World(NamedTuple):
    """rates: bytes per second of the slow actors' links."""

    suffix: str
    slots: int
    rates: tuple[float, ...]


def world_figures(world: World, megabytes: float, step_s: float, seconds: float, folder: Path) -> dict[str, float]:
    """The figures of one world."""
    slow = [f"slow-{number}" for number in range(len(world.rates))]
    throttles = [f"throttle:actor={name},bytes_per_s={int(rate)}" for name, rate in zip(slow, world.rates, strict=True)]
    os.environ.update(faults.variables(";".join(throttles)))
    weights = {f"layer{index}": torch.zeros(int(megabytes * 1e6) // 16) for index in range(4)}
    steps, skipped = round(seconds / step_s), 0
    with contextlib.ExitStack() as closing:
        config = WeightSyncConfig(num_slots=world.slots)
        config.bucket_bytes = 1 << 20
        job = Job(weights, folder, config)
        closing.callback(job.close)
        # The healthy one is by itself: it shall not wait for what the others verify.
        for names in (["healthy"], slow):
            closing.callback(start_actors(job.place, names, log_folder=folder).close)
        job.wait_for_actors(1 + len(slow))
        start = time.time()
        for step in range(steps):
            no_vote = not job.sync.reserve()
            job.sync.fence()
            for tensor in weights.values():
                tensor.fill_(step)
            skipped += not job.publish(no_vote)
            time.sleep(max(0.0, start + (step + 1) * step_s - time.time()))
        end = time.time()
        assert job.sync.watcher is not None
        newest = job.sync.watcher.status()["newest"]
    served = {name: served_versions(folder / f"{name}.log", start, end) for name in ["healthy", *slow]}
    versions = [0, *served["healthy"], newest]
    size = sum(4 * tensor.numel() for tensor in weights.values())
    shares = [len(served[name]) * size / rate / (end - start) for name, rate in zip(slow, world.rates, strict=True)]
    return {
        f"skipped_share{world.suffix}": skipped / steps,
        f"healthy_gap_versions{world.suffix}": max(b - a for a, b in itertools.pairwise(versions)),
        f"slow_served_share{world.suffix}": min(shares),
        f"slow_served_share_mean{world.suffix}": sum(shares) / len(shares),
    }


def served_versions(log: Path, start: float, end: float) -> list[int]:
    """The versions that an actor began to serve within the time that counts."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [int(version) for when, version in lines if start <= float(when) <= end]


def measure(run: Run) -> dict[str, float]:
    options = run.options
    # As fast in versions per second, whatever the size of a version.
    unit, most = options.megabytes * 1e6 / 24, 3 if run.quick else 10
    two, ten = (2.0 * unit, 1.3 * unit), tuple(unit * 24 / (5 + 3 * number) for number in range(most))
    figures: dict[str, float] = {}
    for world in (World("", 3, two), World("_four_slots", 4, two), World("_ten", 3, ten)):
        common.progress(f"{len(world.rates)} slow actors, {world.slots} slots")
        folder = run.folder / f"world{world.suffix}"
        folder.mkdir()
        figures |= world_figures(world, options.megabytes, options.step, options.seconds, folder)
    return figures
