"""What a version costs the trainer when the actors are many: bytes that leave it, with relay and without.

    python benchmarks/weight_sync_fanout.py [--json]

Real shard server, registry and actors; the actors have no engine, several live in one process. Every actor has an
address of its own, as on a machine of its own, unless one host is measured. Every version waits until all actors have
applied it. Bytes are those that actors have received from the trainer, or from the actor that passed them on, of
transfers that were finished.

    egress_copies_one_host    bytes that leave the trainer for four actors of one host that relay ÷ those of a version
    relay_depth_cost    seconds until the last of 16 actors has a version ÷ seconds until one alone has it, where every
                        connection is as slow as the others
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
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
from tests import faults
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

BARS = {
    "egress_growth_4_to_16": ("<=", 1.1),
    "egress_copies_one_host": ("<=", 1.1),
    "relay_depth_cost": ("<=", 2.0),
}
EPOCH = "e1-fanout"
ACTORS_PER_PROCESS = 4
# The first version finds actors that are still connecting.
FIRST_COUNTED_VERSION = 2
LINK_BYTES_PER_S = 4_000_000


def serve(arguments: dict[str, Any]) -> None:
    """In a child: actors until the benchmark kills them."""
    torch.set_num_threads(1)
    for name, host in arguments["actors"]:
        key = role_key(arguments["token"], ACTOR, name)
        SyncActor(arguments["registry"], name, EPOCH, key, lambda _staged: None, relay_host=host).start()
    common.say({"actors": len(arguments["actors"])})
    sys.stdin.read()


def egress_per_version(
    actors: int, relay: bool, versions: int, megabytes: int, folder: Path, one_host: bool = False
) -> dict[str, float]:
    """Mean bytes that leave the trainer and the busiest actor per version, and the median seconds until all have it."""
    run_dir = folder / f"{actors}-{'relay' if relay else 'direct'}-{one_host}"
    config = WeightSyncConfig(bucket_bytes=1 << 20)
    config.table.relay, config.progress_timeout_s = relay, 20.0
    weights = {f"layer{index}": torch.zeros(megabytes << 17, dtype=torch.float32) for index in range(2)}
    token = secrets.token_urlsafe(16)
    seconds = []
    with contextlib.ExitStack() as closing:
        sync = WeightSync(config, weights, epoch=EPOCH, token=token, run_dir=run_dir)
        closing.callback(sync.close)
        named = [(f"actor-{number}", f"127.0.0.{1 if one_host else 2 + number}") for number in range(actors)]
        for first in range(0, actors, ACTORS_PER_PROCESS):
            arguments = {
                "registry": sync.registry_address,
                "token": token,
                "actors": named[first : first + ACTORS_PER_PROCESS],
            }
            child = common.Child(Path(__file__), arguments)
            closing.callback(child.close)
            child.answer()
        common.wait_for(lambda: len(sync.actors()) == actors, 60, "actors join")
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
        # The registry writes its journal in a thread, so on a slow machine the lines come later than the versions.
        common.wait_for(lambda: len(_applied(run_dir)) == actors * versions, 60, "the journal has every transfer")
        egress = _sent(_applied(run_dir))
    trainer = sum(count for sender, count in egress.items() if sender == "trainer")
    busiest = max((count for sender, count in egress.items() if sender != "trainer"), default=0)
    return {
        "trainer": trainer / versions,
        "busiest_actor": busiest / versions,
        "seconds": statistics.median(seconds[FIRST_COUNTED_VERSION:]),
    }


def _applied(run_dir: Path) -> list[dict[str, Any]]:
    """The figures of each transfer of a counted version."""
    records = read_json_lines(run_dir / "weight_sync" / "registry.jsonl")
    counted = (one for one in records if one["event"] == "applied" and one["version"] >= FIRST_COUNTED_VERSION)
    return [record["figures"] for record in counted]


def _sent(applied: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes by sender."""
    egress: dict[str, int] = {}
    for figures in applied:
        egress["trainer"] = egress.get("trainer", 0) + figures["bytes_full"]
        egress[figures["source"]] = egress.get(figures["source"], 0) + figures["bytes_relayed"]
    return egress


def depth_cost(many: int, versions: int, megabytes: int, folder: Path) -> float:
    """Seconds of `many` actors ÷ seconds of one, over links of the same speed."""
    links = [f"throttle:phase={phase},bytes_per_s={LINK_BYTES_PER_S}" for phase in ("send", "relay")]
    os.environ.update(faults.variables(";".join(links)))
    seconds = [egress_per_version(actors, True, versions, megabytes, folder)["seconds"] for actors in (many, 1)]
    del os.environ[faults.VARIABLE]
    return seconds[0] / seconds[1]


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
    few, many = 4, 16
    if options.quick:
        options.versions, options.megabytes, few, many = 2, 1, 1, 2
    versions = options.versions
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fanout-") as folder:
        for relay in (True, False):
            for actors in (few, many):
                common.progress(f"{actors} actors, {'relay' if relay else 'every actor from the trainer'}")
                measured = egress_per_version(actors, relay, versions, options.megabytes, Path(folder))
                name = f"{'relay' if relay else 'direct'}_{actors}"
                figures[f"egress_mb_{name}"] = measured["trainer"] / 1e6
                figures[f"seconds_{name}"] = measured["seconds"]
                if relay:
                    figures[f"busiest_actor_mb_{name}"] = measured["busiest_actor"] / 1e6
        common.progress("four actors of one host")
        measured = egress_per_version(4, True, versions, options.megabytes, Path(folder), one_host=True)
        figures["egress_copies_one_host"] = measured["trainer"] / (options.megabytes << 20)
        common.progress(f"{many} actors and one, over slow links")
        cost = depth_cost(many, 2 if options.quick else 4, options.megabytes, Path(folder) / "links")
    growth = {"relay_depth_cost": cost}
    for how, suffix in (("relay", ""), ("direct", "_without_relay")):
        ratio = figures[f"egress_mb_{how}_{many}"] / figures[f"egress_mb_{how}_{few}"]
        growth[f"egress_growth_{few}_to_{many}{suffix}"] = ratio
    conditions = {
        "quick": options.quick,
        "versions": versions,
        "version_mb": 2 * (options.megabytes << 17) * 4 / 1e6,
        "relay_fanout": WeightSyncConfig.relay_fanout,
        "cores": os.cpu_count(),
    }
    common.report("weight_sync_fanout", {**growth, **figures}, BARS, conditions, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
