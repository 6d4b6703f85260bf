"""What a version costs the trainer when the actors are many: bytes that leave the couriers, with relay and without.

    python benchmarks/weight_sync_fanout.py [--json]

Real couriers, coordinator and receivers; the receivers have no engine, several live in one process. Every version waits
until all actors have applied it. Bytes are counted at the couriers' sockets, all attempts and frame headers included.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import json
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, the folder of this file is on the path, not the repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.receiver import Receiver

BARS = {"egress_growth_4_to_16": ("<=", 1.1)}
EPOCH = "e1-fanout"
RECEIVERS_PER_PROCESS = 4
# The first version finds actors that are still connecting.
FIRST_COUNTED_VERSION = 2


def serve(arguments: dict[str, Any]) -> None:
    """In a child: receivers until the benchmark kills them."""
    torch.set_num_threads(1)
    receivers = [
        Receiver(arguments["coordinator"], name, EPOCH, arguments["token"], lambda _staged: None)
        for name in arguments["names"]
    ]
    for receiver in receivers:
        receiver.start()
    common.say({"receivers": len(receivers)})
    sys.stdin.read()


def egress_per_version(actors: int, relay: bool, versions: int, megabytes: int, folder: Path) -> dict[str, float]:
    """Mean bytes that leave the trainer and the busiest actor per version, and the median seconds until all have it."""
    run_dir = folder / f"{actors}-{'relay' if relay else 'direct'}"
    config = WeightSyncConfig(relay=relay, bucket_bytes=1 << 20, offer_timeout_s=20, progress_timeout_s=20)
    weights = {f"layer{index}": torch.zeros(megabytes << 17, dtype=torch.float32) for index in range(2)}
    token = secrets.token_urlsafe(16)
    seconds = []
    with contextlib.ExitStack() as closing:
        sync = WeightSync(config, weights, epoch=EPOCH, token=token, run_dir=run_dir)
        closing.callback(sync.close)
        names = [f"actor-{number}" for number in range(actors)]
        for first in range(0, actors, RECEIVERS_PER_PROCESS):
            arguments = {
                "coordinator": sync.coordinator_address,
                "token": token,
                "names": names[first : first + RECEIVERS_PER_PROCESS],
            }
            child = common.Child(Path(__file__), arguments)
            closing.callback(child.close)
            child.answer()
        common.wait_for(
            lambda: sum(actor.state == "READY" for actor in sync.actors().values()) == actors, 60, "actors join"
        )
        for version in range(FIRST_COUNTED_VERSION + versions):
            sync.reserve()
            sync.fence()
            for tensor in weights.values():
                tensor.normal_()
            if sync.commit(version, 0) != "published":
                raise SystemExit(f"version {version} was not published")

            def applied(version: int = version) -> None:
                outcome = sync.wait_until_applied(version, 120, at_least=actors)
                if len(outcome.applied) < actors:
                    raise SystemExit(f"version {version} is not everywhere: {outcome.missing}")

            seconds.append(common.timed(applied))
        egress = _sent(run_dir, FIRST_COUNTED_VERSION + versions)
    trainer = sum(count for sender, count in egress.items() if sender == "trainer")
    busiest = max((count for sender, count in egress.items() if sender != "trainer"), default=0)
    return {
        "trainer": trainer / versions,
        "busiest_actor": busiest / versions,
        "seconds": statistics.median(seconds[FIRST_COUNTED_VERSION:]),
    }


def _sent(run_dir: Path, versions: int) -> dict[str, int]:
    """Bytes by sender over the counted versions, once all of them have been reported."""
    path = run_dir / "weight_sync" / "coordinator.jsonl"

    def records() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [record for record in found if record["event"] == "sent"]

    def whole() -> bool:
        applied = path.read_text().count('"event": "applied"')
        return len({(record["version"], record["actor"]) for record in records()}) >= applied

    common.wait_for(whole, 20, "the couriers' reports")
    egress: dict[str, int] = {}
    for record in records():
        if FIRST_COUNTED_VERSION <= record["version"] < versions:
            sender = "trainer" if "rank" in record else record["source"]
            egress[sender] = egress.get(sender, 0) + record["bytes"]
    return egress


def main() -> int:
    """Entry point."""
    arguments = common.child_arguments()
    if arguments is not None:
        serve(arguments)
        return 0
    parser = common.parser(__doc__)
    parser.add_argument("--versions", type=int, default=12, help="counted versions")
    parser.add_argument("--megabytes", type=int, default=4, help="size of a version")
    options = parser.parse_args()
    if options.quick:
        options.versions, options.megabytes = 2, 1
    versions = options.versions
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fanout-") as folder:
        for relay in (True, False):
            for actors in (4, 16):
                common.progress(f"{actors} actors, {'relay' if relay else 'every actor from the trainer'}")
                measured = egress_per_version(actors, relay, versions, options.megabytes, Path(folder))
                name = f"{'relay' if relay else 'direct'}_{actors}"
                figures[f"egress_mb_{name}"] = measured["trainer"] / 1e6
                figures[f"seconds_{name}"] = measured["seconds"]
                if relay:
                    figures[f"busiest_actor_mb_{name}"] = measured["busiest_actor"] / 1e6
    growth = {
        "egress_growth_4_to_16": figures["egress_mb_relay_16"] / figures["egress_mb_relay_4"],
        "egress_growth_4_to_16_without_relay": figures["egress_mb_direct_16"] / figures["egress_mb_direct_4"],
    }
    conditions = {
        "quick": options.quick,
        "versions": versions,
        "version_mb": 2 * (options.megabytes << 17) * 4 / 1e6,
        "relay_fanout": WeightSyncConfig().relay_fanout,
        "cores": os.cpu_count(),
    }
    common.report("weight_sync_fanout", {**growth, **figures}, BARS, conditions, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
