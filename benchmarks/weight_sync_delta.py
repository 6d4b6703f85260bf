"""How many bytes a delta is, over real GRPO steps: what an actor received as deltas ÷ what full versions would be.

    python benchmarks/weight_sync_delta.py [--json]

Whole runs of ./run_grpo.sh's configuration: the debug policy is made and trained with GRPO first; then, for each
learning rate, a job of its own goes on from those float32 weights with a bfloat16 actor and weight_sync.tcp.delta.
Counted is what the actor received, from the second step on; buckets that came in full because nothing was smaller, too.

    delta_ratio_lr_*       mean of a learning rate's versions; delta_ratio_largest_mean is the largest of them
    delta_ratio_max_lr_*   its largest single version; delta_ratio_max is the largest of all

And how long a version takes, published to applied, as a delta ÷ in full: random bfloat16 weights of which 3 % move by
their last bit, over a link that is throttled to 1 or 10 Gbit/s.

    delta_seconds_ratio_1_gbit, delta_seconds_ratio_10_gbit
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, the folder of this file is on the path, not the repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from tests import faults
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.memory.staging import StagedVersion
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

BARS = {
    "delta_ratio_lr_1e-6": ("<=", 0.03),
    "delta_ratio_max": ("<=", 1.0),
    "delta_seconds_ratio_1_gbit": ("<=", 1.0),
}
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
LINKS = {"1_gbit": 125_000_000, "10_gbit": 1_250_000_000}
FIRST_COUNTED_VERSION = 2
EPOCH = "e1-delta"
SECONDS = 120.0


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
    common.progress(f"training it with GRPO for {steps} steps")
    options = {"training.steps": steps, "checkpoint.enable": True, "checkpoint.interval": steps}
    exported = list((train(common.debug_checkpoint(), folder, "training", options)).rglob("model*.safetensors"))
    return exported[0].parent


def ratios(run_dir: Path) -> list[float]:
    """Bytes ÷ bytes of a full version, for each version that an actor has applied, from the second step on."""
    text = (run_dir / "weight_sync" / "registry.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    applied = [record for record in records if record["event"] == "applied" and record["figures"]]
    # An actor's first version comes whole.
    total = max((record["figures"]["bytes_full"] for record in applied), default=0)
    figures = [record["figures"] for record in applied if record["version"] >= FIRST_COUNTED_VERSION]
    if not figures:
        raise SystemExit(f"no version of {run_dir} counts")
    return [(one["bytes_delta"] + one["bytes_full"]) / total for one in figures]


class Pair:
    """A trainer's rank that sends deltas, and an actor; real processes but for the actor's thread."""

    def __init__(self, weights: Mapping[str, torch.Tensor], folder: Path, *, delta: bool, bytes_per_s: int = 0):
        self.weights, self.version = dict(weights), -1
        self.applied = threading.Semaphore(0)
        os.environ.update(faults.variables(f"throttle:bytes_per_s={bytes_per_s}" if bytes_per_s else ""))
        token = secrets.token_urlsafe(16)
        config = WeightSyncConfig(bucket_bytes=16 << 20, apply_timeout_s=SECONDS)
        config.table.delta = delta
        self.publication = WeightSync(config, self.weights, epoch=EPOCH, token=token, run_dir=folder, dtype="bfloat16")
        address, key = self.publication.registry_address, role_key(token, ACTOR, "actor")
        self.actor = SyncActor(address, "actor", EPOCH, key, self._apply)
        self.actor.start()
        assert self.publication.watcher is not None
        self.watcher = self.publication.watcher
        common.wait_for(lambda: bool(self.watcher.status()["actors"]), SECONDS, "the actor joins")

    def _apply(self, _staged: StagedVersion) -> None:
        self.applied.release()

    def publish(self, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, float], float]:
        """The figures of the actor, and the seconds from the snapshot to the apply."""
        common.wait_for(self.publication.boundary.reserve, SECONDS, "a free slot")
        self.publication.publisher.fence()
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])
        self.version += 1
        begun = time.perf_counter()
        self.publication.boundary.commit(self.version, 0)
        if not self.applied.acquire(timeout=SECONDS):
            raise SystemExit(f"version {self.version} was not applied within {SECONDS:g} s")
        seconds = time.perf_counter() - begun

        def known() -> dict[str, Any]:
            return dict(self.watcher.status()["actors"]["actor"])

        common.wait_for(lambda: known()["version"] == self.version, SECONDS, "the trainer hears of it")
        return known()["figures"], seconds

    def close(self) -> None:
        self.actor.close()
        self.publication.close()


def seconds_ratio(bytes_per_s: int, megabytes: int, repeats: int) -> float:
    """Seconds of a version of so many megabytes as a delta ÷ in full, over such a link."""
    torch.manual_seed(0)
    weights = {f"layer{index}": torch.randn(megabytes << 17) for index in range(4)}
    medians = {}
    for delta in (False, True):
        with tempfile.TemporaryDirectory(prefix="delta-") as folder:
            pair = Pair(weights, Path(folder), delta=delta, bytes_per_s=bytes_per_s)
            with contextlib.closing(pair):
                seconds = []
                for _ in range(repeats + 2):
                    for tensor in weights.values():
                        # One unit in the last of bfloat16's eight bits.
                        tensor.mul_(1 + (torch.rand_like(tensor) < 0.03) * 2**-7)
                    seconds.append(pair.publish(weights)[1])
        medians[delta] = statistics.median(seconds[2:])
    return medians[True] / medians[False]


def main() -> int:
    """Entry point."""
    parser = common.parser(__doc__)
    parser.add_argument("--training-steps", type=int, default=60, help="GRPO steps before anything is measured")
    parser.add_argument("--steps", type=int, default=12, help="measured GRPO steps per learning rate")
    parser.add_argument("--megabytes", type=int, default=128, help="of a version whose time is taken")
    options = parser.parse_args()
    if options.quick:
        options.megabytes = 16
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
                "weight_sync.tcp.delta": True,
                "checkpoint.enable": False,
            }
            found = ratios(train(policy, folder, f"rate-{rate:.0e}", settings))
            name_of_rate = f"lr_{rate:.0e}".replace("e-0", "e-")
            figures[f"delta_ratio_{name_of_rate}"] = sum(found) / len(found)
            largest[f"delta_ratio_max_{name_of_rate}"] = max(found)
    figures |= {"delta_ratio_largest_mean": max(figures.values()), **largest, "delta_ratio_max": max(largest.values())}
    for name, bytes_per_s in LINKS.items():
        common.progress(f"{options.megabytes} MB over {name}")
        figures[f"delta_seconds_ratio_{name}"] = seconds_ratio(
            bytes_per_s, options.megabytes, 1 if options.quick else 9
        )
    conditions = {
        "policy": f"debug policy (Qwen3, 298k parameters) after {training_steps} GRPO steps",
        "steps_per_rate": steps,
        "optimizer_steps_per_version": 4,
        "timed_version_mb": options.megabytes,
        "cores": os.cpu_count(),
    }
    common.report("weight_sync_delta", figures, BARS, conditions, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
