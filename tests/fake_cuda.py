"""Tensors on `cuda:3` without data and without a GPU: torch's CUDA build with a stub of its driver (fake_cuda.c).

Operators take the branches of a GPU, and return shapes. Whatever would have to wait for the device, because it asks for
a value, raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from torchtitan.distributed import device

VARIABLE = "TORCHTITAN_FAKE_CUDA"
# Of the rank that is played: what is on the first GPU by mistake meets tensors of another one.
LOCAL_RANK = 3
marks = [
    pytest.mark.fake_cuda,
    pytest.mark.skipif(
        not os.environ.get(VARIABLE), reason="needs torch's CUDA build and a stub of its driver: scripts/fake_cuda.sh"
    ),
]


class _Event:
    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, *_: Any) -> None:
        pass

    synchronize = wait = record

    def query(self) -> bool:
        return True


class _Stream:
    stream_id, device_index, device_type, cuda_stream = 0, LOCAL_RANK, 1, 0

    def __init__(self, *_: Any, **__: Any):
        self.device = torch.device("cuda", LOCAL_RANK)

    def wait_event(self, *_: Any) -> None:
        pass

    wait_stream = synchronize = wait_event

    def record_event(self, *_: Any) -> _Event:
        return _Event()


def _with_values(method: Any) -> Any:
    function = getattr(method, "__func__", method)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return type(method)(run) if function is not method else run


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, the process is the local rank LOCAL_RANK of a machine with eight H100s, on which only fake
    tensors can be."""

    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None  # the compiler wants functions that differ

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: LOCAL_RANK,
        "device_count": lambda: 8,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "set_device": nothing(),
        "synchronize": nothing(),
        "_lazy_init": nothing(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", nothing())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    # Meshes compute with their ranks' numbers.
    for name in ("__init__", "_concatenate"):
        made = DeviceMesh.__dict__[name]
        monkeypatch.setattr(DeviceMesh, name, _with_values(made))
    # It would allocate a byte on the device.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", nothing())
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    monkeypatch.setenv("LOCAL_RANK", str(LOCAL_RANK))
    device.device.cache_clear()


def without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same on real tensors, where only fake ones are made otherwise."""
    return _with_values(function)  # type: ignore[no-any-return]


class Insides(TorchDispatchMode):
    """Runs what lies inside of operators of ours, of which fake tensors know nothing but the shapes of the results, and
    holds these shapes against it. Counts copies between host and device for which the host waits."""

    def __init__(self, insides: Mapping[str, Callable[..., Any]]) -> None:
        """insides: name of an operator -> the function that it runs on a GPU."""
        super().__init__()
        self._insides = insides
        self.ran: Counter[str] = Counter()
        """What ran inside, by operator and then by the operators there"""
        self.blocking: Counter[str] = Counter()
        """By the lines that they come from"""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by
        result = op(*args, **kwargs)
        self.note_copy(op, args, kwargs, result)
        inside = self._insides.get(op.overloadpacket.__name__) if op.namespace == "torchtitan" else None
        if inside is not None:
            seen = _Seen(self)
            with seen:
                found = inside(*args, **kwargs)
            self.ran.update(f"{op.overloadpacket.__name__}: {name}" for name in seen.names)
            registered = [(tuple(x.shape), x.dtype, x.device) for x in tree_iter(result)]
            made = [(tuple(x.shape), x.dtype, x.device) for x in tree_iter(found)]
            assert registered == made, f"{op}: registered {registered}, inside {made}"
        return result

    def note_copy(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = op.overloadpacket.__name__
        if name not in ("copy_", "_to_copy"):
            return
        source = args[1] if name == "copy_" else args[0]
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if waits and {source.device.type, result.device.type} == {"cpu", "cuda"}:
            frames = [frame for frame in traceback.extract_stack() if "/torchtitan/" in frame.filename]
            self.blocking[f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "a test"] += 1


class _Seen(TorchDispatchMode):
    def __init__(self, insides: Insides) -> None:
        super().__init__()
        self._insides, self.names = insides, list[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.names.append(op.overloadpacket.__name__)
        self._insides.note_copy(op, args, kwargs or {}, result)
        return result
