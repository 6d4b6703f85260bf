"""Generation in the trainer's own processes against a server that the trainer waits for: real vLLM on two CPU cores.

    python benchmarks/colocate_vs_server.py --json

The same training (the debug run, every batch sampled by the newest version) in two ways, in turns over the seeds, every
process of a run pinned to the same two cores, one thread per process that computes:

    colocated   two trainer ranks, each with a vLLM of its own
    server      one trainer rank and one vLLM server; the trainer waits for batches and for the weights' arrival

    colocate_gain       tokens per second and core, colocated ÷ server; median over the seeds. The first steps, with
                        their compilations and connections, do not count.
    reward_difference   |difference of the mean rewards of the last tenth of the steps, averaged over the seeds|
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import common  # noqa: E402
from benchmarks.vllm_actor import vllm_python  # noqa: E402

BARS = {"colocate_gain": (">=", 1.0), "reward_difference": ("<=", 0.1)}
RUN_SECONDS = 1800.0
WARM_UP_STEPS = 5
CORES = 2

COMMON = {
    "eval.enable": "false", "checkpoint.enable": "false", "metrics.log_freq": 50, "training.threads": 1,
    "grpo.async_weight_update": "false", "rollout.max_staleness": 0,
}  # fmt: skip
COLOCATED = {"job.config_file": REPOSITORY / "train_configs" / "debug_cpu_vllm_colocate.toml"}
SERVER = {
    "job.config_file": REPOSITORY / "train_configs" / "debug_cpu_vllm.toml",
    "inference.num_actors": 1, "inference.threads_per_actor": 1,
}  # fmt: skip


def run(python: str, ranks: int, settings: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """One training; tokens per second after the warm-up, and the mean reward of its last tenth."""
    launched = ("-m", "torchtitan.utils.launch", "--standalone", "--nproc-per-node", ranks, *common.TRAIN)
    with tempfile.TemporaryDirectory(prefix="colocate-") as folder:
        keys = {"job.dump_folder": folder, "training.steps": steps, "training.seed": seed}
        rows = common.train(COMMON | settings | keys, program=launched, python=python, seconds=RUN_SECONDS)
    rows = [row for row in rows if "reward/mean" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    counted = rows[min(WARM_UP_STEPS, steps // 2) :]
    last = rows[-max(1, steps // 10) :]
    seconds = sum(row["time/step_s"] for row in counted)
    return {
        "tokens_per_s": sum(row["tokens_per_s"] * row["time/step_s"] for row in counted) / seconds,
        "reward": statistics.mean(row["reward/mean"] for row in last),
        "first_reward": rows[0]["reward/mean"],
        "step_s": seconds / len(counted),
        "train_s": statistics.mean(row["time/train_s"] for row in counted),
        "sync_s": statistics.mean(row["time/sync_stall_s"] + row["time/snapshot_s"] for row in counted),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    steps, seeds = (4, 1) if arguments.quick else (arguments.steps, arguments.seeds)
    python, started = vllm_python(), time.monotonic()
    common.run_on(*common.two_cores())
    results: dict[str, list[dict[str, Any]]] = {"colocated": [], "server": []}
    ways = {"colocated": (python, 2, COLOCATED), "server": (sys.executable, 1, SERVER)}
    for seed in range(seeds):
        for way in list(ways)[:: 1 if seed % 2 == 0 else -1]:
            results[way].append(run(*ways[way], steps, seed))
            shown = ", ".join(f"{key} {value:.4g}" for key, value in results[way][-1].items())
            common.progress(f"{way}, seed {seed}: {shown}")
    means = {way: {key: statistics.mean(one[key] for one in all_) for key in all_[0]} for way, all_ in results.items()}
    rates = {way: [one["tokens_per_s"] / CORES for one in all_] for way, all_ in results.items()}
    figures = {
        "colocate_gain": common.median_ratio(rates["colocated"], rates["server"]),
        "reward_difference": abs(means["colocated"]["reward"] - means["server"]["reward"]),
        **{f"{way}_{key}": value for way, mean in means.items() for key, value in mean.items()},
    }
    conditions = {
        "steps": steps,
        "seeds": seeds,
        "cores": CORES,
        "load": os.getloadavg()[0],
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    common.report("colocate_vs_server", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
