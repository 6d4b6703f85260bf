"""How long the trainer stalls when an actor is frozen.

    python benchmarks/weight_sync_stall.py --json
    python benchmarks/weight_sync_stall.py --backend vllm --json
    python benchmarks/weight_sync_stall.py --plot docs/images/weight_sync_stall.png
    python benchmarks/weight_sync_stall.py --transport nccl --json

A real training step on a core of its own, which publishes every version to three actors on another core; they receive,
verify and apply, and generate nothing, so that freezing one frees no core. With --backend vllm a small Qwen3 trains and
the actors are vLLM servers with our weight-transfer backend; what is frozen is the worker that holds the weights. In
turns, block by block:

    none     no version is published
    healthy  every step publishes, all actors take part
    frozen   the same, one actor is stopped (SIGSTOP), and stopped again whenever it has been evicted and has rejoined

    frozen_step_ratio      median step, frozen ÷ healthy
    publish_step_ratio     median step, healthy ÷ none
    sync_stall_pNN_share   all that the trainer thread spends on the synchronisation per step (reserve, commit, fence;
                           snapshot included), one actor frozen ÷ median step of that condition
    largest_stall_per_chunk_timeout
                           with --transport nccl (gloo without a GPU): the largest such time, ÷ the seconds for which a
                           frozen actor may hold a device-wide call of the trainer (weight_sync.chunk_timeout_s)
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from benchmarks.small_policy import PolicyTrainer  # noqa: E402
from benchmarks.small_trainer import Job, Trainer  # noqa: E402
from benchmarks.vllm_actor import VLLMActor  # noqa: E402
from torchtitan.config.job_config import WeightSync as WeightSyncConfig  # noqa: E402
from torchtitan.weight_sync.facade import GONE  # noqa: E402

BARS = {
    "frozen_step_ratio": ("<=", 1.03),
    "publish_step_ratio": ("<=", 1.05),
    "sync_stall_p50_share": ("<=", 0.01),
    "sync_stall_p99_share": ("<=", 0.05),
    # What the other figures are worth: the actor was frozen nearly always, and versions went out all the same.
    "frozen_share_of_steps": (">=", 0.9),
    "published_share_healthy": (">=", 0.95),
    "published_share_frozen": (">=", 0.95),
}
# Of nccl the promise is another one; its shard server is a thread of the trainer.
NCCL_BARS = {
    "largest_stall_per_chunk_timeout": ("<=", 1.0),
    **{key: BARS[key] for key in ("frozen_share_of_steps", "published_share_healthy", "published_share_frozen")},
}
ACTORS = 3
CONDITIONS = ("none", "healthy", "frozen")
# Steps at the beginning of a block that do not count: what the block before left behind is still under way.
SETTLING_STEPS = 3
RESUME_SECONDS = 60.0


class Actor(Protocol):
    """A process that takes part."""

    def send_signal(self, number: int) -> None:
        """To the process that holds the weights."""

    def close(self) -> None:
        """End it."""


def start_actors(job: Job, names: list[str], core: int) -> dict[str, Actor]:
    """Actors without an engine."""
    return {name: job.actor(name, [core]) for name in names}


def start_vllm(job: Job, names: list[str], core: int, folder: Path, stack: contextlib.ExitStack) -> dict[str, Actor]:
    """vLLM servers with the model in `folder`, one after the other on all cores, then pinned to one."""
    actors: dict[str, Actor] = {}
    for name in names:
        options = ["--max-length", "256", "--max-sequences", "4", "--memory-gb", "0.1"]
        actor = VLLMActor(folder.parent, name, folder, "float32", options)
        stack.callback(actor.close)
        actor.join(job.sync.registry_address, job.epoch, job.token)
        actor.pin(core)
        actors[name] = actor
        common.progress(f"{name} is up")
    return actors


class Frozen:
    """Keeps one actor stopped: lets it go on only when its connection was given up, until it has joined again."""

    def __init__(self, job: Job, name: str, actor: Actor):
        self._job, self._name, self._actor = job, name, actor
        self._evictions = 0
        self.stopped = False

    def look(self) -> None:
        """Between two steps."""
        status = self._job.sync.actors()[self._name]
        if not self.stopped and status.state not in GONE:
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

    def __init__(self, trainer: Trainer | PolicyTrainer, job: Job, actors: dict[str, Actor]):
        self.trainer, self.job, self.actors = trainer, job, actors
        name = list(actors)[-1]
        self.frozen = Frozen(job, name, actors[name])
        self.results = {name: Steps() for name in CONDITIONS}
        self.evictions = 0

    def block(self, condition: str, steps: int) -> None:
        """`steps` measured steps of a condition."""
        if condition != "frozen":
            self._all_healthy()
        for number in range(-SETTLING_STEPS, steps):
            if condition == "frozen":
                self.frozen.look()
            self._step(condition, self.results[condition] if number >= 0 else Steps())
        self.frozen.end()

    def _step(self, condition: str, into: Steps) -> None:
        sync = self.job.sync
        publishes = condition != "none"
        begun = time.perf_counter()
        self.trainer.forward_backward()
        before = time.perf_counter()
        no_vote = publishes and not sync.reserve()
        sync.fence()
        between = time.perf_counter()
        self.trainer.update()
        after = time.perf_counter()
        published = publishes and self.job.publish(no_vote)
        end = time.perf_counter()
        into.step.append(end - begun)
        into.sync.append(end - after + between - before)
        into.published += published
        into.frozen += self.frozen.stopped

    def _all_healthy(self) -> None:
        """Wait until every actor serves the newest version, so that nothing is left to be sent."""
        deadline = time.monotonic() + RESUME_SECONDS
        while not all(a.version == self.job.version for a in self.job.sync.actors().values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"the actors do not recover: {self.job.sync.actors()}")
            owed = self.job.sync.owed
            if owed is not None and self.job.sync.reserve():
                self.job.sync.snapshot_owed(owed)
            time.sleep(0.01)

    def figures(self) -> dict[str, float]:
        """The keys and what explains them."""
        median = {name: statistics.median(result.step) for name, result in self.results.items()}
        frozen = self.results["frozen"]
        return {
            "frozen_step_ratio": median["frozen"] / median["healthy"],
            "publish_step_ratio": median["healthy"] / median["none"],
            "sync_stall_p50_share": common.percentile(frozen.sync, 0.5) / median["frozen"],
            "sync_stall_p99_share": common.percentile(frozen.sync, 0.99) / median["frozen"],
            "sync_stall_max_share": max(frozen.sync) / median["frozen"],
            "sync_stall_max_s": max(frozen.sync),
            "frozen_share_of_steps": frozen.frozen / len(frozen.step),
            "published_share_healthy": self.results["healthy"].published / len(self.results["healthy"].step),
            "published_share_frozen": frozen.published / len(frozen.step),
            "evictions": sum(actor.evictions for actor in self.job.sync.actors().values()),
            **{f"step_ms_{name}": 1e3 * value for name, value in median.items()},
        }


def plot(results: dict[str, Steps], file: Path) -> None:
    """Share of steps that took at most so long, a line per condition; beside it what synchronisation took of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    steps, sync = figure.subplots(1, 2)
    labels = {"none": "no versions", "healthy": "3 healthy actors", "frozen": "one of them frozen"}
    for color, (name, label) in enumerate(labels.items()):
        result = results[name]
        shares = [(number + 1) / len(result.step) for number in range(len(result.step))]
        steps.plot([1e3 * value for value in sorted(result.step)], shares, f"C{color}", label=label)
        if name != "none":
            sync.plot([1e3 * value for value in sorted(result.sync)], shares, f"C{color}", label=label)
    steps.set(xlabel="training step (ms)", ylabel="share of steps", title="A step")
    sync.set(xlabel="spent on the weight sync (ms)", xscale="log", title="The weight sync's part of it")
    for axes in (steps, sync):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distribution of the steps")
    parser.add_argument("--steps", type=int, default=504, help="per condition")
    parser.add_argument("--block", type=int, default=42, help="steps of one condition in a row")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=4, help="of the model: 16.8 million parameters")
    parser.add_argument("--rows", type=int, default=160, help="of a batch")
    parser.add_argument("--backend", choices=("none", "vllm"), default="none", help="the actors' engine")
    parser.add_argument("--transport", choices=("tcp", "nccl", "disk"), default="tcp", help="weight_sync.transport")
    arguments = parser.parse_args()
    if arguments.backend == "vllm":
        # As many parameters in a Qwen3 of 4 layers.
        arguments.width //= 2
    if arguments.quick:
        arguments.width, arguments.rows, arguments.steps, arguments.block = 128, 512, 20, 10
    # A server takes half a minute to start, and one shows that it works.
    count = 1 if arguments.quick and arguments.backend == "vllm" else ACTORS
    trainer_core, other_core = common.two_cores()
    names = [f"actor-{number}" for number in range(count)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer: Trainer | PolicyTrainer
        if arguments.backend == "vllm":
            trainer = PolicyTrainer(folder / "model", arguments.width, arguments.blocks, arguments.rows)
        else:
            trainer = Trainer(arguments.width, arguments.blocks, arguments.rows)
        with common.running_on(other_core):
            settings = WeightSyncConfig(transport=arguments.transport)
            job = Job(trainer.parameters, folder, settings)
            stack.callback(job.sync.close)
            if arguments.backend == "none":
                actors = start_actors(job, names, other_core)
                for actor in actors.values():
                    stack.callback(actor.close)
        if arguments.backend == "vllm":
            actors = start_vllm(job, names, other_core, folder / "model", stack)
        common.run_on(trainer_core)
        job.publish(not job.sync.reserve())
        job.applied_everywhere(count)
        benchmark = Benchmark(trainer, job, actors)
        for turn in range(-(-arguments.steps // arguments.block)):
            for condition in CONDITIONS[:: 1 if turn % 2 == 0 else -1]:
                benchmark.block(condition, arguments.block)
            common.progress(f"turn {turn}: step {1e3 * statistics.median(benchmark.results['frozen'].step):.0f} ms")
        figures, bars = benchmark.figures(), BARS
        if arguments.transport == "nccl":
            bars = NCCL_BARS
            figures["largest_stall_per_chunk_timeout"] = figures["sync_stall_max_s"] / settings.chunk_timeout_s
    conditions = {
        **{name: value for name, value in vars(arguments).items() if name not in ("json", "plot")},
        "bytes_per_version": 4 * trainer.elements,
        "actors": count,
        "trainer_core": trainer_core,
        "other_core": other_core,
        "torch": torch.__version__,
    }
    if arguments.plot is not None:
        plot(benchmark.results, arguments.plot)
    common.report("weight_sync_stall", figures, bars, conditions, arguments.json)


if __name__ == "__main__":
    main()
