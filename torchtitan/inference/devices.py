"""Which GPUs the engines that a run starts get: those that its own ranks on this machine leave, or the same ones where
the engines sleep while the ranks train. No torch here."""

from __future__ import annotations

import os

from torchtitan.config.derived import shares_devices
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.utils.gpus import VARIABLE, count_gpus


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(number) for number in range(count_gpus())]


def engine_devices(config: JobConfig, number: int) -> dict[str, str]:
    """What goes into the environment of started actor `number` (from 0); nothing for engines that need no GPU.

    Raises:
        UserError: the ranks leave too few.
    """
    devices = visible_devices()
    if config.inference.backend == "embedded" or not devices:
        return {}
    on_cpu = os.environ.get("TORCHTITAN_DEVICE") == "cpu"
    ranks = 0 if on_cpu or shares_devices(config) else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = config.inference.tensor_parallel_size
    if config.inference.backend == "vllm" and config.weight_sync.route == "engine":
        size += 1  # for the agent: NCCL puts no two ranks of a group on one GPU
    first = ranks + number * size
    if first + size > len(devices):
        actors = config.inference.num_actors
        raise UserError(
            f"{ranks} ranks and {actors} engines on {size} GPUs each need {ranks + actors * size} GPUs, and there are "
            f"{len(devices)} ({VARIABLE}): lower NGPU, inference.num_actors or inference.tensor_parallel_size"
        )
    return {VARIABLE: ",".join(devices[first : first + size])}
