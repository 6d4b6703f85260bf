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

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from benchmarks.second_publisher import SecondPublisher  # noqa: E402
from benchmarks.small_policy import PolicyTrainer  # noqa: E402
from benchmarks.small_trainer import Job, Trainer, start_actor  # noqa: E402
from benchmarks.vllm_actor import VLLMActor  # noqa: E402
from torchtitan.config.job_config import WeightSync as WeightSyncConfig  # noqa: E402
from torchtitan.weight_sync.actor_state import OUT  # noqa: E402
from torchtitan.weight_sync.transports.nccl import CHUNK_SECONDS  # noqa: E402

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
ACTORS = 3
CONDITIONS = ("none", "loads", "healthy", "frozen")
# Steps at the beginning of a block that do not count: what the block before left behind is still under way.
SETTLING_STEPS = 3


class Actor(Protocol):
    """A process that takes part."""

    def send_signal(self, number: int) -> None:
        """To the process that holds the weights."""

    def close(self) -> None:
        """End it."""


def start_actors(
    place: Mapping[str, str], names: Sequence[str], core: int, model: Path | None, stack: contextlib.ExitStack
) -> dict[str, Actor]:
    """Actors of the job at `place`, on one core: without an engine, or vLLM servers of that model, which start one
    after the other on all cores."""
    actors: dict[str, Actor] = {}
    for name in names:
        if model is None:
            actors[name] = actor = start_actor(**place, name=name, cores=[core])
            stack.callback(actor.close)
            continue
        options = ["--max-length", "256", "--max-sequences", "4", "--memory-gb", "0.1"]
        actors[name] = server = VLLMActor(model.parent, name, model, "float32", options)
        stack.callback(server.close)
        server.join(**place)
        server.pin(core)
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

    def __init__(self, trainer: Trainer | PolicyTrainer, job: Job, second: SecondPublisher, actors: dict[str, Actor]):
        self.trainer, self.job, self.second, self.actors = trainer, job, second, actors
        name = list(actors)[-1]
        self.frozen = Frozen(job, name, actors[name])
        self.results = {name: Steps() for name in CONDITIONS}

    def block(self, condition: str, steps: int) -> None:
        """`steps` measured steps of a condition."""
        if condition != "frozen":
            self.job.all_serve_newest()
        before = self.second.settle()
        for number in range(-SETTLING_STEPS, steps):
            if condition == "frozen":
                self.frozen.look()
            self._step(condition, self.results[condition] if number >= 0 else Steps())
        self.frozen.end()
        if condition == "loads":
            # Of all of them, those counted: a version more or less in the steps that settle changes nothing.
            self.results[condition].published += min(self.second.settle() - before, steps)

    def _step(self, condition: str, into: Steps) -> None:
        sync = self.job.sync
        publishes = condition in ("healthy", "frozen")
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
        if condition == "loads":
            self.second.publish()
        into.step.append(end - begun)
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
    # One shows that it works, and a server takes half a minute to start.
    count = 1 if arguments.quick else ACTORS
    trainer_core, other_core = common.two_cores()
    with contextlib.ExitStack() as stack:
        folder, model = Path(stack.enter_context(tempfile.TemporaryDirectory())), None
        trainer: Trainer | PolicyTrainer
        if arguments.backend == "vllm":
            model = folder / "model"
            trainer = PolicyTrainer(model, arguments.width, arguments.blocks, arguments.rows)
        else:
            trainer = Trainer(arguments.width, arguments.blocks, arguments.rows)
        with common.running_on(other_core):
            settings = WeightSyncConfig(transport=arguments.transport)
            job = Job(trainer.parameters, folder, settings)
            stack.callback(job.sync.close)
        second = SecondPublisher(trainer.parameters, arguments.transport, other_core)
        stack.callback(second.close)
        places = {"actor": {"registry": job.sync.registry_address, "epoch": job.epoch, "token": job.token}}
        places["load"] = second.place
        actors, _ = (
            start_actors(place, [f"{name}-{number}" for number in range(count)], other_core, model, stack)
            for name, place in places.items()
        )
        common.run_on(trainer_core)
        job.publish(not job.sync.reserve())
        job.applied_everywhere(count)
        second.first(count)
        benchmark = Benchmark(trainer, job, second, actors)
        for turn in range(-(-arguments.steps // arguments.block)):
            for condition in CONDITIONS[:: 1 if turn % 2 == 0 else -1]:
                benchmark.block(condition, arguments.block)
            common.progress(f"turn {turn}: step {1e3 * statistics.median(benchmark.results['frozen'].step):.0f} ms")
        figures, bars = benchmark.figures("loads" if arguments.backend == "vllm" else "none"), BARS
        if arguments.transport == "nccl":
            bars = NCCL_BARS
            figures["largest_stall_per_chunk_timeout"] = figures["sync_stall_max_s"] / CHUNK_SECONDS
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
