"""What slow actors cost the trainer and the other actors.

    python benchmarks/weight_sync_slow.py [--json]

A trainer without a model publishes a version per step to one healthy actor and to slow ones, all real processes over
loopback; what the shard server sends to a slow actor is throttled. Three worlds: two slow actors with three slots, the
same with four, and ten slow ones with three.

    skipped_share            steps whose version found no slot
    healthy_gap_versions     the most versions from one that the healthy actor served to the next that it served
    slow_served_share        versions that a slow actor got ÷ what its link could carry; the smallest one's
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import itertools
import secrets
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # As a script, the folder of this file is on the path, not the repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from tests import faults
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.memory.staging import StagedVersion
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

EPOCH = "e1-slow"
BUCKET_BYTES = 1 << 20
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


class World(NamedTuple):
    """rates: bytes per second of the slow actors' links."""

    suffix: str
    slots: int
    rates: tuple[float, ...]


def serve(arguments: dict[str, Any]) -> None:
    """In a child: actors that write down when they began to serve which version."""
    common.die_with_parent()
    torch.set_num_threads(1)
    for name, key, log in arguments["actors"]:
        SyncActor(arguments["registry"], name, EPOCH, key, partial(_note, Path(log))).start()
    common.say({"actors": len(arguments["actors"])})
    sys.stdin.read()


def _note(log: Path, staged: StagedVersion) -> None:
    with log.open("a") as lines:
        lines.write(f"{time.time()} {staged.version}\n")


def run(world: World, megabytes: float, step_s: float, seconds: float, folder: Path) -> dict[str, float]:
    """The figures of one world."""
    names = ["healthy", *(f"slow-{number}" for number in range(len(world.rates)))]
    throttles = [f"throttle:actor=slow-{n},bytes_per_s={int(rate)}" for n, rate in enumerate(world.rates)]
    os.environ.update(faults.variables(";".join(throttles)))
    weights = {f"layer{index}": torch.zeros(int(megabytes * 1e6) // 16) for index in range(4)}
    token, steps, skipped = secrets.token_urlsafe(16), round(seconds / step_s), 0
    with contextlib.ExitStack() as closing:
        config = WeightSyncConfig(bucket_bytes=BUCKET_BYTES, num_slots=world.slots)
        publication = WeightSync(config, weights, epoch=EPOCH, token=token, run_dir=folder)
        closing.callback(publication.close)
        watcher = publication.watcher
        assert watcher is not None
        actors = [(name, role_key(token, ACTOR, name), str(folder / f"{name}.log")) for name in names]
        # The healthy one is by itself: it shall not wait for what the others verify.
        for group in (actors[:1], actors[1:]):
            child = common.Child(Path(__file__), {"registry": publication.registry_address, "actors": group})
            closing.callback(child.close)
            child.answer()
        common.wait_for(lambda: len(watcher.status()["actors"]) == len(names), 60, "actors join")
        begun = time.time()
        for version in range(steps):
            no = not publication.boundary.reserve()
            publication.publisher.fence()
            for tensor in weights.values():
                tensor.fill_(version)
            skipped += not publication.boundary.commit(version, int(no))
            time.sleep(max(0.0, begun + (version + 1) * step_s - time.time()))
        ended, newest = time.time(), watcher.status()["newest"]
    served = {name: _served(folder / f"{name}.log", begun, ended) for name in names}
    versions = [0, *(version for _, version in served["healthy"]), newest]
    size = sum(4 * tensor.numel() for tensor in weights.values())
    shares = [len(served[f"slow-{number}"]) * size / rate / (ended - begun) for number, rate in enumerate(world.rates)]
    return {
        f"skipped_share{world.suffix}": skipped / steps,
        f"healthy_gap_versions{world.suffix}": max(b - a for a, b in itertools.pairwise(versions)),
        f"slow_served_share{world.suffix}": min(shares),
        f"slow_served_share_mean{world.suffix}": sum(shares) / len(shares),
    }


def _served(log: Path, begun: float, ended: float) -> list[tuple[float, int]]:
    """(when, version), within the time that counts."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(float(when), int(version)) for when, version in lines if begun <= float(when) <= ended]


def main() -> int:
    """Entry point."""
    arguments = common.child_arguments()
    if arguments is not None:
        serve(arguments)
        return 0
    parser = common.parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=24.0, help="size of a version")
    parser.add_argument("--step", type=float, default=0.5, help="seconds")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each world")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.step, options.seconds = 2.4, 0.3, 3.0
    # As fast in versions per second, whatever the size of a version.
    unit, most = options.megabytes * 1e6 / 24, 3 if options.quick else 10
    two, ten = (2.0 * unit, 1.3 * unit), tuple(unit * 24 / (5 + 3 * number) for number in range(most))
    worlds = [World("", 3, two), World("_four_slots", 4, two), World("_ten", 3, ten)]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="slow-") as folder:
        for number, world in enumerate(worlds):
            common.progress(f"{len(world.rates)} slow actors, {world.slots} slots")
            figures |= run(world, options.megabytes, options.step, options.seconds, Path(folder) / str(number))
    conditions = {
        "quick": options.quick,
        "version_mb": options.megabytes,
        "step_s": options.step,
        "seconds": options.seconds,
        "cores": os.cpu_count(),
    }
    common.report("weight_sync_slow", figures, BARS, conditions, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
