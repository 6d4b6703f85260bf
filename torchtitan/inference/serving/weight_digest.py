"""Checks whether an engine's own tensors hold a version, by computing the manifest's checksums from them.

Transfers are verified bucket by bucket before the engine sees them. This check finds what goes wrong afterwards: a
parameter that was not copied, was copied into an unused tensor, or has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from torchtitan.distributed.device import in_background
from torchtitan.utils.dtypes import DTYPES
from torchtitan.weight_sync.memory.manifest import Layout, checksum_function
from torchtitan.weight_sync.memory.staging import ExpectedChecksums

# The most names in a message.
MAX_NAMES = 3


class Unverifiable(Exception):
    """The check is impossible with these tensors; the message says why."""


class CheckStopped(Exception):
    """The check was stopped because something else needs the tensors."""


def differing_parameters(
    proof: ExpectedChecksums,
    live: Mapping[str, torch.Tensor],
    staged: Mapping[str, torch.Tensor],
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """Describe which of the engine's tensors differ from the version, for a message; empty if none do.

    live: parameter name -> whole tensor in use; read only. staged: the version's tensors, used only to name the
    parameters in a wrong bucket, and only if staging memory still holds them.

    Raises Unverifiable, or CheckStopped as soon as stop() returns True.
    """
    check_types(proof.layout, live)
    wrong = [
        (rank, bucket)
        for rank, table in proof.checksum_tables.items()
        for bucket, found in enumerate(slot_checksums(proof.layout, rank, live, stop))
        if found != table[bucket]
    ]
    if not wrong:
        return ""
    suspects = list(dict.fromkeys(name for key in wrong for name in _names_in_bucket(proof.layout, *key)))
    names = [name for name in suspects if name in staged and not _equal(live[name], staged[name])]
    if names and proof.still_staged():
        return _listed(names)
    where = ", ".join(f"bucket {bucket} of rank {rank}" for rank, bucket in wrong[:MAX_NAMES])
    return f"{where}, which holds {_listed(suspects)}"


def check_types(layout: Layout, live: Mapping[str, torch.Tensor]) -> None:
    """Raise Unverifiable if the tensors in use cannot hold the version's numbers exactly."""
    for entry in layout.parameters:
        tensor = live.get(entry.name)
        if tensor is None or tuple(tensor.shape) != entry.shape:
            raise Unverifiable(f"the engine has no {entry.name} of shape {list(entry.shape)}")
        if tensor.dtype not in (DTYPES[entry.dtype], torch.float32):
            raise Unverifiable(f"{entry.name} is sent as {entry.dtype} and rounded to {tensor.dtype} by the engine")


def slot_checksums(
    layout: Layout, rank: int, live: Mapping[str, torch.Tensor], stop: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Yield the checksum of every bucket that this rank's slot would have if it were filled from these tensors."""
    parts: list[torch.Tensor] = []
    room = layout.bucket_bytes
    for piece in _pieces(layout, rank, live):
        while len(piece):
            if stop():
                raise CheckStopped
            part, piece = piece[:room], piece[room:]
            parts.append(part)
            room -= len(part)
            if room == 0:
                yield _checksum(layout, parts)
                parts, room = [], layout.bucket_bytes
    if parts:
        yield _checksum(layout, parts)


def _checksum(layout: Layout, parts: list[torch.Tensor]) -> str:
    """Return a bucket's checksum."""
    with in_background(parts[0].device):
        if layout.reads_devices:
            return checksum_function(layout.checksum)(torch.cat(parts))
        return checksum_function(layout.checksum)(torch.cat([part.cpu() for part in parts]).numpy())


def _pieces(layout: Layout, rank: int, live: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a slot's bytes in order, as one-dimensional uint8 tensors."""
    for shard in layout.ranks[rank]:
        entry = layout.parameters[shard.parameter]
        box = tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.shape, strict=True))
        tensor = live[entry.name].detach()[box]
        with in_background(tensor.device):
            yield tensor.to(DTYPES[entry.dtype]).contiguous().view(-1).view(torch.uint8)


def _names_in_bucket(layout: Layout, rank: int, bucket: int) -> list[str]:
    start, end = layout.bucket_range(rank, bucket)
    inside = [shard for shard in layout.ranks[rank] if shard.byte_offset < end and shard.byte_end > start]
    return [layout.parameters.names[shard.parameter] for shard in inside]


def _equal(live: torch.Tensor, staged: torch.Tensor) -> bool:
    """Compare bit by bit: identical NaNs are equal, 0 and -0 are not."""
    with in_background(live.device):
        held, other = (tensor.detach().to(staged.dtype).cpu().contiguous() for tensor in (live, staged))
        return torch.equal(held.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
