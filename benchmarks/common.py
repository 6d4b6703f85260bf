"""What the benchmarks share: output, turns that are interleaved, cores, and processes that end with their parent."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parent.parent
TRAIN = ("-m", "torchtitan.grpo_train")

Bars = Mapping[str, tuple[str, float]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="last line: one JSON object")
    options.add_argument("--quick", action="store_true", help="a few seconds: shows that it works, measures nothing")
    return options


def report(
    benchmark: str, figures: Mapping[str, float], bars: Bars, conditions: Mapping[str, Any], as_json: bool
) -> None:
    """A table with the bars that are set, or the JSON line. bars: key -> ("<=" or ">=", value)."""
    for key, value in figures.items():
        line = f"{key:32} {value:12.6g}"
        if key in bars:
            relation, bar = bars[key]
            met = value <= bar if relation == "<=" else value >= bar
            line += f"   {relation} {bar:g}  {'met' if met else 'MISSED'}"
        print(line)
    for key, value in conditions.items():
        print(f"  {key}: {value}")
    if as_json:
        print(json.dumps({"benchmark": benchmark, "figures": dict(figures), "conditions": dict(conditions)}))


def processor() -> str:
    """What figures of arithmetic depend on: the processor's name, and the instructions that torch takes of it."""
    names = [""]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")] or names
    import torch

    return f"{names[0] or platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def progress(text: str) -> None:
    """To the terminal's error stream, so that the result can be piped."""
    print(text, file=sys.stderr, flush=True)


# Time


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def interleaved(
    conditions: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Every condition once per turn, every other turn in reverse order, so that drift meets all of them alike.

    Each call returns its own measurement. The first `warm_up` turns do not count.
    """
    results: dict[str, list[float]] = {name: [] for name in conditions}
    for turn in range(-warm_up, repeats):
        for name in list(conditions)[:: 1 if turn % 2 == 0 else -1]:
            value = conditions[name]()
            if turn >= 0:
                results[name].append(value)
    return results


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the turns of one condition's measurement divided by the other's of the same turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until it holds. Ends the benchmark with a message when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.01)


# Memory


def peak_mib(work: Callable[[], object]) -> float:
    """The peak of resident memory in a call, above what was held before. Linux only."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    work()
    return _memory("VmHWM") - before


def _memory(name: str) -> float:
    """MiB, as the kernel says."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(name)).split()[1]) / 1024


# Cores


def two_cores() -> tuple[int, int]:
    """(the trainer's core, everybody else's). Ends the benchmark where there are not two."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise SystemExit("this benchmark pins the trainer to a core of its own: it needs Linux and two cores")
    return cores[0], cores[1]


def run_on(*cores: int) -> None:
    """Pin this thread, and all threads and processes that it starts from now on."""
    os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def running_on(*cores: int) -> Iterator[None]:
    """Pinned in this block: for starting threads and processes on other cores than one's own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(command: Sequence[object], seconds: float = 3600.0, **variables: str) -> str:
    """Run a command with one thread to its end; returns what it printed. All that it has started goes with it.

    variables: of its environment. Ends the benchmark where it fails, and after so many seconds.
    """
    from torchtitan.utils.child_process import child_environment  # not where peers' environments import this file

    words = [str(word) for word in command]
    with subprocess.Popen(
        words, cwd=REPOSITORY, env=child_environment(1, **variables), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise SystemExit(f"{' '.join(words[:6])} … ended with exit code {process.returncode}:\n{output[-4000:]}")
    return output


def train(
    settings: Mapping[str, object],
    *words: str,
    program: Sequence[object] = TRAIN,
    python: str = sys.executable,
    seconds: float = 3600.0,
    **variables: str,
) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a training run in a process of its own.

    settings: configuration keys, job.dump_folder among them; words: further ones of its command line; seconds,
    variables: see `run`.
    """
    from torchtitan.utils.json_lines import read_json_lines

    options = [word for key, value in settings.items() for word in (f"--{key}", value)]
    run([python, *program, *words, *options], seconds, **variables)
    return read_json_lines(Path(str(settings["job.dump_folder"])) / "latest" / "metrics.jsonl")


def once(note: Path, settings: Mapping[str, object], work: Callable[[], str]) -> None:
    """Do a long work, whose answer says what came of it, unless the note says that it ended, with these settings.

    Ends the benchmark where the note is of other settings.
    """
    wanted = {key: str(value) for key, value in settings.items()}
    if note.is_file():
        if json.loads(note.read_text())["settings"] != wanted:
            raise SystemExit(f"{note} is of a run with other settings: take another folder")
        return
    started_at, load = time.perf_counter(), os.getloadavg()[0]
    came = work()
    seconds = time.perf_counter() - started_at
    note.parent.mkdir(exist_ok=True)
    note.write_text(json.dumps({"settings": wanted, "seconds": seconds, "came": came}))
    progress(f"{note.stem}: {came}; {seconds:.0f} s, load {load:.1f} before and {os.getloadavg()[0]:.1f} after")


def embedded_server(
    folder: Path, model: Path, token: str, *words: object, output: IO[bytes] | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """(the embedded engine as a process of one thread that ends with this one, its URL). Its port is noted in folder;
    words: further ones of its command line; output: where it writes; without it, only its errors
    are written, where ours go."""
    from torchtitan.utils.child_process import child_environment

    port = folder / "port"
    command = (
        sys.executable, "-m", "torchtitan.inference.engines.embedded", "--model", model, "--port-file", port,
        "--token-env", "BENCHMARK_TOKEN", "--threads", 1, "--parent-pid", os.getpid(), *words,
    )  # fmt: skip
    environment = child_environment(1, BENCHMARK_TOKEN=token)
    process = subprocess.Popen(
        [str(word) for word in command], env=environment, stdout=output or subprocess.DEVNULL, stderr=output
    )
    wait_for(lambda: port.exists() or process.poll() is not None, 120, "the engine's port")
    if process.poll() is not None:
        raise SystemExit("the engine did not start")
    return process, f"http://127.0.0.1:{port.read_text().strip()}"


def debug_checkpoint() -> Path:
    """The policy of the built-in addition."""
    return REPOSITORY / "torchtitan" / "assets" / "debug_arithmetic"


def peers_python() -> str:
    """The Python of TRL and Liger. Ends the benchmark where benchmarks/peers/setup.sh has not made it."""
    python = REPOSITORY / "benchmarks" / "peers" / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit("this benchmark compares with TRL and Liger: run benchmarks/peers/setup.sh first")
    return str(python)


def refuse_without_gpu() -> None:
    """Ends the benchmark with exit code 2 where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        sys.exit(2)
