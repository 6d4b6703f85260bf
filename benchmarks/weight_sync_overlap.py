"""Throughput of training with asynchronous against blocking weight synchronisation, over a slow link.

    sudo python benchmarks/weight_sync_overlap.py --json

The trainer and two actors live in network namespaces behind links of 1 Gbit/s. Every step publishes a version. In
turns, block by block:

    none       no version is published: the pure step
    blocking   the trainer waits until both actors have applied the version (async_weight_update = false)
    async      it does not

    gain             steps per second, async ÷ blocking
    share_of_ideal   gain ÷ ((step + sync) ÷ step), where sync is what blocking adds to the pure step

The model is chosen so that waiting takes 40–50 % of a blocking step (sync_share_of_blocking_step). Actors receive,
verify and copy, they do not generate. The trainer has a core of its own.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from benchmarks.namespaces import slow_network  # noqa: E402
from benchmarks.small_trainer import Job, Trainer, start_actor  # noqa: E402
from torchtitan.config.job_config import WeightSync as WeightSyncConfig  # noqa: E402

BARS = {
    "share_of_ideal": (">=", 0.95),
    "gain": (">=", 1.5),
    # What the two are worth: waiting takes 40 to 50 % of a blocking step, so training at least half.
    "sync_share_of_blocking_step": (">=", 0.4),
    "training_share_of_blocking_step": (">=", 0.5),
}
ACTORS = ("actor0", "actor1")
CONDITIONS = ("none", "blocking", "async")
APPLY_SECONDS = 60.0


def block(trainer: Trainer, job: Job, condition: str, steps: int) -> dict[str, float]:
    """Seconds per step of one condition, and how many of its versions were published."""
    published = 0
    begun = time.perf_counter()
    for _ in range(steps):
        trainer.forward_backward()
        no_vote = condition != "none" and not job.sync.reserve()
        job.sync.fence()
        trainer.update()
        if condition != "none":
            published += job.publish(no_vote)
        if condition == "blocking":
            job.applied_everywhere(len(ACTORS), APPLY_SECONDS)
    taken = time.perf_counter() - begun
    if condition == "async":
        job.applied_everywhere(len(ACTORS), APPLY_SECONDS)
    return {"seconds": taken / steps, "published": published}


def run_trainer(arguments: dict[str, Any]) -> None:
    """The trainer's process, in its namespace: answers with its address, then with measurements of each block."""
    trainer = Trainer(arguments["width"], arguments["blocks"], arguments["rows"])
    with tempfile.TemporaryDirectory() as folder:
        with common.running_on(arguments["other_core"]):
            job = Job(trainer.parameters, Path(folder), WeightSyncConfig(host=arguments["host"]), dtype="bfloat16")
        try:
            common.run_on(arguments["trainer_core"])
            common.say({"registry": job.sync.registry_address, "epoch": job.epoch, "token": job.token})
            sys.stdin.readline()
            job.publish(not job.sync.reserve())
            job.applied_everywhere(len(ACTORS), APPLY_SECONDS)
            for condition in CONDITIONS:
                block(trainer, job, condition, 2)
            for turn in range(arguments["turns"]):
                for condition in CONDITIONS[:: 1 if turn % 2 == 0 else -1]:
                    common.say({"condition": condition, **block(trainer, job, condition, arguments["steps"])})
            common.say({"condition": "end", "bytes": 2 * trainer.elements})
        finally:
            job.sync.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16, help="of a block")
    parser.add_argument("--megabits", type=float, default=1000.0, help="per second, of each link")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=4, help="of the model: 9.5 million parameters")
    parser.add_argument("--rows", type=int, default=1024, help="of a batch: decides the length of a step")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.steps, arguments.width, arguments.rows = 2, 2, 256, 1024
    trainer_core, other_core = common.two_cores()
    seconds: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    published = dict.fromkeys(CONDITIONS, 0.0)
    with slow_network(["trainer", *ACTORS], arguments.megabits) as network, contextlib.ExitStack() as stack:
        settings = {name: getattr(arguments, name) for name in ("turns", "steps", "width", "blocks", "rows")}
        settings |= {"host": network.addresses["trainer"], "trainer_core": trainer_core, "other_core": other_core}
        trainer = common.Child(Path(__file__), settings, network.prefix("trainer"))
        stack.callback(trainer.close)
        job = trainer.answer()
        for actor in ACTORS:
            known = (job["registry"], job["epoch"], job["token"])
            stack.callback(start_actor(*known, actor, [other_core], network.prefix(actor)).close)
        trainer.tell({"actors": "started"})
        while (answer := trainer.answer())["condition"] != "end":
            seconds[answer["condition"]].append(answer["seconds"])
            published[answer["condition"]] += answer["published"]
            common.progress(f"{answer['condition']:9} {1e3 * answer['seconds']:.0f} ms a step")
        trainer.process.wait(APPLY_SECONDS)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    gain = common.median_ratio(seconds["blocking"], seconds["async"])
    ideal = common.median_ratio(seconds["blocking"], seconds["none"])
    training_share = median["none"] / median["blocking"]
    figures = {
        "share_of_ideal": gain / ideal,
        "gain": gain,
        "ideal": ideal,
        "sync_share_of_blocking_step": 1 - training_share,
        "training_share_of_blocking_step": training_share,
        "published_share_async": published["async"] / (arguments.turns * arguments.steps),
        **{f"step_ms_{name}": 1e3 * value for name, value in median.items()},
    }
    conditions = {
        **{name: value for name, value in vars(arguments).items() if name != "json"},
        "bytes_per_version": answer["bytes"],
        "actors": len(ACTORS),
        "trainer_core": trainer_core,
        "other_core": other_core,
        "torch": torch.__version__,
    }
    common.report("weight_sync_overlap", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    given = common.child_arguments()
    if given is None:
        main()
    else:
        run_trainer(given)
