"""Reads Distributed Checkpoint's folders. Their metadata is a pickle, which may only name harmless classes."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchtitan.errors import UserError


class CheckedReader(FileSystemReader):
    """Reads tensors from a checkpoint folder; its metadata, a pickle, may only name classes that are known there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        path = f"{self.path}/.metadata"
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # of a file that this program did not write, anything
            raise UserError(f"{path} cannot be read: {error!r}") from error
        if not isinstance(metadata, dcp_metadata.Metadata) or any(
            not isinstance(entry, dcp_metadata.TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
        ):
            raise UserError(f"{path} does not describe tensors, so it is not a checkpoint of this program")
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
