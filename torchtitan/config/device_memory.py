"""How the memory of GPUs is used: where engines receive versions, and what a rank asks of its allocators."""

from __future__ import annotations

import re
from importlib import metadata

from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.config.transports import TRANSPORTS

# The first vLLM that is known to take its memory pools without expandable segments.
SEGMENTS_OFF_IN_POOLS = (0, 32)


def stages_on_device(config: JobConfig) -> bool:
    """Whether engines receive versions in the memory of their GPU. Workers that share a version, and agents that write
    files, receive them in host memory."""
    sync = config.weight_sync
    alone = config.inference.spec.stages_on_device and config.inference.engine.tensor_parallel_size == 1
    return (
        alone and config.inference.engine.route != "agent" and TRANSPORTS[sync.transport].on_device and trains_on_gpu()
    )


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
    colocated, settings = config.is_colocated, list[str]()
    # Packs of changing lengths then leave less between blocks. Engines open such memory of another process slowly and
    # not everywhere (pytorch/pytorch#130890), and the sleep of an older vLLM in this process cannot give it back.
    if _vllm_switches_segments_off() if colocated else config.weight_sync.transport != "ipc":
        settings.append("expandable_segments:True")
    # Pinned blocks of more than 1 MiB then have the size that was asked for, not the next power of two, and go back to
    # the system when they are freed. FSDP2's offload and vLLM's sleep of level 1 take new ones all the time.
    if config.training.enable_cpu_offload is not True and not (colocated and config.inference.sleep_level == 1):
        settings.append("pinned_max_cached_size_mb:1")
    return ",".join(settings)
