"""The optimizer's state in host memory while the engine generates, and back before the next batch is trained on."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


class OptimizerOffload:
    """Moves the bytes and leaves the tensors: the optimizer and checkpoints, which hold them, notice nothing.

    The copies in host memory are made once and used again. Between `away` and `back` the state may not be read.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._away = False

    def away(self) -> None:
        """Copy the state to host memory and free it on the device. Twice is once."""
        if self._away:
            return
        self._copies = {id(state): (state, self._copy_of(state)) for state in self._states()}
        for state, copy in self._copies.values():
            copy.copy_(state, non_blocking=True)
        self._wait()
        for state, _ in self._copies.values():
            state.untyped_storage().resize_(0)
        self._away = True

    def back(self) -> None:
        """Bring the state back, bit for bit."""
        if not self._away:
            return
        for state, copy in self._copies.values():
            state.untyped_storage().resize_(state.numel() * state.element_size())
            state.copy_(copy, non_blocking=True)
        self._wait()
        self._away = False

    def _copy_of(self, state: torch.Tensor) -> torch.Tensor:
        """Host memory for it, the same as last time where it is the same tensor."""
        if id(state) in self._copies:
            return self._copies[id(state)][1]
        return torch.empty_like(state, device="cpu", pin_memory=state.device.type == "cuda")

    def _wait(self) -> None:
        if any(state.device.type == "cuda" for state, _ in self._copies.values()):
            torch.cuda.current_stream().synchronize()

    def _states(self) -> list[torch.Tensor]:
        """This rank's part of every moment; the step counts, single numbers, stay where they are."""
        states: list[torch.Tensor] = []
        for values in self._optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    local = value._local_tensor if isinstance(value, DTensor) else value
                    # A view shares its storage with others; no optimizer makes one, and it could not be freed.
                    if local.untyped_storage().nbytes() == local.numel() * local.element_size() > 0:
                        states.append(local)
        return states
