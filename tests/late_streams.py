"""A stand-in for a GPU whose streams run late: real numbers on a CPU, so that a wrong order gives wrong numbers.

A LateTensor says that it is on `cuda:0`. What is done to it is only queued on the thread's current stream, and runs
when somebody waits for that stream, as late as the program allows: copies to and from pinned memory that do not block
read and write their host memory then, too. Until an operator has run, its result holds NaN, or -1. A stream that
nobody waits for does not move, so two tests, one that waits for each of two streams first, show both orders.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

from torchtitan.distributed import device

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# What the host asks for, so that it waits.
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}


class Stream:
    """A queue of work. Runs what it is waited for, in order."""

    device = CUDA

    def __init__(self, *_: Any, **__: Any):
        self._work: deque[Callable[[], object]] = deque()
        self._queued = self._ran = 0

    def queue(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._queued += 1

    def run(self, until: int) -> None:
        with _running:
            while self._ran < until:
                work = self._work.popleft()
                self._ran += 1
                work()

    def synchronize(self) -> None:
        self.run(self._queued)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream, event.place = self, self._queued
        return event

    def wait_event(self, event: Event) -> None:
        stream, place = event.stream, event.place
        if stream is not None and stream is not self:
            self.queue(lambda: stream.run(place))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def reached(self, place: int) -> bool:
        return self._ran >= place


class Event:
    """A place in a stream's queue."""

    def __init__(self, *_: Any, **__: Any):
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.stream is None or self.stream.reached(self.place)

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            others_may_wait.wait()
        if self.stream is not None:
            self.stream.run(self.place)


_running = threading.RLock()
_default, _thread = Stream(), threading.local()
_pinned: list[range] = []
others_may_wait = threading.Event()
"""Where it is not set, threads beside the test's do not yet get to wait for an event, as if they were slow"""


def current_stream(*_: Any) -> Stream:
    return getattr(_thread, "stream", _default)


@contextlib.contextmanager
def stream(used: Stream) -> Iterator[None]:
    before, _thread.stream = current_stream(), used
    try:
        yield
    finally:
        _thread.stream = before


class LateTensor(torch.Tensor):
    """held: the numbers, as far as they have been computed."""

    held: torch.Tensor
    device = CUDA  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> LateTensor:
        # To torch it is on the CPU: a CPU build knows no other device.
        tensor: LateTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(op, args, kwargs or {})

    # To torch these would have nothing to do.

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        current_stream().synchronize()
        return self.held.clone()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = [*args, *kwargs.values()]
        assert not kwargs.get("non_blocking"), "a test needs it first"
        if any(str(value) == "cpu" for value in wanted):
            return self.cpu().to(*args, **kwargs)
        return super().to(*(value for value in args if not str(value).startswith("cuda")), **kwargs)


def _dispatch(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    where, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", None)
    to_host = where is not None and torch.device(where).type == "cpu"
    if to_host and pinned:
        result = op(*_held(args), **_held(kwargs))
        pin(result)
        return result
    is_view = any(found.alias_info is not None and not found.alias_info.is_write for found in op._schema.returns)
    if op in READS or (to_host and not kwargs.get("non_blocking")):
        current_stream().synchronize()
        return op(*_held(args), **_held(kwargs))
    if is_view:
        return return_and_correct_aliasing(op, args, kwargs, _late(op(*_held(args), **_held(kwargs))))
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    changed = [named[found.name] for found in op._schema.arguments if found.name in named and _writes(found)]
    if changed:
        work_args, work_kwargs = _as_queued((args, kwargs), changed)
        current_stream().queue(lambda: op(*work_args, **work_kwargs))
        host = [tensor for tensor in _tensors(changed) if not isinstance(tensor, LateTensor)]
        if host and not (named.get("non_blocking") and all(map(is_pinned, host))):
            current_stream().synchronize()
        return changed[0] if op._schema.returns else None
    work_args, work_kwargs = _as_queued((args, kwargs), [])
    outline = op(*tree_map(_blank, work_args), **tree_map(_blank, work_kwargs))
    made = tree_map(_unknown, outline)

    def work() -> None:
        results = op(*work_args, **work_kwargs)
        for target, result in zip(_tensors(made), _tensors(results), strict=True):
            target.copy_(result)

    current_stream().queue(work)
    return made if to_host else _late(made)


class Factories(TorchDispatchMode):
    """Tensors that are made on the device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's compiler takes seconds to import

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = kwargs.get("device")
        if any(isinstance(tensor, LateTensor) for tensor in _tensors((args, kwargs))):
            return _dispatch(op, args, kwargs)
        if where is None or torch.device(where).type != "cuda":
            return op(*args, **kwargs)
        made = op(*args, **{**kwargs, "device": "cpu", "pin_memory": False})
        return LateTensor(made)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, tree)
    return found


def _held(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, LateTensor) else leaf, tree)


def _late(tree: Any) -> Any:
    return tree_map(lambda leaf: LateTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _as_queued(tree: Any, changed: list[Any]) -> Any:
    """The operands as a stream has them: memory of the host that is not pinned is read when the work is queued."""
    kept = {id(tensor) for tensor in _tensors(changed)}

    def as_queued(leaf: Any) -> Any:
        if isinstance(leaf, LateTensor):
            return leaf.held
        if isinstance(leaf, torch.Tensor) and id(leaf) not in kept and not is_pinned(leaf):
            return leaf.clone()
        return leaf

    return tree_map(as_queued, tree)


def _blank(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _unknown(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.full_like(leaf, torch.nan if leaf.is_floating_point() else (-1 if leaf.dtype.is_signed else 77))


def pin(tensor: torch.Tensor) -> None:
    start = tensor.untyped_storage().data_ptr()
    _pinned.append(range(start, start + max(1, tensor.untyped_storage().nbytes())))


def is_pinned(tensor: torch.Tensor) -> bool:
    return any(tensor.data_ptr() in memory for memory in _pinned)


def on_device(values: torch.Tensor) -> torch.Tensor:
    """These numbers on the device; whoever reads them has to wait for the stream."""
    return LateTensor(values.clone())


def run_all() -> None:
    """What torch.cuda.synchronize() does for the stream of the computation."""
    _default.synchronize()


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, the process has a GPU whose streams run late."""
    _pinned.clear()
    others_may_wait.set()

    def register(address: int, length: int, _flags: int) -> int:
        _pinned.append(range(address, address + length))
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _address: 0)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "set_device": lambda *_: None,
        "_lazy_init": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda *_: _default,
        "synchronize": lambda *_: run_all(),
        "cudart": lambda: cudart,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: run_all())
    # Optimizers ask for it; a CUDA build without a driver could not answer.
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: SimpleNamespace(is_capturing=lambda: False))
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    device.device.cache_clear()
    device._background_stream.cache_clear()
