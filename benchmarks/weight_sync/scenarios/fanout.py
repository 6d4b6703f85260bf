"""What a version costs the trainer when the actors are many: bytes that leave it, with relay and without.

Real shard server, registry and actors; the actors have no engine, several live in one process. Every actor has an
address of its own, as on a machine of its own, unless one host is measured. Every version waits until all actors have
applied it. Bytes are those that actors have received from the trainer, or from the actor that passed them on, of
transfers that were finished.

    egress_copies_one_host    bytes that leave the trainer for four actors of one host that relay ÷ those of a version
    relay_depth_cost          seconds until the last of 16 actors has a version ÷ seconds until one alone has it, where
                              every connection is as slow as the others
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import WAIT_SECONDS, Job, start_actors
from tests import faults
from tests.journals import deliveries_of
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.wire.runtime import TICK_SECONDS

BARS = {
    "egress_growth_4_to_16": ("<=", 1.1),
    "egress_copies_one_host": ("<=", 1.1),
    "relay_depth_cost": ("<=", 2.0),
}
OPTIONS = {
    "versions": Option(12, "counted versions", quick=2),
    "megabytes": Option(4, "size of a version", quick=1),
}
ACTORS_PER_PROCESS = 4
# The first version finds actors that are still connecting.
FIRST_COUNTED_VERSION = 2
LINK_BYTES_PER_S = 4_000_000


def egress_per_version(
    actors: int, relay: bool, versions: int, megabytes: int, folder: Path, one_host: bool = False
) -> dict[str, float]:
    """Mean bytes that leave the trainer and the busiest actor per version, and the median seconds until all have it."""
    run_dir = folder / f"{actors}-{'relay' if relay else 'direct'}-{one_host}"
    config = WeightSyncConfig()
    config.bucket_bytes = 1 << 20
    config.table.relay, config.progress_timeout_s = relay, 20.0
    weights = {f"layer{index}": torch.zeros(megabytes << 17, dtype=torch.float32) for index in range(2)}
    seconds = []

    def change() -> None:
        for tensor in weights.values():
            tensor.normal_()

    with contextlib.ExitStack() as closing:
        job = Job(weights, run_dir, config)
        closing.callback(job.close)
        names = [f"actor-{number}" for number in range(actors)]
        hosts = [f"127.0.0.{1 if one_host else 2 + number}" for number in range(actors)]
        for first in range(0, actors, ACTORS_PER_PROCESS):
            group = slice(first, first + ACTORS_PER_PROCESS)
            closing.callback(start_actors(job.place, names[group], hosts=hosts[group]).close)
        job.wait_for_actors(actors)
        for version in range(FIRST_COUNTED_VERSION + versions):
            if version == FIRST_COUNTED_VERSION:
                # Who relays is chosen by what shard servers have told of the versions before.
                time.sleep(4 * TICK_SECONDS)
            job.publish_when_free(change)
            start = time.perf_counter()
            job.applied_everywhere(actors)
            seconds.append(time.perf_counter() - start)
        # The registry writes its journal in a thread, so on a slow machine the lines come later than the versions.
        common.wait_for(
            lambda: len(applied(run_dir)) == actors * versions, WAIT_SECONDS, "the journal has every transfer"
        )
        egress = sent_by(applied(run_dir))
    trainer = egress.pop("trainer", 0)
    return {
        "trainer": trainer / versions,
        "busiest_actor": max(egress.values(), default=0) / versions,
        "seconds": statistics.median(seconds[FIRST_COUNTED_VERSION:]),
    }


def applied(run_dir: Path) -> list[dict[str, Any]]:
    """The figures of each transfer of a counted version."""
    deliveries = deliveries_of(run_dir, "applied")
    return [delivery["figures"] for delivery in deliveries if delivery["version"] >= FIRST_COUNTED_VERSION]


def sent_by(transfers: list[dict[str, Any]]) -> Counter[str]:
    """Bytes by sender."""
    egress: Counter[str] = Counter()
    for figures in transfers:
        egress["trainer"] += figures["bytes_full"]
        egress[figures["source"]] += figures["bytes_relayed"]
    return egress


def depth_cost(many: int, versions: int, megabytes: int, folder: Path) -> float:
    """Seconds of `many` actors ÷ seconds of one, over links of the same speed."""
    links = [f"throttle:phase={phase},bytes_per_s={LINK_BYTES_PER_S}" for phase in ("send", "relay")]
    os.environ.update(faults.variables(";".join(links)))
    seconds = [egress_per_version(actors, True, versions, megabytes, folder)["seconds"] for actors in (many, 1)]
    del os.environ[faults.VARIABLE]
    return seconds[0] / seconds[1]


def measure(run: Run) -> dict[str, float]:
    versions, megabytes = run.options.versions, run.options.megabytes
    few, many = (1, 2) if run.quick else (4, 16)
    figures: dict[str, float] = {}
    for relay in (True, False):
        for actors in (few, many):
            common.progress(f"{actors} actors, {'relay' if relay else 'every actor from the trainer'}")
            measured = egress_per_version(actors, relay, versions, megabytes, run.folder)
            name = f"{'relay' if relay else 'direct'}_{actors}"
            figures[f"egress_mb_{name}"] = measured["trainer"] / 1e6
            figures[f"seconds_{name}"] = measured["seconds"]
            if relay:
                figures[f"busiest_actor_mb_{name}"] = measured["busiest_actor"] / 1e6
    common.progress("four actors of one host")
    measured = egress_per_version(4, True, versions, megabytes, run.folder, one_host=True)
    figures["egress_copies_one_host"] = measured["trainer"] / (megabytes << 20)
    common.progress(f"{many} actors and one, over slow links")
    growth = {"relay_depth_cost": depth_cost(many, 2 if run.quick else 4, megabytes, run.folder / "links")}
    for how, suffix in (("relay", ""), ("direct", "_without_relay")):
        ratio = figures[f"egress_mb_{how}_{many}"] / figures[f"egress_mb_{how}_{few}"]
        growth[f"egress_growth_{few}_to_{many}{suffix}"] = ratio
    run.conditions |= {
        "version_mb": 2 * (megabytes << 17) * 4 / 1e6,
        "relay_fanout": WeightSyncConfig.relay_fanout,
    }
    return {**growth, **figures}
