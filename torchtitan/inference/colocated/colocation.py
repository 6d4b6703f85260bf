"""Opens a rank's replica as the configuration says."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchtitan.config.derived import is_colocated
from torchtitan.config.engine_args import option_name
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.errors import UserError
from torchtitan.inference.colocated.offload import OptimizerOffload
from torchtitan.inference.colocated.replica import Replica
from torchtitan.inference.engine_memory import GIB, STEP_TOKENS, EngineMemory, colocated_memory
from torchtitan.inference.vllm.engine import EXACT_HEAD

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_replica(config: JobConfig, optimizer: torch.optim.Optimizer, run_dir: Path) -> Iterator[Replica | None]:
    """This rank's part of the colocated engines (collective); None where actors are processes of their own.

    Raises:
        UserError: there is no vLLM here, it refuses its options, or its KV cache does not fit beside the trainer.
    """
    if not is_colocated(config):
        yield None
        return
    from torchtitan.inference.colocated.vllm_engine import VllmEngine, own_sockets

    inference, rank = config.inference, device.rank()
    on_gpu = device.device().type == "cuda"
    device.ensure_process_group()
    total = torch.cuda.get_device_properties(device.device()).total_memory if on_gpu else None
    memory = colocated_memory(config, device.world_size(), total)
    if memory is None or memory.kv_cache < memory.kv_one_sequence:
        raise UserError(
            "the colocated engine does not fit beside the trainer: no room for one sequence of training.seq_len = "
            f"{config.training.seq_len} in its KV cache. Raise inference.sleep_level or inference.tensor_parallel_size,"
            " or set inference.offload_optimizer (--dry-run shows the memory plan)"
        )
    with own_sockets():
        engine = VllmEngine(
            engine_arguments(config, memory, total),
            log_file=run_dir / "logs" / f"vllm-{rank}.log",
            sleep_level=inference.sleep_level,
            keep_kv=inference.in_flight_kv == "keep",
        )
        offload = OptimizerOffload(optimizer) if inference.offload_optimizer and on_gpu else None
        if inference.offload_optimizer and not on_gpu:
            logger.warning("inference.offload_optimizer does nothing on a CPU: the optimizer's state is in host memory")
        replica = Replica(engine, rank, inference.tensor_parallel_size, inference.sleep_level > 0, offload)
        if rank == 0:
            logger.info("vLLM is up beside the trainer, %.2f GiB of KV cache per rank", memory.kv_cache / GIB)
        try:
            yield replica
        finally:
            replica.close()


def engine_arguments(config: JobConfig, memory: EngineMemory, device_bytes: int | None) -> dict[str, Any]:
    """Arguments of vllm.EngineArgs: ours, and over them [inference.engine_args] (false takes one of ours away)."""
    inference = config.inference
    arguments: dict[str, Any] = {
        "model": config.model.hf_assets_path,
        "skip_tokenizer_init": True,
        # The first version comes from the trainer, before the first token.
        "load_format": "dummy",
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": inference.tensor_parallel_size,
        "distributed_timeout_seconds": config.comm.init_timeout_seconds,
        "dtype": inference.dtype,
        # Equal in a tensor-parallel group, whose ranks must draw alike; every sample has a seed of its own besides.
        "seed": config.training.seed % 2**32,
        "max_model_len": config.training.seq_len,
        "max_num_seqs": inference.max_sequences,
        "max_num_batched_tokens": max(STEP_TOKENS, config.training.seq_len),
        "kv_cache_memory_bytes": memory.kv_cache,
        "logprobs_mode": "processed_logprobs",
        # A step that is still under way when the weights change would be counted to the new ones.
        "async_scheduling": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if device_bytes is None:
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = memory.utilization(device_bytes)
        if inference.dtype != "float32":
            arguments["hf_overrides"] = dict(EXACT_HEAD)
        arguments["enable_sleep_mode"] = inference.sleep_level > 0
    for key, value in inference.engine_args.items():
        _set(arguments, option_name(key).replace("-", "_"), value)
    return arguments


def _set(arguments: dict[str, Any], name: str, value: Any) -> None:
    """One option: `no_x = true` is `x = False`, `a.b = 1` is `a = {"b": 1}`."""
    name, _, inner = name.partition(".")
    if inner:
        nested = arguments.setdefault(name, {})
        _set(nested, inner, value)
    elif value is False:
        arguments.pop(name, None)
    elif value is True and name.startswith("no_"):
        arguments[name.removeprefix("no_")] = False
    else:
        arguments[name] = value
