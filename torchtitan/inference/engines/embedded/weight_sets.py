"""The memory of an engine's weights: the set that it computes with, and a second one that versions are received into.

Every storage of the first has one of the same size in the second, with tensors of the same strides. To exchange the
sets, every parameter, buffer and joint projection is pointed at its other memory, which takes about a millisecond for a
few hundred tensors. An engine on a CPU reads no weights between two of its steps, so the set that it leaves may be
written to at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from torchtitan.distributed.placement import StackPart
from torchtitan.models.decoder import Decoder
from torchtitan.models.fused_projections import fuse_again, joint_weights, take_apart
from torchtitan.models.lora import in_files
from torchtitan.weight_sync.memory.staging import NamedTensors, SetsOfTensors


class WeightSets:
    """The parameters and buffers of `policy`, which stay the same objects whatever memory they have. See EngineSets."""

    def __init__(self, policy: Decoder):
        self._policy = policy
        self.live: NamedTensors = _by_name(policy)
        """Name in checkpoint files -> the tensor that is computed with; tied weights under all of their names"""
        self.outlines: NamedTensors = {
            name: torch.empty_like(tensor, device="meta") for name, tensor in self.live.items()
        }
        # Listed once, because blocks have no joint projections while the engine scores, and other threads call sets().
        self._places = list(_places(policy))
        self._idle: NamedTensors | None = None
        self._other: list[torch.Tensor] = []
        """The other memory of each place; none without an idle set"""
        self._fused: list[bool] | None = None
        """While the weights are dropped: which projections were fused"""
        self._shapes: list[torch.Size] = []
        self._changing = threading.Lock()

    def sets(self) -> SetsOfTensors | None:
        """See EngineSets. The idle set is allocated by the first call."""
        with self._changing:
            if self._fused is not None:
                return None
            if self._idle is None:
                self._allocate()
            assert self._idle is not None
            return SetsOfTensors(self._idle, self.live)

    def computed_with(self) -> NamedTensors:
        """Return the tensors by name as the modules have them, not as the exchange has noted them. Raises RuntimeError
        if a joint projection has other memory than its parameters."""
        tensors = _by_name(self._policy)
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        for owner, attribute in self._places:
            if attribute != "data" and getattr(owner, attribute).untyped_storage().data_ptr() not in memory:
                raise RuntimeError(f"{type(owner).__name__}.{attribute} has other memory than the parameters it joins")
        return tensors

    def is_idle(self, tensors: NamedTensors) -> bool:
        """Return whether this is the idle set of now."""
        return tensors is self._idle

    @torch.no_grad()
    def exchange(self) -> None:
        """Compute with the idle set from now on. Call it between two steps."""
        with self._changing:
            assert self._idle is not None
            used = [getattr(owner, attribute) for owner, attribute in self._places]
            for (owner, attribute), other in zip(self._places, self._other, strict=True):
                setattr(owner, attribute, other)
            self._other = used
            self.live, self._idle = self._idle, self.live

    def forget_idle(self) -> None:
        """Take other memory for the next version: whoever received into the idle set may still write to it."""
        with self._changing:
            self._idle, self._other = None, []

    def drop(self) -> None:
        """Free both sets. The weights must not be used before take(), nor trusted before a whole version has come."""
        # At once: between two steps another thread could ask for an idle set, which would keep its memory.
        with self._changing:
            self._idle, self._other = None, []
            if self._fused is not None:
                return
            parameters = list(self._policy.parameters())
            self._shapes = [parameter.shape for parameter in parameters]
            # Their storages cannot be shrunk in place: those that were read as numpy arrays refuse that.
            self._fused = take_apart(self._policy)
            self.live, self._places = {}, []
            for parameter in parameters:
                parameter.data = parameter.data.new_empty(0)

    def take(self) -> None:
        """If the weights were dropped, allocate memory as large as before, with anything in it."""
        with self._changing:
            if self._fused is None:
                return
            for parameter, shape in zip(self._policy.parameters(), self._shapes, strict=True):
                parameter.data = parameter.data.new_empty(shape)
            fuse_again(self._policy, self._fused)
            self._fused, self.live = None, _by_name(self._policy)
            self._places = list(_places(self._policy))

    def _allocate(self) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        named = {tensor.untyped_storage().data_ptr() for tensor in self.live.values()}

        def other_memory(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            # By their address: a parameter and the joint projection that it is a part of share theirs.
            address = storage.data_ptr()
            if address not in storages:
                # What is received fills its pages, not this thread: others wait for it.
                storages[address] = torch.UntypedStorage(storage.nbytes()) if address in named else storage.clone()
            made = torch.empty(0, dtype=tensor.dtype)
            return made.set_(storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())

        self._other = [other_memory(getattr(owner, attribute)) for owner, attribute in self._places]
        self._idle = {name: other_memory(tensor) for name, tensor in self.live.items()}


def _by_name(policy: Decoder) -> NamedTensors:
    """Return the tensors by their names in files. They keep their memory when the policy's parameters get another."""
    tensors = {**dict(policy.named_parameters(remove_duplicate=False)), **dict(policy.named_buffers())}
    return {
        name: tensor.stack.detach()[tensor.index] if isinstance(tensor, StackPart) else tensor.detach()
        for name, tensor in in_files(policy, tensors).items()
    }


def _places(policy: Decoder) -> Iterator[tuple[object, str]]:
    """Yield (owner, attribute) of everything that computes with a tensor of weights."""
    for tensor in (*policy.parameters(), *policy.buffers()):
        yield tensor, "data"
    yield from joint_weights(policy)
