"""What follows from the configuration and this machine alone, and more than one part of a run has to know. No torch.

Of engines: their addresses, of which `slurm:NODES:PORT` stands for those of all actors on these nodes.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.config.engines import engine_specs
from torchtitan.config.job_config import JobConfig, with_values
from torchtitan.config.sources import Source
from torchtitan.config.transports import TRANSPORTS
from torchtitan.errors import ConfigError
from torchtitan.utils.machine import count_gpus, gpus_of_driver, hides_gpus

ON_GPU: Mapping[str, Any] = {
    # Products in bfloat16 are some 16 times as fast as in float32, and only they have the varlen flash attention.
    "training.mixed_precision_param": "bfloat16",
    # A rank writes its part for a minute or more; a copy of it to pinned memory takes seconds.
    "checkpoint.async_mode": "async",
}
ENGINE_ON_GPU: Mapping[str, Any] = {"inference.dtype": "bfloat16"}
SLURM = "slurm:"
# More is a slip of the pen, and would fill the memory.
MAX_SERVERS = 4096
SLURM_FORM = "slurm:NODES:PORT such as slurm:gpu[01-04,7]:8000 or slurm:gpu1,gpu2:8000-8003"


def trains_on_gpu() -> bool:
    """Whether the ranks of a run that starts here have GPUs, before torch is asked; TORCHTITAN_DEVICE decides first."""
    wanted = os.environ.get("TORCHTITAN_DEVICE")
    if wanted:
        return wanted == "cuda"
    # Device files alone prove nothing where the driver can be asked.
    listed = gpus_of_driver() if shutil.which("nvidia-smi") else count_gpus()
    return listed > 0 and not hides_gpus()


def device_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by `table.key` to take where `given` has none; for a CPU the tables' own defaults are meant."""
    if not trains_on_gpu():
        return {}
    defaults = dict(ON_GPU)
    spec = engine_specs().get(given.get("inference.backend", JobConfig().inference.backend))
    if spec is None or spec.on_gpus:
        defaults |= ENGINE_ON_GPU
    return {key: value for key, value in defaults.items() if key not in given}


def sources_of(config: JobConfig) -> list[tuple[str, JobConfig]]:
    """The name of every source, and the run's configuration as it is for that source: what the source gives is in the
    tables, and `source` has only it. A run without [[source]] has one source, whose name is empty."""
    return [(source.name, for_source(config, source)) for source in config.source] or [("", config)]


def source_name(config: JobConfig) -> str:
    """The name of the source whose configuration this is, as sources_of() made it."""
    return config.source[0].name if config.source else ""


def weights_of(config: JobConfig, rows: Sequence[int]) -> dict[str, float]:
    """The weight of every source by its name. rows: the number of training rows of each."""
    weights = [count * source.epochs if source.epochs else source.weight or 1.0
               for source, count in zip(config.source, rows, strict=False)]  # fmt: skip
    return dict(zip((source.name for source in config.source), weights, strict=True)) or {"": 1.0}


def for_source(config: JobConfig, source: Source) -> JobConfig:
    """The configuration with what this source gives in the tables."""
    values = source.values
    implied: dict[str, Any] = {}
    if "rewards.functions" in values:
        implied["rewards.weights"] = []
    if "distill.teacher" in values:
        implied["distill.server.url"] = ""
    if values.get("distill.teacher") == "":
        implied["distill.hint_column"] = ""
    own = with_values(config, implied | values)
    own.source = [source]
    return own


def warn_no_fp32_masters(config: JobConfig) -> str | None:
    """What to say of a run whose master weights are rounded to bfloat16; None where they are not."""
    if config.training.dtype != "bfloat16" or config.lora.rank:
        return None
    return (
        'training.dtype = "bfloat16" has no float32 master weights: an update below 1/256 of a weight is lost, as most '
        f'are with optimizer.lr = {config.optimizer.lr:g}. Set training.mixed_precision_param = "bfloat16" instead'
    )


def long_warmup(config: JobConfig) -> str | None:
    """What to say of a run that ends before its learning rate has reached its peak; None of others. With sft.epochs,
    training.steps is known only once the data have been read."""
    warmup, steps = config.lr_scheduler.warmup_steps, config.training.steps
    if not warmup or warmup < steps:
        return None
    return (
        f"lr_scheduler.warmup_steps = {warmup} is not below training.steps = {steps}: the learning rate rises all the "
        f"time and never reaches optimizer.lr = {config.optimizer.lr:g}"
    )


def from_torchrun(name: str, default: str = "", least: int = 0) -> int:
    """A number that torchrun sets for every rank; without torchrun `default`. Raises ConfigError."""
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(
            [f"{name}={text!r} in the environment must be a number from {least} on, which torchrun (run_grpo.sh) sets"]
        )
    return int(text)


def world_size() -> int:
    """Ranks of this job: torchrun's WORLD_SIZE, or 1. Raises ConfigError."""
    return from_torchrun("WORLD_SIZE", "1", least=1)


def keeps_unsharded_params(config: JobConfig) -> bool:
    """Whether a rank keeps the gathered form of parameters that it holds alone, and the sum of their gradients, through
    all micro-batches of an optimizer step: their sums are as precise then, and adapters have no use for the memory."""
    training = config.training
    return (
        config.parallelism.fsdp_reshard_after_forward != "always"
        and training.enable_cpu_offload is not True
        and training.mixed_precision_reduce == training.dtype
        and not config.lora.rank
    )


def has_engines(config: JobConfig) -> bool:
    """Whether anything is sampled: not where recorded batches are replayed, and for demonstrations only to evaluate."""
    return not config.rollout.replay and (config.job.stage != "sft" or config.sft.sample)


def started_actors(config: JobConfig) -> int:
    """How many actors the run starts as processes of their own."""
    inference = config.inference
    has_actors = has_engines(config) and not config.inference.spec.in_ranks
    return inference.num_actors if has_actors and not inference.servers else 0


def learns_from_rewards(config: JobConfig) -> bool:
    """Whether samples have advantages. Demonstrations have none, and a teacher's log-probs do without."""
    return config.job.stage == "grpo" or (config.job.stage == "distill" and config.distill.add_rewards)


def compares_vocabulary(config: JobConfig) -> bool:
    """Whether the policy is compared with its teacher over the whole vocabulary, not only at the sampled tokens."""
    return config.job.stage == "distill" and config.distill.divergence != "sampled"


def teacher_of(own: JobConfig) -> str | None:
    """What the policy is compared with on the samples of a source: a server's address, a checkpoint directory, or
    (empty) itself: as it is, with a hint; as it began, for a KL term. None: with nothing."""
    if own.job.stage != "distill":
        return "" if own.job.stage == "grpo" and own.grpo.kl_coefficient > 0 else None
    distill = own.distill
    if distill.server.url or not distill.teacher:
        return distill.server.url or ("" if distill.hint_column else None)
    return os.path.realpath(distill.teacher)


def references_of(config: JobConfig) -> dict[str, JobConfig]:
    """The second policies that the trainer holds: one to stay close to, or each teacher once. What teacher_of() says ->
    the configuration of a source that has it."""
    held: dict[str, JobConfig] = {}
    for _, own in sources_of(config):
        name = teacher_of(own)
        if name is not None and not own.distill.server.url and (name or own.job.stage == "grpo"):
            held.setdefault(name, own)
    return held


def teacher_config(config: JobConfig) -> JobConfig:
    """The configuration of the policy that teaches a source: as the trained one is laid out, with its own weights."""
    own = copy.deepcopy(config)
    own.model.hf_assets_path, own.model.name, own.model.flavor = config.distill.teacher, "auto", ""
    own.lora.rank, own.lora.base_bits, own.grpo.reference_ema_decay = 0, 16, 0.0
    return own


def stop_tokens(config: JobConfig) -> list[int]:
    """The tokens that end completions of any source, besides the checkpoint's own end tokens."""
    return list(dict.fromkeys(token for _, own in sources_of(config) for token in own.rollout.stop_token_ids))


def longest_completion(config: JobConfig) -> int:
    """The most tokens that a completion of any source may have."""
    return max(own.rollout.max_completion_tokens for _, own in sources_of(config))


def groups_per_batch(config: JobConfig) -> int:
    """Groups of a batch over all ranks; of demonstrations, each is one row."""
    return config.training.global_batch_size // group_size(config)


def group_size(config: JobConfig) -> int:
    """Samples of one row."""
    return 1 if config.job.stage == "sft" else config.grpo.group_size


def is_colocated(config: JobConfig) -> bool:
    """Whether the engines run inside the trainer's ranks."""
    return config.inference.spec.in_ranks and has_engines(config)


def shares_devices(config: JobConfig) -> bool:
    """Whether the servers that the run starts have the ranks' own GPUs, in turns with the trainer."""
    spec, inference = config.inference.spec, config.inference
    takes_turns = spec.on_gpus and not spec.in_ranks and inference.engine.sleep_level > 0
    return takes_turns and not inference.servers and has_engines(config)


def stages_on_device(config: JobConfig) -> bool:
    """Whether engines receive versions in the memory of their GPU. Workers that share a version, and agents that write
    files, receive them in host memory."""
    sync = config.weight_sync
    alone = config.inference.spec.stages_on_device and config.inference.engine.tensor_parallel_size == 1
    return (
        alone and config.inference.engine.route != "agent" and TRANSPORTS[sync.transport].on_device and trains_on_gpu()
    )


def allocator_settings(config: JobConfig) -> str:
    """What a rank asks of torch's allocators, in the form of PYTORCH_ALLOC_CONF."""
    colocated, settings = is_colocated(config), list[str]()
    # Packs of changing lengths then leave less between blocks. Engines open such memory of another process slowly and
    # not everywhere (pytorch/pytorch#130890), and vLLM's sleep cannot give it back (pytorch/pytorch#147851).
    if not colocated and config.weight_sync.transport != "ipc":
        settings.append("expandable_segments:True")
    # Pinned blocks of more than 1 MiB then have the size that was asked for, not the next power of two, and go back to
    # the system when they are freed. FSDP2's offload and vLLM's sleep of level 1 take new ones all the time.
    if config.training.enable_cpu_offload is not True and not (colocated and config.inference.engine.sleep_level == 1):
        settings.append("pinned_max_cached_size_mb:1")
    return ",".join(settings)


def sleeps_between_batches(config: JobConfig) -> bool:
    """Whether actors that are processes of their own sleep while the trainer trains."""
    return has_engines(config) and not config.inference.spec.in_ranks and config.inference.engine.sleep_level > 0


def verification(config: JobConfig) -> str:
    """What weight_sync.verify means for this run: digest, probe or off."""
    chosen = config.weight_sync.verify
    if chosen != "auto":
        return chosen
    # Actors with adapters have no tensor that is what was sent.
    return "digest" if config.inference.spec.digests and config.lora.rank == 0 else "probe"


def keeps_initial_adapters(config: JobConfig) -> bool:
    """Whether the policy holds a frozen copy of the adapters that it began with, as the reference of a KL term."""
    return config.lora.trains_only_adapters and bool(config.lora.adapter_path) and "" in references_of(config)


def teachers_of(config: JobConfig) -> dict[str, str]:
    """The directories of all teachers that the trainer holds, by the key that names each."""
    held = references_of(config)
    named = {f"distill.teacher of {name}".removesuffix(" of "): teacher_of(own) for name, own in sources_of(config)}
    return {key: teacher for key, teacher in named.items() if teacher and teacher in held}


def frozen_weights(config: JobConfig) -> dict[str, str]:
    """The directories, by the key that names each, of weights that the run goes on using but does not train: those that
    adapters are added to, those of a KL term's reference that does not follow the policy, and those of teachers."""
    is_fixed = config.lora.trains_only_adapters or config.grpo.reference_ema_decay == 0
    stays_close = "" in references_of(config) and is_fixed
    found = {}
    if config.lora.rank or stays_close:
        found["model.hf_assets_path"] = config.model.hf_assets_path
    if config.lora.rank and stays_close:
        found["lora.adapter_path"] = config.lora.adapter_path
    return found | teachers_of(config)


def reward_weights(config: JobConfig) -> dict[str, float]:
    """The weight of every reward of all sources by its name: those of the functions, and the environment's own with
    weight 1."""
    weights: dict[str, float] = {}
    for _, own in sources_of(config):
        functions = own.rewards.functions
        weights |= dict(zip(functions, own.rewards.weights or [1.0] * len(functions), strict=True))
        weights |= {name: 1.0 for name in [own.environment.reward_name] if name}
    return weights


def reward_labels(config: JobConfig) -> dict[str, str]:
    """What curves and completions call every reward: a function of a module by its own name, if no other has that."""
    own = {name: name.rpartition(":")[2] for name in reward_weights(config)}
    return {name: label if list(own.values()).count(label) == 1 else name for name, label in own.items()}


def judging_reward(config: JobConfig) -> str:
    """The reward by which an evaluation decides whether a sample passes."""
    return config.eval.reward_function or [*config.rewards.functions, config.environment.reward_name][0]


def expand_servers(servers: Sequence[str]) -> list[str]:
    """Every `slurm:` entry replaced by its URLs, node by node; what is malformed stays as it is."""
    expanded: list[str] = []
    for server in servers:
        try:
            expanded += slurm_urls(server) if server.startswith(SLURM) else [server]
        except ValueError:
            expanded.append(server)
    return expanded


def slurm_urls(server: str) -> list[str]:
    """http://node:port of every node and port of a `slurm:` entry. Raises ValueError where it is malformed."""
    match = re.fullmatch(r"slurm:(.+):(\d{1,5})(?:-(\d{1,5}))?", server)
    if match is None:
        raise ValueError(f"must be {SLURM_FORM}")
    first = int(match[2])
    ports = range(first, int(match[3] or first) + 1)
    if not ports or not 0 < first <= ports[-1] < 65536:
        raise ValueError(f"{match[2]} to {match[3]} is not a range of ports" if match[3] else f"{first} is not a port")
    urls = [f"http://{node}:{port}" for node in itertools.islice(nodes(match[1]), MAX_SERVERS + 1) for port in ports]
    if len(urls) > MAX_SERVERS:
        raise ValueError(f"more than {MAX_SERVERS} servers")
    return urls


def nodes(expression: str) -> Iterator[str]:
    """The hosts of Slurm's notation (SLURM_JOB_NODELIST): `a[01-03,7]-x[1-2],b`. Raises ValueError for other text."""
    # Commas inside of brackets do not separate hosts.
    for host in re.split(r",(?![^\[]*\])", expression):
        parts = re.split(r"\[([^\[\]]*)\]", host)
        if not re.fullmatch(r"[A-Za-z0-9.-]*", "".join(parts[::2])) or not host:
            raise ValueError(f"{host!r} is not a node: must be {SLURM_FORM}")
        choices = [[part] if index % 2 == 0 else _numbers(part) for index, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None:
            raise ValueError(f"[{text}] is not a list of numbers: must be {SLURM_FORM}")
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if not 0 < count <= MAX_SERVERS:
            raise ValueError(f"[{text}]: {first} to {last} is not a range of 1 to {MAX_SERVERS} nodes")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
