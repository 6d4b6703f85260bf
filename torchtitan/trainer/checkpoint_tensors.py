"""The tensors of a checkpoint under stable names, and reading them back without trusting a pickle."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchtitan.errors import UserError

# Parts of parameter names that wrappers add (activation checkpointing, torch.compile).
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def collect(
    policy: nn.Module, optimizer: torch.optim.Optimizer, rank: int, reference: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Live tensors by name: model.NAME, optimizer.NAME.KEY, reference.NAME (of a reference policy that changes) and
    random.RANK.DEVICE; sharing memory with the run's.

    Frozen parameters are not in here: they come from model.hf_assets_path again. Nor are hyperparameters: a resumed run
    takes them from its configuration.
    """
    state: dict[str, torch.Tensor] = {}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"optimizer.{name}.{key}"] = value
    # The only buffers are those that a model cannot do without.
    state |= {f"model.{name}": buffer for name, buffer in policy.named_buffers()}
    for name, tensor in [] if reference is None else [*reference.named_parameters(), *reference.named_buffers()]:
        state[f"reference.{name}"] = tensor.detach()
    state[f"random.{rank}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def stage(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory, which the run does not write to; a sharded tensor stays sharded."""
    return {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        for name, tensor in state.items()
    }


def materialize_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state, so that it can be loaded into: a step with rate 0 and zero gradients."""
    if optimizer.state:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


class CheckedReader(FileSystemReader):
    """Reads tensors from a checkpoint folder; its metadata, a pickle, may only name classes that are known there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        path = f"{self.path}/.metadata"
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(metadata, dcp_metadata.Metadata) or any(
            not isinstance(entry, dcp_metadata.TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
        ):
            raise UserError(f"{path} describes something else than tensors: not a checkpoint of this program")
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp_metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _enumeration_member(enumeration: Any, name: Any) -> enum.Enum:
    """What getattr() is for in a pickle by Python 3.11.0 to 3.11.3, which names members of enumerations so."""
    if isinstance(enumeration, enum.EnumMeta) and isinstance(name, str) and name in enumeration.__members__:
        return enumeration[name]
    raise pickle.UnpicklingError(f"{name!r} of {enumeration!r} has no place in a checkpoint's metadata")


class _MetadataUnpickler(pickle.Unpickler):
    _METADATA = {*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING"}
    _OTHERS = {
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module == dcp_metadata.__name__ and name in self._METADATA) or (module, name) in self._OTHERS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enumeration_member
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")
