"""The device of this rank and its process group: cpu with gloo, or cuda with nccl. All device differences are here."""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy
import psutil
import torch
import torch.distributed as dist

from torchtitan.config.job_config import Comm
from torchtitan.errors import UserError
from torchtitan.tools.cores import usable_cores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@functools.cache
def device() -> torch.device:
    """This rank's device, decided once: CUDA where there is one, unless TORCHTITAN_DEVICE=cpu says otherwise."""
    wanted = os.environ.get("TORCHTITAN_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise UserError(f"TORCHTITAN_DEVICE={wanted!r}: allowed are cpu and cuda")
    if wanted == "cpu" or not torch.cuda.is_available():
        if wanted == "cuda":
            raise UserError("TORCHTITAN_DEVICE=cuda, but torch sees no CUDA device")
        return torch.device("cpu")
    if local_rank() >= torch.cuda.device_count():
        raise UserError(f"local rank {local_rank()} has no GPU: this machine shows {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank())


def backend() -> str:
    """Backends of the process group. With CUDA also gloo, for what lives on the CPU (bytes, offloaded parameters)."""
    return "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"


def rank() -> int:
    """This process's rank, as torchrun set it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's rank on its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of ranks; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(comm: Comm) -> None:
    """Join the other ranks; with one rank there is no group and nothing happens.

    Runs a first collective, so a rank that is missing shows here. Its deadline is comm.init_timeout_seconds, and
    stays that until `set_timeouts`. Raises UserError where the ranks do not find each other in time.
    """
    if device().type == "cuda":
        torch.cuda.set_device(device())
    if world_size() == 1 or dist.is_initialized():
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world_size() and "lo" in dict(_interfaces()):
        # All ranks on this machine: nothing needs to listen on the outside.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(backend(), timeout=timedelta(seconds=comm.init_timeout_seconds))
        dist.all_reduce(torch.ones(1, device=device()))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {rank()} of {world_size()}: the ranks did not come together within comm.init_timeout_seconds = "
            f"{comm.init_timeout_seconds}: {error}"
        ) from error


def ensure_process_group() -> None:
    """A group of this process alone, where there is none: FSDP2 needs one for mixed precision or offload."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend(), store=store, rank=0, world_size=1)


def set_timeouts(seconds: int, groups: Iterable[ProcessGroup] = ()) -> None:
    """Deadline of every collective from now on, in the default group and in `groups`.

    Called once the first step is over: compilation and the first connections take longer than any later collective.
    """
    if dist.is_initialized():
        for group in (dist.group.WORLD, *groups):
            # torch has no public name for this; torchtitan calls the same function.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def shutdown() -> None:
    """Leave the group without waiting for anyone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_threads(threads: int, processes: int) -> int:
    """Set torch's CPU threads in this process; 0 means an equal share of the cores among `processes`. Returns them."""
    chosen = threads or max(1, len(usable_cores()) // max(1, processes))
    torch.set_num_threads(chosen)
    return chosen


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch alike on every rank; on request allow deterministic algorithms only."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def memory_statistics() -> dict[str, float]:
    """Memory of this rank in GiB: resident on the host, and on CUDA the peak since the last call."""
    statistics = {"memory/host_gib": psutil.Process().memory_info().rss / 2**30}
    if device().type == "cuda":
        statistics["memory/device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        statistics["memory/device_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return statistics


def _interfaces() -> list[tuple[str, int]]:
    return [(name, index) for index, name in socket.if_nameindex()]
