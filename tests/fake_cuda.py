"""Tensors on `cuda:0` without data and without a GPU: torch's CUDA build with a stub of its driver (fake_cuda.c).

Operators take the branches of a GPU, and return shapes. Whatever would have to wait for the device, because it asks for
a value, raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan.distributed import device

VARIABLE = "TORCHTITAN_FAKE_CUDA"
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
    stream_id, device_index, device_type, cuda_stream = 0, 0, 1, 0

    def __init__(self, *_: Any, **__: Any):
        self.device = torch.device("cuda", 0)

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
    """Until the test ends, the process has one H100, on which only fake tensors can be."""

    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None  # the compiler wants functions that differ

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
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
    device.device.cache_clear()
