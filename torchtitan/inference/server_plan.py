"""Servers on a node that only serves: how many, on how many GPUs each, and with which of the run's settings."""

from __future__ import annotations

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.agent.command import agent_settings, find_python
from torchtitan.inference.engine_memory import device_bytes_of_driver
from torchtitan.models.model_args import ModelArgs
from torchtitan.models.shape import read_shape

# Of a GPU's memory for weights, at most: the rest is the KV cache's and the engine's work.
WEIGHTS_SHARE = 0.4


def plan_servers(config: JobConfig, gpus: int) -> tuple[int, list[str]]:
    """Servers for a node with `gpus` GPUs.

    Returns:
        (GPUs of each server, options of its agent without host and port).

    Raises:
        UserError: the backend has no servers, is not installed, or the model's heads fit no share of the GPUs.
    """
    inference, args = config.inference, read_shape(config)
    if inference.backend == "embedded" or args is None:
        raise UserError("inference nodes need inference.backend = vllm or sglang, and a model that is there")
    share = tensor_parallel_size(config, args, gpus, device_bytes_of_driver())
    config.inference.tensor_parallel_size = share
    python = find_python(inference.backend, inference.engine_python)
    return share, [*agent_settings(inference.backend, config), "--python", python]


def tensor_parallel_size(config: JobConfig, args: ModelArgs, gpus: int, device_bytes: int | None) -> int:
    """GPUs of one server: inference.tensor_parallel_size where that is above 1; else the fewest that hold the weights
    (as many as may be where the GPUs' memory is not known). Heads and GPUs are shared out evenly.

    Raises:
        UserError: there is no such number.
    """
    wanted = config.inference.tensor_parallel_size
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    even = [
        size
        for size in range(1, gpus + 1)
        if gpus % size == 0 and heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    shape = f"{heads} heads and {kv_heads} key-value heads on {gpus} GPUs a node"
    if wanted > 1:
        if wanted not in even:
            raise UserError(f"inference.tensor_parallel_size = {wanted}: {shape} can be shared by {even} GPUs")
        return wanted
    if device_bytes is None:
        return even[-1]
    weights = args.num_parameters() * (2 if config.inference.dtype == "bfloat16" else 4)
    for size in even:
        if weights / size <= WEIGHTS_SHARE * device_bytes:
            return size
    raise UserError(
        f"the model's {weights / 2**30:.0f} GiB in inference.dtype = {config.inference.dtype} do not fit: {shape} can "
        f"be shared by {even} GPUs of {device_bytes / 2**30:.0f} GiB, of which weights may take {WEIGHTS_SHARE:.0%}"
    )
