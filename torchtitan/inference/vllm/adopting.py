"""Spares vLLM's layerwise reload a copy: it packs a layer's weights from where they were staged. Runs inside vLLM."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.weight_sync.staging import PiecedTensor

logger = logging.getLogger(__name__)
METHODS: tuple[type, ...] = ()

try:
    # Names of vLLM 0.32 and 0.33, not all public: without them weights are loaded all the same, with one copy more.
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
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, materialize_layer
    from vllm.platforms import current_platform
except ImportError as error:
    UNKNOWN = str(error)
else:
    taken = list(inspect.signature(materialize_layer).parameters)
    UNKNOWN = "" if taken == ["layer", "info"] else f"materialize_layer takes {taken}"
    # Layers whose weight is that of the checkpoint, or several of them one below the other.
    LAYERS = (
        ReplicatedLinear,
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )
    METHODS += (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
# The attribute of vLLM's layers that holds on to the packed weights on a CPU: what computes with them.
PACKED = "cpu_linear"
POSITIONS = {None: 0, "q": 0, "k": 1, "v": 2}


@contextlib.contextmanager
def adopting_weights(note: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Inside, a layer that is materialized to be loaded takes the tensors that wait for it as its own, where they lie
    in memory as it wants them; what vLLM does next with it copies them. Elsewhere, and in a vLLM that loads otherwise,
    nothing changes. note(layer, info): called before, with what vLLM knows of the load.
    """
    if not _can_adopt():
        yield
        return

    def materialize_and_adopt(layer: nn.Module, info: Any) -> None:
        note(layer, info)
        materialize_layer(layer, info)
        _adopt(layer, info)

    layerwise.materialize_layer = materialize_and_adopt
    try:
        yield
    finally:
        layerwise.materialize_layer = materialize_layer


@functools.cache
def _can_adopt() -> bool:
    """Whether this vLLM loads as it is expected here, and may be helped; said once where it loads otherwise."""
    if UNKNOWN:
        logger.info("weights are not packed from where they were staged, but copied first: %s", UNKNOWN)
        return False
    # zentorch may go on computing with the weight that it was given.
    return not getattr(current_platform, "is_zen_cpu", bool)()


def _adopt(layer: nn.Module, info: Any) -> bool:
    """Make what waits for the layer's weight that weight, where this can be done. Returns whether it was."""
    if type(layer) not in LAYERS or type(layer.quant_method) not in METHODS or getattr(layer, "tp_size", 0) != 1:
        return False
    weight = layer.weight
    # A loader that a model or a platform has put there may do more than place rows.
    if getattr(_get_original_loader(weight), "__self__", None) is not layer:
        return False
    pieces = _in_order([call for name, call in info.loaded_weights if name == "weight"])
    joined = None if pieces is None else in_one_piece(pieces)
    wanted = (weight.shape, weight.dtype, weight.device)
    if joined is None or (joined.shape, joined.dtype, joined.device) != wanted:
        return False
    weight.data = joined
    info.loaded_weights = [(name, call) for name, call in info.loaded_weights if name != "weight"]
    return True


def _in_order(calls: Sequence[inspect.BoundArguments]) -> list[torch.Tensor] | None:
    """What the calls of the weight's loader are to load, from the weight's first row on."""
    placed: dict[int, torch.Tensor] = {}
    for call in calls:
        shard = call.arguments.get("loaded_shard_id")
        position = POSITIONS.get(shard, shard) if shard is None or isinstance(shard, str) else shard
        if not isinstance(position, int) or position in placed:
            return None
        placed[position] = call.arguments["loaded_weight"]
    return [placed[position] for position in sorted(placed)]


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
