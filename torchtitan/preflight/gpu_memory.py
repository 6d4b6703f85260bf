"""Whether what a trainer rank needs of its GPU fits there, by the plan. No torch here.

The plan has been held against traced steps, and against no GPU yet, so a run is refused only where it is far off.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.placement import colocated_memory, device_bytes_of_driver, unfit_engine
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import estimate_memory, on_device, parts_on_host
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.preflight.check import Check
from torchtitan.preflight.memory import size_text
from torchtitan.utils.ranks import local_world_size

# Shares of the GPU's memory: above the first a run is warned of, above the second it is refused.
CLOSE, TOO_MUCH = 0.9, 1.15
# Sizes of micro-batches that are tried are multiples of this.
STEP_TOKENS = 256
MICRO_BATCH, MODEL = "training.tokens_per_micro_batch", "model.hf_assets_path"


def check_gpu_memory(check: Check, args: ModelArgs) -> None:
    """Refuse a run whose ranks cannot fit on this machine's GPUs. A plan, which may be for other ones, only warns."""
    if check.planning:
        return
    try:
        problem = gpu_problem(check.config, args, check.ranks)
    except UserError:  # a teacher's shape; check_stage() reports it
        return
    if problem is not None:
        check.refuse(problem[0], True, problem[1])


def gpu_problem(config: JobConfig, args: ModelArgs, ranks: int) -> tuple[str, str] | None:
    """Return (key, text) of what to refuse because a rank, or the engine beside it, cannot fit on its GPU; None if it
    may, or is not on one."""
    room = _room()
    if room is None:
        return None
    needed, kept = _needed(config, args, ranks)
    if kept > room:
        text = f"parameters, gradients and the optimizer's state alone take {size_text(kept)} of each rank's GPU"
        return MODEL, f"{text}, which has {size_text(room)}: {_smaller_states(config)}"
    if needed > TOO_MUCH * room:
        return MICRO_BATCH, _describe(config, args, ranks, needed, room)
    if config.is_colocated or config.shares_devices:
        # The ranks would say the same, once they have read the model.
        text = unfit_engine(config, colocated_memory(config, ranks, room))
        return (config.inference.engine_key("tensor_parallel_size"), text) if text else None
    return None


def tight_gpu(config: JobConfig, ranks: int) -> str:
    """Return what to say of a run that may not fit on the ranks' GPUs; else an empty string."""
    room = _room()
    if room is None:
        return ""
    args = read_shape(config)
    if problem := gpu_problem(config, args, ranks):
        return f"a run does not start on this machine: {problem[1]}"
    needed, _ = _needed(config, args, ranks)
    return _describe(config, args, ranks, needed, room) if needed > CLOSE * room else ""


def largest_micro_batch(config: JobConfig, args: ModelArgs, ranks: int, room: float) -> int | None:
    """Return the most tokens of a micro-batch, up to the configured ones, with which a rank needs at most `room` bytes
    of its GPU; None if not even one sequence fits."""
    least = -(-config.training.seq_len // STEP_TOKENS)
    low, high = least - 1, config.training.tokens_per_micro_batch // STEP_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        tried = copy.copy(config)
        tried.training = replace(config.training, tokens_per_micro_batch=middle * STEP_TOKENS)
        if _needed(tried, args, ranks)[0] <= room:
            low = middle
        else:
            high = middle - 1
    return low * STEP_TOKENS if low >= least else None


def _room() -> int | None:
    """Bytes of the GPU that a rank has, at best where those of this machine are unlike; None if it is not on one."""
    return device_bytes_of_driver(local_world_size()) if trains_on_gpu() else None


def _needed(config: JobConfig, args: ModelArgs, ranks: int) -> tuple[int, int]:
    """(bytes of a rank's GPU during training, those of its parameters, gradients and optimizer)."""
    memory = estimate_memory(config, args, ranks)
    states = {"parameters", "gradients", "optimizer"} - parts_on_host(config)
    return on_device(config, memory), sum(getattr(memory, part) for part in states)


def _describe(config: JobConfig, args: ModelArgs, ranks: int, needed: int, room: int) -> str:
    text = f"by the plan a rank needs {size_text(needed)} of its GPU, which has {size_text(room)}: "
    fitting = largest_micro_batch(config, args, ranks, CLOSE * room)
    if fitting is not None:
        return f"{text}{MICRO_BATCH} = {fitting} would fit"
    if config.activation_checkpoint.mode != "full":
        fully = copy.copy(config)
        fully.activation_checkpoint = replace(config.activation_checkpoint, mode="full")
        if fitting := largest_micro_batch(fully, args, ranks, CLOSE * room):
            return f'{text}activation_checkpoint.mode = "full" with {MICRO_BATCH} = {fitting} would fit'
    return f"{text}one sequence of training.seq_len does not fit: {_smaller_states(config)}"


def _smaller_states(config: JobConfig) -> str:
    ways = ["more GPUs (NGPU)"]
    if config.training.enable_cpu_offload is False:
        ways.append('training.enable_cpu_offload = "optimizer"')
    if not config.lora.rank:
        ways.append("lora.rank = 16")
    return f"take {', '.join(ways)} or a smaller model"
