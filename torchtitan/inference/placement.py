"""Which cores and GPUs of this machine each actor that a run starts gets. No torch here.

GPUs are those that the run's own ranks leave, or the same ones where the engines sleep while the ranks train.
"""

from __future__ import annotations

import os

from torchtitan.config.derived import shares_devices
from torchtitan.config.job_config import Inference, JobConfig
from torchtitan.errors import UserError
from torchtitan.utils.machine import CUDA_VARIABLE, count_gpus, hides_gpus, usable_cores


def threads_per_actor(config: Inference) -> int:
    """inference.threads_per_actor, or else an equal share of this process's cores."""
    return config.threads_per_actor or max(1, len(usable_cores()) // max(1, config.num_actors))


def actor_cores(config: Inference, number: int) -> list[int]:
    """The cores of started actor `number` (from 0) under inference.pin_cores: one per thread, from the last core down.

    Raises:
        UserError: there are not that many, or the platform cannot pin. The message is what pin_cores needs.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("needs a platform that can pin processes to cores, such as Linux")
    threads, cores = threads_per_actor(config), usable_cores()
    wanted = threads * config.num_actors
    if wanted > len(cores):
        raise UserError(
            f"needs {wanted} cores (inference.num_actors {config.num_actors} × {threads} threads each), and this job "
            f"may use {len(cores)}: lower inference.threads_per_actor or inference.num_actors"
        )
    end = len(cores) - number * threads
    return cores[end - threads : end]


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    named = os.environ.get(CUDA_VARIABLE)
    if hides_gpus():
        return []
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
    first = ranks + number * size
    if first + size > len(devices):
        actors = config.inference.num_actors
        raise UserError(
            f"{ranks} ranks and {actors} engines on {size} GPUs each need {ranks + actors * size} GPUs, and there are "
            f"{len(devices)} ({CUDA_VARIABLE}): lower NGPU, inference.num_actors or inference.tensor_parallel_size"
        )
    return {CUDA_VARIABLE: ",".join(devices[first : first + size])}
