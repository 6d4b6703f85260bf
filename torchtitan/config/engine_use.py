"""What a run does with engines: whether it has any, where they run, what they share with the trainer, and how their
weights are verified."""

from __future__ import annotations

import re
from importlib import metadata

from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.config.transports import TRANSPORTS

# The first vLLM that is known to take its memory pools without expandable segments.
SEGMENTS_OFF_IN_POOLS = (0, 32)


def has_engines(config: JobConfig) -> bool:
    """Whether anything is sampled: not where recorded batches are replayed, and for demonstrations only to evaluate."""
    return not config.rollout.replay and (config.job.stage != "sft" or config.sft.sample)


def started_actors(config: JobConfig) -> int:
    """How many actors the run starts as processes of their own."""
    inference = config.inference
    has_actors = has_engines(config) and not config.inference.spec.in_ranks
    return inference.num_actors if has_actors and not inference.servers else 0


def is_colocated(config: JobConfig) -> bool:
    """Whether the engines run inside the trainer's ranks."""
    return config.inference.spec.in_ranks and has_engines(config)


def shares_devices(config: JobConfig) -> bool:
    """Whether the servers that the run starts have the ranks' own GPUs, in turns with the trainer."""
    spec, inference = config.inference.spec, config.inference
    takes_turns = spec.on_gpus and not spec.in_ranks and inference.sleep_level > 0
    return takes_turns and not inference.servers and has_engines(config)


def stages_on_device(config: JobConfig) -> bool:
    """Whether engines receive versions in the memory of their GPU. Workers that share a version, and agents that write
    files, receive them in host memory."""
    sync = config.weight_sync
    alone = config.inference.spec.stages_on_device and config.inference.engine.tensor_parallel_size == 1
    return (
        alone and config.inference.engine.route != "agent" and TRANSPORTS[sync.transport].on_device and trains_on_gpu()
    )


def sleeps_between_batches(config: JobConfig) -> bool:
    """Whether actors that are processes of their own sleep while the trainer trains."""
    return has_engines(config) and not config.inference.spec.in_ranks and config.inference.sleep_level > 0


def blocking_timeout_s(config: JobConfig) -> float:
    """In blocking mode, how long a step waits for live actors to have its version. The other ranks wait in a collective
    meanwhile: the last quarter of its time is for the next command, and actors that sleep need some to wake up."""
    wakes_s = config.inference.sleep_timeout_s if sleeps_between_batches(config) else 0.0
    return 0.75 * config.comm.train_timeout_seconds - wakes_s


def verification(config: JobConfig) -> str:
    """What weight_sync.verify means for this run: digest, probe or off."""
    chosen = config.weight_sync.verify
    if chosen != "auto":
        return chosen
    # Actors with adapters have no tensor that is what was sent.
    return "digest" if config.inference.spec.digests and config.lora.rank == 0 else "probe"


def _vllm_switches_segments_off() -> bool:
    """Whether the vLLM of this environment takes its pools without expandable segments, and switches them on again
    behind that: sleep cannot give them back (pytorch/pytorch#147851; vllm/device_allocator/cumem.py)."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= SEGMENTS_OFF_IN_POOLS


def allocator_settings(config: JobConfig) -> str:
    """What a rank asks of torch's allocators, in the form of PYTORCH_ALLOC_CONF."""
    colocated, settings = is_colocated(config), list[str]()
    # Packs of changing lengths then leave less between blocks. Engines open such memory of another process slowly and
    # not everywhere (pytorch/pytorch#130890), and the sleep of an older vLLM in this process cannot give it back.
    if _vllm_switches_segments_off() if colocated else config.weight_sync.transport != "ipc":
        settings.append("expandable_segments:True")
    # Pinned blocks of more than 1 MiB then have the size that was asked for, not the next power of two, and go back to
    # the system when they are freed. FSDP2's offload and vLLM's sleep of level 1 take new ones all the time.
    if config.training.enable_cpu_offload is not True and not (colocated and config.inference.sleep_level == 1):
        settings.append("pinned_max_cached_size_mb:1")
    return ",".join(settings)
