"""What lies in host memory while the device's memory is needed for something else: an optimizer's state."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


def begin_host_copy(tensor: torch.Tensor, held: dict[Key, torch.Tensor], key: Key) -> torch.Tensor:
    """Begin to copy a tensor to host memory, and return the copy; a sharded tensor stays sharded.

    The copy of a tensor on a GPU may be read once the current stream has come so far. Its memory is pinned, and is
    allocated once for each key, as that takes longer than a copy; `held` keeps it.
    """
    if key not in held:
        held[key] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return held[key].copy_(tensor, non_blocking=True)


class OptimizerOffload:
    """Moves an optimizer's state to host memory, and brings it back bit for bit.

    `optimizer.state` holds other tensors then, so what reads it, such as a checkpoint, finds the values where they are.
    The tensors in host memory are allocated once and reused. Step counts, single numbers, stay where they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._on_host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._devices: dict[tuple[torch.Tensor, str], torch.device] = {}
        self._away = False

    def between_steps(self) -> None:
        """From now on, keep the state in host memory except while the optimizer takes a step."""
        self._optimizer.register_step_pre_hook(lambda *_: self.back())
        self._optimizer.register_step_post_hook(lambda *_: self.away())

    def away(self) -> None:
        """Move the state to host memory. A second call does nothing."""
        if self._away:
            return
        for place, values, moment in self._moments():
            self._devices[place] = moment.device
            values[place[1]] = begin_host_copy(moment, self._on_host, place)
        self._wait()
        self._away = True

    def back(self) -> None:
        """Bring the state back."""
        if not self._away:
            return
        for place, values, moment in self._moments():
            # Where a checkpoint has been loaded, it may be another tensor than that of last time.
            self._on_host[place] = moment
            values[place[1]] = torch.empty_like(moment, device=self._devices[place]).copy_(moment, non_blocking=True)
        self._wait()
        self._away = False

    def _wait(self) -> None:
        if any(device.type == "cuda" for device in self._devices.values()):
            torch.cuda.current_stream().synchronize()

    def _moments(self) -> Iterator[tuple[tuple[torch.Tensor, str], dict[str, Any], torch.Tensor]]:
        for parameter, values in self._optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    yield (parameter, key), values, value
