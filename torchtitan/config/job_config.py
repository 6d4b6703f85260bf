"""The configuration of a job: one attribute per TOML table. The tables of the run itself are here (its name, where it
writes, what it logs and keeps), the others in training_tables.py and rollout_tables.py.

Names follow torchtitan 0.2 where it has them. Keep the configuration free of heavy imports: its errors must be quick.
The string under a field is its documentation.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cache
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from torchtitan.config.rollout_tables import (
    Environment,
    Eval,
    Inference,
    Rewards,
    Rollout,
    WeightSync,
)
from torchtitan.config.sources import Source, fields_of
from torchtitan.config.training_tables import (
    GRPO,
    ActivationCheckpoint,
    Comm,
    Compile,
    Distill,
    Lora,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    Sft,
    Training,
)
from torchtitan.config.values import TABLE, Count, CountOrZero, Must, PathText, Range, RunName, show, show_key

# Ranks leave by themselves within the save deadline; the launcher kills what is left a little later.
MAX_SAVE_DEADLINE_S = 600

__all__ = [
    "GRPO", "ActivationCheckpoint", "Checkpoint", "Comm", "Compile", "Distill", "Environment", "Eval",
    "Inference", "Job", "JobConfig", "LRScheduler", "Lora", "Metrics", "Model", "Optimizer",
    "Parallelism", "Rewards", "Rollout", "Sft", "Source", "Training", "WeightSync", "free_table",
    "known_keys", "table_types", "value_at", "with_values",
]  # fmt: skip


@dataclass(config=TABLE)
class Job:
    config_file: str = ""
    """TOML file to read; command-line options override it"""

    dump_folder: Annotated[PathText, Must(bool, "must be a folder, or a path where one can be made")] = "./outputs"
    """Each launch writes to a new folder {dump_folder}/{name}-{time}; the link `latest` points to the newest"""

    name: RunName = "grpo"
    """Name of the job; its run folder's name starts with it"""

    stage: Literal["sft", "grpo", "distill"] = "grpo"
    """What the policy learns from: demonstrations (sft: supervised fine-tuning), rewards (grpo), or a teacher's
    log-probs of the policy's own samples (distill: on-policy distillation)"""


Loggers = Annotated[
    list[str], Must(lambda names: set(names) <= {"tensorboard", "wandb"}, "each must be tensorboard or wandb")
]


@dataclass(config=TABLE)
class Metrics:
    log_freq: Count = 1
    """Steps between two console lines (metrics.jsonl always has one object per step)"""

    loggers: Loggers = field(default_factory=lambda: ["tensorboard"])
    """Where else the figures go: tensorboard (event files, in tb/ of the run folder), wandb (Weights & Biases; needs
    the `wandb` extra; WANDB_MODE=offline works)"""

    profile_freq: Annotated[int, Range(2, also=0)] = 0
    """Steps between two traces of torch's profiler, in profile_traces/ of the run folder; 0 records none"""

    completions_per_step: Annotated[int, Range(-1)] = 16
    """Completions written to completions.jsonl per step; -1 for all"""

    live_port: Annotated[int, Range(0, 65535)] = 0
    """Port on 127.0.0.1 of a live page that shows the run while it goes on; 0 for none"""


@dataclass(config=TABLE)
class Checkpoint:
    enable: bool = False
    """Write checkpoints"""

    interval: Count = 50
    """Steps between two checkpoints"""

    async_mode: Literal["disabled", "async"] = "disabled"
    """async writes checkpoints in the background, from a copy in host memory; if not set, it is async where the ranks
    have GPUs"""

    keep_latest_k: CountOrZero = 3
    """Number of checkpoints to keep; 0 keeps all"""

    resume: PathText = ""
    """Run folder to resume from, at its latest complete checkpoint, or `latest`; or one of its checkpoints, as
    RUN/checkpoint/step-N. The run continues in that folder"""

    last_save_in_hf: bool = True
    """Export a Hugging Face checkpoint directory at the end (also on demand: SIGUSR1)"""

    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the exported weights; auto is the type in config.json of model.hf_assets_path, or else training.dtype.
    Weights that float16 cannot hold are exported as float32, with a warning"""

    save_deadline_s: Annotated[float, Range(0, MAX_SAVE_DEADLINE_S, low_open=True)] = 60.0
    """After SIGTERM, SIGINT or SIGHUP, the run saves and exits within this time"""


@dataclasses.dataclass
class JobConfig:
    """Everything one run needs to know."""

    job: Job = field(default_factory=Job)
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
    eval: Eval = field(default_factory=Eval)
    source: list[Source] = field(default_factory=list)
    """[[source]]: the tasks of a run that has several; see source_configs()"""

    @property
    def has_engines(self) -> bool:
        """Whether anything is sampled: not where recorded batches are replayed, and for demonstrations only to
        evaluate."""
        return not self.rollout.replay and (self.job.stage != "sft" or self.sft.sample)

    @property
    def is_colocated(self) -> bool:
        """Whether the engines run inside the trainer's ranks."""
        return self.inference.spec.in_ranks and self.has_engines

    @property
    def started_actors(self) -> int:
        """How many actors the run starts as processes of their own."""
        has_actors = self.has_engines and not self.inference.spec.in_ranks
        return self.inference.num_actors if has_actors and not self.inference.servers else 0

    @property
    def sleeps_between_batches(self) -> bool:
        """Whether actors that are processes of their own sleep while the trainer trains."""
        return self.has_engines and not self.inference.spec.in_ranks and self.inference.sleep_level > 0

    @property
    def shares_devices(self) -> bool:
        """Whether the servers that the run starts have the ranks' own GPUs, in turns with the trainer."""
        return self.sleeps_between_batches and self.inference.spec.on_gpus and not self.inference.servers

    @property
    def blocking_timeout_s(self) -> float:
        """In blocking mode, how long a step waits for live actors to have its version. The other ranks wait in a
        collective meanwhile: the last quarter of its time is for the next command, and actors that sleep need some to
        wake up."""
        wakes_s = self.inference.sleep_timeout_s if self.sleeps_between_batches else 0.0
        return 0.75 * self.comm.train_timeout_seconds - wakes_s

    @property
    def verification(self) -> str:
        """What weight_sync.verify means for this run: digest, probe or off."""
        chosen = self.weight_sync.verify
        if chosen != "auto":
            return chosen
        # Actors with adapters have no tensor that is what was sent.
        return "digest" if self.inference.spec.digests and self.lora.rank == 0 else "probe"


@cache
def table_types() -> dict[str, Any]:
    """TOML table -> its dataclass; tables inside a table come after it."""
    outer = {name: kind for name, kind in get_type_hints(JobConfig).items() if dataclasses.is_dataclass(kind)}
    return {name: kind for table, of_table in outer.items() for name, kind in _with_inner(table, of_table)}


def _with_inner(table: str, kind: Any) -> Iterator[tuple[str, Any]]:
    yield table, kind
    for key, info in fields_of(kind).items():
        if dataclasses.is_dataclass(info.annotation):
            yield from _with_inner(f"{table}.{key}", info.annotation)


@cache
def known_keys() -> dict[str, FieldInfo]:
    """`table.key` -> its type (`annotation`), rules (`metadata`) and default."""
    tables = table_types()
    keys = [(f"{table}.{key}", info) for table, kind in tables.items() for key, info in fields_of(kind).items()]
    return {name: info for name, info in keys if name not in tables}


def free_table(name: str) -> str:
    """The key whose table of free names has `name` (inference.vllm.args of inference.vllm.args.seed), or empty."""
    keys = known_keys().items()
    return next((key for key, info in keys if get_origin(info.annotation) is dict and name.startswith(f"{key}.")), "")


def value_at(config: JobConfig, name: str) -> Any:
    """The value of `table.key`, or the table of that name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def with_values(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """Return a configuration with these values of `table.key`, which shares all other tables with this one."""
    changed, copied = copy.copy(config), set[str]()
    for name, value in values.items():
        *tables, key = name.split(".")
        holder: Any = changed
        for depth, table in enumerate(tables, start=1):
            path = ".".join(tables[:depth])
            if path not in copied:
                copied.add(path)
                setattr(holder, table, copy.copy(getattr(holder, table)))
            holder = getattr(holder, table)
        setattr(holder, key, value)
    return changed


def config_to_toml(config: JobConfig, only: Mapping[str, str] | None = None) -> str:
    """The whole configuration as TOML that loads to the same configuration.

    only: leave out all keys but these; each `table.key` has the comment that stands behind it, or an empty one.
    """
    lines: list[str] = []
    for table in table_types():
        values = {key: value_at(config, f"{table}.{key}") for key in fields_of(table_types()[table])}
        values = {key: value for key, value in values.items() if f"{table}.{key}" in known_keys()}
        if only is not None:
            values = {key: value for key, value in values.items() if f"{table}.{key}" in only}
        sets = values.pop("set", []) if table == "eval" else []
        # What follows a table's own table would belong to that.
        inner = {name: value for name, value in values.items() if isinstance(value, dict)}
        if only is None or len(values) > len(inner):
            lines.append(f"[{table}]")
            for name, value in values.items():
                if name not in inner:
                    comment = only[f"{table}.{name}"] if only is not None else ""
                    lines.append(f"{name} = {show(value)}{f'  # {comment}' if comment else ''}")
            lines.append("")
        for name, value in inner.items():
            lines += [f"[{table}.{name}]", *(f"{show_key(key)} = {show(item)}" for key, item in value.items()), ""]
        for given in sets:
            lines += [
                "[[eval.set]]",
                *(f"{name.removeprefix('eval.')} = {show(value)}" for name, value in given.items()),
                "",
            ]
    for source in config.source:
        lines += ["[[source]]", *(f"{name} = {show(value)}" for name, value in source.given().items()), ""]
    return "\n".join(lines)
