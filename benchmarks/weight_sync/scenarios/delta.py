"""How many bytes a delta is, over real GRPO steps: what an actor received as deltas ÷ what full versions would be.

Whole runs of ./run_grpo.sh's configuration: the debug policy is trained with GRPO first; then, for each learning rate,
a job of its own goes on from those float32 weights with a bfloat16 actor and weight_sync.tcp.delta. Counted is what the
actor received, from the second step on; buckets that came in full because nothing was smaller, too.

    delta_ratio_lr_*       mean of a learning rate's versions; delta_ratio_largest_mean is the largest of them
    delta_ratio_max_lr_*   its largest single version; delta_ratio_max is the largest of all

And how long a version takes, published to applied, as a delta ÷ in full: random bfloat16 weights of which 3 % move by
their last bit, over a link that is throttled to 1 or 10 Gbit/s.

    delta_seconds_ratio_1_gbit, delta_seconds_ratio_10_gbit
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import EPOCH, WAIT_SECONDS, Job
from benchmarks.weight_sync.training_runs import train_beside
from tests import faults
from tests.journals import deliveries_of
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

BARS = {
    "delta_ratio_lr_1e-6": ("<=", 0.03),
    "delta_ratio_max": ("<=", 1.0),
    "delta_seconds_ratio_1_gbit": ("<=", 1.0),
}
OPTIONS = {
    "training_steps": Option(60, "GRPO steps before anything is measured", quick=2),
    "steps": Option(12, "measured GRPO steps per learning rate", quick=4),
    "megabytes": Option(128, "of a version whose time is taken", quick=16),
    "repeats": Option(9, "of a version whose time is taken", quick=1),
}
RATES = {"lr_1e-6": 1e-6, "lr_1e-5": 1e-5, "lr_1e-4": 1e-4, "lr_1e-3": 1e-3}
LINKS = {"1_gbit": 125_000_000, "10_gbit": 1_250_000_000}
FIRST_COUNTED_VERSION = 2


def train(folder: Path, model: Path, settings: dict[str, object]) -> Path:
    """A job of the debug configuration; returns the folder of its files."""
    usual: dict[str, object] = {
        "job.config_file": common.REPOSITORY / "train_configs" / "debug_cpu.toml",
        "model.hf_assets_path": model,
        "metrics.loggers": "[]",
        "eval.num_prompts": 0,
    }
    return train_beside(folder, {**usual, **settings})


def trained_policy(folder: Path, steps: int) -> Path:
    """A Hugging Face directory of the debug policy after `steps` GRPO steps, in float32."""
    common.progress(f"training it with GRPO for {steps} steps")
    settings = {"training.steps": steps, "checkpoint.enable": "true", "checkpoint.interval": steps}
    latest = train(folder / "training", common.debug_checkpoint(), settings)
    return next(latest.resolve().rglob("model*.safetensors")).parent


def delta_shares(latest: Path) -> list[float]:
    """Bytes ÷ bytes of a full version, for each version that an actor has applied, from the second step on."""
    applied = deliveries_of(latest, "applied")
    # An actor's first version comes whole.
    total = max((record["figures"]["bytes_full"] for record in applied), default=0)
    counted = [record["figures"] for record in applied if record["version"] >= FIRST_COUNTED_VERSION]
    if not counted:
        raise SystemExit(f"no version of {latest} counts")
    return [(figures["bytes_delta"] + figures["bytes_full"]) / total for figures in counted]


def version_seconds(folder: Path, megabytes: int, repeats: int, delta: bool) -> float:
    """Median seconds of a version of so many megabytes, from its commit until an actor in this process applies it."""
    torch.manual_seed(0)
    weights = {f"layer{index}": torch.randn(megabytes << 17) for index in range(4)}
    applied = threading.Semaphore(0)

    def change() -> None:
        for tensor in weights.values():
            # One unit in the last of bfloat16's eight bits.
            tensor.mul_(1 + (torch.rand_like(tensor) < 0.03) * 2**-7)

    config = WeightSyncConfig()
    config.apply_timeout_s = WAIT_SECONDS
    config.table.delta = delta
    job = Job(weights, folder, config, dtype="bfloat16")
    key = role_key(job.place["token"], ACTOR, "actor")
    actor = SyncActor(job.place["registry"], "actor", EPOCH, key, lambda _staged: applied.release())
    actor.start()
    try:
        job.wait_for_actors(1)
        seconds = []
        for _ in range(repeats + 2):
            start = job.publish_when_free(change)
            if not applied.acquire(timeout=WAIT_SECONDS):
                raise SystemExit(f"version {job.version} was not applied within {WAIT_SECONDS:g} s")
            seconds.append(time.perf_counter() - start)
            # A delta is taken against what the registry knows the actor to serve.
            job.applied_everywhere(1)
    finally:
        actor.close()
        job.close()
    return statistics.median(seconds[2:])


def measure(run: Run) -> dict[str, float]:
    options = run.options
    means: dict[str, float] = {}
    largest: dict[str, float] = {}
    policy = trained_policy(run.folder, options.training_steps)
    for name, rate in RATES.items():
        common.progress(f"{options.steps} GRPO steps at learning rate {rate:g}")
        # Blocking, so that each version reaches the actor and every delta is one step's.
        settings = {
            "training.steps": options.steps,
            "optimizer.lr": rate,
            "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.decay_type": "constant",
            "grpo.async_weight_update": "false",
            "inference.dtype": "bfloat16",
            "inference.num_actors": 1,
            "weight_sync.tcp.delta": "true",
            "checkpoint.enable": "false",
        }
        shares = delta_shares(train(run.folder / name, policy, settings))
        means[f"delta_ratio_{name}"] = sum(shares) / len(shares)
        largest[f"delta_ratio_max_{name}"] = max(shares)
    figures = {
        **means,
        "delta_ratio_largest_mean": max(means.values()),
        **largest,
        "delta_ratio_max": max(largest.values()),
    }
    for name, bytes_per_s in LINKS.items():
        common.progress(f"{options.megabytes} MB over {name}")
        os.environ.update(faults.variables(f"throttle:bytes_per_s={bytes_per_s}"))
        as_delta, in_full = (
            version_seconds(run.folder / f"{name}-{delta}", options.megabytes, options.repeats, delta)
            for delta in (True, False)
        )
        figures[f"delta_seconds_ratio_{name}"] = as_delta / in_full
    run.conditions["optimizer_steps_per_version"] = 4
    return figures
