"""The configuration of a job: one attribute per TOML table, each table in a file of torchtitan/config/tables.

Names follow torchtitan 0.2 where it has them. Keep the configuration free of heavy imports: its errors must be quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from torchtitan.config.tables.grpo import GRPO
from torchtitan.config.tables.inference import Inference, WeightSync
from torchtitan.config.tables.model import ActivationCheckpoint, Comm, Compile, Lora, Model, Parallelism
from torchtitan.config.tables.rollout import Environment, Eval, Rewards, Rollout
from torchtitan.config.tables.run import Checkpoint, FaultInjection, Job, Metrics, Profiling
from torchtitan.config.tables.training import Distill, LRScheduler, Optimizer, Sft, Training

__all__ = [
    "GRPO", "ActivationCheckpoint", "Checkpoint", "Comm", "Compile", "Distill", "Environment", "Eval", "FaultInjection",
    "Inference", "Job", "JobConfig", "LRScheduler", "Lora", "Metrics", "Model", "Optimizer", "Parallelism", "Profiling",
    "Rewards", "Rollout", "Sft", "Training", "WeightSync", "free_table", "known_keys", "table_types",
]  # fmt: skip


@dataclass
class JobConfig:
    """Everything one run needs to know."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    grpo: GRPO = field(default_factory=GRPO)
    sft: Sft = field(default_factory=Sft)
    distill: Distill = field(default_factory=Distill)
    rollout: Rollout = field(default_factory=Rollout)
    rewards: Rewards = field(default_factory=Rewards)
    environment: Environment = field(default_factory=Environment)
    inference: Inference = field(default_factory=Inference)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    fault_injection: FaultInjection = field(default_factory=FaultInjection)
    eval: Eval = field(default_factory=Eval)


@cache
def table_types() -> dict[str, Any]:
    """TOML table -> its dataclass."""
    return get_type_hints(JobConfig)


@cache
def known_keys() -> dict[str, FieldInfo]:
    """`table.key` -> its type (`annotation`), rules (`metadata`), default and documentation (`description`)."""
    tables = table_types().items()
    return {f"{table}.{key}": info for table, kind in tables for key, info in kind.__pydantic_fields__.items()}


def free_table(name: str) -> str:
    """The key whose table of free names has `name` (inference.engine_args of inference.engine_args.seed), or empty."""
    keys = known_keys().items()
    return next((key for key, info in keys if get_origin(info.annotation) is dict and name.startswith(f"{key}.")), "")
