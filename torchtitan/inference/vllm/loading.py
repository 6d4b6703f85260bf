"""New weights into a vLLM model that runs already: whole checkpoint tensors, layer by layer. Runs inside vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from torchtitan.inference.vllm.replaying import PACKED, Notes, noting
from torchtitan.weight_sync.staging import to_copy

NAMES_SHOWN = 5
# Stacks of gpt-oss's experts, each a tensor in files.
STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
# Said at every load of layers that have nothing to load; what is really missing is found below.
FALSE_ALARM = "Failed to load weights"
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: FALSE_ALARM not in record.getMessage()
)


class IncompleteVersion(RuntimeError):
    """Parameters of the model got nothing: it holds parts of two versions now."""


def load_weights(
    model: nn.Module,
    model_config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    notes: Notes | None = None,
) -> None:
    """Replace all weights of `model` by `weights`: (checkpoint name, whole tensor), which must stay as they are until
    this returns. The engine must stand still. After an exception the model is half loaded, until a later call returns.
    notes: get how the parameters are loaded. With those of an earlier load `weights` may be a mapping, of which that is
    done again.

    Raises:
        IncompleteVersion: something is missing in `weights`.
    """
    _abandon(model, model_config)
    emptied = _drop_packed_weights(model)
    notes, missing = notes or Notes(), list[str]()
    if isinstance(weights, Mapping) and notes.cover(model, weights):
        notes.replay(model, model_config.dtype, weights)
    else:
        missing = _reload(model, model_config, to_copy(weights) if isinstance(weights, Mapping) else weights, notes)
    repack_what_reloading_leaves(model)
    if missing:
        shown = ", ".join(missing[:NAMES_SHOWN])
        raise IncompleteVersion(f"{len(missing)} parameters got no weights: {shown}")
    _repack_padding(emptied.values())
    empty = [name for name, layer in emptied.items() if getattr(layer, PACKED) is None]
    if empty:
        raise IncompleteVersion(f"{len(empty)} layers got no weights: {', '.join(empty[:NAMES_SHOWN])}")


def _reload(
    model: nn.Module, model_config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]], notes: Notes
) -> list[str]:
    """vLLM's own way, for any model. Returns the parameters that have got nothing."""
    expected, sinks = {name for name, _ in model.named_parameters()}, list[tuple[str, torch.Tensor]]()
    initialize_layerwise_reload(model)
    with noting(notes):
        loaded = model.load_weights(notes.named(_through_loaders(weights, sinks)))  # type: ignore[operator]
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
            yield from ((f"{before}.{expert}.{leaf}", one) for expert, one in enumerate(tensor.unbind(0)))
            continue
        if leaf == "sinks":
            sinks.append((name, tensor))
        yield name, tensor


def _copy_sinks(model: nn.Module, sinks: list[tuple[str, torch.Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in sinks:
        own = parameters[name.replace(".self_attn.", ".attn.")].data
        own.copy_(tensor.narrow(0, get_tensor_model_parallel_rank() * len(own), len(own)))


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
