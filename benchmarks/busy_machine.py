"""A training step of two threads beside busy programs and under a quota of CPU time, as OpenMP's threads wait for each
other.

    python benchmarks/busy_machine.py --json

By default they spin at the end of a parallel region, on cores that the threads which they wait for may need. A run on
CPUs has them sleep, unless OMP_WAIT_POLICY is set. Every turn is one process for each way, in interleaved order, beside
four busy loops, in a control group with 1.5 cores (root, Linux), and with neither. The losses must be equal: they are
the same sums in the same order.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

# Whoever sets them would decide for both sides.
for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
    os.environ.pop(name, None)

BUSY_LOOPS = 4
PERIOD_US, QUOTA_CORES = 100_000, 1.5
# What each way is: (whether the run's own setting is made, threads).
WAYS = {"spinning": (False, 2), "sleeping": (True, 2), "one_thread": (True, 1)}
BARS = {"busy_speedup": (">=", 2.0), "quota_speedup": (">=", 1.2), "loss_difference": ("<=", 0.0)}


def work(arguments: dict[str, Any]) -> None:
    """A process: seconds of a training step, its processor time, and the last loss."""
    from torchtitan.utils.machine import count_cores, sleep_between_regions

    if arguments["ours"]:
        sleep_between_regions()
    import torch

    from torchtitan.models.decoder import Decoder
    from torchtitan.models.layers.attention import PackedLayout
    from torchtitan.models.shape.model_args import ModelArgs

    torch.set_num_threads(arguments["threads"])
    policy = Decoder(ModelArgs("llama", 2048, arguments["width"], 512, arguments["layers"], 4, 2, 64))
    policy.initialize_weights(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 2048, (arguments["tokens"],), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        optimizer.zero_grad()
        log_probs, _ = policy(ids, PackedLayout([arguments["tokens"] // 8] * 8), ids.roll(-1))
        loss = -log_probs.mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    step()
    begun, used = time.perf_counter(), time.process_time()
    losses = [step() for _ in range(arguments["steps"])]
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    steps = arguments["steps"]
    common.say({"step": seconds / steps, "cpu": used / steps, "loss": losses[-1], "cores": count_cores()})


@contextlib.contextmanager
def busy(count: int) -> Iterator[tuple[str, ...]]:
    """Beside so many programs that do nothing but compute."""
    loops = [common.Child(Path(__file__), {"loop": True}) for _ in range(count)]
    try:
        yield ()
    finally:
        for loop in loops:
            loop.close()


@contextlib.contextmanager
def quota() -> Iterator[tuple[str, ...]]:
    """In a control group, of version 1 or 2, with a quota. Raises OSError where none can be made."""
    root = Path("/sys/fs/cgroup")
    first = root / "cpu" if (root / "cpu" / "cpu.cfs_quota_us").exists() else root
    group = first / f"busy_machine.{os.getpid()}"
    group.mkdir()
    try:
        amount = int(QUOTA_CORES * PERIOD_US)
        if first == root:
            (group / "cpu.max").write_text(f"{amount} {PERIOD_US}")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(amount))
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    finally:
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        group.rmdir()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    turns, steps, loops = (1, 1, 1) if arguments.quick else (arguments.turns, 4, BUSY_LOOPS)
    # Hardly anything of the small one is worth two threads.
    shape = {"layers": 1, "width": 64, "tokens": 16} if arguments.quick else {"layers": 4, "width": 256, "tokens": 384}
    figures: dict[str, float] = {}
    conditions: dict[str, Any] = {"turns": turns, "steps": steps, "quick": arguments.quick}
    losses: set[float] = set()

    def run(name: str, prefix: tuple[str, ...], spent: dict[str, list[float]]) -> float:
        ours, threads = WAYS[name]
        child = common.Child(Path(__file__), {"ours": ours, "threads": threads, "steps": steps, **shape}, prefix)
        try:
            answer = child.answer()
        finally:
            child.close()
        common.progress(f"{name}: {answer}")
        spent.setdefault(name, []).append(answer["cpu"])
        if threads == 2:
            losses.add(answer["loss"])
        conditions[f"cores_{(len(prefix) and 'quota') or 'machine'}"] = answer["cores"]
        return float(answer["step"])

    places = {"busy": busy(loops), "quota": quota()}
    if not arguments.quick:
        places = {"alone": contextlib.nullcontext(()), **places}
    for place, around in places.items():
        spent: dict[str, list[float]] = {}
        try:
            with around as prefix:
                each = {name: (lambda name=name, prefix=prefix, spent=spent: run(name, prefix, spent)) for name in WAYS}
                seconds = common.interleaved(each, turns, warm_up=0)
        except OSError as error:
            conditions[place] = f"not measured: {error}"
            continue
        figures[f"{place}_speedup"] = common.median_ratio(seconds["spinning"], seconds["sleeping"])
        figures[f"{place}_second_thread"] = common.median_ratio(seconds["one_thread"], seconds["sleeping"])
        for name in WAYS:
            figures[f"{place}_{name}_s"] = statistics.median(seconds[name])
            figures[f"{place}_{name}_cpu_s"] = statistics.median(spent[name])
    figures["loss_difference"] = max(losses) - min(losses)
    conditions |= {"load": os.getloadavg()[0], "processor": common.processor()}
    common.report("busy_machine", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    given = common.child_arguments()
    if given is None:
        main()
    elif "loop" in given:
        while True:
            pass
    else:
        work(given)
