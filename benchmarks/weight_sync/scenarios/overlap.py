"""Throughput of training with asynchronous against blocking weight synchronisation, over a slow link (needs root).

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

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.namespaces import slow_network
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import WAIT_SECONDS, Job, start_actors
from benchmarks.weight_sync.processes import Child, say
from benchmarks.weight_sync.small_models import Trainer, residual_trainer
from torchtitan.config.job_config import WeightSync as WeightSyncConfig

BARS = {
    "share_of_ideal": (">=", 0.95),
    "gain": (">=", 1.5),
    # What the two are worth: waiting takes 40 to 50 % of a blocking step, so training at least half.
    "sync_share_of_blocking_step": (">=", 0.4),
    "training_share_of_blocking_step": (">=", 0.5),
}
OPTIONS = {
    "turns": Option(9, quick=2),
    "steps": Option(16, "of a block", quick=2),
    "megabits": Option(1000.0, "per second, of each link"),
    "width": Option(768, quick=256),
    "blocks": Option(4, "of the model: 9.5 million parameters"),
    "rows": Option(704, "of a batch: decides the length of a step"),
}
ACTORS = ("actor0", "actor1")
CONDITIONS = ("none", "blocking", "async")


def block(trainer: Trainer, job: Job, condition: str, steps: int) -> dict[str, float]:
    """Seconds per step of one condition, and how many of its versions were published."""
    published = 0
    start = time.perf_counter()
    for _ in range(steps):
        trainer.forward_backward()
        no_vote = condition != "none" and not job.sync.reserve()
        job.sync.fence()
        trainer.update()
        if condition != "none":
            published += job.publish(no_vote)
        if condition == "blocking":
            job.applied_everywhere(len(ACTORS))
    taken = time.perf_counter() - start
    if condition == "async":
        job.applied_everywhere(len(ACTORS))
    return {"seconds": taken / steps, "published": published}


def run_trainer(arguments: dict[str, Any]) -> None:
    """In a child, in the trainer's namespace: answers with its place, then with measurements of each block."""
    trainer = residual_trainer(arguments["width"], arguments["blocks"], arguments["rows"])
    with tempfile.TemporaryDirectory() as folder:
        with common.running_on(arguments["other_core"]):
            job = Job(trainer.parameters, Path(folder), WeightSyncConfig(host=arguments["host"]), dtype="bfloat16")
        try:
            common.run_on(arguments["trainer_core"])
            say(job.place)
            sys.stdin.readline()
            job.publish(not job.sync.reserve())
            job.applied_everywhere(len(ACTORS))
            for condition in CONDITIONS:
                block(trainer, job, condition, 2)
            for turn in range(arguments["turns"]):
                for condition in CONDITIONS[:: 1 if turn % 2 == 0 else -1]:
                    say({"condition": condition, **block(trainer, job, condition, arguments["steps"])})
            say({"condition": "end", "bytes": 2 * trainer.elements})
        finally:
            job.close()


def measure(run: Run) -> dict[str, float]:
    options = run.options
    trainer_core, other_core = common.two_cores()
    seconds: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    published = dict.fromkeys(CONDITIONS, 0.0)
    network = run.closing.enter_context(slow_network(["trainer", *ACTORS], options.megabits))
    settings = {name: getattr(options, name) for name in ("turns", "steps", "width", "blocks", "rows")}
    settings |= {"host": network.addresses["trainer"], "trainer_core": trainer_core, "other_core": other_core}
    trainer = Child(run_trainer, settings, network.prefix("trainer"))
    run.closing.callback(trainer.close)
    place = trainer.answer()
    for actor in ACTORS:
        run.closing.callback(start_actors(place, [actor], [other_core], network.prefix(actor)).close)
    trainer.tell({"actors": "started"})
    while (answer := trainer.answer())["condition"] != "end":
        seconds[answer["condition"]].append(answer["seconds"])
        published[answer["condition"]] += answer["published"]
        common.progress(f"{answer['condition']:9} {1e3 * answer['seconds']:.0f} ms a step")
    trainer.process.wait(WAIT_SECONDS)
    run.conditions |= {
        "bytes_per_version": answer["bytes"],
        "actors": len(ACTORS),
        "trainer_core": trainer_core,
        "other_core": other_core,
    }
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    gain = common.median_ratio(seconds["blocking"], seconds["async"])
    ideal = common.median_ratio(seconds["blocking"], seconds["none"])
    training_share = median["none"] / median["blocking"]
    return {
        "share_of_ideal": gain / ideal,
        "gain": gain,
        "ideal": ideal,
        "sync_share_of_blocking_step": 1 - training_share,
        "training_share_of_blocking_step": training_share,
        "published_share_async": published["async"] / (options.turns * options.steps),
        **{f"step_ms_{name}": 1e3 * value for name, value in median.items()},
    }
