"""How long the trainer stalls when an actor is frozen.

A real training step on a core of its own, which publishes every version to three actors on another core; they receive,
verify and apply, and generate nothing, so that freezing one frees no core. With --backend vllm a small Qwen3 trains and
the actors are vLLM servers with our weight-transfer backend; what is frozen is the worker that holds the weights. In
turns, block by block:

    none     no version is published
    loads    no version of this trainer is published; on the other core another process publishes as often and as much,
             to three actors of its own
    healthy  every step publishes, all actors take part
    frozen   the same, one actor is stopped (SIGSTOP), and stopped again whenever it has been evicted and has rejoined

    frozen_step_ratio      median step, frozen ÷ healthy
    publish_step_ratio     median step, healthy ÷ none; with --backend vllm healthy ÷ loads, because three servers that
                           load a version each in every step slow the machine down, no matter which publishes
    same_loads_step_ratio  median step, healthy ÷ loads
    machine_step_ratio     median step, loads ÷ none
    sync_stall_pNN_share   all that the trainer thread spends on the synchronisation per step (reserve, commit, fence;
                           snapshot included), one actor frozen ÷ median step of that condition
    largest_stall_per_chunk_timeout
                           with --transport nccl (gloo without a GPU): the largest such time, ÷ the seconds for which a
                           frozen actor may hold a device-wide call of the trainer (nccl.CHUNK_SECONDS)
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import Job, start_actors
from benchmarks.weight_sync.processes import Child
from benchmarks.weight_sync.second_publisher import SecondPublisher
from benchmarks.weight_sync.small_models import Trainer, qwen3_trainer, residual_trainer
from benchmarks.weight_sync.vllm_server import VLLMActor
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.actor_state import OUT
from torchtitan.weight_sync.transports.nccl import CHUNK_SECONDS

BARS = {
    "frozen_step_ratio": ("<=", 1.03),
    "publish_step_ratio": ("<=", 1.05),
    "sync_stall_p50_share": ("<=", 0.01),
    "sync_stall_p99_share": ("<=", 0.05),
    # What the other figures are worth: the actor was frozen nearly always, and versions went out all the same.
    "frozen_share_of_steps": (">=", 0.9),
    "published_share_loads": (">=", 0.95),
    "published_share_healthy": (">=", 0.95),
    "published_share_frozen": (">=", 0.95),
}
# Of nccl the promise is another one; its shard server is a thread of the trainer.
NCCL_BARS = {
    "largest_stall_per_chunk_timeout": ("<=", 1.0),
    **{key: bar for key, bar in BARS.items() if key == "frozen_share_of_steps" or key.startswith("published_share")},
}
OPTIONS = {
    "plot": Option("", "draw the distribution of the steps to this file"),
    "steps": Option(504, "per condition", quick=20),
    "block": Option(42, "steps of one condition in a row", quick=10),
    "width": Option(1024, "of the model; half of it with vLLM, whose model has as many parameters", quick=128),
    "blocks": Option(4, "of the model: 16.8 million parameters"),
    "rows": Option(160, "of a batch", quick=512),
    "backend": Option("none", "the actors' engine", choices=("none", "vllm")),
    "transport": Option("tcp", "weight_sync.transport", choices=("tcp", "nccl", "disk")),
    # One shows that it works, and a server takes half a minute to start.
    "actors": Option(3, "of this trainer, and as many of the other process", quick=1),
}
CONDITIONS = ("none", "loads", "healthy", "frozen")
# Steps at the beginning of a block that do not count: what the block before left behind is still under way.
SETTLING_STEPS = 3


def start_each(
    run: Run, place: Mapping[str, str], names: Sequence[str], core: int, model: Path | None
) -> list[Child | VLLMActor]:
    """Actors of the job at `place`, each a process on that core: without an engine, or vLLM servers of that model,
    which start one after the other on all cores."""
    actors: list[Child | VLLMActor] = []
    for name in names:
        actor: Child | VLLMActor
        if model is None:
            actor = start_actors(place, [name], [core])
            run.closing.callback(actor.close)
        else:
            options = ["--max-length", "256", "--max-sequences", "4", "--memory-gb", "0.1"]
            actor = VLLMActor(run.folder, name, model, "float32", options)
            run.closing.callback(actor.close)
            actor.join(place)
            actor.pin(core)
            common.progress(f"{name} is up")
        actors.append(actor)
    return actors


class Frozen:
    """Keeps one actor stopped: lets it go on only when its connection was given up, until it has joined again."""

    def __init__(self, job: Job, name: str, actor: Child | VLLMActor):
        self._job, self._name, self._actor = job, name, actor
        self._evictions = 0
        self.stopped = False

    def update(self) -> None:
        """Between two steps."""
        status = self._job.sync.actors()[self._name]
        if not self.stopped and status.state not in OUT:
            self._actor.send_signal(signal.SIGSTOP)
            self.stopped, self._evictions = True, status.evictions
        elif self.stopped and status.evictions > self._evictions:
            self._actor.send_signal(signal.SIGCONT)
            self.stopped = False

    def end(self) -> None:
        """Let it go on."""
        if self.stopped:
            self._actor.send_signal(signal.SIGCONT)
            self.stopped = False


@dataclass
class Steps:
    """Measurements of one condition; seconds per step."""

    step: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    published: int = 0
    frozen: int = 0


class Benchmark:
    """A trainer, its actors and the measurements."""

    def __init__(self, trainer: Trainer, job: Job, second: SecondPublisher, frozen: Frozen):
        self.trainer, self.job, self.second, self.frozen = trainer, job, second, frozen
        self.results = {name: Steps() for name in CONDITIONS}

    def block(self, condition: str, steps: int) -> None:
        """`steps` measured steps of a condition."""
        if condition != "frozen":
            self.job.all_serve_newest()
        before = self.second.settle()
        for number in range(-SETTLING_STEPS, steps):
            if condition == "frozen":
                self.frozen.update()
            self._step(condition, self.results[condition] if number >= 0 else Steps())
        self.frozen.end()
        if condition == "loads":
            # Of all of them, those counted: a version more or less in the steps that settle changes nothing.
            self.results[condition].published += min(self.second.settle() - before, steps)

    def _step(self, condition: str, into: Steps) -> None:
        sync = self.job.sync
        publishes = condition in ("healthy", "frozen")
        start = time.perf_counter()
        self.trainer.forward_backward()
        before = time.perf_counter()
        no_vote = publishes and not sync.reserve()
        sync.fence()
        between = time.perf_counter()
        self.trainer.update()
        after = time.perf_counter()
        published = publishes and self.job.publish(no_vote)
        end = time.perf_counter()
        if condition == "loads":
            self.second.publish()
        into.step.append(end - start)
        into.sync.append(end - after + between - before)
        into.published += published
        into.frozen += self.frozen.stopped

    def figures(self, publishes_beside: str) -> dict[str, float]:
        """The keys and what explains them. publishes_beside: the condition that publish_step_ratio compares with."""
        median = {name: statistics.median(result.step) for name, result in self.results.items()}
        frozen = self.results["frozen"]
        return {
            "frozen_step_ratio": median["frozen"] / median["healthy"],
            "publish_step_ratio": median["healthy"] / median[publishes_beside],
            "same_loads_step_ratio": median["healthy"] / median["loads"],
            "machine_step_ratio": median["loads"] / median["none"],
            "sync_stall_p50_share": common.percentile(frozen.sync, 0.5) / median["frozen"],
            "sync_stall_p99_share": common.percentile(frozen.sync, 0.99) / median["frozen"],
            "sync_stall_max_share": max(frozen.sync) / median["frozen"],
            "sync_stall_max_s": max(frozen.sync),
            "frozen_share_of_steps": frozen.frozen / len(frozen.step),
            **{
                f"published_share_{name}": self.results[name].published / len(self.results[name].step)
                for name in CONDITIONS[1:]
            },
            "evictions": sum(actor.evictions for actor in self.job.sync.actors().values()),
            **{f"step_ms_{name}": 1e3 * value for name, value in median.items()},
        }


def plot(results: dict[str, Steps], file: Path) -> None:
    """Share of steps that took at most so long, a line per condition; beside it what synchronisation took of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    steps, sync = figure.subplots(1, 2)
    labels = {
        "none": "no versions",
        "loads": "another process publishes",
        "healthy": "3 healthy actors",
        "frozen": "one of them frozen",
    }
    for color, (name, label) in enumerate(labels.items()):
        result = results[name]
        shares = [(number + 1) / len(result.step) for number in range(len(result.step))]
        steps.plot([1e3 * value for value in sorted(result.step)], shares, f"C{color}", label=label)
        if name in ("healthy", "frozen"):
            sync.plot([1e3 * value for value in sorted(result.sync)], shares, f"C{color}", label=label)
    steps.set(xlabel="training step (ms)", ylabel="share of steps", title="A step")
    sync.set(xlabel="spent on the weight sync (ms)", xscale="log", title="The weight sync's part of it")
    for axes in (steps, sync):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


def measure(run: Run) -> dict[str, float]:
    options = run.options
    trainer_core, other_core = common.two_cores()
    model = run.folder / "model" if options.backend == "vllm" else None
    if model is None:
        trainer = residual_trainer(options.width, options.blocks, options.rows)
    else:
        trainer = qwen3_trainer(model, options.width // 2, options.blocks, options.rows)
    with common.running_on(other_core):
        job = Job(trainer.parameters, run.folder, WeightSyncConfig(transport=options.transport))
    run.closing.callback(job.close)
    second = SecondPublisher(trainer.parameters, options.transport, other_core)
    run.closing.callback(second.close)
    names = [f"actor-{number}" for number in range(options.actors)]
    actors = start_each(run, job.place, names, other_core, model)
    start_each(run, second.place, [f"load-{number}" for number in range(options.actors)], other_core, model)
    common.run_on(trainer_core)
    job.publish(not job.sync.reserve())
    job.applied_everywhere(options.actors)
    second.first(options.actors)
    benchmark = Benchmark(trainer, job, second, Frozen(job, names[-1], actors[-1]))
    for turn in range(-(-options.steps // options.block)):
        for condition in CONDITIONS[:: 1 if turn % 2 == 0 else -1]:
            benchmark.block(condition, options.block)
        common.progress(f"turn {turn}: step {1e3 * statistics.median(benchmark.results['frozen'].step):.0f} ms")
    figures = benchmark.figures("loads" if options.backend == "vllm" else "none")
    if options.transport == "nccl":
        run.bars = NCCL_BARS
        figures["largest_stall_per_chunk_timeout"] = figures["sync_stall_max_s"] / CHUNK_SECONDS
    if options.plot:
        plot(benchmark.results, Path(options.plot))
    run.conditions |= {
        "bytes_per_version": 4 * trainer.elements,
        "trainer_core": trainer_core,
        "other_core": other_core,
    }
    return figures
