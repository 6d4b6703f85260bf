"""How long a run takes to its first step, and --help, --dry-run and a restarted actor to their end.

The run is the default one (two embedded actors), started by ./run_grpo.sh. Processor seconds are those of all its
processes until metrics.jsonl has the first step. With --against COMMIT, runs of that commit and of this checkout take
turns, and the ratios are of their medians: machines differ, and a commit's figures differ with the load.

    python benchmarks/start_up.py --against 1f555b9b --json
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import psutil  # noqa: E402

from benchmarks import common  # noqa: E402
from torchtitan.models.shape.exports import SHIPPED_FOLDER  # noqa: E402
from torchtitan.utils.json_lines import read_json_lines  # noqa: E402

BARS = {
    "first_step_cpu_ratio": ("<=", 0.55),
    "first_step_ratio": ("<=", 0.55),
    "dry_run_cpu_ratio": ("<=", 0.6),
    "help_cpu_ratio": ("<=", 0.5),
    "actor_restart_s": ("<=", 1.5),
}
# The same work for both, whatever a commit's default run is. It is ended when all is measured.
OPTIONS = (
    "--training.steps", "1000", "--training.global_batch_size", "512", "--training.tokens_per_micro_batch", "16384",
    "--grpo.num_minibatches", "4", "--metrics.log_freq", "1", "--checkpoint.enable", "false",
)  # fmt: skip
ACTOR = ("torchtitan.inference.engines.embedded", "torchtitan.inference.embedded")
RUN_SECONDS, END_SECONDS = 600.0, 60.0
POLL_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def command_seconds(tree: Path, folder: Path, option: str) -> float:
    """Processor seconds of ./run_grpo.sh with an option that starts nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(**started(tree, folder, option), stdout=subprocess.DEVNULL, check=True, timeout=RUN_SECONDS)  # type: ignore[call-overload]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def started(tree: Path, folder: Path, *options: str) -> dict[str, object]:
    """Arguments for a process that is ./run_grpo.sh of this checkout or another, with the same environment."""
    model = SHIPPED_FOLDER / "debug_arithmetic"
    command = [tree / "run_grpo.sh", "--job.dump_folder", folder, "--model.hf_assets_path", model, *options]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tree), "NGPU": "1"}
    # As where users run it: a process that may not write bytecode compiles all of the checkout anew each time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return {"args": [str(word) for word in command], "env": environment, "cwd": folder, "stderr": subprocess.DEVNULL}


def tree_seconds() -> float:
    """Processor seconds of all that this process has started, also of what has ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def until(condition: Callable[[], object], running: subprocess.Popen[bytes]) -> None:
    """Wait for a condition. Raises RuntimeError where the run has ended or it takes RUN_SECONDS."""
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        if running.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended with code {running.poll()}, or did nothing for {RUN_SECONDS:g} s")
        time.sleep(POLL_S)


def actors() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(name in child.cmdline() for name in ACTOR):
                found.append(child)
    return found


def run_once(tree: Path) -> dict[str, float]:
    """Figures of one run: seconds and processor seconds to the first step, memory of an actor, and its restart."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        latest, before, started_at = folder / "latest", tree_seconds(), time.perf_counter()
        running = subprocess.Popen(**started(tree, folder, *OPTIONS), stdout=subprocess.DEVNULL)  # type: ignore[call-overload]
        try:
            until(lambda: any("loss" in row for row in read_json_lines(latest / "metrics.jsonl")), running)
            figures = {"first_step_s": time.perf_counter() - started_at, "first_step_cpu_s": tree_seconds() - before}
            memory = [actor.memory_full_info() for actor in actors()]
            figures["actor_rss_mb"] = statistics.mean(usage.rss for usage in memory) / 2**20
            figures["actor_own_mb"] = statistics.mean(usage.pss for usage in memory) / 2**20

            def back() -> int:
                events = read_json_lines(latest / "events.jsonl")
                return sum(event["kind"] == "actor_ready" for event in events)

            until(lambda: back() == 2, running)
            victim = actors()[0]
            started_at = time.perf_counter()
            victim.kill()
            until(lambda: back() == 3, running)
            figures["actor_restart_s"] = time.perf_counter() - started_at
            return figures
        finally:
            end(running)


def end(running: subprocess.Popen[bytes]) -> None:
    """End a run and all that it has started."""
    children = psutil.Process().children(recursive=True)
    running.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(END_SECONDS)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    running.wait()
    # Those that have lost their parents are ours, and their seconds count once they have been waited for.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass


def measure(tree: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "help_cpu_s": command_seconds(tree, Path(folder), "--help"),
            "dry_run_cpu_s": command_seconds(tree, Path(folder), "--dry-run"),
        }
    return figures | run_once(tree)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="also measure this commit, in turns")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    turns = 1 if arguments.quick else arguments.turns
    trees = {"": REPOSITORY}
    with contextlib.ExitStack() as stack:
        if arguments.against:
            trees["before_"] = stack.enter_context(checkout(arguments.against))
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for turn in range(turns):
            for name, tree in trees.items():
                rows[name].append(measure(tree))
                common.progress(f"turn {turn + 1}, {name or 'now'}: {rows[name][-1]}")
    figures = {
        f"{name}{key}": statistics.median(row[key] for row in measured)
        for name, measured in rows.items()
        for key in measured[0]
    }
    if arguments.against:
        for key in ("first_step_cpu", "first_step", "dry_run_cpu", "help_cpu"):
            figures[f"{key}_ratio"] = figures[f"{key}_s"] / figures[f"before_{key}_s"]
    conditions = {
        "against": arguments.against,
        "turns": turns,
        "cores": len(psutil.Process().cpu_affinity()),
        "load": round(os.getloadavg()[0], 1),
    }
    common.report("start_up", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
