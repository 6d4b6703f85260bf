"""Muon for matrices that any layout of ranks shares: each is orthogonalised once, by one rank.

Every rank has the momentum of its part of a matrix. A step sends these parts to the matrix's owner and the results
back, one exchange each for a bucket of matrices, in the type that they are orthogonalised in; so ranks compute the same
update as one rank would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.distributed.device import device
from torchtitan.distributed.placement import is_distributed, local_region, local_tensor, region_at
from torchtitan.models.shape.costs import MUON_BUCKET_BYTES

# Momentum of Muon, as its author has it (Jordan et al. 2024).
MOMENTUM = 0.95
# What matrices are sent and orthogonalised in.
PRECISION = torch.bfloat16


class Matrix(NamedTuple):
    """These rows and columns of a parameter, or of one entry of a stack. The rows are in runs, one below the other."""

    parameter: nn.Parameter
    entry: tuple[int, ...]
    rows: tuple[range, ...]
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.rows)), len(self.columns)

    @property
    def work(self) -> int:
        """Proportional to the operations of `orthogonalized`: a step multiplies twice with m columns of length n, and
        once with m of length m, where m is the smaller size."""
        small, large = sorted(self.shape)
        return small * small * (2 * large + small)

    def within(self, region: Sequence[slice], run: int) -> tuple[tuple[slice, slice], tuple[int | slice, ...]] | None:
        """The part of it that this run of rows has in a region of the parameter, and the index of that in a tensor of
        the region; None if empty."""
        *stack, rows, columns = region
        if not all(piece.start <= entry < piece.stop for entry, piece in zip(self.entry, stack, strict=True)):
            return None
        part, index = zip(_overlap(self.rows[run], rows), _overlap(self.columns, columns), strict=True)
        if any(piece.start == piece.stop for piece in part):
            return None
        above = sum(map(len, self.rows[:run]))
        part = slice(above + part[0].start, above + part[0].stop), part[1]
        return part, (*(entry - piece.start for entry, piece in zip(self.entry, stack, strict=True)), *index)


def _runs(rows: Sequence[int]) -> tuple[range, ...]:
    """Ascending rows as runs without gaps; a range is one."""
    if isinstance(rows, range):
        return (rows,)
    runs: list[range] = []
    for row in rows:
        if runs and row == runs[-1].stop:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return tuple(runs)


def _overlap(places: range, held: slice) -> tuple[slice, slice]:
    """Which of the places lie within `held`, and where they are there."""

    def places_before(edge: int) -> int:
        return min(len(places), max(0, -((places.start - edge) // places.step)))

    first, last = places_before(held.start), places_before(held.stop)
    begin = places.start + first * places.step - held.start
    return slice(first, last), slice(begin, begin + (last - first) * places.step, places.step)


class Move(NamedTuple):
    """A part of a matrix, of one run of its rows, that goes from one rank to another, or stays on its rank."""

    source: int
    target: int
    matrix: Matrix
    run: int
    part: tuple[slice, slice]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.part
        return rows.stop - rows.start, columns.stop - columns.start


class Bucket(NamedTuple):
    """Matrices that are orthogonalised at a time; only the moves that this rank has a part in."""

    owned: list[Matrix]
    to_owners: list[Move]
    from_owners: list[Move]
    local: bool
    """No matrix is shared, on any rank"""


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024). Its updates have the size of AdamW's, so that one rate and one decay suit both (Liu et
    al. 2025, Moonlight, section 2.2).

    A step is a collective of all ranks, on each of which the same parameters have gradients.

    parameters: matrices, or stacks of them [..., rows, columns], with the rows and columns of each matrix therein that
    is orthogonalised by itself.
    """

    def __init__(
        self, parameters: Mapping[nn.Parameter, Sequence[tuple[Sequence[int], range]]], lr: float, weight_decay: float
    ):
        super().__init__(list(parameters), {"lr": lr, "weight_decay": weight_decay})
        self._parts = parameters
        self._buckets: list[Bucket] = []
        self._planned: list[nn.Parameter] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
            local_tensor(self.state[parameter]["momentum_buffer"]).lerp_(local_tensor(parameter.grad), 1 - MOMENTUM)
            local_tensor(parameter).mul_(1 - group["lr"] * group["weight_decay"])
        if len(trained) != len(self._planned) or any(a is not b for a, b in zip(trained, self._planned, strict=True)):
            self._buckets, self._planned = plan(trained, self._parts), trained
        for bucket in self._buckets:
            self._update(bucket, group["lr"])

    def _update(self, bucket: Bucket, rate: float) -> None:
        shapes: dict[tuple[int, int], list[Matrix]] = {}
        for matrix in bucket.owned:
            shapes.setdefault(matrix.shape, []).append(matrix)
        gathered: dict[int, torch.Tensor] = {}
        stacks = [
            torch.empty((len(alike), *shape), dtype=PRECISION, device=device()) for shape, alike in shapes.items()
        ]
        for alike, stack in zip(shapes.values(), stacks, strict=True):
            gathered |= {id(matrix): tensor for matrix, tensor in zip(alike, stack, strict=True)}
        for move, values in exchange(bucket.to_owners, bucket.local, self._direction):
            gathered[id(move.matrix)][move.part] = values
        for stack in stacks:
            stack.copy_(orthogonalized(stack))
        for move, values in exchange(
            bucket.from_owners, bucket.local, lambda move: gathered[id(move.matrix)][move.part]
        ):
            weights = _held(move, move.matrix.parameter)
            weights.add_(values.to(weights.device), alpha=-0.2 * math.sqrt(max(move.matrix.shape)) * rate)

    def _direction(self, move: Move) -> torch.Tensor:
        """This rank's part of what is orthogonalised: the gradient and its momentum (Nesterov's form)."""
        parameter = move.matrix.parameter
        momentum = _held(move, self.state[parameter]["momentum_buffer"])
        return _held(move, parameter.grad).lerp(momentum, MOMENTUM).to(device(), PRECISION)


def _held(move: Move, tensor: Any) -> torch.Tensor:
    """What this rank has of the moved run, as a view of a tensor that is laid out like the parameter."""
    found = move.matrix.within(local_region(tensor), move.run)
    assert found is not None
    return local_tensor(tensor)[found[1]]


def plan(
    parameters: Sequence[nn.Parameter], parts: Mapping[nn.Parameter, Sequence[tuple[Sequence[int], range]]]
) -> list[Bucket]:
    """Divide the matrices into buckets of similar ones, and the work of each bucket among the ranks: the same plan on
    all ranks. A rank that has all of a matrix is its owner, so that experts stay where they are."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    regions = {parameter: _regions(parameter, ranks) for parameter in parameters}
    matrices = [
        Matrix(parameter, entry, _runs(rows), columns)
        for parameter in parameters
        for entry in itertools.product(*map(range, parameter.shape[:-2]))
        for rows, columns in parts[parameter]
    ]
    matrices.sort(key=lambda matrix: -matrix.work)
    buckets: list[Bucket] = []
    free = 0
    for matrix in matrices:
        size = math.prod(matrix.shape) * PRECISION.itemsize
        if size > free:
            buckets.append(Bucket([], [], [], True))
            free, loads = max(size, MUON_BUCKET_BYTES * ranks), [0] * ranks
        free -= size
        holders: dict[tuple[int, ...], tuple[int, tuple[slice, slice], list[int]]] = {}
        for (at, region), run in itertools.product(regions[matrix.parameter], range(len(matrix.rows))):
            if (found := matrix.within(region, run)) is not None:
                rows, columns = part = found[0]
                held = rows.start, rows.stop, columns.start, columns.stop
                holders.setdefault(held, (run, part, []))[2].append(at)
        complete: list[int] = []
        if len(holders) == len(matrix.rows):  # no run of it is divided
            complete = sorted(set(range(ranks)).intersection(*(holding for _, _, holding in holders.values())))
        owner = min(complete or range(ranks), key=loads.__getitem__)
        loads[owner] += matrix.work
        gathered: list[Move] = []
        scattered: list[Move] = []
        for run, part, holding in holders.values():
            source = owner if owner in holding else holding[owner % len(holding)]
            gathered.append(Move(source, owner, matrix, run, part))
            scattered += [Move(owner, at, matrix, run, part) for at in holding]
        bucket = buckets[-1]
        if owner == rank:
            bucket.owned.append(matrix)
        bucket.to_owners.extend(move for move in gathered if rank in move[:2])
        bucket.from_owners.extend(move for move in scattered if rank in move[:2])
        if any(move.source != move.target for move in gathered + scattered):
            buckets[-1] = bucket._replace(local=False)
    return buckets


def _regions(parameter: nn.Parameter, ranks: int) -> list[tuple[int, tuple[slice, ...]]]:
    """What each rank holds of a parameter."""
    if not is_distributed(parameter):
        return [(rank, local_region(parameter)) for rank in range(ranks)]
    mesh = parameter.device_mesh
    return [
        (int(mesh.mesh[at]), region_at(parameter.shape, mesh.shape, at, parameter.placements))
        for at in itertools.product(*map(range, mesh.shape))
    ]


def exchange(
    moves: Sequence[Move], local: bool, take: Callable[[Move], torch.Tensor]
) -> Iterator[tuple[Move, torch.Tensor]]:
    """Send what `take` gives for the moves from this rank, and return what the moves to it bring. A collective of all
    ranks, unless all moves are local."""
    if local:
        return ((move, take(move)) for move in moves)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    leaving = sorted((move for move in moves if move.source == rank), key=attrgetter("target"))
    coming = sorted((move for move in moves if move.target == rank), key=attrgetter("source"))
    sent_sizes, received_sizes = [0] * ranks, [0] * ranks
    for move in leaving:
        sent_sizes[move.target] += math.prod(move.shape)
    for move in coming:
        received_sizes[move.source] += math.prod(move.shape)
    sent = torch.cat([torch.empty(0, dtype=PRECISION, device=device()), *(take(move).flatten() for move in leaving)])
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes)
    values = received.split([math.prod(move.shape) for move in coming])
    return ((move, flat.view(move.shape)) for move, flat in zip(coming, values, strict=True))


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of every matrix [..., rows, columns] near 1, in `PRECISION`, by five steps of Newton
    and Schulz with the coefficients of Muon's author."""
    x = matrices.to(PRECISION).reshape(-1, *matrices.shape[-2:])
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).reshape(matrices.shape)
