"""New weights into a vLLM model that runs already: whole checkpoint tensors, layer by layer. Runs inside vLLM.

vLLM's layerwise reload has every layer give up its tensors and get others, counts what has come for it, and copies the
result to where it was. What it does is the same each time: it is noted at one load and, where it is simple, done again.
Where a layer's own loaders and the packing of its weight are all that happens, they are enough, and a weight that lies
in memory as its layer wants it is packed from there. Uses names of vLLM 0.32 and 0.33, not all of them public.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.platforms import current_platform

from torchtitan.distributed.pieces import PiecedTensor
from torchtitan.weight_sync.memory.staging import StagedTensors, to_copy

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
NAMES_SHOWN = 5
# Stacks of gpt-oss's experts, each a tensor in files.
STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
# Said at every load of layers that have nothing to load; what is really missing is found below.
FALSE_ALARM = "Failed to load weights"


class LoadRecord(NamedTuple):
    """How a parameter of a layer, a module of vLLM's, is loaded. empty: the parameter, without memory; calls: (name in
    checkpoints, what else the loader is told)."""

    layer: Any
    parameter: str
    empty: torch.Tensor
    loader: Callable[..., None]
    calls: list[tuple[str, dict[str, Any]]]


class LoadRecorder:
    """How a model's parameters are loaded, as `recording` has seen it."""

    def __init__(self) -> None:
        self.loads: dict[tuple[nn.Module, str], LoadRecord] = {}
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        """By a tensor's id(), which another tensor may have once that one is gone"""

    def named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, whose names are known to note()."""
        self._names.clear()
        for name, tensor in weights:
            self._names[id(tensor)] = name, weakref.ref(tensor)
            yield name, tensor

    def _name_of(self, tensor: torch.Tensor | None) -> str:
        """Empty for a tensor that the model has made of those that were named, as of stacks of experts."""
        known = self._names.get(id(tensor))
        return known[0] if known is not None and known[1]() is tensor else ""

    def note(self, layer: nn.Module, info: Any) -> None:
        """vLLM is about to load a layer."""
        for parameter in {parameter for parameter, _ in info.loaded_weights}:
            empty, calls = getattr(layer, parameter), list[tuple[str, dict[str, Any]]]()
            for arguments in (dict(call.arguments) for name, call in info.loaded_weights if name == parameter):
                arguments.pop("param", None)
                calls.append((self._name_of(arguments.pop("loaded_weight", None)), arguments))
            self.loads[layer, parameter] = LoadRecord(layer, parameter, empty, _get_original_loader(empty), calls)

    def cover(self, model: nn.Module, names: Iterable[str]) -> bool:
        """Whether these tensors are loaded into all parameters of the model by what was noted and nothing else."""
        noted = {id(getattr(layer, parameter)) for layer, parameter in self.loads}
        known = {name for load in self.loads.values() for name, _ in load.calls}
        if not known or known != set(names):
            return False
        are_all_noted = all(id(parameter) in noted for parameter in model.parameters())
        return are_all_noted and all(map(_is_simple, self.loads.values()))

    def replay(self, model: nn.Module, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load these, which cover() has said yes to. dtype: the model's."""
        ask = tensors.to_copy if isinstance(tensors, StagedTensors) else tensors.__getitem__
        # A weight last: it may be packed together with the bias.
        for load in sorted(self.loads.values(), key=lambda load: load.parameter == "weight"):
            layer, live = load.layer, getattr(load.layer, load.parameter)
            pieces = [ask(name) for name, _ in load.calls]
            in_place = live.shape == load.empty.shape
            loaded = None if in_place else _joined(load, pieces)
            if loaded is None:
                with live.device:
                    loaded = live if in_place else materialize_meta_tensor(load.empty)
                for piece, (_, arguments) in zip(pieces, load.calls, strict=True):
                    load.loader(loaded, piece, **arguments)
            if load.parameter == "weight" and PACKED in layer.__dict__:
                is_parameter = isinstance(loaded, nn.Parameter)
                layer._parameters["weight"] = loaded if is_parameter else nn.Parameter(loaded, requires_grad=False)
                try:
                    layer.quant_method.process_weights_after_loading(layer)
                finally:
                    layer._parameters["weight"] = live
        for module in filter(is_deferred_attention_layer, model.modules()):
            module.process_weights_after_loading(dtype)


@contextlib.contextmanager
def recording(recorder: LoadRecorder) -> Iterator[None]:
    """Inside, `recorder` gets to know what vLLM's layerwise reload does, and forget what an earlier one has done."""
    materialize = layerwise.materialize_layer
    recorder.loads.clear()

    def note_and_materialize(layer: nn.Module, info: Any) -> None:
        recorder.note(layer, info)
        materialize(layer, info)

    layerwise.materialize_layer = note_and_materialize
    try:
        yield
    finally:
        layerwise.materialize_layer = materialize


def _is_simple(load: LoadRecord) -> bool:
    """Whether its loader, and perhaps the packing of the weight, are all that happens to it."""
    method, live = getattr(load.layer, "quant_method", None), getattr(load.layer, load.parameter)
    is_packed = load.parameter == "weight" and PACKED in load.layer.__dict__
    if method is not None and type(method) not in METHODS:
        return False
    return is_packed or bool(live.shape == load.empty.shape)


def _joined(load: LoadRecord, pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
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
        position = arguments.get("loaded_shard_id")
        if position is None or isinstance(position, str):
            position = POSITIONS.get(position)
        if not isinstance(position, int) or position in placed:
            return None
        placed[position] = piece
    joined = in_one_piece([placed[position] for position in sorted(placed)])
    wanted = (load.empty.shape, load.empty.dtype, live.device)
    if joined is None or (joined.shape, joined.dtype, joined.device) != wanted:
        return None
    return joined


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


logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: FALSE_ALARM not in record.getMessage()
)


class IncompleteVersion(RuntimeError):
    """Parameters of the model got nothing: it holds parts of two versions now."""


def load_weights(
    model: nn.Module,
    model_config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    recorder: LoadRecorder | None = None,
) -> None:
    """Replace all weights of `model` by `weights`: (checkpoint name, whole tensor), which must stay as they are until
    this returns. The engine must stand still. After an exception the model is half loaded, until a later call returns.
    recorder: receives how the parameters are loaded. With the records of an earlier load, `weights` may be a mapping;
    the recorded steps are then repeated.

    Raises:
        IncompleteVersion: something is missing in `weights`.
    """
    _abandon(model, model_config)
    emptied = _drop_packed_weights(model)
    recorder, missing = recorder or LoadRecorder(), list[str]()
    if isinstance(weights, Mapping) and recorder.cover(model, weights):
        recorder.replay(model, model_config.dtype, weights)
    else:
        missing = _reload(model, model_config, to_copy(weights) if isinstance(weights, Mapping) else weights, recorder)
    repack_what_reloading_leaves(model)
    if missing:
        shown = ", ".join(missing[:NAMES_SHOWN])
        raise IncompleteVersion(f"{len(missing)} parameters got no weights: {shown}")
    _repack_padding(emptied.values())
    empty = [name for name, layer in emptied.items() if getattr(layer, PACKED) is None]
    if empty:
        raise IncompleteVersion(f"{len(empty)} layers got no weights: {', '.join(empty[:NAMES_SHOWN])}")


def _reload(
    model: nn.Module, model_config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]], recorder: LoadRecorder
) -> list[str]:
    """vLLM's own way, for any model. Returns the parameters that have got nothing."""
    expected, sinks = {name for name, _ in model.named_parameters()}, list[tuple[str, torch.Tensor]]()
    initialize_layerwise_reload(model)
    with recording(recorder):
        loaded = model.load_weights(recorder.named(_through_loaders(weights, sinks)))  # type: ignore[operator]
        finalize_layerwise_reload(model, model_config)
    _copy_sinks(model, sinks)
    return sorted(expected - loaded) if isinstance(loaded, set) and model_config.quantization is None else []


def _through_loaders(
    weights: Iterable[tuple[str, torch.Tensor]], sinks: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, stacks of experts one expert at a time. gpt-oss's model copies stacks and sinks into its
    parameters by itself (vLLM 0.32 and 0.33), which a reload does not notice: they would stay those of the first load.
    Single experts go by way of their parameter's loader; `sinks` gets the sinks, to be copied afterwards."""
    for name, tensor in weights:
        before, _, leaf = name.rpartition(".")
        if before.endswith(".mlp.experts") and leaf in STACKS:
            yield from ((f"{before}.{expert}.{leaf}", part) for expert, part in enumerate(tensor.unbind(0)))
            continue
        if leaf == "sinks":
            sinks.append((name, tensor))
        yield name, tensor


def _copy_sinks(model: nn.Module, sinks: list[tuple[str, torch.Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in sinks:
        sinks_of_rank = parameters[name.replace(".self_attn.", ".attn.")].data
        sinks_of_rank.copy_(tensor.narrow(0, get_tensor_model_parallel_rank() * len(sinks_of_rank), len(sinks_of_rank)))


def _drop_packed_weights(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by name that compute with a packed copy, as on CPUs, which is freed here. All of them first: the new
    ones take their memory then, and none beside it. That of an embedding beside a head goes for good: it is only looked
    up, and nothing computes with the copy."""
    if any(isinstance(layer, ParallelLMHead) for layer in model.modules()):
        for layer in model.modules():
            if type(layer) is VocabParallelEmbedding and layer.__dict__.pop(PACKED, None) is not None:
                method: Any = layer.quant_method
                method.process_weights_after_loading = lambda _layer: None
    # Also those that have none since a load that failed.
    packed = {name: layer for name, layer in model.named_modules() if PACKED in layer.__dict__}
    for layer in packed.values():
        setattr(layer, PACKED, None)
    return packed


def _repack_padding(emptied: Iterable[nn.Module]) -> None:
    """The vocabulary's rows of a tensor-parallel rank may all be padding: nothing is loaded into them, ever."""
    for layer in emptied:
        if getattr(layer, PACKED) is None and isinstance(layer, VocabParallelEmbedding):
            rows = layer.shard_indices
            if rows.num_org_elements + rows.num_added_elements == 0:
                layer.quant_method.process_weights_after_loading(layer)


def _abandon(model: nn.Module, model_config: ModelConfig) -> None:
    """What an earlier load has left that broke off would be counted as part of the next one."""
    if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
        finalize_layerwise_reload(model, model_config)


def repack_what_reloading_leaves(model: nn.Module) -> None:
    """vLLM 0.32 and 0.33 pack these at their first load only: they would compute with something else than was loaded,
    and nothing would say so."""
    repack_tied_heads(model)
    repack_experts(model)


def repack_experts(model: nn.Module) -> None:
    """On a CPU experts compute with packed weights, but what a reload leaves in their place is not packed."""
    for module in model.modules():
        if type(module).__name__.endswith("RoutedExperts") and next(module.parameters()).device.type == "cpu":
            method: Any = module.quant_method
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


def repack_tied_heads(model: nn.Module) -> None:
    """A head that shares the embedding's parameter is given no weights of its own, but on some devices it computes with
    a packed copy, which would stay that of the old weights for ever."""
    embeddings = {id(parameter) for parameter in _embedding_parameters(model)}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module._parameters.get("weight")) in embeddings:
            module.quant_method.process_weights_after_loading(module)


def _embedding_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)
