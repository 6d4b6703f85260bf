"""How far an actor of middling speed falls behind while a slower one pulls, on the virtual clock.

    python benchmarks/weight_sync_middling.py --json

One rank publishes a version per second to three actors, which take 0.2 s, 1.3 s, and 8 or 20 s for a version. Figures
are versions between the newest one and the one that an actor serves, as the mean over time and at most, of five seeds.

    middling_mean, middling_max     the actor of 1.3 s beside one of 8 s, three slots; _20: beside one of 20 s;
                                    _four: with four slots, _20_four: both
    slow_mean, slow_max             the slower actor
    healthy_max                     the actor of 0.2 s, in any of these
    skipped                         versions that found no slot
    four_slots_gain                 middling_mean with three slots ÷ with four
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

if __name__ == "__main__":
    # As a script, the folder of this file is on the path, not the repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from tests.deterministic.machine import Machine
from tests.unit_tests.weight_sync.job import Job, Shape

HEALTHY, MIDDLING = 0.2, 1.3
BARS = {"healthy_max": ("<=", 2.0), "skipped": ("<=", 0.0)}
# Until then all actors have had a version; and the pause between two looks.
BEGIN_SECONDS, LOOK_SECONDS = 20.0, 0.1


def versions_behind(slow: float, slots: int, seed: int, seconds: float) -> tuple[list[list[int]], int]:
    """For each of the three actors how many versions it is behind, at each look; and how many versions were skipped."""
    machine = Machine(seed)
    machine.validates = False
    shape = Shape(ranks=1, buckets=16, slots=slots, interval=1.0, actor_seconds=(HEALTHY, MIDDLING, slow))
    job = Job(machine, shape)
    machine.run(LOOK_SECONDS)
    job.train(int(seconds / shape.interval))
    behind: list[list[int]] = [[] for _ in job.actors]
    for look in range(int(BEGIN_SECONDS / LOOK_SECONDS), int(seconds / LOOK_SECONDS)):
        machine.run(look * LOOK_SECONDS)
        for actor, versions in zip(job.actors, behind, strict=True):
            serving = actor.puller.serving
            versions.append(max(job.published_at) - (serving.version if serving else -1))
    return behind, len(job.skipped)


def main() -> None:
    arguments = common.parser(__doc__).parse_args()
    seeds, length = (1, 0.5) if arguments.quick else (5, 1.0)
    figures = {"healthy_max": 0.0, "skipped": 0.0}
    for slow, slow_key in (8.0, ""), (20.0, "_20"):
        for slots, key in (3, slow_key), (4, f"{slow_key}_four"):
            common.progress(f"an actor of {slow:g} s, {slots} slots")
            seconds = length * (120.0 if slow < 10 else 240.0)
            runs = [versions_behind(slow, slots, seed, seconds) for seed in range(seeds)]
            healthy, middling, slowest = ([n for behind, _ in runs for n in behind[actor]] for actor in range(3))
            figures[f"middling_mean{key}"], figures[f"middling_max{key}"] = statistics.fmean(middling), max(middling)
            figures[f"slow_mean{key}"], figures[f"slow_max{key}"] = statistics.fmean(slowest), max(slowest)
            figures["healthy_max"] = max(figures["healthy_max"], *healthy)
            figures["skipped"] += sum(skipped for _, skipped in runs)
    figures["four_slots_gain"] = figures["middling_mean"] / figures["middling_mean_four"]
    conditions = {"quick": arguments.quick, "seeds": seeds}
    common.report("weight_sync_middling", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
