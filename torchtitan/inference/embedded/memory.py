"""Gives the memory of a model's weights back, and takes it again; what was in it is lost."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class WeightMemory:
    """Frees the storages and leaves the tensors: whoever holds them, views included, notices nothing afterwards.

    While it is dropped nobody may read or write the tensors.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        tensors = list(parameters)
        for tensor in tensors:
            if not tensor.untyped_storage().resizable():
                # As it lies in the checkpoint's file it cannot be freed.
                tensor.data = tensor.detach().clone()
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]

    def drop(self) -> None:
        for storage, _ in self._sizes:
            storage.resize_(0)

    def take(self) -> None:
        """Memory as large as before, with anything in it."""
        for storage, size in self._sizes:
            storage.resize_(size)
