"""An actor's staging memory: where the senders' bytes are received, and the tensors that they make up.

It is memory of its own, which holds each rank's slot as it is. A parameter may then lie in several pieces; an engine's
loader narrows it to its worker's part and copies that, so nothing needs to be assembled first, and any other operation
gets an ordinary tensor, assembled for it. Or it is a second set of the engine's tensors (EngineSets): a slot then lies
in pieces, and the engine exchanges the sets instead of copying.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from torchtitan.distributed.boxes import Box
from torchtitan.distributed.pieces import PiecedTensor, within
from torchtitan.utils.dtypes import DTYPES
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ShardEntry
from torchtitan.weight_sync.memory.manifest import BucketKey, ChecksumTable, Layout
from torchtitan.weight_sync.memory.manifest import WeightsRefused as WeightsRefused
from torchtitan.weight_sync.wire.runtime import ProtocolError

Area = memoryview | torch.Tensor
"""Bytes: in host memory, or a one-dimensional uint8 tensor on a device"""


NamedTensors = Mapping[str, torch.Tensor]


class SetsOfTensors(NamedTuple):
    """Two sets of an engine's tensors by name, each a mapping that stays the same object as long as its memory."""

    idle: NamedTensors
    """Nothing computes with it, and its values do not matter"""
    live: NamedTensors


class EngineSets(Protocol):
    """An engine in host memory that computes with one set of tensors while versions are received into the other one."""

    @property
    def outlines(self) -> NamedTensors:
        """A set's shapes, strides and types as meta tensors, also while there is no memory."""

    def sets(self) -> SetsOfTensors | None:
        """Return both sets; None while the engine has given its memory back. Any thread may call it. They change places
        only while the engine's function that takes weights runs, see StagedTensors.exchange()."""


@dataclass(frozen=True)
class ExpectedChecksums:
    """What is needed to verify an engine's own tensors against a version after it is applied; see
    inference/serving/weight_digest.py.

    checksum_tables: by sender rank, the checksums of its buckets. still_staged: returns whether staging memory still
    holds this version.
    """

    layout: Layout
    checksum_tables: Mapping[int, ChecksumTable]
    still_staged: Callable[[], bool]


@dataclass
class StagedVersion:
    """A whole, verified version. The tensors live in staging memory, which changes after apply returns: copy them, or
    exchange the engine's sets of tensors if they are one of them (StagedTensors.received_in).

    tensors: parameter name -> full tensor in the inference dtype. Tied parameters appear once, under their first name.
    apply_on_workers: if the actor's workers hold the tensors, has every worker apply its part and returns when all
    have; see group.py. proof: set if the whole version is in this process.
    """

    epoch: str
    version: int
    digest: str
    tensors: Mapping[str, torch.Tensor]
    apply_on_workers: Callable[[], None] | None = None
    proof: ExpectedChecksums | None = None


class StagedTensors(Mapping[str, torch.Tensor]):
    """Parameter name -> its tensor, in the order of the layout. A parameter in one piece is a view of staging memory;
    one in several pieces is assembled anew at each access, which to_copy() avoids.

    pieces: name -> (the parameter's entry, and for each piece the part that it is and its memory). received_in: the
    engine's set of tensors that they are, if they are one.
    """

    def __init__(
        self,
        pieces: Mapping[str, tuple[ParameterEntry, list[tuple[Box, torch.Tensor]]]],
        received_in: NamedTensors | None = None,
    ):
        self._pieces, self.received_in = pieces, received_in
        self._exchanging = threading.Lock()
        self._withdrawn = False

    def offered(self) -> StagedTensors:
        """Return the same tensors, for one call of the engine's function that takes weights."""
        return StagedTensors(self._pieces, self.received_in)

    def exchange(self, function: Callable[[], None]) -> None:
        """Call the function by which the engine computes with this set from now on. Raises WeightsRefused if it is too
        late, and another version may be received into the set."""
        with self._exchanging:
            self.check_offered()
            function()

    def check_offered(self) -> None:
        """Raise WeightsRefused if the call is over that they were offered for: what has been copied since may be of
        another version."""
        if self._withdrawn:
            raise WeightsRefused("it comes too late: its memory takes another version")

    def withdraw(self) -> None:
        """The call is over: exchange() does nothing any more."""
        with self._exchanging:
            self._withdrawn = True

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.to_copy(name)
        return tensor.assembled() if isinstance(tensor, PiecedTensor) else tensor

    def to_copy(self, name: str) -> torch.Tensor:
        """Return a tensor for code that narrows it and copies the result; it is not assembled (PiecedTensor)."""
        entry, pieces = self._pieces[name]
        if not pieces:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return pieces[0][1] if len(pieces) == 1 else PiecedTensor(_whole(entry), pieces)

    def outlines(self) -> dict[str, torch.Tensor]:
        """Return the shapes and dtypes as meta tensors."""
        return {
            name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            for name, (entry, _) in self._pieces.items()
        }


def to_copy(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors by name, for code that narrows and copies them."""
    for name in tensors:
        yield name, tensors.to_copy(name) if isinstance(tensors, StagedTensors) else tensors[name]


class Staging:
    """Memory for one incoming version of one layout, on the device `where`. memory: existing memory to use for all of
    the layout's slots (see Layout.slot_starts). engine_set: an engine's tensors to use; see why_apart()."""

    def __init__(
        self,
        layout: Layout,
        where: str = "cpu",
        memory: mmap.mmap | None = None,
        engine_set: NamedTensors | None = None,
    ):
        self.layout, self.engine_set = layout, engine_set
        self.held: dict[BucketKey, int] = {}
        """Bucket -> serial of the snapshot of which this memory holds it, verified"""
        self.memory: list[list[Area]] = []
        """The pieces of each rank's slot, in order: memoryviews on the host, one-dimensional uint8 tensors elsewhere"""
        if engine_set is None:
            self.memory, parameters = _memory_apart(layout, where, memory)
        else:
            self.memory, parameters = _memory_of(layout, engine_set)
        self.tensors = StagedTensors(parameters, engine_set)
        self._ends = [list(itertools.accumulate(map(len, areas))) for areas in self.memory]

    def pieces(self, key: BucketKey) -> list[Area]:
        """Return the memory of bucket (rank, number), in order; a single piece unless it is an engine's set."""
        (rank, _), (start, end) = key, self.layout.bucket_range(*key)
        ends, pieces = self._ends[rank], list[Area]()
        for index in range(bisect.bisect_right(ends, start), len(ends)):
            area = self.memory[rank][index]
            begin = ends[index] - len(area)
            if begin >= end:
                break
            pieces.append(area[max(0, start - begin) : end - begin])
        return pieces

    def host_pieces(self, key: BucketKey) -> list[memoryview]:
        """Return the same as pieces(), which are in host memory."""
        pieces: list[memoryview] = []
        for piece in self.pieces(key):
            assert isinstance(piece, memoryview)
            pieces.append(piece)
        return pieces

    def bucket(self, key: BucketKey) -> Area:
        """Return the bytes of a bucket, which are one piece. Raises ProtocolError if they are several."""
        pieces = self.pieces(key)
        if len(pieces) != 1:
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} lies in {len(pieces)} pieces of the engine's memory")
        return pieces[0]


def why_apart(layout: Layout, outlines: NamedTensors, min_piece_bytes: int) -> str:
    """Return why versions of this layout cannot be received into an engine's set of tensors, as a clause; empty if they
    can. The bytes that are sent have to be those that are computed with, in pieces of at least `min_piece_bytes` on
    average. outlines: see EngineSets."""
    for entry in layout.parameters:
        tensor = outlines.get(entry.name)
        if tensor is None or tuple(tensor.shape) != entry.shape:
            return f"the engine has no tensor like {entry.name}"
        if tensor.dtype != DTYPES[entry.dtype]:
            return f"{entry.dtype} is sent, and the engine computes in {tensor.dtype}"
    for rank in layout.ranks:
        for shard in rank:
            entry = layout.parameters[shard.parameter]
            if not _part(outlines, entry, shard).is_contiguous():
                return f"a rank sends other parts of {entry.name} than rows"
    mean = layout.total_bytes // max(1, sum(map(len, layout.ranks)))
    return f"the pieces that are sent have {mean} bytes on average" if mean < min_piece_bytes else ""


PiecesOfParameters = dict[str, tuple[ParameterEntry, list[tuple[Box, torch.Tensor]]]]


def _memory_apart(layout: Layout, where: str, memory: mmap.mmap | None) -> tuple[list[list[Area]], PiecesOfParameters]:
    """Return the memory of each slot, one piece, and the pieces of all parameters in it."""
    starts, slots = layout.slot_starts(), list[list[Area]]()
    if where == "cpu" and memory is None:
        memory = _new_memory(starts[-1])
    area = torch.empty(starts[-1], dtype=torch.uint8, device=where) if memory is None else memoryview(memory)
    tensor = area if isinstance(area, torch.Tensor) else torch.frombuffer(area, dtype=torch.uint8)
    parameters: PiecesOfParameters = {entry.name: (entry, []) for entry in layout.parameters}
    for start, rank in zip(starts, layout.ranks, strict=False):
        slots.append([area[start : start + rank.slot_bytes]])
        slot = tensor[start : start + rank.slot_bytes]
        for shard in rank:
            entry, held = parameters[layout.parameters.names[shard.parameter]]
            data = slot[shard.byte_offset : shard.byte_end].view(DTYPES[entry.dtype])
            held.append((Box(shard.offset, shard.shape), data.view(shard.shape)))
    return slots, parameters


def _memory_of(layout: Layout, engine_set: NamedTensors) -> tuple[list[list[Area]], PiecesOfParameters]:
    """Return the pieces of each slot in an engine's tensors, and its tensors: each is one piece, however many ranks
    send it."""
    slots = list[list[Area]]()
    for rank in layout.ranks:
        parts = (_part(engine_set, layout.parameters[shard.parameter], shard) for shard in rank)
        slots.append([part.view(-1).view(torch.uint8).numpy().data for part in parts])
    parameters: PiecesOfParameters = {}
    for entry in layout.parameters:
        parameters[entry.name] = entry, [(_whole(entry), engine_set[entry.name].detach())]
    return slots, parameters


def _part(engine_set: NamedTensors, entry: ParameterEntry, shard: ShardEntry) -> torch.Tensor:
    """Return the view of a shard in an engine's tensor."""
    return within(engine_set[entry.name].detach(), _whole(entry), Box(shard.offset, shard.shape))


def _whole(entry: ParameterEntry) -> Box:
    return Box((0,) * len(entry.shape), entry.shape)


def _new_memory(size: int) -> mmap.mmap:
    """Allocate host memory. Pages that are never written take none; a map must not be empty."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults for the first version, 5 to 10 % less work for the others
    return memory
