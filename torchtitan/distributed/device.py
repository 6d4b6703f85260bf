"""This rank's device and process group (cpu with gloo, or cuda with nccl). All device differences are handled here."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import numpy
import psutil
import torch
import torch.distributed as dist

from torchtitan.config.gpu_defaults import device_problem
from torchtitan.config.job_config import Comm
from torchtitan.errors import ConfigError, UserError
from torchtitan.utils.addresses import choose_interface
from torchtitan.utils.cards import find_card
from torchtitan.utils.child_process import STORE_VARIABLE
from torchtitan.utils.machine import count_cores, gpus_of_driver, hides_gpus, keep_freed_memory
from torchtitan.utils.ranks import from_torchrun

# Part of what this module says of a rank.
from torchtitan.utils.ranks import local_rank as local_rank
from torchtitan.utils.ranks import local_world_size as local_world_size
from torchtitan.utils.ranks import rank as rank
from torchtitan.utils.ranks import world_size as world_size

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

# A copy within host memory that takes longer than this is considered stuck.
_CPU_WORK_SECONDS = 600.0
# A call of NCCL that waits for the peer (connecting does) fails after so many seconds; torch's default is 30 minutes.
# Only communicators of the weight sync wait this way. torch reads it once, at the first communicator of the process.
NCCL_CALL_SECONDS = os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", "30")


@functools.cache
def device() -> torch.device:
    """This rank's device, decided once: CUDA if available, unless TORCHTITAN_DEVICE=cpu.

    Raises ConfigError if torch cannot use the GPU that is there, UserError if this rank has no GPU of its own.
    """
    if problem := device_problem():
        raise ConfigError([problem])
    wanted = os.environ.get("TORCHTITAN_DEVICE", "")
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # Device files alone prove nothing: they are also visible to a job that was given none of the machine's GPUs.
        if wanted == "cuda" or (gpus_of_driver() and not hides_gpus()):
            raise ConfigError([_why_no_cuda()])
        return torch.device("cpu")
    if local_rank() >= torch.cuda.device_count():
        raise UserError(f"local rank {local_rank()} has no GPU: this machine shows {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank())


def _why_no_cuda() -> str:
    """Explain why torch cannot use the GPU. Training on the CPU instead would be slow for no visible reason."""
    what = "this machine shows an NVIDIA GPU" if gpus_of_driver() else "TORCHTITAN_DEVICE=cuda asks for a GPU"
    if torch.version.cuda is None:
        reason = "is a CPU build"
        remedy = "install a CUDA build (TORCH_BACKEND=auto scripts/setup_env.sh)"
    else:
        reason = f"(CUDA {torch.version.cuda}) cannot use it, most often because the driver is older than that CUDA"
        remedy = "install a build for this driver (TORCH_BACKEND=auto scripts/setup_env.sh), or update the driver"
    return f"{what}, and torch {torch.__version__} {reason}: {remedy}, or set TORCHTITAN_DEVICE=cpu to train on the CPU"


def backend() -> str:
    """Backends of the process group. With CUDA, gloo is included for CPU tensors (bytes, offloaded parameters)."""
    return "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"


def set_allocators(settings: str) -> None:
    """On a GPU, set up torch's allocators (config.device_memory.allocator_settings) before anything is allocated; what
    PYTORCH_ALLOC_CONF says wins."""
    set_already = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if device().type == "cuda" and settings and not set_already:
        torch._C._accelerator_setAllocatorSettings(settings)


def init_process_group(comm: Comm) -> str:
    """Join the other ranks; with one rank there is no group and nothing happens.

    Returns the address at which this rank is reached by those of other machines; empty if there are none.

    Runs a first collective, so that a missing rank shows here. The deadline is comm.init_timeout_seconds until
    `set_timeouts`. Raises UserError if the ranks do not find each other in time.
    """
    if device().type == "cuda":
        torch.cuda.set_device(device())
    if world_size() == 1 or dist.is_initialized():
        return ""
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(["MASTER_ADDR is not in the environment: torchrun (run_grpo.sh) starts several ranks"])
    address = ""
    if local_world_size() < world_size():
        address = choose_interface(os.environ["MASTER_ADDR"])
    if local_world_size() == world_size() and "lo" in psutil.net_if_addrs():
        # All ranks are on this machine, so nothing needs to listen on external interfaces.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # While torch waits for the others no handler of Python's runs, and nothing is there yet to be closed.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        dist.init_process_group(backend(), timeout=timeout, store=_store(timeout), rank=rank(), world_size=world_size())
        dist.all_reduce(torch.ones(1, device=device()))
    except (RuntimeError, ValueError) as error:
        if _restarts():
            raise  # the launcher may retry
        raise UserError(
            f"rank {rank()} of {world_size()}: the ranks did not come together within {comm.init_timeout_seconds:g} s: "
            f"{error}{f' (this rank is at {address})' if address else ''}"
        ) from error
    finally:
        signal.signal(signal.SIGINT, handler)
    return address


def _restarts() -> int:
    """How often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _store(timeout: timedelta) -> Store:
    """The store in which ranks find each other's addresses. torchrun keeps one store over all restarts, so without a
    prefix per start a rank would find the address of a dead one."""
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = rank() == 0 and not held_by_torchrun
    address, port = os.environ["MASTER_ADDR"], from_torchrun("MASTER_PORT")
    # Our launcher has opened the socket already.
    descriptor = os.environ.get(STORE_VARIABLE) if leads else None
    if descriptor is not None:
        os.set_inheritable(int(descriptor), False)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world_size(), leads, timeout, wait_for_workers=False,
        master_listen_fd=None if descriptor is None else int(descriptor),
    )  # fmt: skip
    return dist.PrefixStore(f"start-{_restarts()}", store)  # type: ignore[attr-defined]


def ensure_process_group() -> None:
    """Make a group of this process alone if there is none; FSDP2 needs one for mixed precision or offload."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend(), store=store, rank=0, world_size=1)


def set_timeouts(seconds: float, groups: Iterable[ProcessGroup] = ()) -> None:
    """Set the deadline of every later collective in the default group and in `groups`.

    Called after the first step, because compilation and the first connections take longer than any later collective.
    """
    if dist.is_initialized():
        for group in (dist.group.WORLD, *groups):
            # torch has no public name for this; torchtitan calls the same function.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def shutdown() -> None:
    """Leave the group without waiting for other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_threads(threads: int, beside: int) -> int:
    """Set torch's CPU threads in this process; 0 means an equal share of this machine's cores among its ranks and
    `beside` other processes. Returns their number.

    If the CPU is the device, the process also keeps freed memory from here on.
    """
    chosen = threads or max(1, count_cores() // (local_world_size() + beside))
    torch.set_num_threads(chosen)
    if device().type == "cpu":
        keep_freed_memory()
    return chosen


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch alike on every rank; optionally allow only deterministic algorithms."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def synchronize(where: torch.device | None = None) -> None:
    """Wait until a device, by default this rank's, has finished all queued work, whatever the stream."""
    if (where or device()).type == "cuda":
        torch.cuda.synchronize(where)


class Fence(Protocol):
    """The point at which work on a side stream is done."""

    def done(self) -> bool:
        """Whether it has been reached."""

    def wait(self) -> None:
        """Block this thread until it is reached."""

    def hold(self) -> None:
        """Make later work of the compute stream wait for it; only on the CPU does this block the thread."""


class SideStream(Protocol):
    """A queue of device work beside the compute stream."""

    def run(self, work: Callable[[], None]) -> Fence:
        """Queue `work` behind everything queued on the compute stream so far."""


class _CpuFence:
    def __init__(self, work: Future[None]):
        self._work = work

    def done(self) -> bool:
        return self._work.done() and self._work.exception() is None

    def wait(self) -> None:
        _, late = futures_wait([self._work], _CPU_WORK_SECONDS)
        if late:
            raise RuntimeError(f"work beside the computation did not end within {_CPU_WORK_SECONDS:g} s")
        if error := self._work.exception():
            raise RuntimeError("work beside the computation has failed") from error

    # A CPU has no queue that could wait for the fence, so this thread, which computes, has to wait.
    hold = wait


class _CpuStream:
    """A thread whose copies run beside the calling thread's computation."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "side-stream")

    def run(self, work: Callable[[], None]) -> Fence:
        return _CpuFence(self._thread.submit(work))


class _CudaFence:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _CudaStream:
    def __init__(self, where: torch.device):
        # Its few short kernels (casts) have priority, because the next optimizer step waits for them.
        self._stream = torch.cuda.Stream(where, priority=-1)

    def run(self, work: Callable[[], None]) -> Fence:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
            return _fence_here()


def _fence_here() -> Fence:
    # A waiting thread sleeps instead of spinning.
    event = torch.cuda.Event(blocking=True)
    event.record()
    return _CudaFence(event)


_NOTHING = Future[None]()
_NOTHING.set_result(None)
REACHED: Fence = _CpuFence(_NOTHING)
"""A fence that is always reached, because no work was queued"""


def fence(where: torch.device) -> Fence:
    """The point at which what this thread has queued on `where` so far is done. On the CPU it is done already."""
    return _fence_here() if where.type == "cuda" else REACHED


def use(where: torch.device) -> None:
    """Call this first in every thread that uses `where`: otherwise the thread's first access creates another context of
    about 0.5 GB on the first GPU."""
    if where.type == "cuda":
        torch.cuda.set_device(where)


def side_stream(where: torch.device) -> SideStream:
    """Make a separate stream on `where`; on the CPU one thread serves the whole process."""
    return _CudaStream(where) if where.type == "cuda" else _cpu_stream()


@functools.cache
def _cpu_stream() -> _CpuStream:
    return _CpuStream()


@functools.cache
def _background_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(torch.device("cuda", index), priority=0)


def in_background(where: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside the block, the calling thread's device work does not queue behind the compute stream's."""
    if where.type == "cuda":
        assert where.index is not None
        return torch.cuda.stream(_background_stream(where.index))
    return contextlib.nullcontext()


def finish_background(where: torch.device) -> None:
    """Block this thread until its work from `in_background` is done."""
    if where.type == "cuda":
        torch.cuda.current_stream(where).synchronize()


def finish_compute(where: torch.device) -> None:
    """Block this thread until the work queued on the compute stream so far is done."""
    if where.type == "cuda":
        torch.cuda.default_stream(where).synchronize()


def queued_copy(tensor: torch.Tensor, where: torch.device | str) -> torch.Tensor:
    """A host tensor on `where`. The copy to a GPU is queued behind its other work, and the caller does not wait for it:
    it is made from pinned memory, which torch keeps until the copy is done."""
    if torch.device(where).type != "cuda":
        return tensor.to(where)
    return tensor.pin_memory().to(where, non_blocking=True)


def pin_host_memory(address: int, length: int) -> None:
    """Pin mapped host memory, so that the device copies to it at full speed and beside other work. CPU: a no-op.

    Raises UserError if the driver refuses.
    """
    if device().type == "cuda":
        result = int(torch.cuda.cudart().cudaHostRegister(address, length, 1))
        if result != 0:
            raise UserError(
                f"cannot pin {length} bytes of shared memory for the weight slots (cudaError {result}): lower "
                "weight_sync.num_slots, or raise the limit on locked memory (ulimit -l)"
            )


def unpin_host_memory(address: int) -> None:
    """Unpin memory before it is freed. CPU: a no-op."""
    if device().type == "cuda":
        result = int(torch.cuda.cudart().cudaHostUnregister(address))
        if result != 0:
            raise RuntimeError(f"cannot unpin the weight slots (cudaError {result})")


def memory_statistics() -> dict[str, float]:
    """Memory of this rank in GiB: resident on the host, and on CUDA the peak since the last call."""
    statistics = {"memory/host_gib": psutil.Process().memory_info().rss / 2**30}
    if device().type == "cuda":
        statistics["memory/device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        statistics["memory/device_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return statistics


def release_cached_memory() -> None:
    """Return memory that this rank has freed to its device, for other processes there."""
    if device().type == "cuda":
        torch.cuda.empty_cache()


def matmul_converts(tensor: torch.Tensor) -> bool:
    """Whether matmul_operand makes an fp32 copy: the CPU has no product of bfloat16 operands that is summed in fp32."""
    return tensor.device.type == "cpu" and tensor.dtype != torch.float32


@functools.cache
def peak_flops() -> float | None:
    """Operations per second of dense bf16 matrix products on this device, from its data sheet; None if not known."""
    if device().type != "cuda":
        return None
    card = find_card(torch.cuda.get_device_name(device()))
    return None if card is None else card.operations


def matmul_operand(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the type that `matmul` takes."""
    return tensor.float() if matmul_converts(tensor) else tensor


def matmul(
    first: torch.Tensor, second: torch.Tensor, out: torch.Tensor | None = None, accumulate: bool = False
) -> torch.Tensor:
    """first [n, k] @ second [k, m], summed and returned in fp32; into (or added to) `out` if given."""
    plain = first.dtype == torch.float32
    if out is not None and accumulate:
        # A separate product would be as large as the sum itself.
        if plain:
            return out.addmm_(first, second)
        return torch.addmm(out, first, second, out_dtype=torch.float32, out=out)
    return torch.mm(first, second, out=out) if plain else torch.mm(first, second, torch.float32, out=out)


def chunk_elements(where: torch.device) -> int:
    """How many elements to process at a time in a chain of small operations: on the CPU they fit its caches; elsewhere
    they justify the launches."""
    return 2**18 if where.type == "cpu" else 2**23
