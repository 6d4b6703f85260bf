"""How many bytes a delta is, over real GRPO steps: what actors received as deltas ÷ what full versions would have been.

    python benchmarks/weight_sync_delta.py [--json]

Whole runs of ./run_grpo.sh's configuration: the debug policy is made and trained with GRPO first; then, for each
learning rate, a job of its own goes on from those float32 weights with a bfloat16 actor and weight_sync.delta. Counted
is what the actor received, from the second step on; the version that is sent in full by order (its first) is left out,
those that came in full because nothing was smaller are not.

    delta_ratio_lr_*       mean of a learning rate's versions; delta_ratio_largest_mean is the largest of them
    delta_ratio_max_lr_*   its largest single version; delta_ratio_max is the largest of all
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, the folder of this file is on the path, not the repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common

BARS = {"delta_ratio_lr_1e-6": ("<=", 0.15), "delta_ratio_max": ("<=", 1.0)}
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
FIRST_COUNTED_VERSION = 2


def run(command: list[str], log: Path) -> None:
    """Ends the benchmark with the end of the log when the command fails."""
    environment = {**os.environ, "PYTHONPATH": str(common.REPOSITORY)}
    with log.open("ab") as output:
        done = subprocess.run(
            command, stdout=output, stderr=output, cwd=common.REPOSITORY, env=environment, timeout=600
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}:\n{log.read_text()[-3000:]}")


def train(assets: Path, folder: Path, name: str, options: dict[str, Any]) -> Path:
    """One job; returns its run folder."""
    settings = {
        "job.name": name,
        "job.dump_folder": folder,
        "model.hf_assets_path": assets,
        "metrics.enable_tensorboard": False,
        "eval.enable": False,
        **options,
    }
    arguments = [
        f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()
    ]
    config = common.REPOSITORY / "train_configs" / "debug_cpu.toml"
    command = [sys.executable, "-m", "torchtitan.grpo_train", f"--job.config_file={config}", *arguments]
    run(command, folder / f"{name}.log")
    return next(path for path in folder.glob(f"{name}-2*") if path.is_dir())


def trained_policy(folder: Path, steps: int) -> Path:
    """A Hugging Face directory of the debug policy after `steps` GRPO steps, in float32."""
    assets = folder / "assets"
    script = common.REPOSITORY / "scripts" / "make_debug_checkpoint.py"
    common.progress("making the debug policy")
    run([sys.executable, str(script), "--output", str(assets)], folder / "assets.log")
    common.progress(f"training it with GRPO for {steps} steps")
    options = {"training.steps": steps, "checkpoint.enable": True, "checkpoint.interval": steps}
    exported = list((train(assets, folder, "training", options)).rglob("model*.safetensors"))
    return exported[0].parent


def ratios(run_dir: Path) -> list[float]:
    """Bytes ÷ bytes of a full version, for each version that an actor was offered as a delta and has applied."""
    text = (run_dir / "weight_sync" / "coordinator.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    total = next(record["bytes"] for record in records if record["event"] == "layout")
    base: dict[str, int | None] = {}
    found = []
    for record in records:
        if record["event"] == "offer":
            base[record["actor"]] = record["base"]
        elif record["event"] != "applied" or base[record["actor"]] is None:
            continue
        elif record["version"] >= FIRST_COUNTED_VERSION:
            figures = record["figures"]
            found.append((figures["bytes_delta"] + figures["bytes_full"]) / total)
    if not found:
        raise SystemExit(f"no version was sent as a delta in {run_dir}")
    return found


def main() -> int:
    """Entry point."""
    parser = common.parser(__doc__)
    parser.add_argument("--training-steps", type=int, default=60, help="GRPO steps before anything is measured")
    parser.add_argument("--steps", type=int, default=12, help="measured GRPO steps per learning rate")
    options = parser.parse_args()
    training_steps, steps = (2, 4) if options.quick else (options.training_steps, options.steps)
    figures: dict[str, float] = {}
    largest: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="delta-") as name:
        folder = Path(name)
        policy = trained_policy(folder, training_steps)
        for rate in RATES:
            common.progress(f"{steps} GRPO steps at learning rate {rate:g}")
            # Blocking, so that each version reaches the actor and every delta is one step's.
            settings = {
                "training.steps": steps,
                "optimizer.lr": rate,
                "lr_scheduler.warmup_steps": 0,
                "lr_scheduler.decay_type": "constant",
                "grpo.async_weight_update": False,
                "inference.dtype": "bfloat16",
                "inference.num_actors": 1,
                "weight_sync.delta": True,
                "weight_sync.full_every": 10 * steps,
                "checkpoint.enable": False,
            }
            found = ratios(train(policy, folder, f"rate-{rate:.0e}", settings))
            name_of_rate = f"lr_{rate:.0e}".replace("e-0", "e-")
            figures[f"delta_ratio_{name_of_rate}"] = sum(found) / len(found)
            largest[f"delta_ratio_max_{name_of_rate}"] = max(found)
    figures |= {"delta_ratio_largest_mean": max(figures.values()), **largest, "delta_ratio_max": max(largest.values())}
    conditions = {
        "policy": f"debug policy (Qwen3, 298k parameters) after {training_steps} GRPO steps",
        "steps_per_rate": steps,
        "optimizer_steps_per_version": 4,
        "cores": os.cpu_count(),
    }
    common.report("weight_sync_delta", figures, BARS, conditions, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
