"""Does vLLM compute with what was sent? Looked at when a step begins, a few milliseconds at a time. Runs inside vLLM.

Many of its layers compute with a packed copy of their weight, which cannot be read. But a linear layer that is given
rows of the identity matrix answers with its weight, and exactly: each of its sums has one product that is not zero.
What that weight should be is made once more, by the layer's own loader from the version in staging memory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from torchtitan.inference.verification import Torn, Verification
from torchtitan.inference.vllm.replaying import METHODS, PACKED, Noted, Notes
from torchtitan.weight_sync.digest import Stopped, differing_parameters
from torchtitan.weight_sync.staging import StagedTensors, StagedVersion

# Of a step; the next one goes on.
LOOK_SECONDS = 5e-3
# Of the identity matrix at a time.
ROWS = 64


class Looker(Verification):
    """See Verification. All of it on the engine's thread. notes: how the model's parameters are loaded."""

    def __init__(self, model: nn.Module, notes: Notes, every: int, torn: Torn):
        super().__init__(every, torn)
        self._model, self._notes = model, notes
        self._look: tuple[StagedVersion, Iterator[str]] | None = None
        self._hook = model.register_forward_pre_hook(lambda *_: self.look())

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def applied(self, staged: StagedVersion) -> None:
        """The model holds this version, as far as is known."""
        self.status.unfinished += self._look is not None
        self._look = None
        if self.due(staged) and self._notes.loads and isinstance(staged.tensors, StagedTensors):
            self._look = staged, differences(self._model, list(self._notes.loads.values()), staged.tensors)

    def look(self) -> None:
        """Go on for a moment."""
        end = time.monotonic() + LOOK_SECONDS
        while self._look is not None and time.monotonic() < end:
            staged, found = self._look
            if self.judge(staged, functools.partial(_go_on, staged, found)):
                self._look = None


def _go_on(staged: StagedVersion, found: Iterator[str]) -> str | None:
    wrong = next(found, None)
    if wrong is None:
        return ""
    if not wrong:
        return None
    # Or has staging memory been given to the next version meanwhile?
    if staged.proof is None or differing_parameters(staged.proof, staged.tensors, {}):
        raise Stopped
    return f"it does not compute with {wrong}"


def differences(model: nn.Module, loads: Iterable[Noted], tensors: StagedTensors) -> Iterator[str]:
    """Names of parameters that are not what they should be; empty ones after other pieces of work."""
    for load in loads:
        if any(name not in tensors for name, _ in load.calls):
            continue
        live = getattr(load.layer, load.parameter)
        with live.device:
            wanted = materialize_meta_tensor(load.empty).fill_(torch.nan)
        for name, arguments in load.calls:
            load.loader(wanted, tensors.to_copy(name), **arguments)
            yield ""
        said = ", ".join(name for name, _ in load.calls)
        if live.shape == wanted.shape:
            yield "" if _same(live, wanted) else said
        # A tied head has the embedding's parameter, and perhaps a packed copy of its own.
        for layer in model.modules():
            looked_up = type(layer) is VocabParallelEmbedding and PACKED not in layer.__dict__
            multiplies = type(getattr(layer, "quant_method", None)) in METHODS and not looked_up
            if multiplies and layer._parameters.get(load.parameter) is live:
                yield from ("" if same else said for same in _answers(layer, wanted))


def _answers(layer: Any, wanted: torch.Tensor) -> Iterator[bool]:
    """Whether the layer answers with rows of its weight."""
    for columns in torch.arange(wanted.shape[1], device=wanted.device).split(ROWS):
        units = wanted.new_zeros(len(columns), wanted.shape[1])
        units[torch.arange(len(columns)), columns] = 1
        yield _same(layer.quant_method.apply(layer, units), wanted[:, columns].T)


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all are equal, but for those that products round to zero. What no loader has filled, or does not multiply
    to zero, cannot be told."""
    if torch.equal(found, wanted):
        return True
    near = (found - wanted).abs() < torch.finfo(wanted.dtype).tiny
    return bool(near.all() or not wanted.isfinite().all())
