"""What vLLM does to load a model is the same each time: it is noted at one load and, where it is simple, done again.

vLLM's layerwise reload has every layer give up its tensors and get others, counts what has come for it, and copies the
result to where it was. Where a layer's own loaders and the packing of its weight are all that happens, they are enough,
and a weight that lies in memory as its layer wants it is packed from there. Runs inside vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

# Names of vLLM 0.32 and 0.33, not all public.
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.platforms import current_platform

from torchtitan.weight_sync.staging import PiecedTensor, StagedTensors

METHODS: tuple[type, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
# Layers whose weight is that of the checkpoint, or several of them one below the other.
LAYERS = (
    ReplicatedLinear,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
# The attribute of vLLM's layers that holds on to the packed weights on a CPU: what computes with them.
PACKED = "cpu_linear"
POSITIONS = {None: 0, "q": 0, "k": 1, "v": 2}


class Noted(NamedTuple):
    """How a parameter of a layer, a module of vLLM's, is loaded. empty: the parameter, without memory; calls: (name in
    checkpoints, what else the loader is told)."""

    layer: Any
    parameter: str
    empty: torch.Tensor
    loader: Callable[..., None]
    calls: list[tuple[str, dict[str, Any]]]


class Notes:
    """How a model's parameters are loaded, as `noting` has seen it."""

    def __init__(self) -> None:
        self.loads: dict[tuple[nn.Module, str], Noted] = {}
        self._names: dict[int, str] = {}
        """By a tensor's id(), right for as long as the tensor is there"""

    def named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, whose names are known to note()."""
        self._names.clear()
        for name, tensor in weights:
            self._names[id(tensor)] = name
            yield name, tensor

    def note(self, layer: nn.Module, info: Any) -> None:
        """vLLM is about to load a layer."""
        for parameter in {parameter for parameter, _ in info.loaded_weights}:
            empty, calls = getattr(layer, parameter), list[tuple[str, dict[str, Any]]]()
            for arguments in (dict(call.arguments) for name, call in info.loaded_weights if name == parameter):
                arguments.pop("param", None)
                calls.append((self._names.get(id(arguments.pop("loaded_weight", None)), ""), arguments))
            self.loads[layer, parameter] = Noted(layer, parameter, empty, _get_original_loader(empty), calls)

    def cover(self, model: nn.Module, names: Iterable[str]) -> bool:
        """Whether these tensors are loaded into all parameters of the model by what was noted and nothing else."""
        noted = {id(getattr(layer, parameter)) for layer, parameter in self.loads}
        known = {name for load in self.loads.values() for name, _ in load.calls}
        return (
            known == set(names) != set()
            and all(id(parameter) in noted for parameter in model.parameters())
            and all(_is_simple(load) for load in self.loads.values())
        )

    def replay(self, model: nn.Module, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load these, which cover() has said yes to. dtype: the model's."""
        ask = tensors.to_copy if isinstance(tensors, StagedTensors) else tensors.__getitem__
        # A weight last: it may be packed together with the bias.
        for load in sorted(self.loads.values(), key=lambda load: load.parameter == "weight"):
            layer, live = load.layer, getattr(load.layer, load.parameter)
            pieces = [ask(name) for name, _ in load.calls]
            in_place = live.shape == load.empty.shape
            whole = None if in_place else _joined(load, pieces)
            if whole is None:
                with live.device:
                    whole = live if in_place else materialize_meta_tensor(load.empty)
                for piece, (_, arguments) in zip(pieces, load.calls, strict=True):
                    load.loader(whole, piece, **arguments)
            if load.parameter == "weight" and PACKED in layer.__dict__:
                is_parameter = isinstance(whole, nn.Parameter)
                layer._parameters["weight"] = whole if is_parameter else nn.Parameter(whole, requires_grad=False)
                try:
                    layer.quant_method.process_weights_after_loading(layer)
                finally:
                    layer._parameters["weight"] = live
        for module in filter(is_deferred_attention_layer, model.modules()):
            module.process_weights_after_loading(dtype)


@contextlib.contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Inside, `notes` get to know what vLLM's layerwise reload does, and forget what an earlier one has done."""
    materialize = layerwise.materialize_layer
    notes.loads.clear()

    def note_and_materialize(layer: nn.Module, info: Any) -> None:
        notes.note(layer, info)
        materialize(layer, info)

    layerwise.materialize_layer = note_and_materialize
    try:
        yield
    finally:
        layerwise.materialize_layer = materialize


def _is_simple(load: Noted) -> bool:
    """Whether its loader, and perhaps the packing of the weight, are all that happens to it."""
    method, live = getattr(load.layer, "quant_method", None), getattr(load.layer, load.parameter)
    is_packed = load.parameter == "weight" and PACKED in load.layer.__dict__
    return (method is None or type(method) in METHODS) and (is_packed or live.shape == load.empty.shape)


def _joined(load: Noted, pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The weight as it lies in memory; None where it does not lie there as the layer wants it. pieces: one per call."""
    layer, live = load.layer, getattr(load.layer, load.parameter)
    # A loader that a model or a platform has put there may do more than place rows.
    if type(layer) not in LAYERS or layer.tp_size != 1 or getattr(load.loader, "__self__", None) is not layer:
        return None
    # zentorch may go on computing with the weight that it was given.
    if getattr(current_platform, "is_zen_cpu", bool)():
        return None
    placed: dict[int, torch.Tensor] = {}
    for piece, (_, arguments) in zip(pieces, load.calls, strict=True):
        shard = arguments.get("loaded_shard_id")
        position = POSITIONS.get(shard, shard) if shard is None or isinstance(shard, str) else shard
        if not isinstance(position, int) or position in placed:
            return None
        placed[position] = piece
    joined = in_one_piece([placed[position] for position in sorted(placed)])
    wanted = (load.empty.shape, load.empty.dtype, live.device)
    return joined if joined is not None and (joined.shape, joined.dtype, joined.device) == wanted else None


def in_one_piece(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrices one below the other without a copy; None where they do not lie so in one storage."""
    first = pieces[0] if pieces else None
    if first is None or first.dim() != 2 or any(isinstance(piece, PiecedTensor) for piece in pieces):
        return None
    storage, end, rows = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for piece in pieces:
        same = (piece.dtype, piece.shape[1:], piece.untyped_storage().data_ptr()) == (
            first.dtype,
            first.shape[1:],
            storage,
        )
        if not same or not piece.is_contiguous() or piece.data_ptr() != end:
            return None
        end += piece.numel() * piece.element_size()
        rows += piece.shape[0]
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())
