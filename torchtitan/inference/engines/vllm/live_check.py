"""Whether an engine computes with the version that it has just taken: looked at between its steps. No vLLM here.

What an engine's forward is, is not called where a graph replays it; a worker's own call for a step always is. A look
takes a few milliseconds of each step until it is over. On a device nothing waits for it: its comparisons are queued
behind the step before, and their results are read once they have arrived.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchtitan.distributed import device
from torchtitan.distributed.device import Fence
from torchtitan.distributed.offload import begin_host_copy
from torchtitan.inference.serving.weight_digest import CheckStopped, differing_parameters
from torchtitan.inference.serving.weight_verification import OnMismatch, Verification, Verified
from torchtitan.weight_sync.memory.staging import StagedTensors, StagedVersion

# Of a step; the next one goes on.
CHECK_SECONDS = 5e-3
# Of the identity matrix at a time: a device is given few launches, a processor short pieces of work.
ROWS, ROWS_ON_DEVICE = 64, 512


class Comparison(NamedTuple):
    """same: a bool [] on the engine's device, whether a part of these parameters is what was sent; None where a piece
    of work was done that compares nothing yet."""

    parameters: str
    same: torch.Tensor | None


def answers(multiply: Callable[[torch.Tensor], torch.Tensor], wanted: torch.Tensor) -> Iterator[torch.Tensor]:
    """Whether a linear layer answers rows of the identity matrix with its weight: for a part of them at a time, a bool
    [] on the device of `wanted`, the weight [out, in] that it should have. Nothing waits for a device."""
    rows = ROWS if wanted.device.type == "cpu" else ROWS_ON_DEVICE
    for start in range(0, wanted.shape[1], rows):
        columns = wanted[:, start : start + rows]
        units = wanted.new_zeros(columns.shape[1], wanted.shape[1])
        units.diagonal(start).fill_(1)
        yield same(multiply(units), columns.T)


def same(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Whether all are equal, a bool [], but for those that products round to zero. What no loader has filled, or does
    not multiply to zero, cannot be told."""
    if wanted.device.type == "cpu" and torch.equal(found, wanted):
        return torch.tensor(True)
    near = (found == wanted) | ((found - wanted).abs() < torch.finfo(wanted.dtype).tiny)
    return near.all() | ~wanted.isfinite().all()


class LiveWeightChecker(Verification):
    """See Verification. At most one look a version.

    compare: makes the comparisons of a version, a piece of work each. where: the engine's device. report: called with
    the state after each look, on the engine's thread.
    """

    def __init__(
        self,
        every: int,
        on_mismatch: OnMismatch,
        compare: Callable[[StagedTensors], Iterator[Comparison] | None],
        where: torch.device,
        report: Callable[[Verified], None],
    ):
        super().__init__(every, on_mismatch)
        self._compare, self._where, self._report = compare, where, report
        self._look: _Look | None = None

    def replacing(self) -> None:
        """The model's weights change from here on, perhaps to half of a version: a look that has not compared all of
        them is over. What has been queued on a device compares them as they were."""
        if self._look is not None and not self._look.waits:
            self._go_on(self._look, _give_up)

    def applied(self, staged: StagedVersion) -> None:
        """The model holds this version, as far as is known."""
        look = self._look
        # Results that were on their way have arrived, as the new version's copies are done.
        if look is not None and not (look.waits and self._go_on(look, look.go_on)):
            self._go_on(look, _give_up)
        if self.due(staged) and isinstance(staged.tensors, StagedTensors):
            comparisons = self._compare(staged.tensors)
            if comparisons is not None:
                self._look = _Look(staged, comparisons, self._where)

    def check_some(self) -> None:
        """Go on for a moment. Costs nothing where there is nothing to look at."""
        look = self._look
        if look is None:
            return
        end = time.monotonic() + CHECK_SECONDS
        while time.monotonic() < end:
            if self._go_on(look, look.go_on) or look.waits:
                return

    def _go_on(self, look: _Look, check: Callable[[], str | None]) -> bool:
        """Whether the look is over with this piece of work."""
        if not self.judge(look.staged, check):
            return False
        self._look = None
        self._report(self.status)
        return True


def _give_up() -> str:
    raise CheckStopped


class _Look:
    """A look at one version."""

    def __init__(self, staged: StagedVersion, comparisons: Iterator[Comparison], where: torch.device):
        self.staged = staged
        self._comparisons, self._where = comparisons, where
        self._compares = False
        """Whether anything has been compared"""
        self._differ: dict[str, torch.Tensor] = {}
        """Parameters -> whether they differ, a bool [] on the device"""
        self._arriving: tuple[Fence, torch.Tensor] | None = None

    @property
    def waits(self) -> bool:
        """Whether all is queued, and its results have not arrived yet."""
        return self._arriving is not None

    def go_on(self) -> str | None:
        """A piece of work; see Verification.judge."""
        try:
            comparison = next(self._comparisons, None)
        except torch.OutOfMemoryError as error:
            raise CheckStopped(f"the engine's device has no memory left to look at its weights: {error}") from error
        if comparison is None:
            if not self._compares:
                raise CheckStopped("nothing that the engine holds could be compared with it")
            return self._read()
        parameters, same = comparison
        if same is None:
            return None
        self._compares = True
        if self._where.type == "cpu":
            return None if bool(same) else self._wrong(parameters)
        known = self._differ.get(parameters)
        self._differ[parameters] = ~same if known is None else known.logical_or_(~same)
        return None

    def _read(self) -> str | None:
        if not self._differ:
            return ""
        if self._arriving is None:
            differ = begin_host_copy(torch.stack(list(self._differ.values())), {}, "")
            self._arriving = device.fence(self._where), differ
        fence, differ = self._arriving
        if not fence.done():
            return None
        wrong = [parameters for parameters, differs in zip(self._differ, differ.tolist(), strict=True) if differs]
        return self._wrong(wrong[0]) if wrong else ""

    def _wrong(self, parameters: str) -> str:
        # Or has staging memory been given to the next version meanwhile?
        if self.staged.proof is None or differing_parameters(self.staged.proof, self.staged.tensors, {}):
            raise CheckStopped
        return f"it does not compute with {parameters}"


def look_before_steps(worker_wrapper: type, checker_of: Callable[[Any], LiveWeightChecker | None]) -> None:
    """Have every step that this class executes (execute_model) begin with a moment of the look at its weights, if there
    is one. checker_of(wrapper): what looks there."""
    execute: Callable[..., Any] = worker_wrapper.execute_model  # type: ignore[attr-defined]

    @functools.wraps(execute)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        checker = checker_of(self)
        if checker is not None:
            with torch.no_grad():
                checker.check_some()
        return execute(self, *args, **kwargs)

    worker_wrapper.execute_model = execute_model  # type: ignore[attr-defined]
