"""The device of this rank and its process group, with the addresses that ranks talk over: cpu with gloo, or cuda with
nccl. All device differences are here."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import random
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import numpy
import psutil
import torch
import torch.distributed as dist

from torchtitan.config.derived import world_size as world_size  # as device.rank() and its like
from torchtitan.config.job_config import Comm
from torchtitan.errors import ConfigError, UserError
from torchtitan.utils.machine import gpus_of_driver, hides_gpus, is_loopback, keep_freed_memory, usable_cores

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

# Dense bf16 operations per second by words of the device's name, the longer ones first. The makers' data sheets have
# them, beside figures "with sparsity" that are twice as large.
_PEAKS = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H20", 148e12),
    ("B200", 2250e12),
    ("GB200", 2500e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
)
# A copy within the host's memory that takes longer than this will not end.
_CPU_WORK_SECONDS = 600.0
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


@functools.cache
def device() -> torch.device:
    """This rank's device, decided once: CUDA where there is one, unless TORCHTITAN_DEVICE=cpu says otherwise.

    Raises ConfigError where there is a GPU that torch cannot use, UserError where this rank has none of its own.
    """
    wanted = os.environ.get("TORCHTITAN_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise UserError(f"TORCHTITAN_DEVICE={wanted!r}: allowed are cpu and cuda")
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # Device files alone prove nothing: a job without a GPU on a machine that has some sees them too.
        if wanted == "cuda" or (gpus_of_driver() and not hides_gpus()):
            raise ConfigError([_why_no_cuda()])
        return torch.device("cpu")
    if local_rank() >= torch.cuda.device_count():
        raise UserError(f"local rank {local_rank()} has no GPU: this machine shows {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank())


def _why_no_cuda() -> str:
    """Training on the CPU beside a GPU that torch cannot use would be slow for a reason that is never said."""
    what = "this machine shows an NVIDIA GPU" if gpus_of_driver() else "TORCHTITAN_DEVICE=cuda asks for a GPU"
    if torch.version.cuda is None:
        reason = "is a CPU build"
        remedy = "install a CUDA build (TORCH_BACKEND=auto scripts/setup_env.sh)"
    else:
        reason = f"(CUDA {torch.version.cuda}) cannot use it, most often because the driver is older than that CUDA"
        remedy = "install a build for this driver (TORCH_BACKEND=auto scripts/setup_env.sh), or update the driver"
    return f"{what}, and torch {torch.__version__} {reason}: {remedy}, or set TORCHTITAN_DEVICE=cpu to train on the CPU"


def backend() -> str:
    """Backends of the process group. With CUDA also gloo, for what lives on the CPU (bytes, offloaded parameters)."""
    return "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"


def rank() -> int:
    """This process's rank, as torchrun set it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's rank on its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of ranks on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def init_process_group(comm: Comm) -> str:
    """Join the other ranks; with one rank there is no group and nothing happens.

    Returns the address at which this rank meets those of other machines; empty where there are none.

    Runs a first collective, so a rank that is missing shows here. Its deadline is comm.init_timeout_seconds, and
    stays that until `set_timeouts`. Raises UserError where the ranks do not find each other in time.
    """
    if device().type == "cuda":
        torch.cuda.set_device(device())
    if world_size() == 1 or dist.is_initialized():
        return ""
    address = ""
    if local_world_size() < world_size():
        address = choose_interface(comm.interface, os.environ["MASTER_ADDR"])
    if local_world_size() == world_size() and "lo" in psutil.net_if_addrs():
        # All ranks are on this machine: nothing needs to listen on the outside.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        dist.init_process_group(backend(), timeout=timeout, store=_store(timeout), rank=rank(), world_size=world_size())
        dist.all_reduce(torch.ones(1, device=device()))
    except (RuntimeError, ValueError) as error:
        if _restarts():
            raise  # the launcher may try once more
        raise UserError(
            f"rank {rank()} of {world_size()}: the ranks did not come together within comm.init_timeout_seconds = "
            f"{comm.init_timeout_seconds}: {error}{f' (this rank is at {address})' if address else ''}"
        ) from error
    return address


def choose_interface(wanted: str, leader: str) -> str:
    """Have gloo use an interface, and NCCL too where `wanted` (comm.interface) names it; for ranks on several machines.

    Without a name it is GLOO_SOCKET_IFNAME's, or the one by which this machine reaches `leader` (rank 0's MASTER_ADDR).
    NCCL is left its own choice then: it looks for InfiniBand first.

    Returns:
        The address and its interface, such as "10.0.0.8 (ib0)".

    Raises:
        UserError: there is no such interface here, it has no address, or other machines cannot reach it.
    """
    here = _addresses()
    name = wanted or os.environ.get(GLOO_VARIABLE, "")
    listed = ", ".join(f"{other} {address}" for other, address in here.items())
    if name and name not in here:
        raise UserError(
            f"comm.interface = {name!r}: {socket.gethostname()} has no such interface with an address, only: {listed}"
        )
    if not name:
        own = address_towards(leader)
        name = next((other for other, address in here.items() if address == own), "lo")
        if ipaddress.ip_address(here.get(name, own)).is_loopback and not is_loopback(leader):
            raise UserError(
                f"rank 0's address {leader!r} is {own} on {socket.gethostname()} itself (see /etc/hosts), where other "
                f"machines reach nothing: set comm.interface to one of: {listed}"
            )
    os.environ[GLOO_VARIABLE] = name
    if wanted:
        os.environ[NCCL_VARIABLE] = f"={wanted}"  # that one exactly, not all that begin so
    return f"{here.get(name, leader)} ({name})"


def _addresses() -> Mapping[str, str]:
    """The address of each interface that is up: IPv4 where it has one."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [one for one in addresses if one.family in families and "%" not in one.address]
        for one in sorted(usable, key=lambda one: families.index(one.family))[:1]:
            found[name] = one.address
    return found


def address_towards(leader: str) -> str:
    """The address that packets to `leader` would leave with. Nothing is sent. Raises UserError."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(leader, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"rank 0's address {leader!r} cannot be found from {socket.gethostname()}: {error}") from error


def _restarts() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _store(timeout: timedelta) -> Store:
    """Where ranks find each other's addresses. torchrun keeps one store over all restarts, so without a prefix of its
    own a rank would find the address of one that is dead."""
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = rank() == 0 and not held_by_torchrun
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world_size(), leads, timeout, wait_for_workers=False
    )
    return dist.PrefixStore(f"start-{_restarts()}", store)  # type: ignore[attr-defined]


def ensure_process_group() -> None:
    """A group of this process alone, where there is none: FSDP2 needs one for mixed precision or offload."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend(), store=store, rank=0, world_size=1)


def set_timeouts(seconds: float, groups: Iterable[ProcessGroup] = ()) -> None:
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


def set_threads(threads: int, beside: int) -> int:
    """Set torch's CPU threads in this process; 0 means an equal share of this machine's cores among its ranks and
    `beside` more processes. Returns them.

    Where the CPU is the device, its memory is kept from here on as well.
    """
    chosen = threads or max(1, len(usable_cores()) // (local_world_size() + beside))
    torch.set_num_threads(chosen)
    if device().type == "cpu":
        keep_freed_memory()
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


class Fence(Protocol):
    """The point at which work on a side stream is done."""

    def done(self) -> bool:
        """Whether it has been reached."""

    def wait(self) -> None:
        """Block this thread until it is reached."""

    def hold(self) -> None:
        """What the compute stream is given from now on waits for it; this thread does only on the CPU."""


class SideStream(Protocol):
    """A queue of device work beside the compute stream."""

    def run(self, work: Callable[[], None]) -> Fence:
        """Queue `work` behind everything that the compute stream has been given so far."""


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

    # A CPU has no queue of work that could wait for the fence: this thread, which computes, has to.
    hold = wait


class _CpuStream:
    """A thread: its copies run beside the calling thread's computation."""

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
        # Its few short kernels (casts) go first: the next optimizer step waits for them.
        self._stream = torch.cuda.Stream(where, priority=-1)

    def run(self, work: Callable[[], None]) -> Fence:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
            # A waiting thread sleeps instead of spinning.
            event = torch.cuda.Event(blocking=True)
            event.record()
        return _CudaFence(event)


_NOTHING = Future[None]()
_NOTHING.set_result(None)
REACHED: Fence = _CpuFence(_NOTHING)
"""Nothing was given yet"""


def use(where: torch.device) -> None:
    """Right at the start of every thread that is to touch `where`: without it the first touch of a thread makes another
    context of about 0.5 GB, on the first GPU."""
    if where.type == "cuda":
        torch.cuda.set_device(where)


def side_stream(where: torch.device) -> SideStream:
    """A stream of its own on `where`; on the CPU one thread for the whole process."""
    return _CudaStream(where) if where.type == "cuda" else _cpu_stream()


@functools.cache
def _cpu_stream() -> _CpuStream:
    return _CpuStream()


@functools.cache
def _background_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(torch.device("cuda", index), priority=0)


def in_background(where: torch.device) -> contextlib.AbstractContextManager[object]:
    """In this block the calling thread's device work does not queue up behind the compute stream's."""
    if where.type == "cuda":
        assert where.index is not None
        return torch.cuda.stream(_background_stream(where.index))
    return contextlib.nullcontext()


def finish_background(where: torch.device) -> None:
    """Block this thread until what it gave `in_background` is done."""
    if where.type == "cuda":
        torch.cuda.current_stream(where).synchronize()


def finish_compute(where: torch.device) -> None:
    """Block this thread until what was given to the compute stream so far is done."""
    if where.type == "cuda":
        torch.cuda.default_stream(where).synchronize()


def pin_host_memory(address: int, length: int) -> None:
    """Pin mapped host memory, so that the device copies to it at full speed and beside other work. CPU: a no-op.

    Raises UserError where the driver refuses.
    """
    if device().type == "cuda":
        result = int(torch.cuda.cudart().cudaHostRegister(address, length, 1))
        if result != 0:
            raise UserError(
                f"cannot pin {length} bytes of shared memory for the weight slots (cudaError {result}): lower "
                "weight_sync.num_slots, or raise the limit on locked memory (ulimit -l)"
            )


def unpin_host_memory(address: int) -> None:
    """The memory is about to go. CPU: a no-op."""
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
    """Give memory that this rank has freed back to its device, for other processes there."""
    if device().type == "cuda":
        torch.cuda.empty_cache()


def matmul_converts(tensor: torch.Tensor) -> bool:
    """Whether matmul_operand makes an fp32 copy: the CPU has no product of bfloat16 operands that is summed in fp32."""
    return tensor.device.type == "cpu" and tensor.dtype != torch.float32


@functools.cache
def peak_flops() -> float | None:
    """Operations per second of this device's dense bf16 matrix products, as its maker says; None where not known."""
    if device().type != "cuda":
        return None
    return _peak_of(torch.cuda.get_device_name(device()))


def _peak_of(name: str) -> float | None:
    if "MIG" in name:
        return None  # a part of a GPU
    return next((peak for known, peak in _PEAKS if re.search(rf"\b{known}\b", name)), None)


def matmul_operand(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as `matmul` takes it."""
    return tensor.float() if matmul_converts(tensor) else tensor


def matmul(
    first: torch.Tensor, second: torch.Tensor, out: torch.Tensor | None = None, accumulate: bool = False
) -> torch.Tensor:
    """first [n, k] @ second [k, m], summed and returned in fp32; into (or added to) `out`, where there is one."""
    plain = first.dtype == torch.float32
    if out is not None and accumulate:
        # A product beside the sum would be as large as the sum.
        if plain:
            return out.addmm_(first, second)
        return torch.addmm(out, first, second, out_dtype=torch.float32, out=out)
    return torch.mm(first, second, out=out) if plain else torch.mm(first, second, torch.float32, out=out)


def chunk_elements(where: torch.device) -> int:
    """Elements for a chain of small operations at a time, beside whose result little is held: on the CPU they fit its
    caches; elsewhere they are worth the launches."""
    return 2**18 if where.type == "cpu" else 2**23
